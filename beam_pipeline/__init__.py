"""imageshards, the write side: a Beam batch job that turns images in class folders into TFRecord shards.

    manifest = beam_pipeline.run(beam_pipeline.Config(input="photos", output="datasets", name="photos"))

`import beam_pipeline` is cheap: Beam is imported by the first use of `run`, so the reader can share `schema` and
`errors`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Config", "Manifest", "__version__", "run"]

if TYPE_CHECKING:
    from beam_pipeline.launch import Manifest, run
    from beam_pipeline.options import Config


def __getattr__(name: str) -> Any:
    """Load the public names on first use (PEP 562)."""
    if name == "Config":
        from beam_pipeline.options import Config

        return Config
    if name in ("Manifest", "run"):
        from beam_pipeline import launch

        return getattr(launch, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
