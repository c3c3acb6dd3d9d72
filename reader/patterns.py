"""Which files a user means: a pattern, a published dataset's folder, or a list of these."""

from __future__ import annotations

from collections.abc import Sequence

from beam_pipeline import schema
from beam_pipeline.errors import UsageError
from reader.storage import normalize, open_storage

Pattern = str | Sequence[str]

_SHOWN_NAMES = 5


def find_files(pattern: Pattern) -> list[str]:
    """Full paths or URLs of the files, those of each pattern sorted.

    Raises:
        UsageError: nothing matches; says what is there.
    """
    files: list[str] = []
    for text in [pattern] if isinstance(pattern, str) else pattern:
        storage, folder = open_storage(text), normalize(text)
        found = storage.glob(text)
        # A folder is a dataset's: its shards lie beside other files.
        inside = [] if found else [name for name in storage.names(folder) if schema.ShardName.parse(name)]
        found += [f"{folder}/{name}" for name in inside]
        if not found:
            raise UsageError(f"no file matches {text}{_what_is_there(folder)}")
        files += found
    return files


def _what_is_there(path: str) -> str:
    """What lies in a folder, or beside what was asked for; "" where there is no such folder either."""
    for folder in (path, path.rpartition("/")[0]):
        names = open_storage(path).names(folder)
        if names:
            more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
            return f": {folder} holds {', '.join(names[:_SHOWN_NAMES])}{more}"
    return ""
