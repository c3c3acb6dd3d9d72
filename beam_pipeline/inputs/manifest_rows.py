"""Rows of a `--layout manifest` file, CSV or JSONL, as references.

Columns `path` and `label` are required; `split`, `bytes` and `md5` are optional; every other column is a feature of the
record. A feature's column is named `name:int64`, `name:float32` or `name:bytes`, with `[]` for a list; without a type
it is bytes. An empty cell is 0, empty bytes or an empty list. The first JSONL row names the columns. Lines end with LF,
CR LF or CR. A row that can't be read is a UsageError that names it.
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
from typing import Any

from beam_pipeline import storage
from beam_pipeline.config import Config
from beam_pipeline.errors import UsageError, plural
from beam_pipeline.inputs.references import ImageRef, image_url, order_key, ref_maker
from beam_pipeline.schema import NAME_PATTERN, example, is_utf8
from beam_pipeline.schema.example import OWN_COLUMNS, Column, columns, name_and_type

_LONGEST_CELL = 16 << 20  # a cell may hold a long text or list
_LONGEST_SHOWN = 100
_UNKNOWN_SIZE = -1
_BEFORE_A_PATH = re.compile("^([.]/(?!/)|file://(?=/))")
# NUL, and surrogates that stand for no byte of a name on disk.
_IN_NO_PATH = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")
_NO_UTF8 = re.compile("[\udc80-\udcff]")  # bytes, as `surrogateescape` reads them
_MD5 = re.compile("[0-9a-f]{32}")
_NUMBER_SEPARATORS = re.compile(r"[;,|\s]+")


def read_header(url: str, deadline_s: float) -> tuple[str, ...]:
    """The column names of a manifest.

    Raises:
        UsageError: not there, empty, a needed column missing, a name reserved, repeated or of an unknown type.
    """
    try:
        with closing(_cells(url, deadline_s)) as rows:
            _, first = next(rows, (0, None))
    except FileNotFoundError:
        raise UsageError(f"--manifest {url!r}: no such file; give a CSV or JSONL file with rows") from None
    if first is None:
        raise UsageError(f"--manifest {url!r}: it is empty; give a CSV or JSONL file with rows")
    header = tuple(first)
    missing = [name for name in ("path", "label") if name not in header]
    if missing:
        raise UsageError(f"--manifest {url!r}: no column {missing[0]!r} among {', '.join(map(repr, header))}; add it")
    columns(header, url)
    return header


def row_refs(config: Config) -> Iterator[ImageRef]:
    """References of the rows of `--manifest`, streamed: 15 to 25 µs each.

    A remote image whose row lacks `bytes` has size -1 until its folder is listed, see `folder_to_list`.

    Raises:
        UsageError: a row can't be read; names it.
    """
    url, parser = config.manifest, _RowParser(config)
    for number, cells in itertools.islice(_cells(url, config.io_deadline), 1 if _is_csv(url) else 0, None):
        try:
            ref = parser.parse(cells)
        except ValueError as error:
            raise _wrong(url, number, error) from None
        yield ref


def _is_csv(url: str) -> bool:
    """Whether a manifest is CSV; any other is JSONL."""
    return url.lower().endswith(".csv")


def _wrong(url: str, number: int, what: object) -> UsageError:
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
            except csv.Error as error:
                raise _wrong(url, number, f"no CSV, {error}: correct it") from None
            if line is None:
                return
            if _NO_UTF8.search(line if isinstance(line, str) else "".join(line)):
                raise _wrong(url, number, "not UTF-8: save the file as UTF-8")
            if isinstance(line, str) and line.strip():
                yield number, _json_object(url, number, line)
            elif isinstance(line, list) and line:
                yield number, line


@contextmanager
def _long_cells() -> Iterator[None]:
    """Lets the csv module read long cells; its limit is the process's."""
    before = csv.field_size_limit(_LONGEST_CELL)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _json_object(url: str, number: int, line: str) -> dict[str, Any]:
    try:
        found = _DECODER.decode(line)
    except KeyError as error:
        raise _wrong(url, number, f"column {error.args[0]!r} is repeated: keep one") from None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        what = 'no JSON object: write {"path": …, "label": …} in one line, or call a CSV file .csv'
        raise _wrong(url, number, what)
    return found


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise KeyError(next(name for name in names if names.count(name) > 1))
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_without_repeats)


class _RowParser:
    """Makes references of rows; a ValueError says what is wrong with one, and what to do."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._header = config.header
        self._known = frozenset(config.header)
        self._images = config.input
        self._make = ref_maker(config)
        self._columns = columns(config.header)
        self._written = {name_and_type(written)[0]: written for written in config.header}

    def parse(self, cells: Any) -> ImageRef:
        """The reference of a list or dict of cells."""
        if isinstance(cells, list):
            if len(cells) != len(self._header):
                has = f"{plural(len(cells), 'cell')}, the header has {len(self._header)}"
                raise ValueError(f"{has}: write as many, and quotes around a cell with a comma")
            cells = dict(zip(self._header, cells, strict=True))
        elif unknown := sorted(cells.keys() - self._known):
            raise ValueError(f"column {unknown[0]!r} is not in the first row: name every column there")
        path, label, split, byte_count, md5 = map(cells.get, OWN_COLUMNS)
        url = image_url(self._config, self._path(path))
        label, split = _label(label), str(split or "")
        if "split" in self._known and not NAME_PATTERN.fullmatch(split):
            raise ValueError(f"split {_shown(split)} is not a-z, 0-9 and _, a letter first: rename it")
        size, etag = _size(byte_count), _etag(md5)
        features = tuple(self._feature(column, cells) for column in self._columns)
        if size == _UNKNOWN_SIZE and storage.is_local(url):
            found = storage.open_storage(url).stat(url)
            size, etag = (found.bytes, etag or found.etag) if found else (0, etag)
        # Relative even if the row holds the full URL.
        return self._make(url.removeprefix(f"{self._images}/"), size, etag, label, split or None, features)

    def _path(self, written: Any) -> str:
        """A row's path, in its one spelling: a file under several names would be several images."""
        if written is not None and not isinstance(written, str):
            raise ValueError(f"path {_shown(written)} is no text: write one path")
        path = _BEFORE_A_PATH.sub("", written or "")
        if not path:
            raise ValueError("its path is empty: write it, or take the row out")
        if storage.has_password(path):
            raise ValueError("its path holds a password, which every record would hold too; leave it out")
        if _IN_NO_PATH.search(path):
            raise ValueError(f"no file can have the path {_shown(written)}: correct it, or take the row out")
        is_absolute = path.startswith("/")
        if is_absolute or (storage.is_local(path) and storage.is_local(self._images)):
            plain = f"/{os.path.normpath(path).lstrip('/')}" if is_absolute else os.path.normpath(path)
            if plain.startswith("../"):  # out of the input, and perhaps back into it
                inside = os.path.relpath(os.path.join(self._images, path), self._images)
                plain = plain if inside.startswith("../") else inside
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


def _size(written: Any) -> int:
    if written in (None, ""):
        return _UNKNOWN_SIZE
    try:
        size = _to_int(written)
    except (ValueError, OverflowError):
        size = -1
    if size < 0:
        raise ValueError(f"bytes {_shown(written)} is no whole number: write the size, or nothing")
    return size


def _etag(md5: Any) -> str:
    md5 = str(md5).lower() if md5 else ""
    if md5 and not _MD5.fullmatch(md5):
        raise ValueError(f"md5 {_shown(md5)} is not 32 hexadecimal digits: write the image's MD5, or nothing")
    return f"md5:{md5}" if md5 else ""


def _shown(value: Any) -> str:
    """A value as a message holds it."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def _to_int(value: Any) -> int:
    number = int(_digits(value))
    if not -(1 << 63) <= number < 1 << 63:
        raise OverflowError
    return number


def _to_float(value: Any) -> float:
    number = float(_digits(value))
    if math.isinf(number):  # 1e400
        raise OverflowError
    return number


def _digits(value: Any) -> str:
    """A number's text; Python would also read `1_000` and the digits of every script."""
    text = "0" if value in (None, "") else str(value)
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
        return list(json.loads(text))
    if not text:
        return []
    return text.split(";") if dtype == "bytes" else [part for part in _NUMBER_SEPARATORS.split(text) if part]


def folder_to_list(config: Config, ref: ImageRef) -> str | None:
    """The folder whose listing holds the size of a row's image; None if the size is known.

    The first folder below the input, or below the bucket for an image elsewhere: few listings, however many rows.
    """
    if ref.source_bytes != _UNKNOWN_SIZE:
        return None
    url, top = image_url(config, ref.path), config.input
    if not url.startswith(f"{top}/"):
        top = "/".join(url.split("/", 3)[:3])
    folder, slash, _ = url[len(top) + 1 :].partition("/")
    return storage.join(top, folder) if slash else top


def listed_refs(config: Config, folder: str) -> Iterator[ImageRef]:
    """Everything below a folder, with sizes and etags; unlike a row, without a label."""
    store = storage.open_storage(folder, config.io_deadline)
    for file in store.files(folder):
        path = storage.join(folder, file.path).removeprefix(f"{config.input}/")
        yield ImageRef(path, file.bytes, file.etag, "", "", order_key(path, config.seed))


def with_size(ref: ImageRef, listed: ImageRef | None) -> ImageRef:
    """A row's reference with the size of its listed file; 0 bytes without one: it is rejected when it is read."""
    if ref.source_bytes != _UNKNOWN_SIZE:
        return ref
    size, etag = (listed.source_bytes, listed.etag) if listed else (0, "")
    return ref._replace(source_bytes=size, etag=ref.etag or etag)


def rows_with_sizes(config: Config) -> Iterator[ImageRef]:
    """References of all rows with their sizes, in this process, streamed."""
    listed: dict[str, ImageRef] = {}
    folders: set[str] = set()
    for ref in row_refs(config):
        if (folder := folder_to_list(config, ref)) and folder not in folders:
            folders.add(folder)
            listed |= {other.path: other for other in listed_refs(config, folder)}
        yield with_size(ref, listed.get(ref.path))
