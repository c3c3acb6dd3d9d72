"""The members of a tar file, from one header to the next: ustar, GNU and pax, and tar files in it.

https://www.gnu.org/software/tar/manual/html_node/Standard.html
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from beam_pipeline.archives.members import FOLDER, LINK, Member, shown, unpacked_name
from beam_pipeline.errors import UsageError
from beam_pipeline.storage import Part

BLOCK = 512
_MAX_HEADER_BYTES = 1 << 20  # of a long name or pax records: paths have some 4 kB
_RECORD = re.compile(rb"(\d{1,7}) ([^=\n]+)=")
_MAX_TAIL = 1 << 20  # of zeros behind the end, to find a second archive there
_SHARED = rb"[^/]+(/[^/]+)?"  # a class folder, or one of a split


def members(read: Callable[[int, int], bytes], size: int, archive: str) -> Iterator[Member]:
    """Every member of a tar file, and after each tar file that may be a class's its members, as `a.tar/1.jpg`.

    Args:
        read: bytes [start, stop) of it, fewer if it ends before; called from start to end.
        size: of the file.
        archive: its name for messages.

    Raises:
        UsageError: it is none, or truncated.
    """
    yield from _members(read, 0, size, archive, b"")


def _members(read: Callable[[int, int], bytes], at: int, end: int, archive: str, inside: bytes) -> Iterator[Member]:
    begin, long_name, pax, zeros = at, b"", dict[bytes, bytes](), 0
    what = f"{shown(inside)} in {archive}" if inside else archive
    while at < end:
        header = read(at, at + BLOCK)
        if len(header) < BLOCK or at + BLOCK > end:
            raise _corrupt(what, f"it ends in a header, at byte {at}")
        if not any(header):
            zeros, at = zeros + BLOCK, at + BLOCK
            if zeros > _MAX_TAIL:
                return
            continue
        if not _has_checksum(header):
            if zeros:
                return  # padding with something else than zeros, as by some tape drives
            raise _corrupt(what, f"no header at byte {at}" if at > begin else "it doesn't begin with a header")
        if zeros:
            fix = "take them apart, or unpack it by tar --ignore-zeros"
            raise UsageError(f"{what}: behind its end, at byte {at}, another tar file begins: {fix}")
        kind, data = header[156:157], at + BLOCK
        size = int(pax[b"size"]) if pax.get(b"size", b"").isdigit() else _number(header[124:136])
        stop = data + (0 if kind in b"123456" and kind else size)
        at = data + -(-(stop - data) // BLOCK) * BLOCK
        if size < 0 or stop > end:
            raise _corrupt(what, f"it ends in member {shown(_name(header))} at byte {data - BLOCK}")
        if kind in b"LKxgVN" and kind:
            if size > _MAX_HEADER_BYTES:
                raise _corrupt(what, f"the header at byte {data - BLOCK} has {size} bytes")
            if kind == b"L":
                long_name = read(data, stop).partition(b"\0")[0]
            elif kind == b"x":
                pax = _records(read(data, stop))
            continue
        raw = pax.get(b"path") or long_name or _name(header)
        is_sparse = kind == b"S" or any(key.startswith(b"GNU.sparse") for key in pax)
        long_name, pax = b"", {}
        is_folder = kind == b"5" or (kind == b"\0" and raw.endswith(b"/"))
        if not (name := unpacked_name(raw + b"/" * is_folder, archive)):
            continue
        name = inside + b"/" * bool(inside) + name
        if is_folder:
            yield Member(name, data, data)
        elif kind not in (b"0", b"\0", b"7") or is_sparse:
            yield Member(name, data, data, method=LINK)
        else:
            yield Member(name, data, stop, size, size, Part.PLAIN)
            if not inside and name[-4:].lower() == b".tar" and re.fullmatch(_SHARED, name, re.DOTALL):
                yield from _members(read, data, stop, archive, name)


def _has_checksum(header: bytes) -> bool:
    """Whether a header's sum is what it says: of bytes, or as some wrote it, of signed ones."""
    field = header[148:156]
    try:
        expected = int(field.strip(b" \0"), 8)
    except ValueError:
        return False
    total = sum(header) - sum(field) + 8 * 32
    return expected in (total, total - 256 * sum(byte > 127 for byte in header[:148] + header[156:]))


def _number(field: bytes) -> int:
    """A number in octal digits, or if its first bit is set in base 256; -1 if it is neither."""
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big") if field[0] == 0x80 else -1
    try:
        return int(field.strip(b" \0") or b"0", 8)
    except ValueError:
        return -1


def _name(header: bytes) -> bytes:
    name, prefix = header[:100].partition(b"\0")[0], b""
    if header[257:263] == b"ustar\0":
        prefix = header[345:500].partition(b"\0")[0]
    return prefix + b"/" + name if prefix else name


def _records(data: bytes) -> dict[bytes, bytes]:
    """pax records: `LENGTH KEY=VALUE\\n`, the length of all of it."""
    records, at = {}, 0
    while match := _RECORD.match(data, at):
        stop = at + int(match[1])
        if stop <= match.end():
            break
        records[match[2]], at = data[match.end() : stop - 1], stop
    return records


def _corrupt(archive: str, why: str) -> UsageError:
    return UsageError(f"{archive}: no valid tar file, {why}: copy it again, or test it by tar -tf")
