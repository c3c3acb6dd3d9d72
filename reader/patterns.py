"""Which files a user means: a pattern, a published dataset's folder, or a list of these."""

from __future__ import annotations

import os
from collections.abc import Sequence

from beam_pipeline import schema
from beam_pipeline.errors import UsageError
from reader.storage import normalize, open_storage

PathLike = str | os.PathLike[str]
Pattern = PathLike | Sequence[PathLike]

_SHOWN_NAMES = 5


def find_files(pattern: Pattern) -> list[str]:
    """Full paths or URLs of the files, those of each pattern sorted; each file once, however many patterns match it.

    Raises:
        UsageError: nothing matches; says what is there.
    """
    patterns = [pattern] if isinstance(pattern, str | os.PathLike) else list(pattern)
    if not patterns:
        raise UsageError(
            f"no file is named by {pattern!r}: give a pattern, such as 'folder/*.tfrec', or a list of these"
        )
    files: list[str] = []
    for one in patterns:
        text = os.fspath(one)
        storage, folder = open_storage(text), normalize(text)
        # Names may hold brackets, which a pattern takes for a choice of letters.
        found = [folder] if "[" in text and _is_file(folder) else storage.glob(text)
        # A folder is a dataset's: its shards lie beside other files.
        inside = [] if found else [name for name in storage.names(folder) if schema.ShardName.parse(name)]
        found += [f"{folder}/{name}" for name in inside]
        if not found:
            raise UsageError(f"no file matches {text}{_what_is_there(folder)}")
        files += found
    return list(dict.fromkeys(files))


def _is_file(path: str) -> bool:
    folder, _, name = path.rpartition("/")
    return name in open_storage(path).names(folder)


def _what_is_there(path: str) -> str:
    """What lies in a folder, or beside what was asked for; "" where there is no such folder either."""
    for folder in (path, path.rpartition("/")[0]):
        names = open_storage(path).names(folder)
        if names:
            more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
            return f": {folder} holds {', '.join(names[:_SHOWN_NAMES])}{more}"
    return ""
