"""Rows of a `--layout manifest` file, CSV or JSONL: a path, a label and what else is known, without a request a row.

Columns `path` and `label` are required; `split`, `bytes` and `md5` are optional; every other column is a feature of the
record. A feature's column is named `name:int64`, `name:float32` or `name:bytes`, with `[]` for a list; without a type
it is bytes. An empty cell is 0, empty bytes or an empty list. The first JSONL row names the columns.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from beam_pipeline import examples, secrets, storage
from beam_pipeline.errors import ImageShardsError, UsageError
from beam_pipeline.schema import NAME_PATTERN, RECORD_KEYS
from beam_pipeline.wording import why_unreadable

_OWN_COLUMNS = ("path", "label", "split", "bytes", "md5")
_RANGE_BYTES = 32 << 20  # of a JSONL file that one element reads: some seconds of work
_PIECE_BYTES = 1 << 20
csv.field_size_limit(16 << 20)  # a cell may hold a long text or list
_BEFORE_A_PATH = re.compile("^([.]/(?!/)|file://(?=/))")
# NUL, and surrogates that stand for no byte of a name on disk.
_IN_NO_PATH = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")
_NUMBER_SEPARATORS = re.compile(r"[;,|\s]+")


class Column(NamedTuple):
    """One feature column: its key in the record, `int64`, `float32` or `bytes`, and whether each cell is a list."""

    name: str
    dtype: str
    is_list: bool


class Row(NamedTuple):
    """One row.

    Attributes:
        path: as written, but for `./` or `file://` before it.
        split, byte_count, md5: None where there is no such column or the cell is empty.
        features: serialized `tf.train.Feature`s in order of their names.
    """

    path: str
    label: str
    split: str | None
    byte_count: int | None
    md5: str | None
    features: tuple[bytes, ...]


def read_header(url: str, deadline_s: float) -> tuple[str, ...]:
    """The column names of a manifest.

    Raises:
        UsageError: not there, empty, a needed column missing, a name reserved, repeated or of an unknown type.
    """
    store = storage.open_storage(url, deadline_s)
    try:
        with store.open(url) as file:
            first = file.readline().decode("utf-8-sig")
        header = tuple(_first_row(url, first))
    except (OSError, UnicodeDecodeError, ValueError, StopIteration) as error:
        raise UsageError(f"--manifest {url!r}: {why_unreadable(error)}; give a CSV or JSONL file with rows") from None
    missing = [name for name in ("path", "label") if name not in header]
    if missing:
        raise UsageError(f"--manifest {url!r}: no column {missing[0]!r} among {', '.join(map(repr, header))}; add it")
    columns(header, url)
    return header


def _first_row(url: str, text: str) -> Sequence[str]:
    if is_csv(url):
        return next(csv.reader([text]))
    row = json.loads(text)
    if not isinstance(row, dict):
        raise ValueError("the first line is no JSON object")
    return list(row)


def is_csv(url: str) -> bool:
    """Whether a manifest is CSV; any other is JSONL."""
    return url.lower().endswith(".csv")


def columns(header: Sequence[str], url: str = "") -> tuple[Column, ...]:
    """The feature columns of a header, in order of their names.

    Raises:
        UsageError: a name is reserved or repeated, or a type unknown.
    """
    found: dict[str, Column] = {}
    for written in header:
        if written in _OWN_COLUMNS:
            if header.count(written) > 1:
                raise UsageError(f"--manifest {url!r}: column {written!r} is repeated: keep one")
            continue
        name, dtype = _name_and_type(written)
        if not name or name in RECORD_KEYS or name in _OWN_COLUMNS:
            raise UsageError(f"--manifest {url!r}: column {written!r} has a reserved name: rename it")
        if name in found:
            raise UsageError(f"--manifest {url!r}: column {name!r} is repeated: keep one")
        if dtype not in _DTYPES:
            raise UsageError(f"--manifest {url!r}: column {written!r} has no type int64, float32 or bytes: declare one")
        found[name] = Column(name, dtype, written.endswith("[]"))
    return tuple(found[name] for name in sorted(found))


def _name_and_type(written: str) -> tuple[str, str]:
    """`age:int64` → age, int64; `tags[]` → tags, bytes."""
    name, _, dtype = written.removesuffix("[]").partition(":")
    return name, dtype or "bytes"


class RowReader:
    """Reads rows of a manifest whose header is known.

    Args:
        url: of the manifest.
        header: of `read_header`.
        deadline_s: how long a storage request is retried.
        images: folder or URL that the rows' paths are relative to.
    """

    def __init__(self, url: str, header: Sequence[str], deadline_s: float, images: str) -> None:
        self._url = url
        self._images = images
        self._header = tuple(header)
        self._columns = columns(header, url)
        self._written = {_name_and_type(written)[0]: written for written in header}
        self._store = storage.open_storage(url, deadline_s)

    def ranges(self) -> list[tuple[int, int]]:
        """Byte ranges that can be read on their own: one of a CSV file, many of a large JSONL file."""
        size = self._size()
        step = size if is_csv(self._url) else _RANGE_BYTES
        return [(start, min(start + step, size)) for start in range(0, size, step)]

    def _size(self) -> int:
        file = self._store.stat(self._url)
        if file is None or not file.bytes:
            raise ImageShardsError(f"--manifest {self._url!r} is gone or empty: put it back and run again")
        return file.bytes

    def rows(self, start: int, end: int) -> Iterator[Row]:
        """The rows that begin in bytes [start, end).

        Raises:
            ImageShardsError: a row can't be read; names it.
        """
        return self._csv_rows() if is_csv(self._url) else self._jsonl_rows(start, end)

    def _csv_rows(self) -> Iterator[Row]:
        with self._store.open(self._url) as file:
            reader = csv.reader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), strict=True)
            for number in itertools.count(1):
                where = f"row {number}"
                try:
                    cells = next(reader, None)
                except (csv.Error, UnicodeDecodeError) as error:
                    raise self._wrong(where, f"no CSV in UTF-8: {error}") from None
                if cells is None:
                    return
                if number == 1 or not cells:
                    continue
                if len(cells) != len(self._header):
                    raise self._wrong(where, f"{len(cells)} cells, the header has {len(self._header)}")
                yield self._row(where, dict(zip(self._header, cells, strict=True)))

    def _jsonl_rows(self, start: int, end: int) -> Iterator[Row]:
        for position, line in self._lines(start, end):
            if not line.strip():
                continue
            where = f"line at byte {position}"
            try:
                cells = json.loads(line.decode("utf-8-sig"))
                unknown = sorted(cells.keys() - set(self._header))
            except (ValueError, AttributeError):
                raise self._wrong(where, "no JSON object") from None
            if unknown:
                raise self._wrong(where, f"column {unknown[0]!r} is not in the first row: name every column there")
            yield self._row(where, cells)

    def _lines(self, start: int, end: int) -> Iterator[tuple[int, bytes]]:
        """(byte position, line) of the lines that begin in [start, end), read in pieces."""
        size = self._size()
        position = max(0, start - 1)  # a line begins at `start` only if the byte before ends another
        rest, skip_first = b"", start > 0
        while True:
            begin, stop = position + len(rest), min(position + len(rest) + _PIECE_BYTES, size)
            piece = self._store.read(self._url, begin, stop) if begin < stop else b""
            *lines, rest = (rest + piece).split(b"\n")
            if not piece and rest:
                lines, rest = [rest], b""
            for line in lines:
                if position >= end and not skip_first:
                    return
                if not skip_first:
                    yield position, line
                skip_first = False
                position += len(line) + 1
            if not piece or (position >= end and not skip_first):
                return

    def _row(self, where: str, cells: dict[str, Any]) -> Row:
        path, label, split, byte_count, md5 = (cells.get(name) for name in _OWN_COLUMNS)
        path = self._path(where, str(path or ""))
        label, split = "" if label is None else str(label), str(split or "")
        if not label or label != label.strip() or len(label.splitlines()) != 1:
            raise self._wrong(where, f"label {label!r} is empty or has white space around it or a line break")
        if "split" in self._header and not NAME_PATTERN.fullmatch(split):
            raise self._wrong(where, f"split {split!r} is not a-z, 0-9 and _, a letter first")
        try:
            size = None if byte_count in (None, "") else int(str(byte_count))
            if size is not None and size < 0:
                raise ValueError
        except ValueError:
            raise self._wrong(where, f"bytes {byte_count!r} is no whole number") from None
        features = tuple(self._feature(where, column, cells) for column in self._columns)
        return Row(path, label, split or None, size, str(md5).lower() if md5 else None, features)

    def _path(self, where: str, written: str) -> str:
        """A row's path, in the one spelling it has: a file of several names would be several images."""
        path = _BEFORE_A_PATH.sub("", written)
        if not path:
            raise self._wrong(where, "its path is empty")
        if secrets.has_password(path):
            raise self._wrong(where, "its path holds a password, which every record would hold too; leave it out")
        if _IN_NO_PATH.search(path):
            raise self._wrong(where, f"no file can have the path {written!r}")
        if storage.is_local(path) and (storage.is_local(self._images) or path.startswith("/")):
            plain = os.path.normpath(path).replace("//", "/")
            if plain.startswith("../"):  # out of the input, and perhaps back into it
                whole, inside = os.path.normpath(os.path.join(self._images, path)), f"{self._images}/"
                plain = whole.removeprefix(inside) if whole.startswith(inside) else plain
            if path != plain:
                what = f"path {written!r} holds '//', '.' or '..', which give one image several names"
                raise self._wrong(where, f"{what}: write {plain!r}")
        return path

    def _feature(self, where: str, column: Column, cells: dict[str, Any]) -> bytes:
        cell = cells.get(self._written[column.name])
        encode, convert = _DTYPES[column.dtype]
        try:
            if column.is_list:
                return encode(*(convert(value) for value in _list_values(cell, column.dtype)))
            return encode(convert(cell))
        except (ValueError, OverflowError, TypeError, struct.error):
            kind = f"{column.dtype}{'[]' * column.is_list}"
            raise self._wrong(where, f"column {column.name!r} holds {cell!r}, no {kind}") from None

    def _wrong(self, where: str, what: str) -> ImageShardsError:
        return ImageShardsError(f"--manifest {self._url!r}: {where}: {what}")


def _to_int(value: Any) -> int:
    number = 0 if value in (None, "") else int(str(value))
    if not -(1 << 63) <= number < 1 << 63:
        raise OverflowError
    return number


def _to_float(value: Any) -> float:
    return 0.0 if value in (None, "") else float(value)


def _to_bytes(value: Any) -> bytes:
    if value is None:
        return b""
    return (value if isinstance(value, str) else json.dumps(value, sort_keys=True)).encode()


_DTYPES: dict[str, tuple[Callable[..., bytes], Callable[[Any], Any]]] = {
    "int64": (examples.int64_feature, _to_int),
    "float32": (examples.float_feature, _to_float),
    "bytes": (examples.bytes_feature, _to_bytes),
}


def _list_values(cell: Any, dtype: str) -> Sequence[Any]:
    """A list cell: a JSON list, or values separated by `;` (numbers also by `,`, `|` or white space)."""
    if cell is None or isinstance(cell, list):
        return cell or []
    text = str(cell).strip()
    if text.startswith("["):
        values = json.loads(text)
        if not isinstance(values, list):
            raise ValueError
        return values
    if not text:
        return []
    return text.split(";") if dtype == "bytes" else [part for part in _NUMBER_SEPARATORS.split(text) if part]
