"""`bench`: how fast a dataset is read here in all the ways people read images, beside decoding alone.

Rows take turns, so that a slow minute of the machine hits all of them. Decoding alone is the same decoding, resizing
and augmentation on bytes in memory, on every core: what is missing to it is what reading and handing over cost.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from beam_pipeline import schema
from beam_pipeline.errors import UsageError
from reader import augment
from reader.batches import open_source, train_batches
from reader.decode import ImageDecoder
from reader.example import ImageFinder
from reader.info import DatasetInfo
from reader.limits import cpu_count
from reader.packages import explained

Batches = Iterator[int]  # images of each batch, without end
Tensor = Any  # TensorFlow ships no types

_SHARDS = 8
_PNG = b"\x89PNG"
_SHUFFLED = 2048  # records, as the tutorials have it
OURS = "train_batches"
_AUGMENTS: dict[str, Any] = {
    "": None,
    ", flip_crop": augment.flip_crop,
    ", random_resized_crop": augment.random_resized_crop(),
}
# Below these a run tells more of starts and of other programs than of the dataset.
_LEAST_IMAGES, _LEAST_REPEATS = 1000, 3
_IDLE_SHARE, _LARGER_BY = 0.25, 1.5  # above these a change is worth while


class Material(NamedTuple):
    """Some records of a split in every form that is compared.

    Attributes:
        info, split: of the dataset.
        images: encoded, in memory.
        files: folder of class folders with an image file each, or the originals that the user named.
        gzip_shards, plain_shards: TFRecord files of the records.
    """

    info: DatasetInfo
    split: str
    images: Sequence[bytes]
    files: str
    gzip_shards: Sequence[str]
    plain_shards: Sequence[str]


@dataclass
class Row:
    """One way to read.

    Attributes:
        name: as the table shows it.
        open: begins to read; fails with ModuleNotFoundError if it needs a package that isn't installed.
        compared: the row of decoding alone that does the same work, "" if none does.
        is_cached: the first pass fills a cache, and has to come to its end.
        missing: what isn't installed.
        images, wall_s, cpu_s: of each run; CPU of the complete process.
    """

    name: str
    open: Callable[[], Batches]
    compared: str = ""
    is_cached: bool = False
    missing: str = ""
    images: list[int] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    @property
    def images_per_s(self) -> float:
        """Median by the clock."""
        return statistics.median(self.rates)

    @property
    def rates(self) -> list[float]:
        """Images/s of each run."""
        return [images / wall for images, wall in zip(self.images, self.wall_s, strict=True)]

    @property
    def cpu_per_1000(self) -> float:
        """Median CPU seconds for 1,000 images."""
        return statistics.median(self._cpu)

    @property
    def _cpu(self) -> list[float]:
        return [cpu / images * 1000 for images, cpu in zip(self.images, self.cpu_s, strict=True)]

    def speed_of(self, alone: Row) -> tuple[float, float]:
        """Its speed as a share of another row's, by clock and by CPU: medians over the runs side by side."""
        by_clock = statistics.median(mine / its for mine, its in zip(self.rates, alone.rates, strict=True))
        return by_clock, statistics.median(its / mine for mine, its in zip(self._cpu, alone._cpu, strict=True))


def prepare(info: DatasetInfo, split: str, most: int, against: str | None, scratch: Path) -> Material:
    """Read up to `most` records of a split and write them in the other forms into `scratch`.

    Raises:
        UsageError: no such split.
        ImageShardsError: a shard is missing or cut, or a record is corrupt.
    """
    reader = open_source(info, split).reader
    numbers = np.arange(min(most, reader.table.total))
    runs, index = reader.table.runs_of(numbers)
    records: list[bytes] = []
    for run in dict.fromkeys(runs.tolist()):
        found = reader.read(run)
        records += [found.record(one) for one in index[runs == run].tolist()]
    picked = [(bytes(image), label) for image, label in map(ImageFinder(info.image_key, info.class_key), records)]
    if against is None:
        for number, (image, label) in enumerate(picked):
            suffix = "png" if image.startswith(_PNG) else "jpg"
            path = scratch / "files" / f"{label:06d}" / f"{number:08d}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(image)
    shards: dict[str, list[str]] = {"plain": [], "gzip": []}
    for number in range(min(_SHARDS, len(records))):
        data = b"".join(map(schema.frame, records[number::_SHARDS]))
        packer = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
        for kind, content in (("plain", data), ("gzip", packer.compress(data) + packer.flush())):
            shards[kind].append(str(scratch / f"{kind}-{number:05d}"))
            Path(shards[kind][-1]).write_bytes(content)
    images = [image for image, _ in picked]
    return Material(info, split, images, against or str(scratch / "files"), shards["gzip"], shards["plain"])


# --- the rows


def all_rows(material: Material, size: int, batch: int, with_caches: str = "") -> list[Row]:
    """Every way there is to read this dataset, and decoding alone for each kind of work.

    Args:
        size: side in pixels.
        batch: images in a batch.
        with_caches: a new folder for the disk cache of individual files; "" leaves the cached rows out.
    """
    info, split = material.info, material.split
    options: dict[str, Any] = {"image_size": size}

    def files(cache: str | None) -> Callable[[], Batches]:
        def load() -> Any:
            import reader

            return reader.image_files_dataset(material.files, batch_size=batch, image_size=size, cache=cache)

        return _reopened(load)

    def tensorflow() -> Any:
        import reader

        return reader.train_dataset(info, split, global_batch_size=batch, **options)

    def torch() -> Any:
        import reader

        return reader.torch.loader(info, split, batch_size=batch, **options)

    is_same = material.files.endswith("/files")  # not the user's originals
    rows = [Row("individual files", files(None), _alone("") if is_same else "")]
    if with_caches:
        rows.append(Row("individual files, cached in memory", files("memory"), is_cached=True))
        rows.append(Row("individual files, cached on disk", files(with_caches), is_cached=True))
    rows += [
        Row("GZIP shards, the tutorial's way", _reopened(lambda: _tutorial(material, size, None)), _alone("")),
        Row("plain shards, the tutorial's way", _reopened(lambda: _tutorial(material, size, batch)), _alone("")),
        Row("train_dataset (TensorFlow)", _reopened(tensorflow), _alone("")),
        Row("torch.loader (PyTorch)", _reopened(torch), _alone("")),
    ]
    for name, changed in _AUGMENTS.items():
        batches = train_batches(info, split, global_batch_size=batch, augment=changed, **options)
        rows.append(Row(f"{OURS}{name}", _reopened(lambda batches=batches: batches), _alone(name)))  # type: ignore[misc]
        rows.append(Row(_alone(name), _decoding(material, batch, changed, size)))
    return rows


def _alone(augmented: str) -> str:
    return f"decoding alone{augmented}"


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


def _decoding(material: Material, batch: int, changed: Any, size: int) -> Callable[[], Batches]:
    """A thread a core decodes its part of each batch's images into rows that are there."""
    decode = ImageDecoder(material.info.image, size, augment=changed)
    threads = cpu_count()
    rows = np.empty((batch * threads, *decode.shape), np.uint8)

    def work(images: Iterable[bytes], first: int) -> None:
        for number, image in enumerate(images):
            decode(image, rows[first + number], number)

    def read() -> Batches:
        images = itertools.cycle(material.images)
        while True:
            parts = [list(itertools.islice(images, batch)) for _ in range(threads)]
            workers = [threading.Thread(target=work, args=(part, i * batch)) for i, part in enumerate(parts)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            yield batch * threads

    return read


def _tutorial(material: Material, size: int, batch: int | None) -> Any:
    """As https://keras.io/examples/keras_recipes/tfrecord and TensorFlow's guides read shards.

    Args:
        batch: of plain shards, uint8; None for the first form: GZIP, float32, single images.
    """
    import tensorflow as tf

    info, autotune = material.info, tf.data.AUTOTUNE
    keys = {info.image_key: tf.io.FixedLenFeature([], tf.string), info.class_key: tf.io.FixedLenFeature([], tf.int64)}

    def example(record: Tensor) -> tuple[Tensor, Tensor]:
        parsed = tf.io.parse_single_example(record, keys)
        image = tf.io.decode_image(parsed[info.image_key], info.image.channels, expand_animations=False)
        image = tf.ensure_shape(image, [None, None, info.image.channels])
        if (size, size) != info.image.min_size or info.image.min_size != info.image.max_size:
            image = tf.cast(tf.round(tf.image.resize(image, [size, size])), tf.uint8)
        image = tf.ensure_shape(image, [size, size, info.image.channels])
        return image if batch else tf.cast(image, tf.float32) / 255.0, parsed[info.class_key]

    if batch:
        records = tf.data.TFRecordDataset(list(material.plain_shards), num_parallel_reads=autotune)
    else:
        names = tf.data.Dataset.from_tensor_slices(list(material.gzip_shards)).shuffle(_SHARDS, seed=0)
        records = names.interleave(lambda name: tf.data.TFRecordDataset(name, "GZIP"), num_parallel_calls=autotune)
    return records.shuffle(_SHUFFLED, seed=0).map(example, autotune).batch(batch or 1).prefetch(autotune)


# --- measuring


def measure(rows: Sequence[Row], images: int, repeats: int, tell: Callable[[str], None]) -> None:
    """Read every row once to warm up, then all of them in turns; the rows note their times.

    Args:
        images: read in each run, again and again if there are fewer.
        repeats: runs of each that count.
        tell: is given a line of progress.
    """
    for repeat, row in itertools.product(range(repeats + 1), rows):
        if row.missing:
            continue
        tell(f"{f'repeat {repeat} of {repeats}' if repeat else 'warm-up'}: {row.name}")
        wall, cpu, read = time.perf_counter(), time.process_time(), 0
        batches = row.open()
        try:
            while read < images:
                read += next(batches)
        except ModuleNotFoundError as error:
            row.missing = str(explained(error))
            continue
        finally:
            batches.close()  # type: ignore[attr-defined]
        if repeat:
            row.images.append(read)
            row.wall_s.append(time.perf_counter() - wall)
            row.cpu_s.append(time.process_time() - cpu)


def advise(rows: Sequence[Row], info: DatasetInfo, size: int) -> str:
    """The one change that would help most."""
    by_name = {row.name: row for row in rows}
    ours, alone, augmented = by_name[OURS], by_name[_alone("")], by_name[f"{OURS}, flip_crop"]
    if min(ours.images) < _LEAST_IMAGES or len(ours.images) < _LEAST_REPEATS:
        return (
            f"these runs are too short to judge, it takes {_LEAST_IMAGES:,} images in each of {_LEAST_REPEATS} repeats"
        )
    by_clock, by_cpu = ours.speed_of(alone)
    idle = 1 - min(1.0, by_clock / by_cpu)  # of what decoding alone got of the CPUs: other programs have the rest
    if idle > _IDLE_SHARE and info.shard_storage.is_remote:
        return f"the CPUs wait {idle:.0%} of the time for storage: copy the dataset to a local disk, or use cache=DIR"
    stored = info.image.max_size
    if stored and stored[0] * stored[1] > _LARGER_BY * size * size:
        return f"images are stored at up to {stored[0]}x{stored[1]}: write the dataset with --image_size {size}"
    if augmented.cpu_per_1000 > 1.3 * ours.cpu_per_1000:
        return "augmentation is a quarter of the work: augment on the device"
    return f"decoding is {by_cpu:.0%} of the work and little else to gain: more CPU cores"


# --- what was found


def table(rows: Sequence[Row]) -> str:
    """Lines of text, a row each."""
    by_name, width = {row.name: row for row in rows}, max(len(row.name) for row in rows)
    lines = [f"{'':{width}}  images/s (slowest to fastest)  CPU s/1,000  % of decode-only speed (time / CPU)"]
    for row in rows:
        if row.missing:
            lines.append(f"{row.name:{width}}  {row.missing}")
            continue
        rate = f"{row.images_per_s:9,.0f} ({min(row.rates):,.0f} to {max(row.rates):,.0f})"
        line = f"{row.name:{width}}{rate:32} {row.cpu_per_1000:11.3f}"
        if row.compared:
            line += " {:11.0%} / {:.0%}".format(*row.speed_of(by_name[row.compared]))
        lines.append(line)
    return "\n".join(lines)


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The same for programs."""
    by_name = {row.name: row for row in rows}
    found: list[dict[str, Any]] = []
    for row in rows:
        if row.missing:
            found.append({"name": row.name, "missing": row.missing})
            continue
        shares = row.speed_of(by_name[row.compared]) if row.compared else None
        entry = {
            "name": row.name,
            "images": statistics.median(row.images),
            "images_per_s": round(row.images_per_s, 1),
            "images_per_s_spread": [round(min(row.rates), 1), round(max(row.rates), 1)],
            "cpu_s_per_1000": round(row.cpu_per_1000, 4),
            "of_decoding_alone": {"clock": round(shares[0], 4), "cpu": round(shares[1], 4)} if shares else None,
        }
        found.append(entry)
    return found


def chart(rows: Sequence[Row], title: str, path: str) -> None:
    """Bars of images/s with their spread, and decoding alone as a mark on those it is compared with, as a PNG.

    Raises:
        OSError: the file can't be written.
        ModuleNotFoundError: Matplotlib isn't installed.
    """
    from matplotlib.figure import Figure  # a second to import

    by_name = {row.name: row for row in rows}
    shown = [row for row in rows if not row.missing and not row.name.startswith(_alone(""))]
    limit = 1.25 * max(max(by_name[row.compared or row.name].images_per_s, 0) for row in shown if not row.is_cached)
    figure = Figure(figsize=(10, 1.4 + 0.5 * len(shown)), layout="constrained")
    axes = figure.subplots()
    for y, row in enumerate(shown):
        is_ours, rate = row.name.startswith(("train_", "torch.")), row.images_per_s
        axes.barh(y, min(rate, limit), height=0.6, color="tab:blue" if is_ours else "tab:gray")
        if rate > limit:  # of a cache of pixels: cut off
            axes.text(0.99 * limit, y, f"{rate:,.0f} →", va="center", ha="right", color="white")
            continue
        axes.plot([min(row.rates), max(row.rates)], [y, y], color="black", linewidth=1)
        axes.text(max(row.rates) + 0.006 * limit, y, f"{rate:,.0f}", va="center")
        if row.compared:
            alone = by_name[row.compared].images_per_s
            (mark,) = axes.plot([alone, alone], [y - 0.35, y + 0.35], color="tab:orange", linewidth=3)
    axes.set_yticks(range(len(shown)), [row.name for row in shown])
    axes.invert_yaxis()
    axes.set_xlim(0, limit)
    axes.set_xlabel("images/s: median, and a line from the slowest to the fastest run")
    axes.set_title(title, loc="left")
    axes.legend([mark], ["decoding alone, from memory"], loc="lower right", frameon=False)
    figure.savefig(path, dpi=120, format="png")


def check_chart(path: str) -> None:
    """Make the chart's folder, before minutes are spent. Raises UsageError if the file can't be written."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab"):
            pass
    except OSError as error:
        raise UsageError(f"--chart {path!r}: {error.strerror or error}; name a file that can be written") from None
