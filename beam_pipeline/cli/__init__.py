"""The command line and `run`: checks, the job, and what is printed of it."""
