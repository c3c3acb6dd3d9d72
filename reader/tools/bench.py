"""`bench`: how fast a dataset is read here in all the ways people read images, compared with decoding alone.

Rows take turns, so that a slow minute of the machine hits all of them. Decoding alone is the same decoding, resizing
and augmentation on bytes in memory, on every core: the difference is what reading and handing over cost.
"""

from __future__ import annotations

import itertools
import os
import platform
import re
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

import reader
from beam_pipeline import storage
from beam_pipeline.errors import ImageShardsError, UsageError
from beam_pipeline.text import plural
from reader import augment
from reader.hosts import integer
from reader.info import DatasetInfo, as_info
from reader.machine import cpu_count
from reader.pixels import ImageDecoder
from reader.select import Classes, Selection, select
from reader.tools import tutorial
from reader.tools.checks import read_records
from reader.tools.experiment import Batches, Experiment, Way, experiment, image_files
from reader.tools.forms import write_forms

_OF_A_FILE = re.compile(r"ImageShardsError: (.+)")  # tf.data hands on only the text of an error
OURS, ALONE = "train_batches", "decoding alone"
_AUGMENTS: dict[str, Any] = {
    "": None,
    ", flip_crop": augment.flip_crop,
    ", random_resized_crop": augment.random_resized_crop(),
}


@dataclass
class Row(Way):
    """One way to read, again and again.

    Attributes:
        alone: the row of decoding alone that does the same work, if there is one.
    """

    alone: Row | None = None

    @property
    def of_alone(self) -> tuple[float, float] | None:
        """Its speed as a share of decoding alone, by clock and by CPU: medians over the passes side by side."""
        if self.alone is None:
            return None
        pairs = list(zip(self.passes, self.alone.passes, strict=True))
        by_clock, by_cpu = (
            statistics.median((of(alone) / alone.images) / (of(one) / one.images) for one, alone in pairs)
            for of in (attrgetter("wall_s"), attrgetter("cpu_s"))
        )
        return by_clock, by_cpu

    def as_json(self) -> dict[str, Any]:
        document = super().as_json()
        if not self.missing:
            document["of_decoding_alone"] = self.of_alone and dict(zip(("clock", "cpu"), self.of_alone, strict=True))
        return document


@dataclass(frozen=True)
class BenchResult:
    """What `bench` measured; as text, a table.

    Attributes:
        title: dataset, side and machine, in a line.
        conditions: what the rows hold for: the arguments, the dataset and the machine.
        rows: one for each way to read.
    """

    title: str
    conditions: dict[str, Any]
    rows: list[Row]

    def __str__(self) -> str:
        images, repeats, split, records, originals = (
            self.conditions[name] for name in ("images", "repeats", "split", "split_images", "against")
        )
        again = f" ({split} has {records:,}, read again and again)" if records < images else ""
        runs = "1 run" if repeats == 1 else f"median of {repeats} runs in turns"
        lines = [f"{self.title}, {plural(images, 'image')} a run{again}, {runs}"]
        lines += [f"individual files: {originals}"] if originals else []
        return "\n".join([*lines, table(self.rows)])

    def as_json(self) -> dict[str, Any]:
        """The same for programs."""
        return {**self.conditions, "rows": [row.as_json() for row in self.rows]}

    def draw(self, path: str) -> None:
        """Draw the rows, as `chart`."""
        chart(self.rows, self.title, path)


def bench(
    info: DatasetInfo | str | os.PathLike[str],
    split: str = "train",
    *,
    classes: Classes = None,
    images: int = 6400,
    batch_size: int = 64,
    image_size: int = 224,
    repeats: int | None = None,
    against: str | os.PathLike[str] | None = None,
    cached: bool = False,
    latency_ms: float | None = None,
    with_traces: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> BenchResult | Experiment:
    """Measure how fast a dataset is read here in every common way, compared with decoding alone.

    Args:
        info: what `load_info` returned, or the URL.
        split: TFDS split string.
        classes: read these only, as of `train_batches`; not with `latency_ms`.
        images: how many each run reads; a smaller split is read again and again.
        batch_size: images in a batch, at most the split's.
        image_size: side in pixels that images are resized to.
        repeats: runs that count, after one to warm up; None for 7, or with `latency_ms` for 3, without one to warm up.
        against: original images in class folders for the individual files; None takes the records' images.
        cached: also read individual files from caches of decoded pixels; not with `latency_ms`, which always does.
        latency_ms: each request to storage waits so many milliseconds first and is counted, as if all files were in a
            bucket; measures other rows (`reader.tools.experiment`), and needs `against`.
        with_traces: with `latency_ms`, record what the first and the last row do in a second.
        report: is given lines of progress.

    Raises:
        UsageError: no such split, a number is out of bounds, or there are no images in `against`.
        ImageShardsError: a shard is missing or truncated, or a record is corrupt.
    """
    info, originals = as_info(info), storage.normalize(os.fspath(against)) if against else ""
    if latency_ms is None and with_traces:
        raise UsageError("with_traces needs latency_ms")
    if latency_ms is not None:
        _check_latency(latency_ms, originals)
        if cached:
            raise UsageError("cached doesn't go with latency_ms, whose rows have caches anyway; leave it out")
    if latency_ms is not None and classes is not None:
        raise UsageError("classes doesn't go with latency_ms, whose experiment reads complete splits; leave it out")
    selection = select(info, split, classes)
    repeats = repeats if repeats is not None else 7 if latency_ms is None else 3
    numbers = {"images": images, "batch_size": batch_size, "image_size": image_size, "repeats": repeats}
    for name, number in numbers.items():
        integer(name, number, 1)
    with tempfile.TemporaryDirectory(prefix="imageshards-bench-") as scratch:
        there = np.arange(info.records(split)) if selection is None else selection.numbers()
        records = [run.record(index) for _, run, index in read_records(info, split, lambda _: there[:images])]
        batch = min(batch_size, len(records))
        if latency_ms is not None:
            forms = write_forms(info, records, Path(scratch), with_files=True)
            return experiment(
                info,
                split,
                forms,
                against=originals,
                latency_ms=latency_ms,
                image_size=image_size,
                batch_size=batch,
                repeats=repeats,
                with_traces=with_traces,
                report=report,
            )
        rows = all_rows(info, split, records, image_size, batch, Path(scratch), originals, cached, selection)
        measure(rows, images, repeats, report)
    conditions = {"dataset": info.url, "split": split, "split_images": len(records), **numbers}
    conditions |= {"against": originals or None, "cores": cpu_count(), "python": platform.python_version()}
    title = f"{info.name} {info.version}, {image_size} px, {plural(cpu_count(), 'core')}"
    return BenchResult(title, conditions, rows)


def _check_latency(latency_ms: float, originals: str) -> None:
    if not 0 <= latency_ms <= 10_000:  # NaN is neither
        raise UsageError(f"latency_ms must be from 0 to 10,000, got {latency_ms:g}")
    if not originals:
        raise UsageError("latency_ms needs against: the class folders of the original images")
    image_files(originals)


# --- the rows


def all_rows(
    info: DatasetInfo,
    split: str,
    records: Sequence[bytes],
    size: int,
    batch: int,
    scratch: Path,
    originals: str = "",
    with_caches: bool = False,
    selection: Selection | None = None,
) -> list[Row]:
    """Every way to read these records of a split, and decoding alone; `scratch` gets them in the other forms.

    Individual files are those of the class folders `originals`, or of the records; with caches, cached files too.
    """
    options: dict[str, Any] = {"batch_size": batch, "image_size": size}
    ours: dict[str, Any] = {"global_batch_size": batch, "image_size": size, "where": selection}
    forms = write_forms(info, records, scratch, with_files=not originals)

    def files(cache: Any = None) -> Any:
        return reader.image_files_dataset(originals or forms.files, cache=cache, **options)

    ways: dict[str, Callable[[], Any]] = {"individual files": files}
    if with_caches:
        ways["individual files, cached in memory"] = partial(files, cache="memory")
        ways["individual files, cached on disk"] = partial(files, cache=scratch / "cache")
    ways |= {
        "GZIP shards, the tutorial's way": partial(tutorial.local_shards, info, forms.zipped, size, None),
        "plain shards, the tutorial's way": partial(tutorial.local_shards, info, forms.plain, size, batch),
        "train_dataset (TensorFlow)": lambda: reader.train_dataset(info, split, **ours),
        "as_torch (PyTorch)": lambda: reader.as_torch(reader.train_batches(info, split, **ours)),
    }
    alone = {
        name: Row(f"{ALONE}{name}", _decoding(forms.images, batch, ImageDecoder(info.image, size, augment=one)))
        for name, one in _AUGMENTS.items()
    }
    # Other files, or no decoding at all, compare with nothing.
    has_other_work = {name for name in ways if "cached" in name or (originals and name.startswith("individual"))}
    rows = [
        Row(name, _reopened(make), alone=None if name in has_other_work else alone[""]) for name, make in ways.items()
    ]
    for name, one in _AUGMENTS.items():
        train = partial(reader.train_batches, info, split, augment=one, **ours)
        rows += [Row(f"{OURS}{name}", _reopened(train), alone=alone[name]), alone[name]]
    return rows


def _reopened(make: Callable[[], Any]) -> Callable[[], Batches]:
    """Opens a new pass after pass over what `make` makes once: small splits are read again and again."""
    made: list[Any] = []

    def read() -> Batches:
        if not made:
            made.append(make())
        while True:
            for batch in made[0]:
                yield len(batch[0])

    return read


def _decoding(encoded: Sequence[bytes], batch: int, decode: ImageDecoder) -> Callable[[], Batches]:
    """One thread per core decodes a batch of images into rows that are there."""
    threads = cpu_count()
    rows = np.empty((batch * threads, *decode.shape), np.uint8)

    def work(images: Iterable[bytes], first: int) -> None:
        for number, image in enumerate(images):
            decode(image, rows[first + number], number)

    def read() -> Batches:
        images = itertools.cycle(encoded)
        while True:
            parts = [list(itertools.islice(images, batch)) for _ in range(threads)]
            workers = [threading.Thread(target=work, args=(part, i * batch)) for i, part in enumerate(parts)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            yield batch * threads

    return read


# --- measuring


def measure(rows: Sequence[Row], images: int, repeats: int, report: Callable[[str], None]) -> None:
    """Read every row once to warm up, then all of them in turns, `images` each; `report` is given lines of progress."""
    for repeat, row in itertools.product(range(repeats + 1), rows):
        if row.missing:
            continue
        report(f"{f'repeat {repeat} of {repeats}' if repeat else 'warm-up'}: {row.name}")
        try:
            row.measure(images)
        except Exception as error:
            if found := _OF_A_FILE.search(str(error)):
                raise ImageShardsError(f"{found[1]}; remove the file, or leave --against out") from None
            raise
        if not repeat:
            row.passes.clear()


# --- what was found


def table(rows: Sequence[Row]) -> str:
    """Lines of text, a row each."""
    width = max(len(row.name) for row in rows)
    lines = [f"{'':{width}}  images/s (slowest to fastest)  CPU s/1,000  % of decode-only speed (time / CPU)"]
    for row in rows:
        if row.missing:
            lines.append(f"{row.name:{width}}  {row.missing}")
            continue
        line = f"{row.name:{width}}{row.rate_text():32} {row.cpu_per_1000:11.3f}"
        lines.append(line + (" {:11.0%} / {:.0%}".format(*row.of_alone) if row.of_alone else ""))
    return "\n".join(lines)


def chart(rows: Sequence[Row], title: str, path: str) -> None:
    """Draw bars of images/s with their spread, and decoding alone as marks, as a PNG.

    Raises:
        OSError: the file can't be written.
        ModuleNotFoundError: Matplotlib isn't installed.
    """
    from matplotlib.figure import Figure  # a second to import

    shown = [row for row in rows if not row.missing and not row.name.startswith(ALONE)]
    names, rates = [row.name for row in shown], [row.images_per_s for row in shown]
    spread = [[row.images_per_s - min(row.rates), max(row.rates) - row.images_per_s] for row in shown]
    colours = ["tab:blue" if name.startswith(("train_", "as_torch")) else "tab:gray" for name in names]
    compared = [(row.alone.images_per_s, row.name) for row in shown if row.alone]
    figure = Figure(figsize=(10, 1.4 + 0.5 * len(shown)), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(names, rates, 0.6, xerr=np.transpose(spread), color=colours)
    axes.bar_label(bars, fmt="{:,.0f}", padding=4)
    axes.plot(*zip(*compared, strict=True), "|", markersize=22, color="tab:orange", label="decoding alone, from memory")
    axes.set_xlim(0, 1.2 * max(rate for rate, _ in compared))  # caches of pixels are so fast that their bars are cut
    axes.invert_yaxis()
    axes.set_xlabel("images/s: median, slowest to fastest run")
    axes.set_title(title, loc="left")
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=120, format="png")
