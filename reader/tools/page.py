"""The page of `report`: thumbnails, charts, and the template that they go into, which escapes every name."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.resources import files
from itertools import accumulate, chain, groupby, islice
from typing import Any

import jinja2
import numpy as np

from beam_pipeline import __version__, schema
from beam_pipeline.schema.exclude import ListedImage
from beam_pipeline.schema.job import as_run
from beam_pipeline.schema.manifest import builtins_of
from beam_pipeline.schema.table import SOURCE_FORMATS
from beam_pipeline.text import name_line, plural, printable, size_text
from reader.info import DatasetInfo
from reader.map import records
from reader.pixels import in_8_bits, open_image
from reader.tables import Array
from reader.tools.diff import Difference
from reader.tools.read import with_records
from reader.tools.report import Finding, Report, Rows

# What the page has room for: bytes of pictures in base64, and of each list; pictures or lines of a finding, pictures of
# a group; rows of the table of classes. All of it full is less than 4 MB.
_LOOK_BYTES, _CLASS_BYTES, _LIST_BYTES = 1_500_000, 900_000, 60_000
_SHOWN, _IN_GROUP, _CLASSES = 40, 8, 2_000
_END = 40  # letters of a file's name below its picture
_LOOK_SIDE, _CLASS_SIDE = 96, 48  # pixels
_BLOCK = 64  # records in memory at once
_BINS, _WIDTH, _HEIGHT = 32, 320, 88  # of a chart
_BATCH = 64


def render(report: Report, found: Rows, difference: Difference | None) -> bytes:
    """The page in UTF-8."""
    text = files(__package__).joinpath("report.html").read_text()
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    options: dict[str, Any] = {"undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = jinja2.Environment(autoescape=True, **options)
    environment.filters |= {"end": _end, "name": name_line, "plural": plural, "printable": printable}
    environment.filters |= {"size": size_text, "number": "{:,}".format}
    look = [_look(one) for one in report.findings if one.count]
    shown = [one.row for finding in look for group in finding["groups"] for one in group.pictures[:_IN_GROUP]]
    labels, rows = np.unique(found.columns["class"], return_index=True)
    classes, first = _classes(found.counts), dict(zip(labels.tolist(), rows.tolist(), strict=True))
    by_turns = chain.from_iterable(zip(classes, reversed(classes), strict=True))  # the rarest and the most frequent
    faces = [first[number] for number in by_turns if number in first]
    page = environment.from_string(text).render(
        info=found.info,
        report=report,
        version=__version__,
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        stored=_stored(found.info),
        made=_made(found.info),
        snippet=snippet(found.info),
        look=look,
        in_group=_IN_GROUP,
        fine=[one.title for one in report.findings if not one.count],
        pictures=dict(_pictures(found, shown, _LOOK_SIDE, _LOOK_BYTES)),
        classes=classes,
        counts=found.counts.T.tolist(),
        first=first,
        faces=dict(_pictures(found, faces, _CLASS_SIDE, _CLASS_BYTES)),
        charts=list(_charts(found)),
        formats=_formats(found),
        difference=difference,
    )
    return page.encode("utf-8", "backslashreplace")


def _stored(info: DatasetInfo) -> str:
    """How the images are stored, in a sentence."""
    image, sizes = info.image, sorted({*filter(None, (info.image.min_size, info.image.max_size))})
    pixels = " to ".join(f"{height} × {width}" for height, width in sizes)
    index = ". This is an index: its records are in TFRecord files that imageshards didn't write"
    what = f"{image.format.upper()}, {plural(image.channels, 'channel')}, {pixels} pixels (height × width)"
    return what + index * info.is_index


def _made(info: DatasetInfo) -> str:
    """The command that wrote the dataset, if that is known, and its flags."""
    try:
        command = as_run(json.loads(info.storage.read(info.path(schema.RUN_FILE)))).command
    except (FileNotFoundError, ValueError):
        command = ()
    flags = info.manifest["configuration"].items()
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in sorted(flags) if name != "labels"]
    return "\n".join(map(name_line, [shlex.join(command)] * bool(command) + lines))


def snippet(info: DatasetInfo) -> str:
    """A program that loads the dataset, with a line for each framework."""
    names = with_records(info)
    train = "train" if "train" in names else names[0]
    size = "" if info.image.min_size == info.image.max_size else ", image_size=224"
    given = f"{info.url!r}, {{!r}}, global_batch_size={min(_BATCH, info.splits[train].records)}{size}"
    evals = [f"evals = imageshards.eval_batches({given.format(name)})" for name in names if name != train][:1]
    lines = [
        "import imageshards\n",
        f"batches = imageshards.train_batches({given.format(train)})",
        *evals,
        "dataset = imageshards.as_tf(batches)  # TensorFlow",
        "arrays = imageshards.as_jax(batches, mesh)  # JAX",
        "loader = imageshards.as_torch(batches)  # PyTorch",
        f"model.fit(**imageshards.keras.fit_arguments(batches{', evals' * len(evals)}), epochs=3)  # Keras",
    ]
    return "\n".join(lines)


def _end(name: str) -> str:
    """The end of a long name: its beginning is often a folder's."""
    shown = name_line(name)
    return shown if len(shown) <= _END else f"…{shown[-_END:]}"


def _look(one: Finding) -> dict[str, Any]:
    """What the page shows of a finding, and the text of its list."""
    sizes = accumulate(min(len(group.pictures), _IN_GROUP) or 1 for group in one.groups)
    groups = [group for group, size in zip(one.groups, sizes, strict=True) if size <= _SHOWN]
    text, copied = _list_text(one.lines)
    more = one.count - sum(group.size for group in groups)
    return {"finding": one, "groups": groups, "more": more, "text": text, "copied": copied}


def _list_text(lines: Sequence[ListedImage]) -> tuple[str, int]:
    """The lines that there is room for, of groups all or none, and how many they are."""
    text, copied = "", 0
    for _, group in groupby(enumerate(lines), lambda pair: pair[1].group or pair[0]):
        some = [schema.canonical_json(builtins_of(line)).decode() for _, line in group]
        if len(text) + sum(map(len, some)) > _LIST_BYTES:
            break
        text, copied = text + "".join(some), copied + len(some)
    return text, copied


def _pictures(found: Rows, rows: Iterable[int], side: int, room: int) -> Iterator[tuple[int, str]]:
    """(row, data URL) of some records, each once, until there is no room."""
    every, left = records(found.info, found.split, decode=False, features=[]), iter(dict.fromkeys(rows))
    while some := list(islice(left, _BLOCK)):
        for row, record in zip(some, every[some], strict=True):
            image = open_image(record["image"])
            image.draft("RGB", (side, side))
            small = in_8_bits(image).convert("RGB")
            small.thumbnail((side, side))
            out = io.BytesIO()
            small.save(out, "WEBP", quality=50)
            url = f"data:image/webp;base64,{base64.b64encode(out.getvalue()).decode()}"
            room -= len(url)
            if room < 0:
                return
            yield row, url


def _classes(counts: Array) -> list[int]:
    """Class ids, the rarest first; of very many the rarest and the most frequent."""
    order = np.argsort(counts.sum(0), kind="stable")
    if len(order) > _CLASSES:
        order = np.concatenate([order[: _CLASSES // 2], order[-_CLASSES // 2 :]])
    return [int(number) for number in order]


# --- charts and tables


def _charts(found: Rows) -> Iterator[dict[str, str]]:
    columns, image = found.columns, found.info.image
    if "source_height" in columns:
        longer = np.maximum(columns["source_height"], columns["source_width"])
        is_one_size = image.max_size is not None and image.min_size == image.max_size
        stored = f"; stored at {max(image.max_size)} px" if is_one_size and image.max_size else ""
        yield _histogram("Longer side of the originals", longer, lambda value: f"{value:,.0f} px", stored)
    yield _histogram("Bytes per record", columns["bytes"], size_text)
    yield _histogram("Images of a class", found.counts.sum(0), lambda value: f"{value:,.0f}")


def _histogram(title: str, values: Array, text: Callable[[float], str], more: str = "") -> dict[str, str]:
    """A chart of how many values are in each of equal steps; logarithmic if they span much."""
    low, high, median = (float(one) for one in np.quantile(values, (0, 1, 0.5)))
    scale = np.log if low > 0 and high > 16 * low else np.asarray
    counts, _ = np.histogram(scale(values.astype(np.float64)), _BINS)
    step = _WIDTH / _BINS
    bars = [
        f"M{number * step + 0.5} {_HEIGHT}v{-max(2.0, round(count / counts.max() * _HEIGHT, 1))}h{step - 1}V{_HEIGHT}"
        for number, count in enumerate(counts.tolist())
        if count
    ]
    span = f"{text(low)} to {text(high)}, median {text(median)}" if low < high else f"all {text(low)}"
    return {"title": title, "text": span + more, "bars": "".join(bars), "low": text(low), "high": text(high)}


def _formats(found: Rows) -> list[tuple[str, int, int]]:
    """(format of the originals, images, those stored without encoding them again), most first."""
    if "source_format" not in found.columns:
        return []
    codes, passed = found.columns["source_format"], found.columns["passthrough"] > 0
    counts = [(name, codes == code) for code, name in enumerate(SOURCE_FORMATS)]
    rows = [(name, int(one.sum()), int((one & passed).sum())) for name, one in counts if one.any()]
    return sorted(rows, key=lambda row: -row[1])
