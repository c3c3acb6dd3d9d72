"""Anybody's TFRecord files without TensorFlow: which files a pattern means, and their records from end to end."""

from __future__ import annotations

import gzip
import logging
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from beam_pipeline import schema, storage
from beam_pipeline.errors import CorruptRecordError, ImageShardsError, UsageError
from reader.example import Value, parse_example

PathLike = str | os.PathLike[str]
Pattern = PathLike | Sequence[PathLike]

_SHOWN_NAMES = 5
_SAMPLED_FILES, _SAMPLED_RECORDS = 4, 100
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
            more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
            return f": {folder} holds {', '.join(names[:_SHOWN_NAMES])}{more}"
    return ""


class Frame(NamedTuple):
    """One record of a file: its number, its byte offset, and its bytes or what is wrong with them."""

    number: int
    offset: int
    record: bytes | CorruptRecordError


def scan_file(url: str) -> Iterator[Frame]:
    """Every record of a TFRecord file, plain or GZIP, the corrupt ones too; costs 4 µs a record.

    A wrong CRC of a record's data costs that record. A wrong length costs the rest of the file, since only lengths tell
    where the next record begins. In a GZIP file offsets count unpacked bytes.

    Raises:
        StorageError: the file is missing or can't be read.
    """
    number = offset = 0
    with storage.open_storage(url).open(url) as packed:
        stream = gzip.GzipFile(fileobj=packed) if is_gzip(url) else packed
        while True:
            record: bytes | CorruptRecordError
            frame, length = b"", None
            try:
                header = stream.read(schema.FRAME_HEADER_BYTES)
                length = schema.framed_bytes(header)
                frame = header if length is None else header + stream.read(length - len(header))
                if not frame:
                    return
                record = next(schema.unframe(frame, url, number, offset))
            except CorruptRecordError as error:
                lost = ", so the rest of the file is lost" * (len(frame) == schema.FRAME_HEADER_BYTES)
                record = CorruptRecordError(url, number, offset, error.reason + lost)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                record = CorruptRecordError(url, number, offset, f"the GZIP stream is corrupt ({error})")
            yield Frame(number, offset, record)
            if len(frame) != length:
                return
            number, offset = number + 1, offset + length


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
    for number, offset, record in scan_file(url):
        try:
            if isinstance(record, CorruptRecordError):
                raise record
            example = Example(f"{url}: record {number}", record, parse_example(record))
        except (CorruptRecordError, ValueError) as error:
            if not isinstance(error, CorruptRecordError):
                error = CorruptRecordError(url, number, offset, "not a tf.train.Example")
            if not skip:
                raise error from None
            logging.getLogger(__name__).warning("skipped: %s", error)
        else:
            yield example


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
