"""`python -m reader bench`: how fast a dataset is read, in all the ways people read images, and what holds it back."""
