"""The members of a zip file, by Python's zipfile from the directory at its end, and the file in a member's range."""

from __future__ import annotations

import io
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator

from beam_pipeline.archives.members import FOLDER, LINK, PLAIN, Member, shown, unpacked_name
from beam_pipeline.errors import ImageShardsError, Reject, UsageError
from beam_pipeline.schema import RejectReason
from beam_pipeline.storage import Part, Storage

ENCRYPTED = 1 << 15  # added to the method
_LENGTHS = struct.Struct("<26x2H")  # of a member's name and extra field, which the directory's may not be
_HEADER_BYTES = 30
_TAIL_BYTES = 0xFFFF + 98  # a comment, the end of the directory, and where that of a zip64 is
_MAX_DIRECTORY_BYTES = 256 << 20  # some two million members; its size may be a lie
_FAT, _UNIX = 0, 3
# What zipfile raises on bytes that it doesn't expect.
_INVALID = (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, OSError, EOFError, struct.error)
_IS_ENCRYPTED, _IS_UTF8 = 1, 0x800


def members(read: Callable[[int, int], bytes], size: int, archive: str) -> Iterator[Member]:
    """Every member of a zip file, in the order of their bytes.

    Args:
        read: bytes [start, stop) of it: called at most three times.
        size: of the file.
        archive: its name for messages.

    Raises:
        UsageError: it is none, truncated, in several parts, or members share bytes.
    """
    try:
        with zipfile.ZipFile(_File(read, size)) as file:
            infos, end = sorted(file.infolist(), key=lambda info: info.header_offset), file.start_dir
    except ImageShardsError:
        raise
    except _INVALID as error:
        fix = "copy it again, or test it by unzip -t"
        raise UsageError(f"{archive}: no zip file that can be read ({str(error)[:100]}): {fix}") from None
    starts = [*(info.header_offset for info in infos[1:]), end][: len(infos)]
    for info, next_start in zip(infos, starts, strict=True):
        name, start, method = unpacked_name(_name(info), archive), info.header_offset, info.compress_type
        if not 0 <= start <= next_start - _HEADER_BYTES - info.compress_size:
            raise UsageError(f"{archive}: member {shown(name)} at byte {start} and the next share bytes: pack it again")
        if name.endswith(b"/"):
            method = FOLDER
        elif info.create_system == _UNIX and stat.S_ISLNK(info.external_attr >> 16):
            method = LINK
        elif info.flag_bits & _IS_ENCRYPTED:
            method |= ENCRYPTED
        stop = min(next_start, start + _HEADER_BYTES + 2 * 0xFFFF + info.compress_size)
        if name:
            yield Member(name, start, stop, info.file_size, info.compress_size, method, info.CRC)


def is_zip(read: Callable[[int, int], bytes], size: int) -> bool:
    """Whether a file is a zip file, even a truncated one, by its first or last bytes."""
    return read(0, min(size, 2)) in (b"PK", b"") or b"PK\5\6" in read(max(0, size - _TAIL_BYTES), size)


def _name(info: zipfile.ZipInfo) -> bytes:
    """A member's name as unzip writes it."""
    name = info.filename
    if not name.isascii() and info.create_system == _UNIX and not info.flag_bits & _IS_UTF8:
        return name.encode("cp437")  # as which zipfile took it; but on Unix it is in the bytes of the file system
    return (name.replace("\\", "/") if info.create_system == _FAT and "/" not in name else name).encode()


class _File(io.RawIOBase):
    """What zipfile reads from: its end, kept, and the directory before."""

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        self._read, self._size, self._position = read, size, 0
        self._tail_start = max(0, size - _TAIL_BYTES)
        self._tail = read(self._tail_start, size)

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if self._position < 0:
            raise OSError("truncated")
        return self._position

    def read(self, size: int = -1) -> bytes:
        start = self._position
        stop = self._position = self._size if size < 0 else min(self._size, start + size)
        if start >= self._tail_start:
            return self._tail[start - self._tail_start : stop - self._tail_start]
        if stop - start > _MAX_DIRECTORY_BYTES:
            raise ValueError(f"a directory of {stop - start} bytes, at most {_MAX_DIRECTORY_BYTES} are read")
        return self._read(start, stop)


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
