"""The files of an archive and where their bytes are, sorted by name: some 50 bytes each besides the name."""

from __future__ import annotations

import re
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate, islice, pairwise
from typing import Any, NamedTuple

import msgspec

from beam_pipeline.errors import UsageError
from beam_pipeline.storage import Part

FOLDER, LINK = 0x101, 0x102  # methods that no zip has: a folder; a link or a sparse file, which gives no image
_COLUMNS = {"start": "Q", "stop": "Q", "size": "Q", "packed": "Q", "method": "I", "crc32": "I"}
_ODD = re.compile(rb"\A/|//|(\A|/)\.\.?(/|\Z)|\0")
_TAR_FOLDER = re.compile(rb"\.tar/", re.IGNORECASE)


class Member(NamedTuple):
    """One file or folder of an archive.

    Attributes:
        name: its path when unpacked; a folder's ends in a slash.
        start, stop: the range of the archive that holds it, with the local header of a zip's.
        size, packed: bytes of the file; bytes as they are stored.
        method: zip's, `Part.PLAIN`, FOLDER or LINK.
        crc32: of the file; 0 in a tar.
    """

    name: bytes
    start: int
    stop: int
    size: int = 0
    packed: int = 0
    method: int = FOLDER
    crc32: int = 0


def unpacked_name(name: bytes, archive: str) -> bytes:
    """A member's name as it is unpacked; "" for the folder itself.

    Raises:
        UsageError: it leads out of that folder.
    """
    if not _ODD.search(name):
        return name
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if b".." in parts or b"\0" in name:
        raise UsageError(f"{archive}: member {shown(name)} leads out of the folder that it is unpacked in: remove it")
    return b"/".join(parts) + b"/" * (name.endswith((b"/", b"/.")) and bool(parts))


def shown(name: bytes) -> str:
    """A member's name in a message."""
    text = repr(name.decode("utf-8", "backslashreplace"))
    return text if len(text) <= 100 else f"{text[:100]}…"


class Members:
    """The members of one archive, by name."""

    def __init__(self, names: bytes, columns: dict[str, array[int]]) -> None:
        self._names, self._columns = names, columns
        self._ends = array("Q", (match.end() for match in re.finditer(b"\0", names)))

    @classmethod
    def of(cls, found: Iterable[Member], archive: str) -> Members:
        """Sort the members of an archive.

        Raises:
            UsageError: two have one name, or share bytes.
        """
        members = sorted(found)
        for one, other in pairwise(members):
            if one.name == other.name and (one.method, other.method) != (FOLDER, FOLDER):
                where = f"at bytes {one.start} and {other.start}"
                raise UsageError(f"{archive}: two members are called {shown(one.name)}, {where}: remove one")
        columns = {name: array(code, (getattr(member, name) for member in members)) for name, code in _COLUMNS.items()}
        return cls(b"".join(member.name + b"\0" for member in members), columns)

    def __len__(self) -> int:
        return len(self._ends)

    def name(self, number: int) -> bytes:
        """The name of a member."""
        return self._names[self._ends[number - 1] if number else 0 : self._ends[number] - 1]

    def _first(self, name: bytes) -> int:
        """The number of the first member that isn't before this name."""
        return bisect_left(range(len(self)), name, key=self.name)

    def __getitem__(self, number: int) -> Member:
        return Member(self.name(number), *(column[number] for column in self._columns.values()))

    def is_expanded(self, archive: bytes) -> bool:
        """Whether the members of a tar file in this archive, given with a slash, are here, or it has none."""
        number = self._first(archive)
        return number < len(self) and self.name(number).startswith(archive)

    def find(self, name: bytes) -> Member | None:
        """The file with this name."""
        number = self._first(name)
        found = self[number] if number < len(self) else None
        return found if found and found.name == name else None

    def below(self, folder: bytes) -> Iterator[Member]:
        """The files below a folder, given with its slash or as b""; those of a tar in it aren't."""
        archive = b""
        for number in range(self._first(folder), len(self)):
            name = self.name(number)
            if not name.startswith(folder):
                return
            if archive and name.startswith(archive):
                continue
            if (match := _TAR_FOLDER.search(name, len(folder))) and self.find(name[: match.end() - 1]):
                archive = name[: match.end()]
            elif not name.endswith(b"/"):
                yield self[number]

    def children(self, folder: bytes) -> Iterator[bytes]:
        """The names directly in a folder, those of folders with a slash; a tar in it is a file."""
        number = self._first(folder)
        while number < len(self) and (name := self.name(number)).startswith(folder):
            child, slash, _ = name[len(folder) :].partition(b"/")
            if slash:
                number = self._first(folder + child + b"0")  # the first behind all that begin with child/
                if not self.find(folder + child):
                    yield child + slash
            else:
                number += 1
                if child:
                    yield child

    def encode(self) -> bytes:
        """For a file that spares the next command the listing."""
        columns = {name: column.tobytes() for name, column in self._columns.items()}
        return zlib.compress(msgspec.msgpack.encode((self._names, columns)), 1)

    @classmethod
    def decode(cls, data: bytes) -> Members:
        """Raises ValueError or zlib.error."""
        names, columns = msgspec.msgpack.decode(zlib.decompress(data), type=tuple[bytes, dict[str, bytes]])
        return cls(names, {name: array(code, columns[name]) for name, code in _COLUMNS.items()})
