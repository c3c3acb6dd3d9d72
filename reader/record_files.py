"""Third-party TFRecord files without TensorFlow: which files a pattern means, and their records from end to end."""

from __future__ import annotations

import bisect
import gzip
import logging
import os
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice, pairwise
from typing import IO, Any, NamedTuple

import google_crc32c

from beam_pipeline import schema, storage
from beam_pipeline.errors import CorruptRecordError, ImageShardsError, UsageError
from reader.example import Value, parse_example
from reader.records import frame_bounds, frame_fault
from reader.words import some

PathLike = str | os.PathLike[str]
Pattern = PathLike | Sequence[PathLike]

_SAMPLED_FILES, _SAMPLED_RECORDS = 4, 100
_PIECE_BYTES, _UNPACKED_BYTES = 8 << 20, 1 << 20
_BLOCK_RECORDS = 64  # checked by a thread at a time: 20 ms of decoding
_GZIP = b"\x1f\x8b\x08"


def find_files(pattern: Pattern) -> list[str]:
    """Full paths or URLs of the files, those of each pattern sorted; each file once, however many patterns match it.

    Args:
        pattern: a pattern or a file, a published dataset's folder for its shards, or a list of these.

    Raises:
        UsageError: nothing matches; says what is there.
    """
    patterns = [pattern] if isinstance(pattern, str | os.PathLike) else list(pattern)
    if not patterns:
        raise UsageError(
            f"no file is named by {pattern!r}: give a pattern, such as 'folder/*.tfrec', or a list of these"
        )
    files: list[str] = []
    for one in patterns:
        text = os.fspath(one)
        store, url = storage.open_storage(text), storage.normalize(text)
        # Names may hold brackets, which a pattern takes for a choice of letters.
        found = [url] if "[" in url and _is_file(url) else store.glob(url)
        # A dataset's folder is no file: its shards are meant, not what is beside them.
        found = found or [storage.join(url, name) for name in store.names(url) if schema.ShardName.parse(name)]
        if not found:
            raise UsageError(f"no file matches {text}{_what_is_there(url)}")
        files += found
    return list(dict.fromkeys(files))


def _is_file(url: str) -> bool:
    folder, _, name = url.rpartition("/")
    return name in storage.open_storage(url).names(folder)


def _what_is_there(url: str) -> str:
    """What a folder holds, or the folder of what was asked for; "" if there is no such folder either."""
    for folder in (url, url.rpartition("/")[0]):
        names = storage.open_storage(url).names(folder)
        if names:
            return f": {folder} holds {some(names, 5)}"
    return ""


class Frame(NamedTuple):
    """One record of a file: its number, its byte offset, and its bytes or what is wrong with them."""

    number: int
    offset: int
    record: bytes | CorruptRecordError


class FileScan:
    """Every record of a TFRecord file, plain or GZIP, the corrupt ones too, in one pass; memory is two pieces of 8 MiB.

    A wrong CRC of a record's data costs that record. A wrong length costs the rest of the file, unless `bounds` tell
    where the next record begins. In a GZIP file offsets count unpacked bytes.

    Args:
        file: path or URL.
        bounds: where each record begins, then where the last ends, if that is known.

    Attributes:
        crc32c: of the complete file, once the pass has ended.

    Raises:
        StorageError: the file is missing or can't be read.
    """

    def __init__(self, file: str, bounds: Sequence[int] = ()) -> None:
        self.crc32c = 0
        self._file, self._bounds = file, bounds

    def __iter__(self) -> Iterator[Frame]:
        return chain.from_iterable(self.blocks())

    def blocks(self) -> Iterator[Iterable[Frame]]:
        """Up to 64 records in a block; its CRCs are checked by the thread that iterates over it."""
        is_packed = is_gzip(self._file)
        with storage.open_storage(self._file).open(self._file) as stream:
            source = _Summed(stream)
            data, number, offset = b"", 0, 0
            for piece in _unpacked(source) if is_packed else source.pieces():
                if isinstance(piece, str):
                    yield [self._lost(number, offset, piece)]
                    data = b""
                    break
                data += piece
                ends = self._ends_in(data, number, offset)
                for first in range(0, len(ends) - 1, _BLOCK_RECORDS):
                    yield self._frames(number + first, offset, data, ends[first : first + _BLOCK_RECORDS + 1])
                number, offset, data = number + len(ends) - 1, offset + ends[-1], data[ends[-1] :]
                if self._bounds:
                    if number >= len(self._bounds) - 1:
                        data = b""
                        break
                elif len(data) >= schema.FRAME_HEADER_BYTES and schema.framed_bytes(data[:12]) is None:
                    yield [self._lost(number, offset, f"{frame_fault(data)}, so the rest of the file is lost")]
                    data = b""
                    break
            if data:
                yield self._frames(number, offset, data, [0, len(data)])
            deque(source.pieces(), maxlen=0)  # for the checksum
            self.crc32c = source.crc32c

    def _ends_in(self, data: bytes, number: int, offset: int) -> list[int]:
        """Where the records that `data` holds completely begin, then where the last ends."""
        if not self._bounds:
            return frame_bounds(memoryview(data), len(data))
        stop = bisect.bisect_right(self._bounds, offset + len(data))
        return [bound - offset for bound in self._bounds[number:stop]]

    def _frames(self, number: int, offset: int, data: bytes, ends: Sequence[int]) -> Iterator[Frame]:
        for record, (begin, end) in enumerate(pairwise(ends), number):
            frame = data[begin:end]
            try:
                (found,) = schema.unframe(frame)
                yield Frame(record, offset + begin, found)
            except (CorruptRecordError, ValueError):  # the latter if the index is of other records
                yield self._lost(record, offset + begin, frame_fault(frame))

    def _lost(self, number: int, offset: int, reason: str) -> Frame:
        return Frame(number, offset, CorruptRecordError(self._file, number, offset, reason))


class _Summed:
    """A stream of bytes, whose CRC-32C is that of what was read so far."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self.crc32c = stream, 0

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self.crc32c = google_crc32c.extend(self.crc32c, data)
        return data

    def pieces(self) -> Iterator[bytes]:
        return iter(partial(self.read, _PIECE_BYTES), b"")


def _unpacked(packed: Any) -> Iterator[bytes | str]:
    """What a GZIP stream holds, in pieces; as text what is wrong with it, behind all that could be unpacked."""
    stream, data, wrong = gzip.GzipFile(fileobj=packed), bytearray(), ""
    while True:
        try:
            part = stream.read1(_UNPACKED_BYTES)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            part, wrong = b"", f"the GZIP stream is corrupt ({error})"
        data += part
        if len(data) >= _PIECE_BYTES or not part:
            yield bytes(data)
            data.clear()
        if not part:
            break
    if wrong:
        yield wrong


def is_gzip(url: str) -> bool:
    """Whether a file is packed: it begins as GZIP, and not with the length of a record that happens to look like it."""
    head = storage.open_storage(url).read(url, 0, schema.FRAME_HEADER_BYTES)
    return head.startswith(_GZIP) and schema.framed_bytes(head) is None


class Example(NamedTuple):
    """One record of a file: `FILE: record NUMBER`, its bytes, and feature → values."""

    name: str
    record: bytes
    features: dict[str, Value]


def read_examples(url: str, skip: bool = False) -> Iterator[Example]:
    """Every record of a file, parsed; costs 15 µs each.

    Args:
        url: of the file.
        skip: log records that are corrupt or no Examples, and go on behind them.

    Raises:
        CorruptRecordError: the first such record, without `skip`.
        StorageError: the file is missing or can't be read.
    """
    for frame in FileScan(url):
        try:
            features = features_of(url, frame)
        except CorruptRecordError as error:
            if not skip:
                raise
            logging.getLogger(__name__).warning("skipped: %s", error)
        else:
            assert isinstance(frame.record, bytes)
            yield Example(f"{url}: record {frame.number}", frame.record, features)


def features_of(file: str, frame: Frame) -> dict[str, Value]:
    """Feature → values of a record. Raises CorruptRecordError, also if it is no Example."""
    if isinstance(frame.record, CorruptRecordError):
        raise frame.record
    try:
        return parse_example(frame.record)
    except ValueError:
        raise CorruptRecordError(file, frame.number, frame.offset, "not a tf.train.Example") from None


def infer_features(
    files: Sequence[str], keys: Sequence[str] | None = None, skip: bool = False
) -> dict[str, tuple[str, bool]]:
    """Feature → its type (string, float32, int64) and whether it is a scalar, from the first records of some files.

    Args:
        files: four of these are looked at, spread over all; the others only if these hold no record.
        keys: features wanted, None for all in order of names.
        skip: leave out records that are corrupt.

    Raises:
        UsageError: a key isn't there; lists what there is.
        ImageShardsError: they hold no record, no Examples, or one feature with two types.
    """
    spread = [files[i * (len(files) - 1) // (_SAMPLED_FILES - 1)] for i in range(_SAMPLED_FILES)]
    first, sampled = "", 0
    types: dict[str, str] = {}
    scalars: Counter[str] = Counter()
    for file in dict.fromkeys((*spread, *files)):
        if sampled and file not in spread:
            break
        for name, _, features in islice(read_examples(file, skip), _SAMPLED_RECORDS):
            first, sampled = first or name, sampled + 1
            for key, value in features.items():
                found = "string" if isinstance(value, list) else value.dtype.name
                if len(value) and types.setdefault(key, found) != found:
                    raise ImageShardsError(f"{name}: feature {key!r} is {found}, in records before it {types[key]}")
                scalars[key] += len(value) == 1
    if not sampled:
        raise ImageShardsError(f"{', '.join(files[:_SAMPLED_FILES])}: no record in {len(files)} files")
    if not types:
        raise ImageShardsError(f"{first} and others: Examples without a value")
    if unknown := [key for key in keys or () if key not in types]:
        raise UsageError(f"no feature {', '.join(unknown)} in {files[0]}: it has {', '.join(sorted(types))}")
    return {key: (types[key], scalars[key] == sampled) for key in keys or sorted(types)}
