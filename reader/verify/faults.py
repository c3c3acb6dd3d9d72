"""What `verify` finds: one fault is one thing that isn't as published, placed as exactly as can be known."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that isn't as published.

    Attributes:
        file: full path or URL.
        record: number of the record in the file, from 0; None where the fault is the whole file's.
        offset: byte offset of its framing in the file (of the uncompressed bytes where it is GZIP); None as above.
        what: what is wrong, in a few words.
    """

    file: str
    record: int | None
    offset: int | None
    what: str

    def __str__(self) -> str:
        where = "" if self.record is None else f" record {self.record} at byte {self.offset}:"
        return f"{self.file}:{where} {self.what}"


def of_file(file: str, what: str) -> Fault:
    """A fault of a whole file."""
    return Fault(file, None, None, what)
