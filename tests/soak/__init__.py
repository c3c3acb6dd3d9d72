"""Trainings that are killed again and again, on every framework: `make soak`; not a part of `make test`."""
