"""What is done with complete datasets: check them, index, copy, show, measure. Each tool is a function in a file."""
