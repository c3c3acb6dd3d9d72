"""Lets Dataflow's `--setup_file` and old tools build the package; everything it says is in pyproject.toml."""

from setuptools import setup

setup()
