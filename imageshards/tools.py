"""What looks at a dataset: the verbs of the command as functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from beam_pipeline.names import SHELVES
from imageshards import public

if TYPE_CHECKING:  # for editors
    from reader.tools.bench import bench as bench
    from reader.tools.diff import diff as diff
    from reader.tools.duplicates import duplicates as duplicates
    from reader.tools.index import index as index
    from reader.tools.rejects import rejects as rejects
    from reader.tools.report import report as report
    from reader.tools.show import show as show
    from reader.tools.verify import verify as verify
else:  # a type checker would take any name for one that exists

    def __getattr__(name: str) -> Any:
        return public(__name__, name)


__all__ = sorted(SHELVES[__name__])


def __dir__() -> list[str]:
    return __all__
