"""The record table of a shard: what is known of each record without reading it, one column behind the other."""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from beam_pipeline.schema import normal_path_bytes, relative_path_bytes
from beam_pipeline.schema.manifest import Column

Table = npt.NDArray[np.void]
# Codes in the table, part of the format: only appended to.
SOURCE_FORMATS = ("AVIF", "BMP", "GIF", "HEIF", "JPEG", "PNG", "TIFF", "WEBP")  # as Pillow names them
# How compressed pixels may come through unchanged: in the same bytes, or in a file that has lost its metadata. Their
# codes begin at 1; 0 is encoded again.
PASSTHROUGH = ("whole", "without_metadata")
# Every table of the writer has these; those of `imageshards index` lack what only the source knows.
COLUMNS = {
    "order_key": "<u8",  # ascending
    "bytes": "<u4",  # of the framed record, as the text index has them
    "class": "<u4",
    "source_bytes": "<u8",
    "source_md5": "(16,)u1",
    "source_height": "<u4",  # in pixels, upright
    "source_width": "<u4",
    "source_format": "u1",
    "passthrough": "u1",
    "name": "<u8",  # `name_hash` of the file name
}
_NUMBERS = {"int64": "<i8", "float32": "<f4"}
_MAGIC = b"\x93NUMPY\x03\x00"  # https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
_RECORDS = re.compile(r"(?<=', \()\d+")  # ('bytes', '<u4', (1266,))
_HEADER_SIZE = struct.Struct("<I")
_MAX_HEADER_BYTES = 1 << 24  # of thousands of columns; NumPy's default refuses more than 10,000


def order_key(path: str, seed: int) -> int:
    """64-bit key of an image's position in the order: BLAKE2b of its path keyed by the seed."""
    digest = hashlib.blake2b(normal_path_bytes(path), digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(digest, "big")


def name_hash(path: str) -> int:
    """64-bit BLAKE2b of a record's `filename`: finds a path without reading records."""
    return int.from_bytes(hashlib.blake2b(relative_path_bytes(path), digest_size=8).digest(), "little")


def column_name(feature: str) -> str:
    """Column of the table that holds the numbers of a manifest's column."""
    return f"column:{feature}"


def numeric(features: Iterable[Column]) -> dict[str, str]:
    """Column of the table → its type, of the manifest's columns that hold one number per record."""
    return {
        column_name(column.name): _NUMBERS[column.dtype]
        for column in features
        if column.dtype in _NUMBERS and not column.list
    }


def table_bytes(types: Mapping[str, str], columns: Mapping[str, Sequence[Any]]) -> bytes:
    """The bytes of a `.records.npy`: a structured scalar of one array per column, so that a range read gets a column.

    Args:
        types: column → its type.
        columns: column → its values, one record after the other, in file order.
    """
    dtypes = {name: np.dtype(kind) for name, kind in types.items()}
    arrays = {name: np.array(columns[name], dtype.base).reshape(-1, *dtype.shape) for name, dtype in dtypes.items()}
    table = np.empty((), [(name, array.dtype, array.shape) for name, array in arrays.items()])
    for name, array in arrays.items():
        table[name][...] = array
    out = io.BytesIO()
    np.lib.format.write_array(out, table, version=(3, 0), allow_pickle=False)  # names in UTF-8
    return out.getvalue()


def read_table(data: bytes) -> Table:
    """The columns of a `.records.npy`: `table["class"]` has a value for each record.

    Raises:
        ValueError: it isn't one.
    """
    table: Table = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False, max_header_size=_MAX_HEADER_BYTES)
    lengths = {table[name].shape[:1] for name in table.dtype.names or ()}
    if table.shape or len(lengths) != 1 or () in lengths:
        raise ValueError("it isn't a record table")
    return table


class Field(NamedTuple):
    """Where a column is in a `.records.npy`: `shape` values of `dtype`, from byte `offset` on."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    @property
    def bytes(self) -> int:
        """Size of the column."""
        return self.dtype.itemsize * math.prod(self.shape)


def table_fields(read: Callable[[int], bytes], guess: int) -> tuple[dict[str, Field], int]:
    """The columns of a `.records.npy`, from its header alone, and how long the file is.

    Args:
        read: the first so many bytes of the file.
        guess: how long its header probably is, at most.

    Raises:
        ValueError: it isn't a record table.
    """
    data = read(guess)
    try:
        (size,) = _HEADER_SIZE.unpack_from(data, len(_MAGIC))
        begin = len(_MAGIC) + _HEADER_SIZE.size
        if not data.startswith(_MAGIC) or size > _MAX_HEADER_BYTES:
            raise ValueError("it isn't a record table")
        header = (data if begin + size <= len(data) else read(begin + size))[begin : begin + size].decode()
        # A name with a quote may hold what the pattern looks for.
        counted = header if '"' in header or "\\" in header else _RECORDS.sub("0", header)
        columns = _columns(counted)
        (records,) = {shape[0] for *_, shape in columns} if counted is header else set(_RECORDS.findall(header))
    except (struct.error, SyntaxError, KeyError, TypeError, ValueError) as error:
        raise ValueError("it isn't a record table") from error
    fields, offset = {}, begin + size
    for name, dtype, shape in columns:
        fields[name] = Field(dtype, (int(records), *shape[1:]), offset)
        offset += fields[name].bytes
    return fields, offset


@functools.lru_cache(maxsize=64)  # parsing takes 100 µs, and the tables of a dataset differ in the number of records
def _columns(header: str) -> list[tuple[str, np.dtype[Any], tuple[int, ...]]]:
    """Name, type and shape of each column."""
    dtype: Any = np.lib.format.descr_to_dtype(ast.literal_eval(header)["descr"])
    return [(name, dtype[name].base, dtype[name].shape) for name in dtype.names]
