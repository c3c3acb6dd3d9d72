"""Transforms for your own Beam pipelines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from beam_pipeline.names import SHELVES
from imageshards import public

if TYPE_CHECKING:  # for editors
    from beam_pipeline.errors import from_worker as from_worker
    from beam_pipeline.transforms import ConvertedImage as ConvertedImage
    from beam_pipeline.transforms import ImageRef as ImageRef
    from beam_pipeline.transforms import ListImages as ListImages
    from beam_pipeline.transforms import ReadImages as ReadImages
    from beam_pipeline.transforms import RejectLine as RejectLine
    from beam_pipeline.transforms import WriteDataset as WriteDataset
else:  # a type checker would take any name for one that exists

    def __getattr__(name: str) -> Any:
        return public(__name__, name)


__all__ = sorted(SHELVES[__name__])


def __dir__() -> list[str]:
    return __all__
