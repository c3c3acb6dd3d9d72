"""`bench`: how fast a dataset is read here by each adapter, compared with decoding alone and with single image files.

Rows take turns, so that a slow minute of the machine hits all of them. Decoding alone is the same decoding and
resizing of bytes in memory, on every core: the difference is what reading and handing over cost. With a latency, every
request of our storage layer waits first, single files included: bandwidth stays that of this machine.
"""

from __future__ import annotations

import os
import platform
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import cycle, islice, product
from statistics import median
from typing import Any, NamedTuple

import numpy as np

import reader
from beam_pipeline import storage
from beam_pipeline.errors import ImageShardsError, UsageError
from beam_pipeline.machine import cpu_count
from beam_pipeline.text import plural
from reader.hosts import integer
from reader.info import DatasetInfo, load_info
from reader.pixels import ImageDecoder, UndecodableImageError
from reader.preprocess import PhotoError, Preprocessing, image_files
from reader.select import Classes, select
from reader.splits import first_records
from reader.tools.read import checked_table, read_images
from reader.tools.requests import Request, SlowStorage

Batches = Iterator[int]  # images of each batch

ONE_AT_A_TIME, AT_ONCE = "files, one at a time", 32
_TRIED = 16  # images that are decoded for the estimate of the duration
_LIMIT_S = 10.0  # of a run: files one at a time, each after a wait, would take minutes


class Pass(NamedTuple):
    """One run of a row; its requests to storage are those for images that were only read ahead, too."""

    images: int
    wall_s: float
    cpu_s: float
    requests: int
    bytes_read: int


@dataclass
class Row:
    """One way to read."""

    name: str
    open: Callable[[], Batches]  # begins to read, for as many images as a run takes, or for ever
    expected_s: float  # for an image, for the estimate of the duration
    package: str = ""  # package that `open` needs, in addition to NumPy
    alone: Row | None = None  # decoding alone, if that does the same work
    passes: list[Pass] = field(default_factory=list)  # those that were measured

    @property
    def missing(self) -> str:
        """Why it can't be measured: what isn't installed; "" if it can."""
        if not self.package or find_spec(self.package) is not None:
            return ""
        return str(reader.with_install_hint(ModuleNotFoundError(name=self.package)))

    @property
    def rates(self) -> list[float]:
        """Images/s of each run."""
        return [1 / cost for cost in self.per_image("wall_s")]

    def per_image(self, metric: str) -> list[float]:
        """A number of each run, divided by its images."""
        return [getattr(one, metric) / one.images for one in self.passes]

    def relative_to_decode_only(self, metric: str) -> float:
        """The speed of decoding alone that is left, by one metric: the median over runs next to each other."""
        both = zip(self.alone.per_image(metric) if self.alone else (), self.per_image(metric), strict=True)
        return median(alone / here for alone, here in both)

    def as_json(self) -> dict[str, Any]:
        """What was measured: medians."""
        if self.missing:
            return {"name": self.name, "missing": self.missing}
        shares = {name: self.relative_to_decode_only(f"{name}_s") for name in ("wall", "cpu") if self.alone}
        return {
            "name": self.name,
            "images": median(one.images for one in self.passes),
            "images_per_s": round(median(self.rates), 1),
            "images_per_s_spread": [round(min(self.rates), 1), round(max(self.rates), 1)],
            "cpu_s_per_1000": round(1000 * median(self.per_image("cpu_s")), 4),
            "requests_per_1000": round(1000 * median(self.per_image("requests")), 2),
            "bytes_per_image": round(median(self.per_image("bytes_read")), 1),
            "of_decoding_alone": shares or None,
        }


@dataclass(frozen=True)
class BenchResult:
    """What `bench` measured; as text, a table."""

    title: str  # dataset, machine and how it was measured, in a line
    conditions: dict[str, Any]  # what the rows hold for: the arguments, the dataset and the machine
    rows: list[Row]  # one for each way to read

    def __repr__(self) -> str:
        width = max(len(row.name) for row in self.rows)
        heads = "images/s (slowest to fastest)  CPU s/1,000  requests/1,000  kB/image  % of decode-only (time / CPU)"
        lines = [self.title, f"{'':{width}}  {heads}"]
        for row in self.rows:
            found, line = row.as_json(), f"{row.name:{width}}  "
            if row.missing:
                lines.append(f"{line}{row.missing}")
                continue
            slowest, fastest = found["images_per_s_spread"]
            line += f"{found['images_per_s']:7,.0f} {f'({slowest:,.0f} to {fastest:,.0f})':21}"
            line += f"  {found['cpu_s_per_1000']:11.3f}  {found['requests_per_1000']:14,.1f}"
            line += f"  {found['bytes_per_image'] / 1000:8,.1f}"
            shares = found["of_decoding_alone"]
            lines.append(line + (f"  {shares['wall']:17.0%} / {shares['cpu']:.0%}" if shares else ""))
        for file, why in islice(self.conditions["left_out"].items(), 1):
            lines.append(f"{plural(len(self.conditions['left_out']), 'file')} left out, such as {file}: {why}")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """The same for programs."""
        return {**self.conditions, "rows": [row.as_json() for row in self.rows]}


def bench(
    dataset: DatasetInfo | str | os.PathLike[str],
    split: str = "train",
    *,
    classes: Classes = None,
    images: int = 6400,
    batch_size: int = 64,
    image_size: int = 224,
    repeats: int = 3,
    against: str | os.PathLike[str] | None = None,
    latency_ms: float = 0,
    report: Callable[[str], None] = lambda line: None,
) -> BenchResult:
    """Measure how fast a dataset is read here by each adapter, compared with decoding alone.

    Args:
        dataset: what `load_info` returned, or the URL.
        split: TFDS split string.
        classes: read these only, as of `train_batches`.
        images: how many each run reads, of the split's first ones; a smaller split is read again and again. A run ends
            after 10 s, too.
        batch_size: images in a batch, at most the split's.
        image_size: side in pixels that images are resized to.
        repeats: runs that count, after a batch to warm up.
        against: image files in class folders, which are then read one at a time, and 32 at a time.
        latency_ms: each request to storage waits so many milliseconds first, as if all files were in a bucket.
        report: is given lines of progress, the first says how long it takes.

    Raises:
        UsageError: no such split, a number is out of bounds, or there are no images in `against`.
        ImageShardsError: a shard is missing or truncated, a record is corrupt, or no image of `against` decodes.
    """
    info, folder = load_info(dataset), storage.normalize(os.fspath(against)) if against else ""
    numbers = {"images": images, "batch_size": batch_size, "image_size": image_size, "repeats": repeats}
    for name, number in numbers.items():
        integer(name, number, 1)
    if not 0 <= latency_ms <= 10_000:  # NaN is neither
        raise UsageError(f"latency_ms must be from 0 to 10,000, got {latency_ms:g}")
    files = [storage.join(folder, path) for path in image_files(folder) if "/" in path] if folder else []
    if folder and not files:
        raise UsageError(f"{folder!r}: no image in class folders there")
    selection = select(info, split, classes)
    chosen = (np.arange(info.records(split)) if selection is None else selection.numbers())[:images]
    read = first_records(info.ranges(split), int(chosen[-1]) + 1)  # only these: what is read ahead is of the run, too
    encoded = list(read_images(info, checked_table(info, split, chosen), lambda _, image: bytes(image)))
    options: dict[str, Any] = {"global_batch_size": min(batch_size, len(encoded)), "image_size": image_size}
    try:
        rows, left_out = file_rows(info, files, images, image_size, latency_ms / 1000) if files else ([], {})
        rows += dataset_rows(info, read, encoded, options | {"where": select(info, read, classes)})
        measure(rows, images, repeats, options["global_batch_size"], latency_ms / 1000, report)
    except UndecodableImageError as error:
        raise ImageShardsError(f"{info.url}: {error}; imageshards verify finds the record") from None
    conditions = {"dataset": info.url, "split": split, "split_images": len(encoded), **numbers}
    conditions |= {"against": folder or None, "left_out": left_out, "latency_ms": latency_ms, "cores": cpu_count()}
    again = f" ({split} has {len(encoded):,}, read again and again)" if len(encoded) < images else ""
    title = f"{info.name} {info.version}, {image_size} px, {plural(cpu_count(), 'core')}, {latency_ms:g} ms a request, "
    title += f"{plural(images, 'image')} a run{again}, {plural(repeats, 'run')} in turns"
    return BenchResult(title, conditions | {"python": platform.python_version()}, rows)


def dataset_rows(info: DatasetInfo, split: str, encoded: Sequence[bytes], options: dict[str, Any]) -> list[Row]:
    """A row for each adapter, and decoding alone."""

    def as_jax() -> Any:
        import jax

        return reader.as_jax(batches(), jax.sharding.SingleDeviceSharding(jax.devices()[0]))

    batches = partial(reader.train_batches, info, split, **options)
    decode = ImageDecoder(info.image, options["image_size"], is_foreign=info.is_index)
    one_row = np.empty(decode.shape, np.uint8)
    expected_s = _seconds(lambda image: decode(image, one_row, 0), encoded) / cpu_count()
    alone = Row("decoding alone", _decoding(encoded, options["global_batch_size"], decode), expected_s)
    adapters: list[tuple[str, str, Callable[[], Any]]] = [
        ("train_batches (NumPy)", "", batches),
        ("as_tf (TensorFlow)", "tensorflow", lambda: reader.as_tf(batches())),
        ("as_torch (PyTorch)", "torch", lambda: reader.as_torch(batches())),
        ("as_jax (JAX)", "jax", as_jax),
    ]
    return [*(Row(name, _again(make), expected_s, package, alone) for name, package, make in adapters), alone]


def _again(make: Callable[[], Any]) -> Callable[[], Batches]:
    """Reads what `make` makes once, again and again: small splits are read several times in a run."""
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
        images = cycle(encoded)
        with ThreadPoolExecutor(threads) as pool:
            while True:
                parts = [list(islice(images, batch)) for _ in range(threads)]
                list(pool.map(work, parts, range(0, batch * threads, batch)))
                yield batch * threads

    return read


def file_rows(
    info: DatasetInfo, files: Sequence[str], images: int, size: int, latency_s: float
) -> tuple[list[Row], dict[str, str]]:
    """Rows of single image files of any format, drawn from all classes; and those that don't decode, with why."""
    decode, left_out = Preprocessing(info.manifest, True, (size, size)).decode, dict[str, str]()
    drawn = list(islice(cycle(random.Random(0).sample(files, len(files))), images))

    def load(file: str) -> int:
        try:
            decode(storage.open_storage(file).read(file))
        except PhotoError as error:
            left_out[file] = str(error)  # as the writer does
        return file not in left_out

    def at_once(count: int) -> Batches:
        threads = ThreadPoolExecutor(count)
        try:
            yield from threads.map(load, drawn)
        finally:
            threads.shutdown(cancel_futures=True)

    spent_s = _seconds(load, drawn)
    if left_out.keys() >= {*drawn[:_TRIED]}:
        raise ImageShardsError(f"{next(iter(left_out))}: {left_out.popitem()[1]}; none of the first images decodes")
    many_s = max(spent_s / cpu_count(), (spent_s + latency_s) / AT_ONCE)
    one = Row(ONE_AT_A_TIME, lambda: at_once(1), spent_s + latency_s)
    return [one, Row(f"files, {AT_ONCE} at a time", lambda: at_once(AT_ONCE), many_s)], left_out


def _seconds(work: Callable[[Any], object], items: Sequence[Any]) -> float:
    """Seconds for each of the first items, for the estimate of the duration."""
    tried, begin = items[:_TRIED], time.perf_counter()
    for one in tried:
        work(one)
    return (time.perf_counter() - begin) / len(tried)


def measure(
    rows: Sequence[Row], images: int, repeats: int, batch: int, latency_s: float, report: Callable[[str], None]
) -> None:
    """Read a batch of every row to warm up, then all rows in turns, `images` each; `report` is given the progress."""
    measured, requests = [row for row in rows if not row.missing], list[Request]()
    expected_s = repeats * sum(min(_LIMIT_S, images * row.expected_s) for row in measured)
    report(f"about {max(1, round(expected_s)):,} s: {plural(len(measured), 'row')} × {plural(repeats, 'run')}")
    with storage.wrapped(lambda store: SlowStorage(store, latency_s, requests.append)):
        for repeat, row in product(range(repeats + 1), measured):
            report(f"run {repeat} of {repeats}: {row.name}" if repeat else f"warm-up: {row.name}")
            one = read_pass(row.open(), images if repeat else batch, requests)
            row.passes += [one] if repeat else []


def read_pass(batches: Batches, images: int, requests: list[Request]) -> Pass:
    """Read so many images, or what the limit allows; storage adds its requests to `requests`."""
    with closing(batches):  # type: ignore[type-var]
        requests.clear()  # what came before is no part of this run
        read, wall_s, begin, cpu_s = 0, 0.0, time.perf_counter(), time.process_time()
        for count in batches:
            # Up to the last batch: an iterator of tf.data ends when its tuner wakes up, maybe seconds later.
            read, wall_s = read + count, time.perf_counter() - begin
            if read >= images or wall_s > _LIMIT_S:
                break
        cpu_s, sent = time.process_time() - cpu_s, [*requests]
    return Pass(read, wall_s, cpu_s, len(sent), sum(one.bytes_read for one in sent))
