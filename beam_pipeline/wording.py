"""Counts and sizes as a person reads them, and printing that fails nothing."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TextIO

_UNITS = (("GB", 1e9, 2), ("MB", 1e6, 1), ("kB", 1e3, 1))


def plural(count: int, noun: str) -> str:
    """`1 shard`, `1,200 shards`, `2 classes`."""
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{ending}"


def why_unreadable(error: Exception) -> str:
    """Why a small file that a flag names can't be used."""
    kinds = {
        IsADirectoryError: "a folder, not a file",
        FileNotFoundError: "no such file",
        UnicodeDecodeError: "not UTF-8",
    }
    found = (text for kind, text in kinds.items() if isinstance(error.__cause__, kind) or isinstance(error, kind))
    return next(found, "not what it should be")


def size_text(byte_count: float) -> str:
    """Bytes in the unit that leaves the fewest digits."""
    for unit, size, digits in _UNITS:
        if byte_count >= size:
            return f"{byte_count / size:.{digits}f} {unit}"
    return plural(round(byte_count), "byte")


def say(text: str, stream: TextIO | None = None) -> None:
    """Print; a reader who has gone, or reads no Unicode, doesn't fail the command.

    Args:
        text: one or more lines.
        stream: stdout if it is None.
    """
    stream = stream or sys.stdout
    if stream is None:  # closed when the process began
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            stream.close()  # else Python would try once more at its end, and exit 120
