"""The command line and `run`: checks, the job, what is told of it."""
