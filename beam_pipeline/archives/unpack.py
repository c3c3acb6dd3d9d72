"""A range of an archive → the file that it holds."""

from __future__ import annotations

import zlib

from beam_pipeline.archives.zip import ENCRYPTED, LOCAL_HEADER
from beam_pipeline.errors import Reject
from beam_pipeline.schema import RejectReason
from beam_pipeline.storage import Part, Storage

_STORED, _DEFLATED = 0, 8


def read_part(store: Storage, part: Part, size: int) -> bytes:
    """The bytes of a file in an archive; read again if its CRC isn't that of the directory: a bit may have flipped.

    Args:
        store: of the archive.
        part: the range, as listed.
        size: of the file, as listed.

    Raises:
        FileNotFoundError: the archive is gone.
        Reject: it is another one than was listed, or the member can't be unpacked.
    """
    if not size:
        return b""
    for is_last in (False, True):
        data = store.read_if(part.url, part.start, part.stop, part.generation)
        if data is None:
            raise Reject(RejectReason.CHANGED, "its archive isn't the one that was listed")
        try:
            return unpack(part, bytes(data), size)
        except Reject:
            if is_last or part.method & ENCRYPTED:
                raise
    raise AssertionError


def unpack(part: Part, data: bytes, size: int) -> bytes:
    """The file in the bytes of a range; it never inflates to more than `size` bytes.

    Raises:
        Reject: it is encrypted, compressed by another method, or not what the archive's directory says.
    """
    if part.method == Part.PLAIN:
        return data
    if part.method & ENCRYPTED:
        raise Reject(RejectReason.UNSUPPORTED, "encrypted in its zip file")
    if part.method not in (_STORED, _DEFLATED):
        raise Reject(RejectReason.UNSUPPORTED, f"compressed in its zip file by method {part.method}")
    if len(data) < LOCAL_HEADER.size or data[:4] != b"PK\3\4":
        raise Reject(RejectReason.DECODE_ERROR, "its zip file has no header where the directory says")
    *_, name_length, extra_length = LOCAL_HEADER.unpack_from(data)
    begin = LOCAL_HEADER.size + name_length + extra_length
    packed = data[begin : begin + part.packed]
    try:
        file = packed if part.method == _STORED else zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, size + 1)
    except zlib.error:
        raise Reject(RejectReason.DECODE_ERROR, "corrupt in its zip file") from None
    if len(file) != size or zlib.crc32(file) != part.crc32:
        raise Reject(RejectReason.DECODE_ERROR, "its CRC or size isn't that of its zip file's directory")
    return file
