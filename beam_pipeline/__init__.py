"""imageshards, the write side: a Beam batch job that turns images in class folders into TFRecord shards.

    manifest = beam_pipeline.run(beam_pipeline.Config(input="photos", output="datasets", name="photos"))

`import beam_pipeline` is cheap, so the reader can share `schema` and `errors`: Pillow is imported by the first use of
`Config`, Beam by the first job.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from beam_pipeline.errors import UsageError

__version__ = "0.1.0"
__all__ = [
    "Config",
    "ConvertedImage",
    "ImageRef",
    "ListImages",
    "Manifest",
    "ReadImages",
    "RejectLine",
    "WriteDataset",
    "__version__",
    "from_worker",
    "run",
]

if TYPE_CHECKING:
    from beam_pipeline.cli.run import run
    from beam_pipeline.config import Config
    from beam_pipeline.errors import from_worker
    from beam_pipeline.schema.manifest import Manifest
    from beam_pipeline.transforms import ConvertedImage, ImageRef, ListImages, ReadImages, RejectLine, WriteDataset


_MODULES = {
    "Config": "config",
    "Manifest": "schema.manifest",
    "run": "cli.run",
    "from_worker": "errors",
    **dict.fromkeys(
        ("ConvertedImage", "ImageRef", "ListImages", "ReadImages", "RejectLine", "WriteDataset"), "transforms"
    ),
}


def __getattr__(name: str) -> Any:
    """Load the public names on first use (PEP 562)."""
    module = _MODULES.get(name)
    if module is not None:
        require_pipeline()
        return getattr(importlib.import_module(f"beam_pipeline.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


_NEEDED = {"apache_beam": "Apache Beam", "PIL": "Pillow"}


def require_pipeline() -> None:
    """Look, without importing anything, whether the extra `pipeline` is installed.

    Raises:
        UsageError: it is not; names what is missing.
    """
    for module, name in _NEEDED.items():
        if find_spec(module) is None:
            raise UsageError(f"{name} is not installed: pip install 'imageshards[pipeline]'")
