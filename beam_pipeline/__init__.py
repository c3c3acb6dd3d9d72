"""imageshards, the write side: a Beam batch job that turns images in class folders into TFRecord shards.

    manifest = beam_pipeline.run(beam_pipeline.Config(input="photos", output="datasets", name="photos"))

`import beam_pipeline` is cheap, so the reader can share `schema` and `errors`: Pillow is imported by the first use of
`Config`, Beam by the first job.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from beam_pipeline import extras

__version__ = "0.1.0"
__all__ = ["Config", "Manifest", "__version__", "run"]

if TYPE_CHECKING:
    from beam_pipeline.launch import run
    from beam_pipeline.options import Config
    from beam_pipeline.summary import Manifest


def __getattr__(name: str) -> Any:
    """Load the public names on first use (PEP 562)."""
    module = {"Config": "options", "Manifest": "summary", "run": "launch"}.get(name)
    if module is not None:
        extras.require()
        return getattr(importlib.import_module(f"beam_pipeline.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
