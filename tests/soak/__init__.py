"""Trainings that are killed again and again, on every framework: `make soak`."""
