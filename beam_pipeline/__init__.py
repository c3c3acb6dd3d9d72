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
from beam_pipeline.names import homes

__version__ = "0.1.0"
_HOMES = {"run" if name == "write" else name: home for name, home in homes("beam_pipeline").items()}
__all__ = ["__version__", *sorted(_HOMES)]

if TYPE_CHECKING:  # for editors
    from beam_pipeline.cli.run import run as run
    from beam_pipeline.config import Config as Config
    from beam_pipeline.errors import ImageShardsError as ImageShardsError
    from beam_pipeline.errors import from_worker as from_worker
    from beam_pipeline.schema.manifest import Manifest as Manifest
    from beam_pipeline.transforms import ConvertedImage as ConvertedImage
    from beam_pipeline.transforms import ImageRef as ImageRef
    from beam_pipeline.transforms import ListImages as ListImages
    from beam_pipeline.transforms import ReadImages as ReadImages
    from beam_pipeline.transforms import RejectLine as RejectLine
    from beam_pipeline.transforms import WriteDataset as WriteDataset


def __getattr__(name: str) -> Any:
    """Load the public names on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_pipeline()
    return getattr(importlib.import_module(_HOMES[name]), name)


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
