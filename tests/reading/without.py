"""Runs a program as if some packages weren't installed: python tests/reading/without.py tensorflow,jax PROGRAM …"""

from __future__ import annotations

import importlib.machinery
import runpy
import sys
from typing import Any


class Without:
    """Finds modules on `sys.path`, but for those of some packages."""

    def __init__(self, packages: list[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The module's spec, or None."""
        if name.partition(".")[0] in self._packages:
            return None
        return importlib.machinery.PathFinder.find_spec(name, path, target)


if __name__ == "__main__":
    packages = sys.argv[1].split(",")
    finder: Any = Without(packages)
    sys.meta_path[:] = [one for one in sys.meta_path if one is not importlib.machinery.PathFinder] + [finder]
    sys.argv[:] = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    assert not set(packages) & set(sys.modules)
