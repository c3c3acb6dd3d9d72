"""The page of `report`: thumbnails, charts, and the template that they go into, which escapes every name."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from itertools import chain, groupby, islice
from typing import Any

import jinja2
import numpy as np

from beam_pipeline import __version__, schema
from beam_pipeline.schema.exclude import ListedImage
from beam_pipeline.schema.job import Run
from beam_pipeline.schema.manifest import FOREIGN_KEY, builtins_of
from beam_pipeline.schema.table import SOURCE_FORMATS
from beam_pipeline.text import name_line, plural, printable, size_text
from reader.info import DatasetInfo
from reader.map import records
from reader.pixels import in_8_bits, open_image
from reader.tables import Array
from reader.tools.diff import Difference
from reader.tools.report import Finding, Report, Rows, class_counts

# What the page has room for: bytes of pictures in base64, and of each list; groups, pictures of a group, single
# pictures and titles of a finding; rows of the table of classes. All of it full is less than 4 MB.
_LOOK_BYTES, _CLASS_BYTES, _LIST_BYTES = 1_500_000, 900_000, 60_000
_GROUPS, _IN_GROUP, _SINGLE, _TITLES, _CLASSES = 10, 8, 24, 30, 2_000
_LOOK_SIDE, _CLASS_SIDE = 96, 48  # pixels
_BLOCK = 64  # records in memory at once
_BINS, _WIDTH, _HEIGHT = 32, 320, 84  # of a chart
_BATCH = 64


def render(report: Report, found: Rows, difference: Difference | None, run: Run) -> bytes:
    """The page in UTF-8."""
    text = files(__package__).joinpath("report.html").read_text()
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"name": name_line, "plural": plural, "printable": printable, "size": size_text}
    look, classes = [_look(one) for one in report.findings if one.count], _classes(found)
    shown = [one.row for finding in look for _, some, _ in finding["groups"] for one in some]
    ends = zip(classes, reversed(classes), strict=True)  # the rarest and the most frequent by turns
    faces = [one["face"] for one in chain.from_iterable(ends) if one["total"]]
    page = environment.from_string(text).render(
        info=found.info,
        report=report,
        version=__version__,
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        stored=_stored(found.info),
        made=_made(found.info, run),
        snippets=snippets(found.info),
        splits=found.splits,
        look=look,
        lists=[finding["text"] for finding in look],
        fine=[one.title for one in report.findings if not one.count],
        pictures=dict(_pictures(found, shown, _LOOK_SIDE, _LOOK_BYTES)),
        classes=classes,
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
    return what + index * (FOREIGN_KEY in info.manifest)


def _made(info: DatasetInfo, run: Run) -> str:
    """The command that wrote the dataset, and its flags."""
    flags = info.manifest["configuration"].items()
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in sorted(flags) if name != "labels"]
    return "\n".join(map(name_line, [shlex.join(run.command)] * bool(run.command) + lines))


def snippets(info: DatasetInfo) -> dict[str, str]:
    """Framework → a program that loads the dataset."""
    names = [name for name, split in info.splits.items() if split.records]
    train = "train" if "train" in names else names[0]
    others = [name for name in names if name != train]
    size = "" if info.image.min_size == info.image.max_size else ", image_size=224"
    batch = min(_BATCH, info.splits[train].records)
    given = f"{info.url!r}, {{!r}}, global_batch_size={batch}{size}"
    begin = f"batches = imageshards.train_batches({given.format(train)})\n"
    evals = f"evals = imageshards.eval_batches({given.format(others[0])})\n" if others else ""
    fit = f"model.fit(**imageshards.keras.fit_arguments(batches{', evals' * bool(evals)}, epochs=3))"
    mesh = 'mesh = jax.sharding.Mesh(jax.devices(), ("data",))\n'
    loop = "for images, labels in {}:\n    ..."
    return {
        "TensorFlow": f"import imageshards\n\ndataset = imageshards.train_dataset({given.format(train)})\n"
        + loop.format("dataset"),
        "JAX": f"import imageshards\nimport jax\n\n{begin}{mesh}{loop.format('imageshards.as_jax(batches, mesh)')}",
        "PyTorch": f"import imageshards\n\n{begin}{loop.format('imageshards.as_torch(batches)')}",
        "Keras": f"import imageshards\n\n{begin}{evals}{fit}",
    }


def _look(one: Finding) -> dict[str, Any]:
    """What the page shows of a finding, and the text of its list."""
    single = len(one.groups) == 1 and not one.groups[0][0]
    some = _SINGLE if single else _IN_GROUP
    groups = [(title, shown[:some], len(shown[some:])) for title, shown in one.groups[:_GROUPS] if shown]
    titles = [title for title, shown in one.groups if not shown]
    text, copied = _list_text(one.lines)
    return {
        "kind": one.kind,
        "title": one.title,
        "count": one.count,
        "unit": one.unit,
        "about": one.about,
        "groups": groups,
        "titles": titles[:_TITLES],
        "more": 0 if single else one.count - len(groups) - min(len(titles), _TITLES),
        "text": text,
        "copied": copied,
        "listed": one.listed,
        "complete": one.complete,
    }


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


def _classes(found: Rows) -> list[dict[str, Any]]:
    """A row per class, the rarest first; of very many the rarest and the most frequent."""
    info = found.info
    counts = class_counts(info)
    totals, first = counts.sum(0), np.zeros(info.num_classes, np.int64)
    labels, at = np.unique(found.columns["class"], return_index=True)
    first[labels] = at
    order = np.argsort(totals, kind="stable")
    if len(order) > _CLASSES:
        order = np.concatenate([order[: _CLASSES // 2], order[-_CLASSES // 2 :]])
    return [
        {
            "id": number,
            "name": info.classes[number],
            "counts": counts[:, number].tolist(),
            "total": int(totals[number]),
            "face": int(first[number]),
        }
        for number in order.tolist()
    ]


# --- charts and tables


def _charts(found: Rows) -> Iterator[dict[str, Any]]:
    columns, image = found.columns, found.info.image
    if "source_height" in columns:
        longer = np.maximum(columns["source_height"], columns["source_width"])
        stored = None if image.min_size != image.max_size or image.max_size is None else max(image.max_size)
        yield _histogram("Longer side of the originals", longer, lambda value: f"{value:,.0f} px", stored)
    yield _histogram("Bytes per record", columns["bytes"], size_text, None)
    totals = np.bincount(columns["class"], minlength=found.info.num_classes)
    yield _histogram("Images of a class", totals, lambda value: f"{value:,.0f}", None)


def _histogram(title: str, values: Array, text: Any, mark: float | None) -> dict[str, Any]:
    """A chart of how many values are in each of equal steps; logarithmic if they span much."""
    low, high, median = (float(one) for one in np.quantile(values, (0, 1, 0.5)))
    first, last = min(low, low if mark is None else mark), max(high, high if mark is None else mark)
    scale = np.log if first > 0 and last > 16 * first else np.asarray
    span = float(scale(last) - scale(first)) or 1.0
    at = (scale(values.astype(np.float64)) - float(scale(first))) / span
    counts = np.bincount(np.minimum((at * _BINS).astype(np.int64), _BINS - 1), minlength=_BINS)
    step = _WIDTH / _BINS
    bars = [
        (round(number * step + 0.5, 1), step - 1, max(2.0, round(count / counts.max() * _HEIGHT, 1)), f"{count:,}")
        for number, count in enumerate(counts.tolist())
        if count
    ]
    caption = f"{text(low)} to {text(high)}, median {text(median)}"
    caption += "" if mark is None else f"; stored at {text(mark)} (dashed)"
    place = None if mark is None else round(float(scale(mark) - scale(first)) / span * _WIDTH, 1)
    return {"title": title, "text": caption, "bars": bars, "mark": place, "low": text(first), "high": text(last)}


def _formats(found: Rows) -> list[tuple[str, int, int]]:
    """(format of the originals, images, those stored without encoding them again), most first."""
    if "source_format" not in found.columns:
        return []
    codes, passed = found.columns["source_format"], found.columns["passthrough"] > 0
    counts = [(name, codes == code) for code, name in enumerate(SOURCE_FORMATS)]
    rows = [(name, int(one.sum()), int((one & passed).sum())) for name, one in counts if one.any()]
    return sorted(rows, key=lambda row: -row[1])
