"""The files of an archive and where their bytes are, sorted by name: some 140 bytes each."""

from __future__ import annotations

import re
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from beam_pipeline.errors import UsageError

# Methods that no zip has: the range is the file; a folder; a symbolic link or a sparse file, which gives no image.
PLAIN, FOLDER, LINK = 1 << 16, 2 << 16, 3 << 16
_FACTS = 6
_TAR_FOLDER = re.compile(rb"\.tar/", re.IGNORECASE)


class Member(NamedTuple):
    """One file or folder of an archive.

    Attributes:
        name: its path when unpacked; a folder's ends in a slash.
        start, stop: the range of the archive that holds it, with the local header of a zip's.
        size, packed: bytes of the file; bytes as they are stored.
        method: zip's, PLAIN, FOLDER or LINK.
        crc32: of the file; 0 in a tar.
        target: the name of the member that a hard link is.
    """

    name: bytes
    start: int
    stop: int
    size: int = 0
    packed: int = 0
    method: int = FOLDER
    crc32: int = 0
    target: bytes = b""


def unpacked_name(name: bytes, archive: str) -> bytes:
    """A member's name as it is unpacked; "" for the folder itself.

    Raises:
        UsageError: it leads out of that folder.
    """
    if not (name.startswith((b"/", b".")) or b"//" in name or b"/." in name or b"\0" in name):
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
    """The members of one archive, sorted by name.

    Args:
        names: of the members, sorted.
        facts: int64 [members, 6], the other attributes of `Member` but the last.
    """

    def __init__(self, names: list[bytes], facts: npt.NDArray[np.int64]) -> None:
        self._names, self._facts = names, facts

    @classmethod
    def of(cls, found: Iterable[Member], archive: str) -> Members:
        """Sort the members of an archive; a hard link to one before it has that one's range.

        Raises:
            UsageError: two have one name.
        """
        names, facts, links = list[bytes](), array("q"), list[Member]()
        for member in found:
            names.append(member.name)
            facts.extend(member[1:-1])
            if member.target:
                links.append(member)
        order = sorted(range(len(names)), key=names.__getitem__)
        members = cls([names[number] for number in order], np.array(facts).reshape(-1, _FACTS)[order])
        for number, (one, other) in enumerate(pairwise(members._names)):
            if one == other and not one.endswith(b"/"):
                where = f"at bytes {members[number].start} and {members[number + 1].start}"
                raise UsageError(f"{archive}: two members are called {shown(one)}, {where}: remove one")
        for link in links:
            if (file := members.find(link.target)) and file.start < link.start:
                members._facts[bisect_left(members._names, link.name)] = file[1:-1]
        return members

    def __getitem__(self, number: int) -> Member:
        return Member(self._names[number], *self._facts[number].tolist())

    def _below(self, folder: bytes) -> range:
        """The numbers of the members below a folder, given with its slash or as b""."""
        end = bisect_left(self._names, folder[:-1] + b"0") if folder else len(self._names)  # 0 follows /
        return range(bisect_left(self._names, folder), end)

    def has(self, folder: bytes) -> bool:
        """Whether there is a folder, or a tar file whose members are here."""
        return bool(self._below(folder))

    def find(self, name: bytes) -> Member | None:
        """The file with this name."""
        number = bisect_left(self._names, name)
        return self[number] if self._names[number : number + 1] == [name] else None

    def files(self, folder: bytes) -> Iterator[Member]:
        """The files below a folder; those of a tar file in it aren't."""
        archive, below = b"\0", self._below(folder)
        for number, facts in zip(below, self._rows(below), strict=True):
            name = self._names[number]
            if name.startswith(archive):
                continue
            if b".tar/" in name.lower() and (tar := self._tar(name, len(folder))):
                archive = tar
            elif not name.endswith(b"/"):
                yield Member(name, *facts)

    def _tar(self, name: bytes, start: int) -> bytes | None:
        """The tar file, with a slash, that a member is in below a folder whose name ends at `start`."""
        ends = (match.end() for match in _TAR_FOLDER.finditer(name, start))
        return next((name[:end] for end in ends if self.find(name[: end - 1])), None)

    def _rows(self, numbers: range) -> Iterator[Any]:
        """The facts of many; NumPy gives some thousand at once in a third of the time."""
        for start in range(numbers.start, numbers.stop, 1000):
            yield from self._facts[start : min(start + 1000, numbers.stop)].tolist()

    def children(self, folder: bytes) -> Iterator[bytes]:
        """The names directly in a folder, those of folders with a slash; a tar file is a file."""
        numbers = self._below(folder)
        number = numbers.start
        while number < numbers.stop:
            child, slash, _ = self._names[number][len(folder) :].partition(b"/")
            number = self._below(folder + child + b"/").stop if slash else number + 1
            if child and not (slash and self.find(folder + child)):
                yield child + slash

    def encode(self) -> bytes:
        """For a file that spares the next command the listing."""
        return zlib.compress(msgspec.msgpack.encode((self._names, self._facts.tobytes())), 1)

    @classmethod
    def decode(cls, data: bytes) -> Members:
        """Raises msgspec.DecodeError or zlib.error."""
        names, facts = msgspec.msgpack.decode(zlib.decompress(data), type=tuple[list[bytes], bytes])
        return cls(names, np.frombuffer(facts, np.int64).reshape(len(names), _FACTS))
