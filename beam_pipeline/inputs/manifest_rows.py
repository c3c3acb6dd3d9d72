"""Rows of a `--layout manifest` file, CSV or JSONL, as references.

Columns `path` and `label` are required; `split`, `bytes` and `md5` are optional; every other column is a feature of the
record, named `name:int64`, `name:float32` or `name:bytes`, with `[]` for a list; without a type it is bytes. An empty
cell is NaN, empty bytes or an empty list, and an error for int64. The first JSONL row names the columns. Lines end with
LF, CR LF or CR. A row that can't be read raises a UsageError that names its line.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

from beam_pipeline import storage
from beam_pipeline.archives.tree import tree
from beam_pipeline.config import Config, feature_columns, name_and_type
from beam_pipeline.errors import StorageError, UsageError
from beam_pipeline.inputs.references import ImageRef, class_name, image_url, labels_spelling, ref_maker
from beam_pipeline.schema import BOX_NAME, NAME_PATTERN, example, is_utf8, relative_path_bytes
from beam_pipeline.schema.manifest import Column
from beam_pipeline.schema.table import order_key
from beam_pipeline.storage import Etag
from beam_pipeline.text import first_few, plural

_UNKNOWN_SIZE = -1
_BEFORE_A_PATH = re.compile("^([.]/(?!/)|file://(?=/))")
_MD5 = re.compile("[0-9a-f]{32}")
_BOX_ROWS = 100  # that are read to detect boxes
_NUMBER_SEPARATORS, _LAST_SEPARATOR = re.compile(r"\s*[;,|]\s*|\s+"), re.compile(r"(?<=\S)\s*[;,|]$")
_NO_CLASS = re.compile(r"[+-]?nan|<na>|.*[;|].*", re.IGNORECASE)  # missing, as pandas writes it, or several
# What else it may be called.
_LIKE = {"path": "file|path|image|img|url|uri", "label": "label|class|categor|target|species"}


def read_header(url: str, deadline_s: float) -> tuple[str, ...]:
    """The column names of a manifest.

    Raises:
        UsageError: not there, empty, a needed column missing, a name reserved, repeated or of an unknown type.
    """
    try:
        _, first = next(_cells(url, deadline_s), (0, None))
    except FileNotFoundError:
        raise UsageError(f"--manifest {url!r}: no such file; give a CSV or JSONL file with rows") from None
    if first is None:
        raise UsageError(f"--manifest {url!r}: it is empty; give a CSV or JSONL file with rows")
    header = tuple(first)
    missing = [name for name in ("path", "label") if name not in header]
    if missing:
        like = next((name for name in header if re.search(_LIKE[missing[0]], name.lower()) and name not in _LIKE), None)
        classless = ": every row needs a class, the same one if there are none" * (missing == ["label"])
        fix = f"rename {like!r} to {missing[0]}" if like else f"add it{classless}"
        if len(header) == 1 and (separator := re.search("[;\t|]", header[0])):
            fix = f"separate columns by commas, not by {separator[0]!r}"
        raise UsageError(f"--manifest {url!r}: no column {missing[0]!r} among {', '.join(map(repr, header))}; {fix}")
    feature_columns(header, url)
    return header


def row_refs(config: Config) -> Iterator[ImageRef]:
    """References of the rows of `--manifest`, streamed: 15 to 25 µs each.

    A remote image whose row lacks `bytes`, or one in an archive, has size -1 until it is listed, see `note_folders`.

    Raises:
        UsageError: a row can't be read; names its line.
    """
    url, parser = config.manifest, _RowParser(config)
    rows = _cells(url, config.io_deadline)
    if _is_csv(url):
        next(rows)
    for line, cells in rows:
        try:
            ref = parser.parse(cells)
        except ValueError as error:
            raise _wrong(url, line, error) from None
        yield ref


def box_notice(config: Config) -> str | None:
    """A warning of columns that look like boxes, by their names or by four floats in each row; None without any."""
    if config.layout != "manifest":
        return None
    rows = [ref.features for ref in islice(row_refs(config), _BOX_ROWS)]
    none, four = (len(example.float_feature(*[0.0] * count)) for count in (0, 4))
    boxes = [
        repr(column.name)
        for number, column in enumerate(config.columns)
        if BOX_NAME.search(column.name)
        or (column.dtype == "float32" and column.list and {len(row[number]) for row in rows} - {none} == {four})
    ]
    if not boxes:
        return None
    looks = f"{first_few(boxes)} {'looks like a box' if len(boxes) == 1 else 'look like boxes'}"
    need = "boxes in pixels, of upright images, need --image_size none"
    fit = "boxes as fractions also fit --resize_mode stretch, shorter and longer"
    return f"{looks} and won't be moved with the pixels: {need}, {fit}"


def _is_csv(url: str) -> bool:
    """Whether a manifest is CSV; any other is JSONL."""
    return url.lower().endswith(".csv")


def _wrong(url: str, line: int, what: object) -> UsageError:
    return UsageError(f"--manifest {url!r}: line {line}: {what}")


def _cells(url: str, deadline_s: float) -> Iterator[tuple[int, Any]]:
    """(number of its first line, cells) of each row that isn't blank; the cells of CSV are a list, of JSONL a dict."""
    before = 0  # lines before the row
    with storage.open_storage(url, deadline_s).open(url) as file:
        newline = "" if _is_csv(url) else None
        text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline=newline)
        try:
            if _is_csv(url):
                table = csv.reader(text, strict=True)
                for row in table:
                    if row:
                        _check_utf8("".join(row))
                        yield before + 1, row
                    before = table.line_num
            else:
                for before, line in enumerate(text):
                    if line.strip():
                        _check_utf8(line)
                        yield before + 1, _json_object(line)
        except csv.Error as error:
            raise _wrong(url, before + 1, f"can't be read, {error}: correct it") from None
        except ValueError as error:
            raise _wrong(url, before + 1, error) from None


def _check_utf8(text: str) -> None:
    if not is_utf8(text):
        raise ValueError("not UTF-8: save the file as UTF-8")


def _json_object(line: str) -> dict[str, Any]:
    try:
        row = _DECODER.decode(line)
    except KeyError as error:
        raise ValueError(f"column {error.args[0]!r} is repeated: keep one") from None
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise ValueError('not a JSON object: write {"path": …, "label": …} in one line, or call a CSV file .csv')
    return row


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise KeyError(Counter(name for name, _ in pairs).most_common(1)[0][0])
    return row


_DECODER = json.JSONDecoder(object_pairs_hook=_without_repeats)


class _RowParser:
    """Turns rows into references; a ValueError says what is wrong with a row, and the fix."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._make = ref_maker(config)
        self._spelled = labels_spelling(config)
        self._known = frozenset(config.header)
        headings = {name_and_type(heading)[0]: heading for heading in config.header}
        self._packed, self._may_list = dict[str, bool](), True
        self._features = [(headings[column.name], column, _encoder(column)) for column in config.columns]

    def parse(self, cells: list[str] | dict[str, Any]) -> ImageRef:
        header = self._config.header
        if isinstance(cells, list):
            if len(cells) != len(header):
                has = f"{plural(len(cells), 'cell')}, the header has {len(header)}"
                raise ValueError(f"{has}: write as many, and quotes around a cell with a comma")
            cells = dict(zip(header, cells, strict=True))
        elif unknown := sorted(cells.keys() - self._known):
            raise ValueError(f"column {unknown[0]!r} is not in the first row: name every column there")
        url = image_url(self._config, self._path(cells.get("path") or ""))
        label = self._label(cells.get("label"))
        split = _read(cells, "split", "split", _SPLIT, _to_split) if "split" in header else None
        size = _read(cells, "bytes", "bytes", "size in bytes", _to_size)
        etag = _read(cells, "md5", "md5", "MD5 of 32 hexadecimal digits", _to_etag)
        features = tuple(
            _read(cells, heading, column.name, f"{column.dtype}{'[]' * column.list}", encode)
            for heading, column, encode in self._features
        )
        is_here = storage.is_local(url)
        if (is_here or size != _UNKNOWN_SIZE) and self._is_packed(url):
            size = _UNKNOWN_SIZE  # until the archive is listed
        elif is_here and size == _UNKNOWN_SIZE:
            file = storage.open_storage(url).stat(url)
            size, etag = (file.bytes, etag or file.etag) if file else (0, etag)
        elif size == _UNKNOWN_SIZE and storage.scheme_of(url) == "http":
            raise ValueError(f"{url} needs its size, which http:// and https:// don't list: give it in a column bytes")
        # Relative even if the row holds the full URL.
        return self._make(url.removeprefix(f"{self._config.input}/"), size, etag, label, split, features)

    def _is_packed(self, url: str) -> bool:
        """Whether an image is in an archive: its folder isn't here; a remote one is as its first folder's first row."""
        (folder, _, _), top = url.rpartition("/"), self._config.input
        if not url.startswith(f"{top}/") or "/../" in url:
            return False
        is_here = storage.is_local(top)
        key = folder if is_here else folder[len(top) + 1 :].partition("/")[0]
        if key not in self._packed and not (is_here and os.path.isdir(folder)) and self._may_list:
            try:
                self._packed[key] = tree(self._config).is_packed(top, folder)
            except StorageError:  # sizes may be given because listing is refused
                self._may_list = False
        return self._packed.setdefault(key, False)

    def _label(self, cell: Any) -> str:
        label = self._spelled(class_name(cell, "label"))
        if self._config.labels is None and _NO_CLASS.fullmatch(label):
            fix = "correct it, put several in a column such as tags[], or list that class in --labels_file"
            raise ValueError(f"label {label!r} is a missing value, or several classes: {fix}")
        return label

    def _path(self, cell: Any) -> str:
        """A row's path, normalised: a local file under several names would be several images."""
        path = _BEFORE_A_PATH.sub("", cell) if isinstance(cell, str) else ""
        try:
            is_path = path and "\0" not in path and relative_path_bytes(path)
        except UnicodeEncodeError:  # a surrogate that stands for no byte
            is_path = False
        if not is_path:
            raise ValueError(f"no file can have the path {_shown(cell)}: correct it, or remove the row")
        input_folder = self._config.input
        if storage.has_password(path):
            raise ValueError("its path holds a password, which every record would hold too; leave it out")
        if path.startswith("/"):
            return f"/{os.path.normpath(path).lstrip('/')}"
        if storage.is_local(path) and storage.is_local(input_folder):
            path = os.path.normpath(path)
            if path.startswith("../"):  # out of the input, and perhaps back into it
                return os.path.relpath(os.path.join(input_folder, path), input_folder)
        return path


def _read(cells: dict[str, Any], heading: str, name: str, kind: str, convert: Callable[[Any], Any]) -> Any:
    """The value of a cell; `convert` gets None if a JSON object lacks it."""
    cell = cells.get(heading)
    try:
        return convert(cell)
    except (ValueError, OverflowError, RecursionError):
        raise ValueError(f"column {name!r} holds {_shown(cell)}, no {kind}: correct it") from None


def _shown(cell: Any) -> str:
    text = repr(cell)
    return text if len(text) <= 100 else f"{text[:100]}…"


_SPLIT = "split (a-z, 0-9 and _, a letter first)"


def _to_split(cell: Any) -> str:
    if not NAME_PATTERN.fullmatch(str(cell)):
        raise ValueError
    return str(cell)


def _to_size(cell: Any) -> int:
    if cell in (None, ""):
        return _UNKNOWN_SIZE
    if (size := _to_int(cell)) < 0:
        raise ValueError
    return size


def _to_etag(cell: Any) -> Etag:
    if cell in (None, ""):
        return ""
    if not _MD5.fullmatch(md5 := str(cell).lower()):
        raise ValueError
    return bytes.fromhex(md5)


def _digits(cell: Any) -> str:
    """A number's text, in ASCII digits; Python would also read `1_000` and other scripts' digits."""
    text = str(cell)
    if "_" in text or not text.isascii():
        raise ValueError
    return text


def _to_int(cell: Any) -> int:
    number = int(_digits(cell))
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError
    return number


def _to_float(cell: Any) -> float:
    number = float(_digits(cell)) if cell is not None and str(cell).strip() else math.nan
    if math.isinf(number):  # 1e400
        raise ValueError
    return number


def _to_bytes(cell: Any) -> bytes:
    return (cell or "" if isinstance(cell, str | None) else json.dumps(cell, sort_keys=True)).encode()


_DTYPES: dict[str, tuple[Callable[..., bytes], Callable[[Any], Any]]] = {
    "int64": (example.int64_feature, _to_int),
    "float32": (example.float_feature, _to_float),
    "bytes": (example.bytes_feature, _to_bytes),
}


def _encoder(column: Column) -> Callable[[Any], bytes]:
    """A function from a cell to a serialized `tf.train.Feature`."""
    encode, convert = _DTYPES[column.dtype]
    if column.list:
        return lambda cell: encode(*map(convert, _list_values(cell, column.dtype)))
    return lambda cell: encode(convert(cell))


def _list_values(cell: Any, dtype: str) -> Sequence[Any]:
    """A list cell: a JSON list, or values separated by `;` (numbers also by `,`, `|` or white space)."""
    if cell is None or isinstance(cell, list):
        return cell or []
    text = str(cell).strip()
    if text.startswith("["):
        return list(json.loads(text))
    if not text:
        return []
    return text.split(";") if dtype == "bytes" else _NUMBER_SEPARATORS.split(_LAST_SEPARATOR.sub("", text))


def note_folders(config: Config, refs: Iterable[ImageRef], to_list: dict[str, set[str]]) -> None:
    """Add what must be listed for the sizes of rows' images: a folder → the folders in it that hold them.

    That is the first folder below the input, or below the bucket of another input: few listings, however many rows.
    """
    for ref in refs:
        if ref.source_bytes != _UNKNOWN_SIZE:
            continue
        url, top = image_url(config, ref.path), config.input
        if not url.startswith(f"{top}/"):
            top = "/".join(url.split("/", 3)[:3])
        first, slash, _ = url[len(top) + 1 :].partition("/")
        holding = to_list.setdefault(storage.join(top, first) if slash else top, set())
        while len(url := url.rpartition("/")[0]) > len(top) and url not in holding:
            holding.add(url)


def listed_refs(config: Config, folder: str, holding: Collection[str]) -> Iterator[ImageRef]:
    """References of all files below a folder, with sizes and etags, without labels; archives become `holding`."""
    archives, is_inside = tree(config), folder.startswith(f"{config.input}/")
    files = iter(()) if is_inside and storage.is_local(folder) else archives.unpacked(folder, folder, holding)
    if (first := next(files, None)) is None and is_inside:
        files = chain.from_iterable(archives.unpacked(url, folder, holding) for url in archives.places(folder))
    for url, file in chain(filter(None, [first]), files):
        path = url.removeprefix(f"{config.input}/")
        yield ImageRef(path, file.bytes, file.etag, "", "", order_key(path, config.seed), part=file.part)


def fill_in_size(ref: ImageRef, listed: ImageRef | None) -> ImageRef:
    """A row's reference with the size of its listed file; 0 bytes if there is none, which is rejected when read."""
    if ref.source_bytes != _UNKNOWN_SIZE:
        return ref
    size, etag, part = (listed.source_bytes, listed.etag, listed.part) if listed else (0, "", None)
    return ref._replace(source_bytes=size, etag=ref.etag or etag, part=part)


def by_path(listed: Iterable[ImageRef]) -> dict[str, ImageRef]:
    """Listed files by their paths.

    Raises:
        UsageError: it is in two archives.
    """
    found: dict[str, ImageRef] = {}
    for ref in listed:
        if (other := found.setdefault(ref.path, ref)).part != ref.part:
            where = " and in ".join(sorted(repr(one.part.url) for one in (ref, other) if one.part))
            raise UsageError(f"--manifest: path {ref.path!r} is in {where}: keep one")
    return found


def rows_with_sizes(config: Config) -> Iterator[ImageRef]:
    """References of all rows with their sizes, listed in this process."""
    to_list: dict[str, set[str]] = {}
    note_folders(config, row_refs(config), to_list)
    listed = by_path(ref for folder, holding in to_list.items() for ref in listed_refs(config, folder, holding))
    yield from (fill_in_size(ref, listed.get(ref.path)) for ref in row_refs(config))
