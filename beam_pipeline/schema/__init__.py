"""The on-disk contract, which `docs/format.md` describes: file names, record keys, TFRecord framing, indexes."""

from __future__ import annotations

import hashlib
import json
import re
import struct
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import google_crc32c
import numpy as np

from beam_pipeline.errors import CorruptRecordError

NAME_PATTERN = re.compile(r"[a-z][a-z0-9_]*")  # TFDS reads no other dataset and split names
# Names of columns that hold boxes: `bbox`, `object/bbox/xmin`, `y_max`.
BOX_NAME = re.compile(r"(?<![a-z])((b|bounding_?)?box(es)?|[xy]_?m(in|ax))(?![a-z])|xyxy|xywh", re.IGNORECASE)
VERSION_PATTERN = re.compile(r"(?:0|[1-9]\d*)\.(?:0|[1-9]\d*)\.(?:0|[1-9]\d*)")


def newest_first(names: Iterable[str]) -> list[str]:
    """The versions among the names of a folder, as `Storage.names` gives them: folders have a slash at their end."""
    versions = [name[:-1] for name in names if name[-1:] == "/" and VERSION_PATTERN.fullmatch(name[:-1])]
    return sorted(versions, key=lambda version: tuple(map(int, version.split("."))), reverse=True)


def canonical_json(value: Any) -> bytes:
    """The one JSON text of `value`: sorted keys, UTF-8, no white space, a line break at the end.

    A name on disk that isn't UTF-8 keeps its lone surrogates as `\\udcXX` escapes, which Python's parser reads back.
    """
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace") + b"\n"


def is_utf8(text: str) -> bool:
    """Whether a name can be written as UTF-8: one on disk need not be."""
    return re.search("[\ud800-\udfff]", text) is None


def relative_path_bytes(path: str) -> bytes:
    """A listed path as bytes: UTF-8, and a local name that isn't UTF-8 as the bytes it has on disk."""
    return path.encode("utf-8", "surrogateescape")


def normal_path_bytes(path: str) -> bytes:
    """A relative path as it is hashed: UTF-8 of its NFC form, so that both normal forms of a name agree."""
    return relative_path_bytes(path if path.isascii() else unicodedata.normalize("NFC", path))


def sha256(data: bytes) -> str:
    """SHA-256 of `data` as 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


# Files of a published version other than its shards.
MANIFEST_FILE = "manifest.json"
RUN_FILE = "run.json"
LABELS_FILE = "class.labels.txt"
FEATURES_FILE = "features.json"
DATASET_INFO_FILE = "dataset_info.json"
REJECTS_FILE = "rejects.jsonl"
REPORT_FILE = "report.html"
INDEX_FOLDER = "index"
STATE_FOLDER = "_state"
UNHASHED_FILES = frozenset({RUN_FILE})  # differs from run to run
# Keys of a record (`tf.train.Example`).
IMAGE_KEY = "image"  # bytes: the encoded image
CLASS_KEY = "class"  # int64: class id
LABEL_KEY = "label"  # bytes: class name, UTF-8
SIZE_KEY = "size"  # int64[2]: height, width in pixels
FILENAME_KEY = "filename"  # bytes: path relative to the input, as listed
ONE_HOT_KEY = "one_hot_class"  # float[classes], with --one_hot
RECORD_KEYS = (IMAGE_KEY, CLASS_KEY, LABEL_KEY, SIZE_KEY, FILENAME_KEY, ONE_HOT_KEY)
# A run is the unit of reading and shuffling: 64 records of ~13 kB are one range read of ~0.8 MB, long enough that
# seeking costs nothing, short enough that a window of 16 mixes well.
RUN_RECORDS = 64
RUN_DTYPE = np.dtype([("shard", "<u4"), ("offset", "<u8"), ("bytes", "<u4"), ("records", "<u2")])


class RejectReason(StrEnum):
    """Why an input image got no record; `docs/format.md` says what each means."""

    NOT_AN_IMAGE = "not_an_image"
    UNSUPPORTED = "unsupported"
    TRUNCATED = "truncated"
    DECODE_ERROR = "decode_error"
    TOO_MANY_PIXELS = "too_many_pixels"
    TOO_MANY_BYTES = "too_many_bytes"
    OUT_OF_MEMORY = "out_of_memory"
    VANISHED = "vanished"
    CHANGED = "changed"
    DECODER_CRASH = "decoder_crash"
    DECODER_TIMEOUT = "decoder_timeout"


# Rejects that the machine or the moment causes, not the input bytes: with none of these, a dataset is reproducible.
ENVIRONMENT_REASONS = (
    RejectReason.OUT_OF_MEMORY,
    RejectReason.VANISHED,
    RejectReason.CHANGED,
    RejectReason.DECODER_CRASH,
    RejectReason.DECODER_TIMEOUT,
)


@dataclass(frozen=True, slots=True)
class ShardName:
    """The file name of one shard: formats and parses `NAME-SPLIT.tfrecord-00000-of-00012`."""

    dataset: str
    split: str
    index: int
    count: int

    @property
    def file(self) -> str:
        """File name inside the version folder."""
        return f"{self.dataset}-{self.split}.tfrecord-{self.index:05d}-of-{self.count:05d}"

    @property
    def short(self) -> str:
        """Its name in the state folder."""
        return f"{self.split}-{self.index:05d}"

    @property
    def index_file(self) -> str:
        """Path of its text index (`offset length` per record) inside the version folder."""
        return f"{INDEX_FOLDER}/{self.file}.idx"

    @property
    def table_file(self) -> str:
        """Path of its record table inside the version folder."""
        return table_file(self.file)

    @classmethod
    def parse(cls, file: str) -> ShardName | None:
        """The parts of a shard's file name, or None if it is another kind of file."""
        match = _SHARD_FILE.fullmatch(file)
        if match is None:
            return None
        return cls(match["dataset"], match["split"], int(match["index"]), int(match["count"]))


_SHARD_FILE = re.compile(
    rf"(?P<dataset>{NAME_PATTERN.pattern})-(?P<split>{NAME_PATTERN.pattern})"
    r"\.tfrecord-(?P<index>\d{5,})-of-(?P<count>\d{5,})"
)


def table_file(shard: str) -> str:
    """Path of a shard's record table (see `schema.table`) inside the version folder; it may be a third-party file."""
    folder, _, name = shard.rpartition("/")
    unique = f"{sha256(relative_path_bytes(shard))[:8]}-" if folder else ""
    return f"{INDEX_FOLDER}/{unique}{name}.records.npy"


def runs_file(split: str) -> str:
    """Path of a split's run index (an array of `RUN_DTYPE`) inside the version folder."""
    return f"{INDEX_FOLDER}/{split}.runs.npy"


# TFRecord framing, https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details:
#   uint64 length, uint32 masked CRC-32C of length, byte data[length], uint32 masked CRC-32C of data; little endian.
_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
FRAME_HEADER_BYTES = _LENGTH.size + _CRC.size
FRAME_BYTES = FRAME_HEADER_BYTES + _CRC.size


def masked_crc32c(data: bytes) -> int:
    """CRC-32C of `data`, rotated and offset as TFRecord files store it."""
    crc: int = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def frame(record: bytes) -> bytes:
    """One record with its TFRecord framing: `len(record) + FRAME_BYTES` bytes."""
    length = _LENGTH.pack(len(record))
    return b"".join((length, _CRC.pack(masked_crc32c(length)), record, _CRC.pack(masked_crc32c(record))))


def framed_bytes(header: bytes) -> int | None:
    """Length of a record with its framing, from the first `FRAME_HEADER_BYTES` of it; None if they are corrupt."""
    if len(header) < FRAME_HEADER_BYTES or _CRC.unpack_from(header, 8)[0] != masked_crc32c(header[:8]):
        return None
    length: int = _LENGTH.unpack_from(header)[0]
    return length + FRAME_BYTES


def unframe(data: bytes) -> Iterator[bytes]:
    """The records of `data`, complete frames one after the other, with both CRCs of each checked.

    Raises:
        CorruptRecordError: names the first corrupt record and its offset; no file.
    """
    start, number = 0, 0
    while start < len(data):
        header = data[start : start + FRAME_HEADER_BYTES]
        length = framed_bytes(header)
        if length is None and len(header) == FRAME_HEADER_BYTES:
            raise CorruptRecordError("", number, start, "the CRC of the length is wrong")
        if length is None or start + length > len(data):
            raise CorruptRecordError("", number, start, "the file ends inside this record")
        end = start + length
        record = data[start + FRAME_HEADER_BYTES : end - _CRC.size]
        if _CRC.unpack_from(data, end - _CRC.size)[0] != masked_crc32c(record):
            raise CorruptRecordError("", number, start, "the CRC of the data is wrong")
        yield record
        start, number = end, number + 1


def run_rows(shard: int, record_bytes: Iterable[int]) -> list[tuple[int, int, int, int]]:
    """Rows of `RUN_DTYPE` for one shard, from the framed length of each of its records in order."""
    rows = []
    start = offset = records = 0
    for length in record_bytes:
        offset += length
        records += 1
        if records == RUN_RECORDS:
            rows.append((shard, start, offset - start, records))
            start, records = offset, 0
    if records:
        rows.append((shard, start, offset - start, records))
    return rows


_METADATA = {LABELS_FILE, FEATURES_FILE, REJECTS_FILE, RUN_FILE, DATASET_INFO_FILE, MANIFEST_FILE}


def is_ours(file: str, dataset: str) -> bool:
    """Whether a job of `--name dataset` gives a file this path in the version's folder."""
    name = file.removeprefix(f"{INDEX_FOLDER}/")
    if shard := ShardName.parse(name.removesuffix(".idx").removesuffix(".records.npy")):
        return shard.dataset == dataset and file in (shard.file, shard.index_file, shard.table_file)
    split = name.removesuffix(".runs.npy")
    return file in _METADATA or (file == runs_file(split) and bool(NAME_PATTERN.fullmatch(split)))
