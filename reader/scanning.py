"""Whole TFRecord files from end to end, plain or GZIP, without an index: anybody's, and those that are checked."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import NamedTuple

from beam_pipeline import schema
from beam_pipeline.errors import CorruptRecordError
from reader.storage import CHUNK_BYTES, Storage, chunks

_GZIP = b"\x1f\x8b"
_WRONG_LENGTH = 0


class Frame(NamedTuple):
    """One record of a file: its byte offset, and its bytes or what is wrong with them."""

    offset: int
    record: bytes | CorruptRecordError


def scan_file(storage: Storage, path: str, offset: int = 0, number: int = 0) -> Iterator[Frame]:
    """Every record of one TFRecord file, plain or GZIP, the wrong ones too; memory is about two chunks of 8 MiB.

    A wrong CRC of a record's data costs that record. A wrong length costs the rest of the file, since only lengths tell
    where the next record begins.

    Args:
        offset, number: of the record to begin with; a GZIP file is unpacked from its beginning all the same.
    """
    data = b""
    try:
        for chunk in _plain_chunks(storage, path, offset):
            data = data + chunk if data else chunk
            position = 0
            while size := frame_bytes(data, position):
                yield Frame(
                    offset + position, check_frame(data[position : position + size], path, number, offset + position)
                )
                position, number = position + size, number + 1
            offset, data = offset + position, data[position:]
            if size == _WRONG_LENGTH:
                break
    except CorruptRecordError as error:  # of the GZIP stream
        yield Frame(offset, CorruptRecordError(path, number, offset, error.reason))
        return
    if data:  # the file ends, or nobody knows where the next record begins
        yield Frame(offset, check_frame(data, path, number, offset))


def check_frame(frame: bytes, path: str, number: int, offset: int) -> bytes | CorruptRecordError:
    """The one record that `frame` holds, or what is wrong with it; the rest says where it lies, for the error."""
    try:
        records = list(schema.unframe(frame, path, number, offset))
    except CorruptRecordError as error:
        return error
    if len(records) == 1:
        return records[0]
    reason = f"{len(records)} records lie where the index has one" if records else "the file ends before this record"
    return CorruptRecordError(path, number, offset, reason)


def frame_bytes(data: bytes, position: int) -> int | None:
    """Length of the frame at `position`; None where `data` ends before it does; 0 where its length is wrong."""
    header = data[position : position + schema.FRAME_HEADER_BYTES]
    if len(header) < schema.FRAME_HEADER_BYTES:
        return None
    if int.from_bytes(header[8:], "little") != schema.masked_crc32c(header[:8]):
        return _WRONG_LENGTH
    size = int.from_bytes(header[:8], "little") + schema.FRAME_BYTES
    return size if position + size <= len(data) else None


def is_gzip(storage: Storage, path: str) -> bool:
    """Whether a file is packed, by its first bytes."""
    return storage.read(path, 0, len(_GZIP)) == _GZIP


def _plain_chunks(storage: Storage, path: str, offset: int) -> Iterator[bytes]:
    """The bytes from `offset` on in chunks, unpacked where the file is GZIP (RFC 1952; of one member or more)."""
    size = storage.size(path)
    if offset and not is_gzip(storage, path):
        yield from chunks(storage, path, size, offset)
        return
    raw = chunks(storage, path, size)
    first = next(raw, b"")
    if not first.startswith(_GZIP):
        yield first
        yield from raw
        return
    for plain in _unpack(first, raw, path):
        skipped = min(offset, len(plain))
        offset -= skipped
        yield plain[skipped:]


def _unpack(packed: bytes, more: Iterator[bytes], path: str) -> Iterator[bytes]:
    """The plain bytes of a GZIP stream, at most `CHUNK_BYTES` at once however well it is packed."""
    offset = 0
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        while packed:
            plain = unpacker.decompress(packed, CHUNK_BYTES)
            offset += len(plain)
            yield plain
            packed = unpacker.unconsumed_tail
            if unpacker.eof:
                packed = unpacker.unused_data or next(more, b"")
                if not packed:
                    return
                unpacker = zlib.decompressobj(zlib.MAX_WBITS | 16)
            packed = packed or next(more, b"")
        yield unpacker.flush()
    except zlib.error as error:
        raise CorruptRecordError(path, -1, offset, f"the gzip stream is damaged ({error})") from None
    if not unpacker.eof:
        raise CorruptRecordError(path, -1, offset, "the gzip stream ends too early")
