"""What the write side needs besides this package: told in one line if it isn't installed."""

from __future__ import annotations

from importlib.util import find_spec

from beam_pipeline.errors import UsageError

_NEEDED = {"apache_beam": "Apache Beam", "PIL": "Pillow"}


def require() -> None:
    """Look, without importing anything, whether the extra `pipeline` is installed.

    Raises:
        UsageError: it is not; names what is missing.
    """
    for module, name in _NEEDED.items():
        if find_spec(module) is None:
            raise UsageError(f"{name} is not installed: pip install '.[pipeline]'")
