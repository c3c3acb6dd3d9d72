"""Text for users: lines that a terminal can show, names of many, numbers with their units."""

from __future__ import annotations

import sys
from collections.abc import Collection
from contextlib import suppress
from typing import TextIO


def one_line(error: BaseException) -> str:
    """The text of any exception as a single line, for the end of a command."""
    text = " ".join(str(error).split())
    return text or type(error).__name__


def printable(text: str) -> str:
    """Lines of text, but what `repr` escapes as it does: a name in it may hold what a terminal obeys."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)


def print_line(text: str, stream: TextIO | None = None, end: str = "\n", wipe: bool = False) -> None:
    """Print; a reader who has gone, or reads no Unicode, doesn't fail the command.

    Args:
        text: one or more lines; printed as `printable` has them.
        stream: stdout if it is None.
        end: printed behind the text.
        wipe: whether to clear a terminal's line before.
    """
    stream = stream or sys.stdout
    if stream is None:  # closed when the process began
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    text = ("\r\x1b[K" if wipe else "") + printable(text)
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, end=end, flush=True)
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            stream.close()  # else Python would try once more at its end, and exit 120


def first_few(names: Collection[str], most: int = 3) -> str:
    """`a, b, c and 7 more`: the first names of many."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(list(names)[:most]) + more


def plural(count: int, noun: str) -> str:
    """`1 shard`, `1,200 shards`, `2 classes`."""
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{ending}"


def size_text(byte_count: float) -> str:
    """`512 bytes`, `4.20 kB`, `131 MB`: three digits, decimal units."""
    if byte_count < 1000:
        return plural(round(byte_count), "byte")
    value, units = float(byte_count), ["kB", "MB", "GB", "TB"]
    while (value := value / 1000) >= 999.5 and len(units) > 1:
        units.pop(0)
    return f"{value:,.{max(0, 3 - len(str(int(value))))}f} {units[0]}"
