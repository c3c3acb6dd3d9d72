"""The commands of `python -m reader`: their flags, and what they print."""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from beam_pipeline import schema, storage
from beam_pipeline.errors import EXIT_FAILED, EXIT_OK, NotPublishedError, UsageError, one_line, plural, size, some
from beam_pipeline.schema.manifest import FOREIGN_KEY
from reader.commands import train
from reader.commands.flags import REQUIRED, Command, Flag, Result, whole_number
from reader.info import DatasetInfo, load_info
from reader.limits import cpu_count
from reader.tools.copy import checked_sizes, copy, dataset_hash

_SHOWN_FAULTS, _SHOWN_CLASSES = 50, 20


def _info(values: dict[str, Any]) -> Result:
    info = load_info(values["dataset"])
    if not values["hash"]:
        return Result(dict(info.manifest), _describe(info))
    checked_sizes(info)  # without a file the hash would be of something else
    digest = dataset_hash(values["dataset"])
    return Result({"hash": digest}, digest)


def _describe(info: DatasetInfo) -> str:
    """A few lines on counts, classes, shards and sizes."""
    return "\n".join([f"{info.name} {info.version} at {info.url}", *(f"  {line}" for line in _lines(info))])


def _lines(info: DatasetInfo) -> Iterator[str]:
    image, manifest = info.image, info.manifest
    classes = plural(info.num_classes, "class")
    yield f"{plural(manifest['records'], 'record')} of {plural(manifest['images'], 'image')}, {classes}"
    pixels = " to ".join(
        f"{height}x{width}" for height, width in sorted({*filter(None, (image.min_size, image.max_size))})
    )
    yield f"{image.format}, {plural(image.channels, 'channel')}, {pixels or 'no image'} (height x width)"
    if manifest["features"]:
        columns = (f"{one['name']} ({'list of ' * one['list']}{one['dtype']})" for one in manifest["features"])
        yield f"columns: {', '.join(columns)}"
    for split in info.splits.values():
        sizes = [shard.bytes for shard in split.shards]
        range_ = " to ".join(dict.fromkeys(map(size, (min(sizes), max(sizes)))))
        yield f"{split.name}: {plural(split.records, 'record')} in {plural(len(sizes), 'shard')} of {range_}"
    files = [shard.file for split in info.splits.values() for shard in split.shards]
    folders = sorted({file.rpartition("/")[0] for file in files if info.path(file) == file})
    if folders:
        yield f"this is an index: the shards are in {some(folders)}"
    for number, label in enumerate(info.classes[:_SHOWN_CLASSES]):
        counts = ", ".join(f"{split.name} {split.class_counts[number]:,}" for split in info.splits.values())
        yield f"class {number} {label!r}: {counts}"
    if info.num_classes > _SHOWN_CLASSES:
        yield f"… and {plural(info.num_classes - _SHOWN_CLASSES, 'more class')}; --json names them all"
    if image.mean:
        mean, std = (" ".join(f"{value:.4f}" for value in values) for values in (image.mean, image.std))
        yield f"mean {mean}, std {std} (of [0, 1], from {plural(manifest['image']['sampled_images'], 'image')})"
    rejects = manifest["rejects"]["by_reason"]
    if rejects:
        name = "left out" if FOREIGN_KEY in manifest else "rejected"
        yield f"{name}: {', '.join(f'{reason} {number:,}' for reason, number in sorted(rejects.items()))}"


def _verify(values: dict[str, Any]) -> Result:
    url, decode = values["dataset"], values["decode"]
    try:
        info = load_info(url)
    except NotPublishedError as error:
        if not values["json"]:
            raise
        file = storage.join(storage.normalize(url), schema.MANIFEST_FILE)
        fault = {"file": file, "record": None, "offset": None, "what": one_line(error)}
        return Result({"dataset": None, "records": None, "decode": decode, "faults": [fault]}, "", EXIT_FAILED)
    from reader.tools.verify import verify  # Pillow

    report = verify(info, decode=decode)
    faults = list(map(dataclasses.asdict, report.faults))
    lines = list(map(str, report.faults[:_SHOWN_FAULTS]))
    if len(faults) > _SHOWN_FAULTS:
        lines.append(f"… and {len(faults) - _SHOWN_FAULTS:,} more; --json names them all")
    foreign = FOREIGN_KEY in info.manifest
    fix = "make it again with python -m reader index" if foreign else "run the job again with --repair"
    lines.append(str(report) if report else f"{report}; {fix}")
    document = {"dataset": info.url, "records": report.records, "decode": decode, "faults": faults}
    return Result(document, "\n".join(lines), EXIT_OK if report else EXIT_FAILED)


def _show(values: dict[str, Any]) -> Result:
    from reader.tools.show import choose, grid  # Pillow

    split, out = values["split"], values["out"]
    records = choose(load_info(values["dataset"]), split, values["count"], values["seed"])
    shown = [
        {"record": record.number, "label": record.label, "height": record.size[0], "width": record.size[1]}
        for record in records
    ]
    if not values["json"]:
        with _written("--out", out):
            grid(records).save(out, "PNG")
    return Result({"split": split, "records": shown}, f"{plural(len(records), 'image')} of {split} in {out}")


@contextmanager
def _written(flag: str, file: str) -> Iterator[None]:
    """Writes a file, whose folder may be new. Raises UsageError if that fails."""
    try:
        os.makedirs(os.path.dirname(file) or ".", exist_ok=True)
        yield
    except OSError as error:
        raise UsageError(f"{flag} {file!r}: {error.strerror or error}; name a file that can be written") from None


def _bench(values: dict[str, Any]) -> Result:
    if find_spec("tensorflow") is not None:
        import reader.commands.quiet  # noqa: F401
    from reader.tools import bench

    info, side, images, out = load_info(values["dataset"]), values["image_size"], values["images"], values["chart"]
    originals = storage.normalize(values["against"]) if values["against"] else ""
    with _written("--chart", out):  # before minutes are spent
        Path(out).touch()
    with tempfile.TemporaryDirectory(prefix="imageshards-bench-") as scratch:
        records = bench.prepare(info, values["split"], images)
        there = len(records)
        batch, more = min(values["batch_size"], there), (originals, values["cached"])
        rows = bench.all_rows(info, values["split"], records, side, batch, Path(scratch), *more)
        bench.measure(rows, images, values["repeats"], _tell)
    names = ("split", "images", "batch_size", "image_size", "repeats", "against")
    conditions = {name: values[name] for name in names} | {"dataset": info.url, "split_images": there}
    conditions |= {"cores": cpu_count(), "python": platform.python_version()}
    title = f"{info.name} {info.version}, {side} px, {plural(cpu_count(), 'core')}"
    try:
        bench.chart(rows, title, out)
        drawn = f"chart: {out}"
    except ModuleNotFoundError:
        drawn = "no chart: Matplotlib is not installed"
    again = f" ({values['split']} has {there:,}, read again and again)" if there < images else ""
    runs = "1 run" if values["repeats"] == 1 else f"median of {values['repeats']} runs in turns"
    lines = [f"{title}, {plural(images, 'image')} a run{again}, {runs}"]
    lines += [f"individual files: {originals}"] if originals else []
    lines += [bench.table(rows), drawn]
    return Result({**conditions, "rows": [*map(bench.as_json, rows)]}, "\n".join(lines))


def _tell(line: str) -> None:
    """Progress, on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


def _copy(values: dict[str, Any]) -> Result:
    copied = copy(values["dataset"], values["dir"])
    there = "all of them" if copied.kept == copied.files else f"{copied.kept:,} of them"
    kept = f", {there} already there" if copied.kept else ""
    text = f"OK: {plural(copied.files, 'file')}, {size(copied.bytes)} in {copied.folder}{kept}; all checksums match"
    return Result(dataclasses.asdict(copied), text)


def _index(values: dict[str, Any]) -> Result:
    from reader.tools.index import index  # Pillow

    names = ("image_key", "class_key", "labels_file")
    indexed = index(values["pattern"], values["out"], **{name: values[name] for name in names})
    document = {"dataset": indexed.info.url, "records": indexed.records, "left_out": dict(indexed.left_out)}
    return Result(document, _describe(indexed.info))


# In the order of the help.
COMMANDS = (
    Command(
        "info",
        ("DATASET",),
        "Say what a dataset holds: counts, classes, shards, sizes.",
        "With --hash, print one SHA-256 over every file instead, which reads every byte: equal hashes, equal datasets.",
        "datasets/photos/1.0.0 --hash",
        "0 done, 1 the dataset or its storage can't be read, or a file is missing",
        _info,
        (Flag("--hash", "", "Print one SHA-256 over all files but run.json and report.html.", False),),
    ),
    Command(
        "verify",
        ("DATASET",),
        "Read and check every file, record and image of a dataset, on all cores.",
        "A line for each fault names the file, and the record and its byte offset if it is a record's.",
        "gs://bucket/datasets/photos/1.0.0 --decode sample",
        "0 OK, 1 there is a fault",
        _verify,
        (Flag("--decode", "all|sample|none", "Which images are decoded; sample is one in 64.", "all"),),
    ),
    Command(
        "show",
        ("DATASET",),
        "Draw a grid of a dataset's images with their labels and sizes.",
        "Records are numbered from 0 in the split: train[17:18] is record 17 of train, in all commands and readers.",
        "datasets/photos/1.0.0 --split validation --out grid.png",
        "0 drawn, 1 the dataset or its storage can't be read",
        _show,
        (
            Flag("--split", "SPLIT", "Records to draw from, such as train[:100].", "train"),
            Flag("--count", "N", "How many images are shown.", 20, whole_number(1)),
            Flag("--seed", "N", "Decides which images are shown.", 0, whole_number()),
            Flag("--out", "PNG", "File to write.", "show.png"),
        ),
    ),
    Command(
        "bench",
        ("DATASET",),
        "Measure how fast a dataset is read here, compared with decoding alone.",
        "Reads the same images in every way people read images, in turns; decoding alone is the same work on bytes in "
        "memory. Figures worth quoting need the defaults.",
        "datasets/photos/1.0.0 --chart bench.png",
        "0 measured, 1 the dataset or its storage can't be read",
        _bench,
        (
            Flag("--split", "SPLIT", "Records to read, such as train[:10000].", "train"),
            Flag(
                "--images",
                "N",
                "How many images each run reads; a smaller split is read again and again.",
                6400,
                whole_number(1),
            ),
            Flag("--batch_size", "N", "Images in a batch.", 64, whole_number(1)),
            Flag("--image_size", "N", "Side in pixels that images are resized to.", 224, whole_number(1)),
            Flag("--repeats", "N", "How many runs of each way count, after one to warm up.", 7, whole_number(1)),
            Flag(
                "--against",
                "DIR",
                "Original images in class folders for the individual files (default: the records' own).",
            ),
            Flag(
                "--cached",
                "",
                "Also read individual files from caches of decoded pixels, in memory and on disk.",
                False,
            ),
            Flag("--chart", "PNG", "File to draw into.", "bench.png"),
        ),
    ),
    Command(
        "copy",
        ("DATASET", "DIR"),
        "Copy a dataset to a local folder and compare every checksum.",
        "DIR is new, empty, or of an earlier copy of the same dataset, which is checked and completed.",
        "gs://bucket/datasets/photos/1.0.0 /data/photos",
        "0 every file is there and valid, 1 a file can't be read or isn't the published one",
        _copy,
    ),
    Command(
        "index",
        ("PATTERN…",),
        "Index existing TFRecord files so they can be used as a dataset; the files stay where they are.",
        "Every image is decoded once. A file's split is the word train, validation, val, test … in its name.",
        "'gs://bucket/*.tfrec' --out indexed",
        "0 indexed, 1 a file can't be read, or holds no valid record",
        _index,
        (
            Flag("--out", "DIR", "Local folder for the index, new or empty.", REQUIRED),
            Flag(
                "--image_key", "NAME", "Feature that holds the encoded image (default: image or another common name)."
            ),
            Flag(
                "--class_key", "NAME", "Feature that holds the class id (default: class, label or another common name)."
            ),
            Flag("--labels_file", "FILE", "Class names, one per line in order of their ids (default: the records')."),
        ),
    ),
    train.COMMAND,
)
