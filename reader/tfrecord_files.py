"""Third-party TFRecord files without TensorFlow: which files a pattern matches, and their records from start to end."""

from __future__ import annotations

import gzip
import logging
import os
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice, pairwise
from typing import IO, Any, NamedTuple

import google_crc32c

from beam_pipeline import schema, storage
from beam_pipeline.errors import CorruptRecordError, ImageShardsError, UsageError
from beam_pipeline.text import first_few, name_line, plural
from reader.example import Value, parse_example
from reader.runs import frame_bounds

PathLike = str | os.PathLike[str]
Pattern = PathLike | Sequence[PathLike]

_SAMPLED_FILES, _SAMPLED_RECORDS = 4, 100
_PIECE_BYTES, _READ_BYTES = 8 << 20, 1 << 20
_BLOCK_RECORDS = 64  # checked by a thread at a time: 20 ms of decoding
_GZIP = b"\x1f\x8b\x08"


def find_files(pattern: Pattern) -> list[str]:
    """Full paths or URLs of the files, those of each pattern sorted; each file once, however many patterns match it.

    Args:
        pattern: a pattern or a file, a published dataset's folder for its shards, or a list of these.

    Raises:
        UsageError: nothing matches; lists what is in the folder.
    """
    files: dict[str, None] = {}
    for item in [pattern] if isinstance(pattern, str | os.PathLike) else pattern:
        url = storage.normalize(os.fspath(item))
        store = storage.open_storage(url)
        # A file name may contain brackets, which a pattern takes for a choice of letters.
        matches = [url] if "[" in url and store.stat(url) else store.glob(url)
        matches = matches or [storage.join(url, name) for name in store.names(url) if schema.ShardName.parse(name)]
        if not matches:
            folders = {folder: store.names(folder) for folder in (url, url.rpartition("/")[0])}
            listing = next(
                (f": {folder} holds {first_few(names, 5)}" for folder, names in folders.items() if names), ""
            )
            raise UsageError(f"no file matches {os.fspath(item)}{listing}")
        files.update(dict.fromkeys(matches))
    if not files:
        raise UsageError(f"pattern must name files, such as 'folder/*.tfrec', got {pattern!r}")
    return list(files)


class Frame(NamedTuple):
    """One record of a file: its number, its byte offset, and its bytes or their error."""

    number: int
    offset: int
    record: bytes | CorruptRecordError


class FileScan:
    """Every record of a TFRecord file, plain or GZIP, also corrupt ones, in one pass; memory is two pieces of 8 MiB.

    A wrong CRC of a record's data costs that record, a wrong length the rest of the file: only lengths tell where a
    record begins. In a GZIP file offsets count uncompressed bytes.

    Args:
        file: path or URL.

    Attributes:
        crc32c: of the complete file, once the pass has ended.

    Raises:
        StorageError: the file is missing or can't be read.
    """

    def __init__(self, file: str) -> None:
        self.crc32c = 0
        self._file = file

    def __iter__(self) -> Iterator[Frame]:
        return chain.from_iterable(self.blocks())

    def blocks(self) -> Iterator[Iterable[Frame]]:
        """Up to 64 records in a block; the CRCs of their data are checked by the thread that iterates over it."""
        is_compressed = is_gzip(self._file)
        with storage.open_storage(self._file).open(self._file) as stream:
            source = _Summed(stream)
            data, number, offset, fault = b"", 0, 0, ""
            for piece in _uncompressed(source) if is_compressed else source.pieces():
                if isinstance(piece, str):
                    fault = piece
                    break
                data += piece
                ends = frame_bounds(memoryview(data), len(data))
                for first in range(0, len(ends) - 1, _BLOCK_RECORDS):
                    yield self._frames(number + first, offset, data, ends[first : first + _BLOCK_RECORDS + 1])
                number, offset, data = number + len(ends) - 1, offset + ends[-1], data[ends[-1] :]
                header = data[: schema.FRAME_HEADER_BYTES]
                if len(header) == schema.FRAME_HEADER_BYTES and not schema.framed_bytes(header):
                    fault = "the CRC of the length is wrong, so the rest of the file is lost"
                    break
            if fault or data:
                yield [self._lost(number, offset, fault or "the file ends inside this record")]
            deque(source.pieces(), maxlen=0)  # for the checksum
            self.crc32c = source.crc32c

    def _frames(self, number: int, offset: int, data: bytes, ends: Sequence[int]) -> Iterator[Frame]:
        for record, (begin, end) in enumerate(pairwise(ends), number):
            try:
                (content,) = schema.unframe(data[begin:end])
                yield Frame(record, offset + begin, content)
            except CorruptRecordError as error:
                yield self._lost(record, offset + begin, error.reason)

    def _lost(self, number: int, offset: int, reason: str) -> Frame:
        return Frame(number, offset, CorruptRecordError(self._file, number, offset, reason))


class _Summed:
    """A stream of bytes, with the CRC-32C of those read so far."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self.crc32c = stream, 0

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self.crc32c = google_crc32c.extend(self.crc32c, data)
        return data

    def pieces(self) -> Iterator[bytes]:
        return iter(partial(self.read, _PIECE_BYTES), b"")


def _uncompressed(source: Any) -> Iterator[bytes | str]:
    """The content of a GZIP stream, in pieces; if it is corrupt, all that can be read, then the fault as text."""
    stream, data, fault = gzip.GzipFile(fileobj=source), bytearray(), ""
    try:
        while part := stream.read1(_READ_BYTES):
            data += part
            if len(data) >= _PIECE_BYTES:
                yield bytes(data)
                data.clear()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        fault = f"the GZIP stream is corrupt ({error})"
    yield bytes(data)
    if fault:
        yield fault


def is_gzip(url: str) -> bool:
    """Whether a file is GZIP: it begins as one, and not with the length of a record that happens to look like it."""
    head = storage.open_storage(url).read(url, 0, schema.FRAME_HEADER_BYTES)
    return head.startswith(_GZIP) and schema.framed_bytes(head) is None


class Example(NamedTuple):
    """One record of a file: `FILE: record NUMBER`, its bytes, and feature → values."""

    name: str
    record: bytes
    features: dict[str, Value]


def read_examples(url: str, skip: Callable[[CorruptRecordError], object] | None = None) -> Iterator[Example]:
    """Every record of a file, parsed; costs 15 µs each.

    Args:
        url: of the file.
        skip: called with the error of each record that is corrupt or not an Example; None to raise it.

    Raises:
        CorruptRecordError: the first such record, without `skip`.
        StorageError: the file is missing or can't be read.
    """
    for number, offset, record in FileScan(url):
        if isinstance(record, bytes):
            try:
                features = parse_example(record)
            except ValueError:
                record = CorruptRecordError(url, number, offset, "not a tf.train.Example")
            else:
                yield Example(f"{url}: record {number}", record, features)
                continue
        if skip is None:
            raise record
        skip(record)


def log_skipped(error: CorruptRecordError) -> None:
    """Log a record that `read_examples` skips."""
    logging.getLogger(__name__).warning("skipped: %s", name_line(str(error)))


def infer_features(
    files: Sequence[str], keys: Sequence[str] | None, skip: Callable[[CorruptRecordError], object] | None
) -> dict[str, tuple[str, bool]]:
    """Feature → its type (string, float32, int64) and whether it is a scalar, from the first records of some files.

    Args:
        files: four of these are read, spread over all; the others only if these hold no record.
        keys: which features, None for all in order of names.
        skip: as for `read_examples`.

    Raises:
        UsageError: no record has such a key; lists the keys there are.
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
                dtype = "string" if isinstance(value, list) else value.dtype.name
                if len(value) and types.setdefault(key, dtype) != dtype:
                    raise ImageShardsError(f"{name}: feature {key!r} is {dtype}, in records before it {types[key]}")
                scalars[key] += len(value) == 1
    if not sampled:
        raise ImageShardsError(f"{', '.join(files[:_SAMPLED_FILES])}: no record in {plural(len(files), 'file')}")
    if not types:
        raise ImageShardsError(f"{first} and others: Examples without a value")
    if unknown := [key for key in keys or () if key not in types]:
        raise UsageError(f"no feature {', '.join(unknown)} in {files[0]}: it has {', '.join(sorted(types))}")
    return {key: (types[key], scalars[key] == sampled) for key in keys or sorted(types)}
