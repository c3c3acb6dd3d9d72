"""Text for users: lines that any terminal can show, lists of names, numbers with units."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Any, TextIO


def one_line(error: BaseException) -> str:
    """The text of an exception as a single line."""
    text = " ".join(str(error).split())
    return text or type(error).__name__


def printable(text: str) -> str:
    """Text with unprintable characters escaped as `repr` does: names may hold a terminal's control sequences."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)


def name_line(name: str) -> str:
    """A `printable` name in one line: names of files and classes may hold line breaks, which would forge lines."""
    return printable(name).replace("\n", "\\n")


def shown_on(stream: Any) -> Any:
    """The stream itself, or the terminal that `cli.quiet` has put a log in the place of."""
    return getattr(stream, "terminal", stream)


def print_line(text: str, stream: TextIO | None = None, end: str = "\n", wipe: bool = False) -> None:
    """Print `printable` text; a closed stream, or one without Unicode, doesn't fail the command.

    Args:
        text: one or more lines.
        stream: stdout if it is None.
        end: printed after the text.
        wipe: whether to clear a terminal's line first.
    """
    stream = shown_on(stream or sys.stdout)
    if stream is None:  # it was closed when the process started
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    text = ("\r\x1b[K" if wipe else "") + printable(text)
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, end=end, flush=True)
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            stream.close()  # else Python would flush it again at exit, and end with code 120


def first_few(names: Collection[str], most: int = 3) -> str:
    """`a, b, c and 7 more`."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(list(names)[:most]) + more


def nearest(given: str, names: Iterable[str], likeness: float = 0.6) -> str:
    """The most similar name, "" if none is near: from 0, nothing in common, `likeness` goes to 1, equal."""
    return next(iter(difflib.get_close_matches(given, names, 1, likeness)), "")


def meant(given: str, names: Iterable[str], otherwise: str | None = None, shown: Callable[[str], str] = repr) -> str:
    """The end of an error about an unknown name: `did you mean 'validation'?`, also for `val`, and `column:x` for `x`.

    Args:
        otherwise: if no name is near; None for the names that there are.
        shown: how the name is written.
    """
    names = list(names)
    begin = [name for name in names if name.startswith(given)]
    parts = (*begin, *(name for name in names if given.startswith(name) or name.endswith(f":{given}")))
    if near := begin[0] if len(begin) == 1 else nearest(given, names) or next(iter(parts), ""):
        return f"did you mean {shown(near)}?"
    return f"there are {first_few(names, 20)}" if otherwise is None else otherwise


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
