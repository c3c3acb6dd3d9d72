"""The members of a tar file, from one header to the next: ustar, GNU and pax, and tar files in it.

https://www.gnu.org/software/tar/manual/html_node/Standard.html
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from beam_pipeline.archives.members import LINK, PLAIN, Member, shown, unpacked_name
from beam_pipeline.errors import UsageError

BLOCK = 512
Read = Callable[[int, int], bytes]
_HARD, _SPARSE, _WITHOUT_DATA, _OF_NEXT = b"1", b"S", b"123456", b"LKxgVN"  # types; some say more of the next member
_MAX_HEADER_BYTES = 1 << 20  # of a long name or pax records: paths have some 4 kB
_MAX_TAIL = 1 << 20  # behind the end: padding; there the next of two joined archives may begin
_EMPTY_BYTES = 20 * BLOCK  # of a tar file without members
MAX_SEARCH = 1 << 20  # for any header, where there is none at the start
_HIDDEN = re.compile(rb"(?:\A|/)\.")  # such as what macOS puts next to each file
_RECORD = re.compile(rb"(\d{1,7}) ((?:path|linkpath|size)(?==)|GNU\.sparse)?[^=\n]*=")


def members(read: Read, size: int, archive: str) -> Iterator[Member]:
    """Every member of a tar file, and after each tar file in it its members, as `a.tar/1.jpg`.

    Args:
        read: bytes [start, stop) of it, fewer if it ends before; called from start to end.
        size: of the file.
        archive: its name for messages.

    Raises:
        UsageError: it is none, or truncated, or two that were joined.
    """
    yield from _members(read, 0, size, archive, b"")


def _members(read: Read, at: int, end: int, archive: str, inside: bytes) -> Iterator[Member]:
    begin, pax = at, dict[bytes, bytes]()
    what = f"{shown(inside[:-1])} in {archive}" if inside else archive
    while any(header := read(at, min(end, at + BLOCK))):
        if not _is_header(header):
            raise _corrupt(what, f"no header at byte {at}" if at > begin else "it doesn't begin with a header")
        kind, data = header[156:157], at + BLOCK
        while kind == _SPARSE and header[482 if data == at + BLOCK else 504]:  # more of a sparse file's map
            header, data = header[:482] + (read(data, data + BLOCK)[504:505] or b"\0") * 30, data + BLOCK
        size = int(pax[b"size"]) if pax.get(b"size", b"").isdigit() else _number(header[124:136])
        stop = data + (0 if kind in _WITHOUT_DATA else size)
        if size < 0 or stop > end:
            raise _corrupt(what, f"it ends in member {shown(_name(header))} at byte {at}")
        if kind in _OF_NEXT and size > _MAX_HEADER_BYTES:
            raise _corrupt(what, f"the header at byte {at} has {size} bytes")
        at = data + -(-(stop - data) // BLOCK) * BLOCK
        if kind in _OF_NEXT:
            pax |= _of_next(kind, read(data, stop))
            continue
        raw = pax.get(b"path") or _name(header)
        target = pax.get(b"linkpath") or header[157:257].partition(b"\0")[0]
        is_sparse = kind == _SPARSE or b"GNU.sparse" in pax
        pax.clear()
        is_folder = kind == b"5" or (kind == b"\0" and raw.endswith(b"/"))
        name = inside + unpacked_name(raw + b"/" * is_folder, archive)
        if name == inside:
            continue
        if is_folder:
            yield Member(name, data, data)
        elif kind == _HARD and target:
            yield Member(name, data, data, method=LINK, target=inside + unpacked_name(target, archive))
        elif kind in _WITHOUT_DATA + b"DM" or is_sparse:
            yield Member(name, data, data, method=LINK)
        else:
            yield Member(name, data, stop, size, size, PLAIN)
            may_be_tar = not inside and name[-4:].lower() == b".tar" and not _HIDDEN.search(name)
            if may_be_tar and is_tar(read, data, stop):
                yield Member(name + b"/", data, data)
                yield from _members(read, data, stop, archive, name + b"/")
    if not header:
        raise _corrupt(what, "it has no end")
    if end - at > (_MAX_TAIL if at > begin else _EMPTY_BYTES):  # zeros where an interrupted download left a gap
        raise _corrupt(what, f"{end - at} bytes follow its end at byte {at}")
    for after in range(at, end, BLOCK):
        if _is_header(read(after, min(end, after + BLOCK))):
            fix = "take them apart, or unpack it by tar --ignore-zeros"
            raise UsageError(f"{what}: behind its end, at byte {after}, another tar file begins: {fix}")


def is_tar(read: Read, start: int, stop: int) -> bool:
    """Whether a file is a tar file, even a truncated or corrupt one: not if there is no header in its first MB."""
    header = read(start, min(stop, start + BLOCK))
    if len(header) < BLOCK or not any(header) or header[257:262] == b"ustar":
        return True
    blocks = range(start, min(stop, start + MAX_SEARCH), BLOCK)
    return any(_is_header(read(at, min(stop, at + BLOCK))) for at in blocks)


def _is_header(header: bytes) -> bool:
    """Whether a header's sum is what it says: of bytes, or as some wrote it, of signed ones."""
    field = header[148:156]
    try:
        expected = int(field.strip(b" \0"), 8)
    except ValueError:
        return False
    total = sum(header) - sum(field) + 8 * 32
    if expected != total and expected != total - 256 * sum(byte > 127 for byte in header[:148] + header[156:]):
        return False
    return len(header) == BLOCK and expected > 8 * 32


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


def _of_next(kind: bytes, data: bytes) -> dict[bytes, bytes]:
    """What an extra header tells of the next member: GNU's long names; pax records, `LENGTH KEY=VALUE\\n`."""
    if kind in b"LK":
        return {b"path" if kind == b"L" else b"linkpath": data.partition(b"\0")[0]}
    records, at = dict[bytes, bytes](), 0
    while kind == b"x" and (match := _RECORD.match(data, at)):
        stop = at + int(match[1])
        if stop <= match.end():
            break
        if match[2]:
            records[match[2]] = data[match.end() : stop - 1]
        at = stop
    return records


def _corrupt(archive: str, why: str) -> UsageError:
    return UsageError(f"{archive}: no valid tar file, {why}: copy it again, or test it by tar -tf")
