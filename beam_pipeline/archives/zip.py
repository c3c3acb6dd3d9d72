"""The members of a zip file, from the directory at its end: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from itertools import pairwise

from beam_pipeline.archives.members import FOLDER, LINK, Member, shown, unpacked_name
from beam_pipeline.errors import UsageError

Read = Callable[[int, int], bytes]
ENCRYPTED = 0x1000  # added to the method
LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_LOCAL, _ENTRY_MAGIC = b"PK\3\4", b"PK\1\2"
_ENTRY = struct.Struct("<4s6H3L5H2L")
_END, _END64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_MAX_COMMENT = 0xFFFF
_TAIL_BYTES = _MAX_COMMENT + _END.size + _END64.size + _LOCATOR.size
_PIECE_BYTES = 64 << 20  # of the directory
_MAX_HEADER = LOCAL_HEADER.size + 2 * 0xFFFF
_UTF8, _IS_ENCRYPTED = 0x800, 1
_FAT, _UNIX = 0, 3
_UNICODE_PATH, _ZIP64 = 0x7075, 1


def members(read: Read, size: int, archive: str) -> Iterator[Member]:
    """Every member of a zip file, in the order of their bytes.

    Args:
        read: bytes [start, stop) of it.
        size: of the file.
        archive: its name for messages.

    Raises:
        UsageError: it is none, truncated, in several parts, or members share bytes.
    """
    begin, stop, shift = _directory(read, size, archive)
    found = sorted(_entries(read, begin, stop, shift, archive), key=lambda member: member.start)
    ends = [member.start for member in found[1:]] + [begin]
    for member, end in zip(found, ends, strict=True):
        least = member.start + LOCAL_HEADER.size + member.packed
        if least > end or member.start < 0:
            raise _corrupt(archive, f"{shown(member.name)} at byte {member.start} and what follows it share bytes")
        # Behind the name comes an extra field that may differ from the directory's; then the data, maybe a descriptor.
        yield member._replace(stop=min(end, member.start + _MAX_HEADER + member.packed))


def _directory(read: Read, size: int, archive: str) -> tuple[int, int, int]:
    """(start, stop) of the directory, and how far offsets are off: by what was put before the archive."""
    first = max(0, size - _TAIL_BYTES)
    tail = read(first, size)
    at = len(tail)
    while (at := tail.rfind(b"PK\5\6", 0, at)) >= 0:
        if at + _END.size <= len(tail):
            _, disk, first_disk, _, entries, length, offset, comment = _END.unpack_from(tail, at)
            if at + _END.size + comment == len(tail):
                break
    else:
        raise _corrupt(archive, "it has no directory at its end")
    stop = first + at
    if tail[at - _LOCATOR.size : at][:4] == b"PK\6\7":
        where = stop - _LOCATOR.size - _END64.size
        end64 = _END64.unpack(read(where, where + _END64.size))
        if end64[0] == b"PK\6\6":
            disk, first_disk, length, offset, stop = *end64[4:6], *end64[8:10], where
    if disk or first_disk:
        raise _corrupt(archive, "it is one of several parts", "join them")
    begin = stop - length
    if begin < 0 or offset > begin:
        raise _corrupt(archive, f"its directory of {length} bytes at {offset} isn't there")
    return begin, stop, begin - offset


def _entries(read: Read, begin: int, stop: int, shift: int, archive: str) -> Iterator[Member]:
    data, at = b"", 0
    while begin < stop or at < len(data):
        if len(data) - at < _ENTRY.size + 3 * 0xFFFF and begin < stop:
            end = min(stop, begin + _PIECE_BYTES)
            data, at, begin = data[at:] + read(begin, end), 0, end
        if len(data) - at < _ENTRY.size or data[at : at + 4] != _ENTRY_MAGIC:
            raise _corrupt(archive, "its directory is corrupt")
        (_, made_by, _, flags, method, _, _, crc32, packed, size, name_length, extra_length, comment, *_, mode, start) = (
            _ENTRY.unpack_from(data, at)
        )
        name_at = at + _ENTRY.size
        raw = data[name_at : name_at + name_length]
        extra = data[name_at + name_length : name_at + name_length + extra_length]
        at = name_at + name_length + extra_length + comment
        if at > len(data):
            raise _corrupt(archive, "its directory is corrupt")
        name, fields = _name(raw, flags, made_by >> 8, extra), _extra(extra)
        if wide := fields.get(_ZIP64, b""):
            values = [value for (value,) in struct.iter_unpack("<Q", wide[: len(wide) // 8 * 8])]
            size, packed, start = (
                values.pop(0) if value == 0xFFFFFFFF and values else value for value in (size, packed, start)
            )
        if not (name := unpacked_name(name, archive)):
            continue
        is_link = made_by >> 8 == _UNIX and mode >> 16 & 0o170000 == 0o120000
        method |= ENCRYPTED * (flags & _IS_ENCRYPTED)
        kind = FOLDER if name.endswith(b"/") else LINK if is_link else method
        yield Member(name, start + shift, 0, size, packed, kind, crc32)


def _name(raw: bytes, flags: int, host: int, extra: bytes) -> bytes:
    """A member's name in UTF-8, with the separators that unzip gives it."""
    if not (flags & _UTF8) and not raw.isascii():
        field = _extra(extra).get(_UNICODE_PATH, b"")
        is_of_name = field[:1] == b"\1" and field[1:5] == zlib.crc32(raw).to_bytes(4, "little")
        raw = field[5:] if is_of_name else raw.decode("cp437").encode()
    return raw.replace(b"\\", b"/") if host == _FAT and b"/" not in raw else raw


def _extra(extra: bytes) -> dict[int, bytes]:
    """The extra fields of an entry, by kind."""
    fields = {}
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<2H", extra)
        fields[kind], extra = extra[4 : 4 + length], extra[4 + length :]
    return fields


def _corrupt(archive: str, why: str, fix: str = "copy it again, or test it by unzip -t") -> UsageError:
    return UsageError(f"{archive}: no valid zip file, {why}: {fix}")
