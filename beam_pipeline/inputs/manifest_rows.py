"""Rows of a `--layout manifest` file, CSV or JSONL: a path, a label and what else is known, without a request a row.

Columns `path` and `label` are required; `split`, `bytes` and `md5` are optional; every other column is a feature of the
record. A feature's column is named `name:int64`, `name:float32` or `name:bytes`, with `[]` for a list; without a type
it is bytes. An empty cell is 0, empty bytes or an empty list. The first JSONL row names the columns. Lines end with LF,
CR LF or CR. What can't be read is a UsageError that names the row.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import os
import re
import struct
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

from beam_pipeline import storage
from beam_pipeline.config import Config
from beam_pipeline.errors import UsageError, plural, why_unreadable
from beam_pipeline.inputs.references import ImageRef, image_url, order_key, ref_maker
from beam_pipeline.schema import NAME_PATTERN, example, is_utf8
from beam_pipeline.schema.example import OWN_COLUMNS, Column, columns, name_and_type
from beam_pipeline.storage import base

_LONGEST_CELL = 16 << 20  # a cell may hold a long text or list
_LONGEST_SHOWN = 100
_BEFORE_A_PATH = re.compile("^([.]/(?!/)|file://(?=/))")
# An empty part, `.` or `..`: what gives a file a second spelling.
_ODD_PART = re.compile(r"/[.]{0,2}(?:/|$)|^[.]{1,2}(?:/|$)")
# NUL, and surrogates that stand for no byte of a name on disk.
_IN_NO_PATH = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")
_NO_UTF8 = re.compile("[\udc80-\udcff]")  # bytes, as `surrogateescape` reads them
_MD5 = re.compile("[0-9a-f]{32}")
_NUMBER_SEPARATORS = re.compile(r"[;,|\s]+")


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
    try:
        with closing(_cells(url, deadline_s)) as rows:
            _, first = next(rows, (0, None))
    except OSError as error:
        raise UsageError(f"--manifest {url!r}: {why_unreadable(error)}; give a CSV or JSONL file with rows") from None
    if first is None:
        raise UsageError(f"--manifest {url!r}: it is empty; give a CSV or JSONL file with rows")
    header = tuple(first)
    missing = [name for name in ("path", "label") if name not in header]
    if missing:
        raise UsageError(f"--manifest {url!r}: no column {missing[0]!r} among {', '.join(map(repr, header))}; add it")
    columns(header, url)
    return header


def read_rows(url: str, header: Sequence[str], deadline_s: float, images: str) -> Iterator[Row]:
    """The rows of a manifest whose header is known, streamed: 15 to 25 µs each.

    Args:
        url: of the manifest.
        header: of `read_header`.
        deadline_s: how long a storage request is retried.
        images: folder or URL that the rows' paths are relative to.

    Raises:
        UsageError: a row can't be read; names it.
    """
    parser = _RowParser(header, images)
    for number, cells in itertools.islice(_cells(url, deadline_s), 1 if _is_csv(url) else 0, None):
        try:
            row = parser.parse(cells)
        except ValueError as error:
            raise _wrong(url, number, str(error)) from None
        yield row


def _is_csv(url: str) -> bool:
    """Whether a manifest is CSV; any other is JSONL."""
    return url.lower().endswith(".csv")


def _wrong(url: str, number: int, what: str) -> UsageError:
    return UsageError(f"--manifest {url!r}: row {number}: {what}")


def _cells(url: str, deadline_s: float) -> Generator[tuple[int, Any]]:
    """(number from 1, cells) of each row that isn't blank: a list in a CSV file, whose header is one; else a dict."""
    newline = "" if _is_csv(url) else None  # a quoted cell keeps its line ends
    with storage.open_storage(url, deadline_s).open(url) as file, _long_cells():
        text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline=newline)
        lines: Iterator[Any] = csv.reader(text, strict=True) if _is_csv(url) else text
        for number in itertools.count(1):
            try:
                line = next(lines, None)
                if line is None:
                    return
                if _NO_UTF8.search(line if isinstance(line, str) else "".join(line)):
                    raise ValueError("not UTF-8: save the file as UTF-8")
                cells = (line or None) if _is_csv(url) else _json_object(line)
            except csv.Error as error:
                raise _wrong(url, number, f"no CSV, {error}: correct it") from None
            except ValueError as error:
                raise _wrong(url, number, str(error)) from None
            if cells is not None:
                yield number, cells


@contextmanager
def _long_cells() -> Iterator[None]:
    """Lets the csv module read long cells; its limit is the process's."""
    before = csv.field_size_limit(_LONGEST_CELL)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _json_object(line: str) -> dict[str, Any] | None:
    """The object of one line, or None of a blank one.

    Raises:
        ValueError: there is none; says why and what to do.
    """
    if not line.strip():
        return None
    try:
        found = _DECODER.decode(line)
    except KeyError as error:
        raise ValueError(f"column {error.args[0]!r} is repeated: keep one") from None
    except RecursionError:
        raise ValueError("its brackets are nested too deeply to be read: take them out") from None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError('no JSON object: write {"path": …, "label": …} in one line, or call a CSV file .csv')
    return found


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise KeyError(next(name for name in names if names.count(name) > 1))
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_without_repeats)


class _RowParser:
    """Parses the cells of a row; a ValueError says what is wrong with them, and what to do."""

    def __init__(self, header: Sequence[str], images: str) -> None:
        self._header = tuple(header)
        self._known = frozenset(header)
        self._images = images
        self._columns = columns(header)
        self._written = {name_and_type(written)[0]: written for written in header}

    def parse(self, cells: Any) -> Row:
        """The row of a list or dict of cells."""
        if isinstance(cells, list):
            if len(cells) != len(self._header):
                has = f"{plural(len(cells), 'cell')}, the header has {len(self._header)}"
                raise ValueError(f"{has}: write as many, and quotes around a cell with a comma")
            cells = dict(zip(self._header, cells, strict=True))
        elif not cells.keys() <= self._known:
            unknown = sorted(cells.keys() - self._known)
            raise ValueError(f"column {unknown[0]!r} is not in the first row: name every column there")
        path, label, split, byte_count, md5 = map(cells.get, OWN_COLUMNS)
        path, label, split = self._path(path), _label(label), str(split or "")
        if "split" in self._known and not NAME_PATTERN.fullmatch(split):
            raise ValueError(f"split {_shown(split)} is not a-z, 0-9 and _, a letter first: rename it")
        try:
            size = None if byte_count in (None, "") else _to_int(byte_count)
        except (ValueError, OverflowError):
            size = -1
        if size is not None and size < 0:
            raise ValueError(f"bytes {_shown(byte_count)} is no whole number: write the size, or nothing")
        md5 = str(md5).lower() if md5 else None
        if md5 and not _MD5.fullmatch(md5):
            raise ValueError(f"md5 {_shown(md5)} is not 32 hexadecimal digits: write the image's MD5, or nothing")
        features = tuple(self._feature(column, cells) for column in self._columns)
        return Row(path, label, split or None, size, md5, features)

    def _path(self, written: Any) -> str:
        """A row's path, in the one spelling it has: a file of several names would be several images."""
        if written is not None and not isinstance(written, str):
            raise ValueError(f"path {_shown(written)} is no text: write one path")
        path = _BEFORE_A_PATH.sub("", written or "")
        if not path:
            raise ValueError("its path is empty: write it, or take the row out")
        if base.has_password(path):
            raise ValueError("its path holds a password, which every record would hold too; leave it out")
        if _IN_NO_PATH.search(path):
            raise ValueError(f"no file can have the path {_shown(written)}: correct it, or take the row out")
        is_local = storage.is_local(path) and (storage.is_local(self._images) or path.startswith("/"))
        if is_local and _ODD_PART.search(path):
            plain = os.path.normpath(path).replace("//", "/")
            if plain.startswith("../"):  # out of the input, and perhaps back into it
                whole, inside = os.path.normpath(os.path.join(self._images, path)), f"{self._images}/"
                plain = whole.removeprefix(inside) if whole.startswith(inside) else plain
            if path != plain:
                what = f"path {written!r} holds '//', '.' or '..', which give one image several names"
                raise ValueError(f"{what}: write {plain!r}")
        return path

    def _feature(self, column: Column, cells: dict[str, Any]) -> bytes:
        cell = cells.get(self._written[column.name])
        encode, convert = _DTYPES[column.dtype]
        try:
            if column.is_list:
                return encode(*(convert(value) for value in _list_values(cell, column.dtype)))
            return encode(convert(cell))
        except (ValueError, OverflowError, TypeError, RecursionError, struct.error):
            kind = f"{column.dtype}{'[]' * column.is_list}"
            raise ValueError(f"column {column.name!r} holds {_shown(cell)}, no {kind}: write one, or nothing") from None


def _label(written: Any) -> str:
    label = "" if written is None or isinstance(written, list | dict) else str(written)
    if not label or label != label.strip() or len(label.splitlines()) != 1 or not is_utf8(label):
        what = "write UTF-8 text without white space around it or line breaks"
        raise ValueError(f"label {_shown(written)} is no name of a class: {what}")
    return label


def _shown(value: Any) -> str:
    """A value as a message holds it."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def _to_int(value: Any) -> int:
    if value in (None, ""):
        return 0
    number = int(_digits(value))
    if not -(1 << 63) <= number < 1 << 63:
        raise OverflowError
    return number


def _to_float(value: Any) -> float:
    if value in (None, ""):
        return 0.0
    number = float(_digits(value) if isinstance(value, str) else value)
    if math.isinf(number):  # 1e400
        raise OverflowError
    return number


def _digits(value: Any) -> str:
    """A number's text; Python would also read `1_000` and the digits of every script."""
    text = str(value)
    if "_" in text or not text.isascii():
        raise ValueError
    return text


def _to_bytes(value: Any) -> bytes:
    if value is None:
        return b""
    return (value if isinstance(value, str) else json.dumps(value, sort_keys=True)).encode()


_DTYPES: dict[str, tuple[Callable[..., bytes], Callable[[Any], Any]]] = {
    "int64": (example.int64_feature, _to_int),
    "float32": (example.float_feature, _to_float),
    "bytes": (example.bytes_feature, _to_bytes),
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


def row_refs(config: Config) -> Iterator[ImageRef]:
    """References of the rows of `--manifest`, streamed; a size that isn't in the row is -1 until `sized`."""
    make, inside = ref_maker(config), f"{config.input}/"
    for row in read_rows(config.manifest or "", config.header, config.io_deadline, config.input or ""):
        path = image_url(config, row.path).removeprefix(inside)  # relative also where the row holds the whole URL
        size, etag = -1 if row.byte_count is None else row.byte_count, f"md5:{row.md5}" if row.md5 else ""
        yield make(path, size, etag, row.label, row.split, row.features)


def size_prefix(config: Config, ref: ImageRef) -> str | None:
    """The folder that is listed to know the size of a row's image: few of them, whatever the number of rows.

    The first folder below the input, or below the bucket for an image elsewhere. None where the size is known, and for
    local files, which are asked one by one: that is no request.
    """
    base = config.input or ""
    if ref.source_bytes >= 0 or storage.is_local(base):
        return None
    url = image_url(config, ref.path)
    if not url.startswith(f"{base}/"):
        base = "/".join(url.split("/", 3)[:3])
    folder, slash, _ = url[len(base) + 1 :].partition("/")
    return storage.join(base, folder) if slash else base


def sized(config: Config, ref: ImageRef, listed: ImageRef | None = None) -> ImageRef:
    """The reference of a row with its size, of `listed_refs` if it has a `size_prefix`.

    An image that isn't there becomes a reject when it is read.
    """
    if ref.source_bytes >= 0:
        return ref
    size, etag = (listed.source_bytes, listed.etag) if listed else (0, "")
    if storage.is_local(url := image_url(config, ref.path)) and (file := storage.open_storage(url).stat(url)):
        size, etag = file.bytes, file.etag
    return ref._replace(source_bytes=size, etag=ref.etag or etag)


def listed_refs(config: Config, prefix: str) -> Iterator[ImageRef]:
    """Everything below a folder, with sizes and etags; without labels, which tells it from a row."""
    store = storage.open_storage(prefix, config.io_deadline)
    for file in store.files(prefix):
        path = storage.join(prefix, file.path).removeprefix(f"{config.input}/")
        yield ImageRef(path, file.bytes, file.etag, "", "", order_key(path, config.seed))


def all_rows(config: Config) -> Iterator[ImageRef]:
    """References of all rows with their sizes, in this process, streamed."""
    listed: dict[str, ImageRef] = {}
    prefixes: set[str] = set()
    for ref in row_refs(config):
        if (prefix := size_prefix(config, ref)) and prefix not in prefixes:
            prefixes.add(prefix)
            listed |= {other.path: other for other in listed_refs(config, prefix)}
        yield sized(config, ref, listed.get(ref.path))
