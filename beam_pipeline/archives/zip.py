"""The members of a zip file, by the directory at its end, and the file in a member's range.

https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

from __future__ import annotations

import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from itertools import accumulate

from beam_pipeline.archives.members import FOLDER, LINK, PLAIN, Member, shown, unpacked_name
from beam_pipeline.archives.tar import Read
from beam_pipeline.errors import Reject, UsageError
from beam_pipeline.schema import RejectReason
from beam_pipeline.storage import Part, Storage

ENCRYPTED = 1 << 15  # added to the method
_LENGTHS = struct.Struct("<26x2H")  # of a member's name and extra field, which the directory's may not be
_ENTRY = struct.Struct("<4sxB2x2H4x3I3H4x2I")
_EXTRA, _LONG = struct.Struct("<2H"), struct.Struct("<q")
_END = struct.Struct("<4xH6x2I2x")
_END_64, _LOCATOR = struct.Struct("<40x2Q"), struct.Struct("<4xI8xI")  # follow each other, before the end
_HEADER_BYTES = 30
_TAIL_BYTES = 0xFFFF + _END.size + _END_64.size + _LOCATOR.size  # with a comment
_MAX_DIRECTORY_BYTES = 256 << 20  # some two million members; its size may be a lie
_IN_EXTRA, _ZIP64 = 0xFFFF_FFFF, 1
_FAT, _UNIX = 0, 3
_IS_ENCRYPTED, _IS_UTF8 = 1, 0x800


def members(read: Read, size: int, archive: str) -> Iterator[Member]:
    """Every member of a zip file, in the order of their bytes.

    Args:
        read: bytes [start, stop) of it: called at most twice.
        size: of the file.
        archive: its name for messages.

    Raises:
        UsageError: it is none, truncated, in several parts, or members share bytes.
    """
    try:
        directory, begin, moved = _directory(read, size)
        entries = sorted(_entries(directory, moved))
    except (ValueError, struct.error) as error:
        fix = "copy it again, or test it by unzip -t"
        raise UsageError(f"{archive}: no zip file that can be read ({str(error)[:100]}): {fix}") from None
    starts = (*(entry[0] for entry in entries[1:]), begin)
    for (start, file_bytes, packed, method, crc32, raw), next_start in zip(entries, starts, strict=False):
        name = unpacked_name(raw, archive)
        if not 0 <= start <= next_start - _HEADER_BYTES - packed:
            raise UsageError(f"{archive}: member {shown(name)} at byte {start} and the next share bytes: pack it again")
        stop = min(next_start, start + _HEADER_BYTES + 2 * 0xFFFF + packed)
        if name:
            yield Member(name, start, stop, file_bytes, packed, FOLDER if name.endswith(b"/") else method, crc32)


def _directory(read: Read, size: int) -> tuple[bytes, int, int]:
    """A zip file's directory, where it is, and how far from where the file says that it is: something was put before.

    Raises:
        ValueError: there is none.
        struct.error: it is truncated.
    """
    tail_start = max(0, size - _TAIL_BYTES)
    tail = read(tail_start, size)
    stop = tail.rfind(b"PK\5\6", 0, max(0, len(tail) - _END.size + 4))
    if stop < 0:
        raise ValueError("it has no end")
    disk, length, said = _END.unpack_from(tail, stop)
    disks, at = 1, stop - _END_64.size - _LOCATOR.size
    if at >= 0 and tail.startswith(b"PK\6\6", at) and tail.startswith(b"PK\6\7", at + _END_64.size):
        disk, disks = _LOCATOR.unpack_from(tail, at + _END_64.size)
        length, said = _END_64.unpack_from(tail, at)
        stop = at
    if disk or disks > 1:
        raise ValueError("it is in several parts")
    begin = tail_start + stop - length
    if begin < 0 or length > _MAX_DIRECTORY_BYTES:
        raise ValueError(f"a directory of {length} bytes, in a file of {size}; at most {_MAX_DIRECTORY_BYTES} are read")
    directory = tail[stop - length : stop] if length <= stop else read(begin, begin + length)
    return directory, begin, begin - said


def _entries(directory: bytes, moved: int) -> Iterator[tuple[int, int, int, int, int, bytes]]:
    """(start, bytes of the file, bytes as stored, method, CRC-32, name) of each entry.

    100,000 take 0.2 s; Python's zipfile takes 1 s, and 600 bytes each.

    Raises:
        ValueError, struct.error: one can't be read.
    """
    at = 0
    while at < len(directory):
        fields = _ENTRY.unpack_from(directory, at)
        signature, system, flags, method, crc32, packed, size, *lengths, mode, start = fields
        if signature != b"PK\1\2":
            raise ValueError(f"no entry at byte {at} of its directory")
        name_at, extra_at, comment_at, next_at = accumulate(lengths, initial=at + _ENTRY.size)
        name = directory[name_at:extra_at]
        if not name.isascii() or b"\\" in name or b"\0" in name:
            name = _file_name(name, system, flags)
        if _IN_EXTRA in (size, packed, start):
            size, packed, start = _of_zip64(directory[extra_at:comment_at], size, packed, start)
        if system == _UNIX and stat.S_ISLNK(mode >> 16):
            method = LINK
        elif flags & _IS_ENCRYPTED:
            method |= ENCRYPTED
        yield start + moved, size, packed, method, crc32, name
        at = next_at
    if at > len(directory):
        raise ValueError("its directory is truncated")


def _of_zip64(extra: bytes, *fields: int) -> Iterator[int]:
    """Fields of an entry; those that don't fit into 32 bits are in its extra field, in this order."""
    at, data = 0, b""
    while at + _EXTRA.size <= len(extra) and not data:
        kind, length = _EXTRA.unpack_from(extra, at)
        at += _EXTRA.size + length
        data = extra[at - length : at] if kind == _ZIP64 else b""
    at = 0
    for field in fields:
        if field == _IN_EXTRA:
            (field,) = _LONG.unpack_from(data, at)
            at += _LONG.size
            if field < 0:
                raise ValueError("a member of more than 8 exabytes")
        yield field


def is_zip(read: Read, size: int) -> bool:
    """Whether a file is a zip file, even a truncated one, by its first or last bytes."""
    return read(0, min(size, 2)) in (b"PK", b"") or b"PK\5\6" in read(max(0, size - _TAIL_BYTES), size)


def _file_name(name: bytes, system: int, flags: int) -> bytes:
    """A member's name as unzip writes it: up to a 0, in UTF-8; without that flag in CP437, but on Unix as it is."""
    name = name.partition(b"\0")[0]
    if flags & _IS_UTF8:
        name.decode()  # raises UnicodeDecodeError
    elif system != _UNIX:
        name = name.decode("cp437").encode()
    return name.replace(b"\\", b"/") if system == _FAT and b"/" not in name else name


def read_part(store: Storage, part: Part, size: int) -> bytes:
    """The bytes of a file in a zip or tar; read again if its CRC isn't that of the directory: a bit may have flipped.

    Args:
        store: of the archive.
        part: the range, as listed.
        size: of the file, as listed.

    Raises:
        FileNotFoundError: the archive is gone.
        Reject: it is another one than was listed, or the member can't be unpacked.
    """
    if part.method & ENCRYPTED:
        raise Reject(RejectReason.UNSUPPORTED, "encrypted in its zip file")
    if part.method not in (PLAIN, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise Reject(RejectReason.UNSUPPORTED, f"compressed in its zip file by method {part.method}")
    for _ in range(2):
        data = store.read_if(part.url, part.start, part.stop, part.generation) if size else b""
        if data is None:
            raise Reject(RejectReason.CHANGED, "its archive isn't the one that was listed")
        if part.method == PLAIN:
            return bytes(data)
        file = _unpacked(part, bytes(data), size)
        if len(file) == size and zlib.crc32(file) == part.crc32:
            return file
    raise Reject(RejectReason.DECODE_ERROR, "corrupt in its zip file: not the size and CRC-32 of the directory")


def _unpacked(part: Part, data: bytes, size: int) -> bytes:
    """The file in a member's range, with its header; not all of it if that is more than `size` bytes."""
    if len(data) < _HEADER_BYTES:
        return b""
    begin = _HEADER_BYTES + sum(_LENGTHS.unpack_from(data))
    packed = data[begin : begin + part.packed]
    if part.method == zipfile.ZIP_STORED:
        return packed
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, size + 1)
    except zlib.error:
        return b""
