"""`bench --latency_ms`: why files in a bucket are read slowly, and what each remedy brings, on files that are here.

Every request of our storage layer waits first, single files included. Only latency is added: bandwidth stays that of
this machine. TensorFlow's own gs:// can't be pointed at anything else, so its pipelines read through
`tf.numpy_function` over the same layer.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import os
import platform
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import reader
from beam_pipeline import storage
from beam_pipeline.errors import UsageError
from beam_pipeline.text import plural
from reader import order
from reader.buffers import BufferPool
from reader.class_folders import list_images
from reader.engine import Cursor, Engine
from reader.info import DatasetInfo, ImageInfo
from reader.machine import cpu_count
from reader.pixels import ImageDecoder, UndecodableImageError
from reader.rows import RecordRows
from reader.stream import open_source
from reader.tools import tutorial
from reader.tools.forms import Forms, write_temporary
from reader.tools.requests import Request, SlowStorage
from reader.tools.trace import Trace, TracedDecoder, Tracer, draw

Batches = Iterator[int]  # images of each batch, to the end of a pass

_FILES = 2000  # that a pass reads: 3 s of 32 at a time at 50 ms, and 300 MB of cached pixels
_AT_ONCE = 32
_SLOW_S = 3.0  # of waiting in a pass that reads few files at a time: it takes some of them only
_LIMIT_S = 12.0  # then a row stops in the middle of a pass, and what it read ahead counts as requests, not as images
TRAINED_PER_S = 8000  # images, by the accelerator that some rows feed
ONE_AT_A_TIME, PARALLEL_MAP = "files, one at a time", "files, tf.data's parallel map"
FILES_AT_ONCE = f"files, {_AT_ONCE} at a time"
FAIR, OURS = f"files of the stored images, {_AT_ONCE} at a time", "imageshards, train_batches"
Decode = ImageDecoder | TracedDecoder


class Pass(NamedTuple):
    """One pass over a row's images, or what `_LIMIT_S` allowed of it."""

    images: int
    wall_s: float
    cpu_s: float
    requests: list[Request]


class _NotMeasuredError(Exception):
    """A way can't be measured; the text says why."""


@dataclass
class Way:
    """One way to read.

    Attributes:
        name: as the table shows it.
        open: begins a pass; fails with ModuleNotFoundError if it needs a package that isn't installed.
        missing: why it can't be measured: what isn't installed.
        passes: those that were measured.
    """

    name: str
    open: Callable[[], Batches]
    missing: str = ""
    passes: list[Pass] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Images/s of each pass, by the clock."""
        return [one.images / one.wall_s for one in self.passes]

    @property
    def images_per_s(self) -> float:
        """Their median."""
        return statistics.median(self.rates)

    def an_image(self, of: Callable[[Pass], float]) -> float:
        """The median of a number of each pass, divided by its images."""
        return statistics.median(of(one) / one.images for one in self.passes)

    @property
    def cpu_per_1000(self) -> float:
        """Median CPU seconds for 1,000 images."""
        return self.an_image(lambda one: 1000 * one.cpu_s)

    @property
    def requests(self) -> float:
        """Median requests an image."""
        return self.an_image(lambda one: len(one.requests))

    @property
    def bytes_read(self) -> float:
        """Median bytes an image."""
        return self.an_image(lambda one: sum(request.bytes_read for request in one.requests))

    def measure(
        self, images: float = math.inf, limit_s: float = math.inf, requests: list[Request] | None = None
    ) -> None:
        """Read a pass, or so much of it, if what it needs is installed; storage adds its own to `requests`."""
        requests = [] if requests is None else requests
        try:
            with closing(self.open()) as batches:  # type: ignore[type-var]
                requests.clear()  # what came before is no part of this pass
                read, wall, begin, cpu_s = 0, 0.0, time.perf_counter(), time.process_time()
                for count in batches:
                    # Up to the last batch: an iterator of tf.data ends when its tuner wakes up, maybe seconds later.
                    read, wall = read + count, time.perf_counter() - begin
                    if read >= images or wall > limit_s:
                        break
                self.passes.append(Pass(read, wall, time.process_time() - cpu_s, [*requests]))
        except (ModuleNotFoundError, _NotMeasuredError) as error:
            self.missing = str(reader.with_install_hint(error) if isinstance(error, ImportError) else error)

    def rate_text(self) -> str:
        """As tables show it: the median, and the slowest to the fastest."""
        return f"{self.images_per_s:9,.0f} ({min(self.rates):,.0f} to {max(self.rates):,.0f})"

    def as_json(self) -> dict[str, Any]:
        """The same for programs."""
        if self.missing:
            return {"name": self.name, "missing": self.missing}
        return {
            "name": self.name,
            "images": statistics.median(one.images for one in self.passes),
            "images_per_s": round(self.images_per_s, 1),
            "images_per_s_spread": [round(min(self.rates), 1), round(max(self.rates), 1)],
            "cpu_s_per_1000": round(self.cpu_per_1000, 4),
        }


@dataclass(frozen=True)
class Experiment:
    """What was measured; as text, a table.

    Attributes:
        title: dataset and machine, in a line.
        conditions: what the rows hold for.
        rows: one for each way to read.
        traces: of the first and the last row, if they were asked for.
    """

    title: str
    conditions: dict[str, Any]
    rows: list[Way]
    traces: list[Trace]

    def __str__(self) -> str:
        latency, repeats, against = (self.conditions[name] for name in ("latency_ms", "repeats", "against"))
        width = max(len(row.name) for row in self.rows)
        lines = [
            f"{self.title}, {latency:g} ms a request, {'1 run' if repeats == 1 else f'median of {repeats} runs'}",
            f"files: {against}",
            f"{'':{width}}  images/s (slowest to fastest)  CPU s/1,000  requests/1,000  MB/1,000",
        ]
        for row in self.rows:
            if row.missing:
                lines.append(f"{row.name:{width}}  {row.missing}")
                continue
            requests, megabytes = 1000 * row.requests, row.bytes_read / 1000
            numbers = f"{row.cpu_per_1000:12.3f}  {requests:14,.1f}  {megabytes:8,.1f}"
            lines.append(f"{row.name:{width}}{row.rate_text():31}{numbers}")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """The same for programs."""
        document = {**self.conditions, "rows": [*map(self._row, self.rows)]}
        return document | ({"traces": [trace.as_json() for trace in self.traces]} if self.traces else {})

    def draw(self, path: str) -> None:
        """Draw the traces, as a PNG.

        Raises:
            OSError: the file can't be written.
            ModuleNotFoundError: Matplotlib isn't installed.
        """
        draw(self.traces).savefig(path, dpi=110, format="png")

    def _row(self, row: Way) -> dict[str, Any]:
        document = row.as_json()
        if not row.missing:
            document["requests_per_1000"] = round(1000 * row.requests, 2)
            document["bytes_per_image"] = round(row.bytes_read, 1)
        return document


def experiment(
    info: DatasetInfo,
    split: str,
    forms: Forms,
    *,
    against: str,
    latency_ms: float,
    image_size: int,
    batch_size: int,
    repeats: int,
    with_traces: bool,
    report: Callable[[str], None],
) -> Experiment:
    """Read images in ways from the slowest to ours, with a latency on each request.

    Args:
        info: the dataset.
        split: the records that are read in a pass.
        forms: their images in the other forms.
        against: original images in class folders.
        latency_ms: wait of each request, in milliseconds.
        image_size: side in pixels that images are resized to.
        batch_size: images in a batch.
        repeats: passes of each row, in turns.
        with_traces: whether to record what the first and the last row do in a second.
        report: is given lines of progress.

    Raises:
        UsageError: there are no images in `against` that decode.
    """
    with tempfile.TemporaryDirectory(prefix="imageshards-files-") as folder:
        _copy(against, Path(folder), min(_FILES, len(forms.images)))
        whole = split
        if len(forms.images) < info.records(split):
            split = _first_records(info, split, len(forms.images))
        requests: list[Request] = []
        with storage.wrapped(lambda store: SlowStorage(store, latency_ms / 1000, requests.append)):
            rows = ways(info, split, forms, folder, latency_ms, image_size, batch_size)
            for repeat, row in itertools.product(range(repeats), rows):
                if not row.missing:
                    report(f"repeat {repeat + 1} of {repeats}: {row.name}")
                    row.measure(limit_s=_LIMIT_S, requests=requests)
        traces = _traces(info, whole, image_files(folder), latency_ms, image_size, batch_size) if with_traces else []
    conditions = {"dataset": info.url, "split": split, "against": against, "latency_ms": latency_ms}
    conditions |= {"images": len(forms.images), "batch_size": batch_size, "image_size": image_size}
    conditions |= {"repeats": repeats, "cores": cpu_count(), "python": platform.python_version()}
    title = f"{info.name} {info.version}, {image_size} px, {plural(cpu_count(), 'core')}"
    return Experiment(title, conditions, rows, traces)


def _first_records(info: DatasetInfo, split: str, count: int) -> str:
    """The split string of so many records from the start of another: `train[:40]`, 16 → `train[:16]`."""
    parts = []
    for part in info.ranges(split):
        stop = min(part.stop, part.start + count)
        if stop > part.start:
            parts.append(f"{part.split}[{part.start or ''}:{stop}]")
            count -= stop - part.start
    return "+".join(parts)


# --- the rows


def ways(
    info: DatasetInfo, split: str, forms: Forms, folder: str, latency_ms: float, size: int, batch: int
) -> list[Way]:
    """Every way to read; `folder` has the original images in class folders, `forms` the records in other forms."""
    originals = random.Random(0).sample(found := image_files(folder), len(found))  # few of them are of all classes
    stored = image_files(str(forms.files))[: len(originals)]
    few = max(16, int(1000 * _SLOW_S / max(1.0, latency_ms)))
    step_s = batch / TRAINED_PER_S
    cache_folder = str(forms.files.parent / "cache")
    filled: dict[str, Any] = {}  # datasets whose caches are

    def first_epoch(cache: str) -> Batches:
        shutil.rmtree(cache_folder, ignore_errors=True)
        filled.pop(cache, None)
        dataset = reader.image_files_dataset(folder, batch_size=batch, image_size=size, cache=cache)

        def read() -> Batches:
            yield from _sizes(dataset)
            filled[cache] = dataset

        return read()

    def second_epoch(cache: str) -> Batches:
        importlib.import_module("tensorflow")  # else there was no first one
        if cache not in filled:
            raise _NotMeasuredError(f"its first epoch takes more than {_LIMIT_S:g} s")
        return _sizes(filled[cache])

    plain = functools.partial(tutorial.shards, info, forms.plain, size, batch)
    zipped = functools.partial(tutorial.shards, info, forms.zipped, size, batch, is_gzip=True)
    fed = f"plain shards, interleave, {1000 * step_s:g} ms of training a batch"
    opens: dict[str, Callable[[], Batches]] = {
        ONE_AT_A_TIME: lambda: one_at_a_time(originals[:few], decoder(size)),
        PARALLEL_MAP: lambda: _sizes(tutorial.files(originals[: few * cpu_count()], batch, decoder(size))),
        FILES_AT_ONCE: lambda: at_once(originals, decoder(size)),
        FAIR: lambda: at_once(stored, decoder(size)),
        "files cached in memory, first epoch": lambda: first_epoch("memory"),
        "files cached in memory, second epoch": lambda: second_epoch("memory"),
        "files cached on disk, first epoch": lambda: first_epoch(cache_folder),
        "files cached on disk, second epoch": lambda: second_epoch(cache_folder),
        "GZIP shards, one after the other": lambda: _sizes(zipped(interleaved=1)),
        "GZIP shards, interleave": lambda: _sizes(zipped()),
        "plain shards, one after the other": lambda: _sizes(plain(interleaved=1)),
        "plain shards, interleave": lambda: _sizes(plain()),
        f"{fed}, no prefetch": lambda: _sizes(plain(prefetch=False), step_s),
        f"{fed}, prefetch": lambda: _sizes(plain(), step_s),
        OURS: lambda: ours(info, split, size, batch),
    }
    return [Way(name, open) for name, open in opens.items()]


def decoder(size: int) -> ImageDecoder:
    """Of images of any size and format."""
    return ImageDecoder(ImageInfo("jpeg", 3, None, None, (), ()), size)


def one_at_a_time(files: Sequence[str], decode: Decode) -> Batches:
    """Read an image, decode it, read the next."""
    read, row = storage.open_storage(files[0]).read, np.empty(decode.shape, np.uint8)
    for file in files:
        decode(read(file), row, 0)
        yield 1


def at_once(files: Sequence[str], decode: Decode) -> Batches:
    """The same in 32 threads."""
    read = storage.open_storage(files[0]).read

    def load(file: str) -> None:
        decode(read(file), np.empty(decode.shape, np.uint8), 0)

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        try:
            for _ in threads.map(load, files):
                yield 1
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


def ours(info: DatasetInfo, split: str, size: int, batch: int) -> Batches:
    """An epoch of `train_batches`."""
    return _sizes(reader.train_batches(info, split, global_batch_size=batch, image_size=size))


def _sizes(batches: Iterable[Any], step_s: float = 0) -> Batches:
    """Images of each batch; an accelerator trains on it as long as that."""
    for batch in batches:
        time.sleep(step_s)
        yield len(batch[0])


def image_files(folder: str) -> list[str]:
    """Images in class folders. Raises UsageError if there is none."""
    url = storage.normalize(folder)
    return [storage.join(url, path) for path, _ in list_images(folder)]


def _copy(against: str, folder: Path, count: int) -> None:
    """So many images of class folders, evenly drawn or again and again, in local ones; those that decode."""
    files, decode = image_files(against), decoder(32)
    store = storage.open_storage(files[0])

    def copy(number: int) -> None:
        file = files[number * len(files) // count if len(files) > count else number % len(files)]
        label, encoded = file.removeprefix(storage.normalize(against) + "/").partition("/")[0], store.read(file)
        with suppress(UndecodableImageError):
            decode(encoded, np.empty(decode.shape, np.uint8), 0)
            write_temporary(folder / label / f"{number:06d}{os.path.splitext(file)[1]}", encoded)

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        list(threads.map(copy, range(count)))
    if not any(folder.iterdir()):
        raise UsageError(f"{against}: none of the images there decodes")


# --- measuring


def _traces(
    info: DatasetInfo, split: str, files: Sequence[str], latency_ms: float, size: int, batch: int
) -> list[Trace]:
    """What the first and the last row do in their first second, while an accelerator trains on their batches."""
    step_s, found = batch / TRAINED_PER_S, []

    def traced(name: str, open: Callable[[Tracer], Batches]) -> None:
        tracer = Tracer()

        def saw(one: Request) -> None:
            tracer.add("reads", one.begin, one.end)

        with storage.wrapped(lambda store: SlowStorage(store, latency_ms / 1000, saw)):
            found.append(tracer.record(name, open(tracer), batch, step_s))

    traced(ONE_AT_A_TIME, lambda tracer: one_at_a_time(files, TracedDecoder(decoder(size), tracer)))
    traced(OURS, lambda tracer: _traced_engine(info, split, size, batch, tracer))
    return found


def _traced_engine(info: DatasetInfo, split: str, size: int, batch: int, tracer: Tracer) -> Batches:
    """What `train_batches` reads, with a decoder that is watched."""
    batches = reader.train_batches(info, split, global_batch_size=batch, image_size=size)
    source = open_source(info, split)
    cursor = Cursor(order.train_windows(order.each_once(source.reader.table.first), batches.start, 0))
    rows = RecordRows(info, TracedDecoder(ImageDecoder(info.image, size), tracer), {})  # type: ignore[arg-type]
    tracer.restart()
    with Engine(source, rows, cursor, [batch] * len(batches), threads=cpu_count(), pool=BufferPool()) as engine:
        for _ in range(len(batches)):
            yield len(engine.next_batch().labels)
