"""`python -m reader bench`: one run, and what it prints."""

from __future__ import annotations

import platform
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from beam_pipeline import storage
from beam_pipeline.errors import UsageError
from reader.commands.flags import Command, Flag, Result, whole_number
from reader.info import load_info
from reader.limits import cpu_count
from reader.words import count


def _bench(values: dict[str, Any]) -> Result:
    if find_spec("tensorflow") is not None:
        import reader.train.quiet  # noqa: F401
    from reader.tools import bench

    try:  # before minutes are spent
        Path(values["chart"]).parent.mkdir(parents=True, exist_ok=True)
        Path(values["chart"]).touch()
    except OSError as error:
        raise UsageError(f"--chart {values['chart']!r}: {error.strerror}; name a file that can be written") from None
    info, size, images = load_info(values["dataset"]), values["image_size"], values["images"]
    against = storage.normalize(values["against"]) if values["against"] else None
    with tempfile.TemporaryDirectory(prefix="imageshards-bench-") as scratch:
        material = bench.prepare(info, values["split"], images, against, Path(scratch))
        there = len(material.images)
        caches = f"{scratch}/cache" if values["cached"] else ""
        rows = bench.all_rows(material, size, min(values["batch_size"], there), caches)
        bench.measure(rows, images, values["repeats"], _tell)
    names = ("split", "images", "batch_size", "image_size", "repeats", "against")
    conditions = {name: values[name] for name in names} | {"dataset": info.url, "split_images": there}
    conditions |= {"cores": cpu_count(), "python": platform.python_version()}
    title = f"{info.name} {info.version}, {size} px, {count(cpu_count(), 'core')}"
    advice = bench.advise(rows, info, size)
    try:
        bench.chart(rows, title, values["chart"])
        drawn = f"chart: {values['chart']}"
    except ModuleNotFoundError:
        drawn = "no chart: Matplotlib is not installed"
    again = f" ({values['split']} has {there:,}, read again and again)" if there < images else ""
    runs = "1 run" if values["repeats"] == 1 else f"median of {values['repeats']} runs in turns"
    lines = [f"{title}, {count(images, 'image')} a run{again}, {runs}"]
    lines += [f"individual files: {against}"] if against else []
    lines += [bench.table(rows), f"what would help most: {advice}", drawn]
    return Result({**conditions, "rows": [*map(bench.as_json, rows)], "advice": advice}, "\n".join(lines))


def _tell(line: str) -> None:
    """Progress, if somebody looks on."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


_N = whole_number(1)

BENCH = Command(
    "bench",
    ("DATASET",),
    "Measure how fast a dataset is read here, and what holds it back.",
    "Reads the same images in every way people read images, in turns, beside decoding alone: the same work on bytes "
    "in memory. Figures worth quoting need the defaults.",
    "datasets/photos/1.0.0 --chart bench.png",
    "0 measured, 1 the dataset or its storage can't be read",
    _bench,
    (
        Flag("--split", "SPLIT", "Records to read, such as train[:10000].", "train"),
        Flag("--images", "N", "How many images each run reads; a smaller split is read again and again.", 6400, _N),
        Flag("--batch_size", "N", "Images in a batch.", 64, _N),
        Flag("--image_size", "N", "Side in pixels that images are resized to.", 224, _N),
        Flag("--repeats", "N", "How many runs of each way count, after one to warm up.", 7, _N),
        Flag(
            "--against", "DIR", "Original images in class folders for the individual files (default: the records' own)."
        ),
        Flag("--cached", "", "Also read individual files from caches of decoded pixels, in memory and on disk.", False),
        Flag("--chart", "PNG", "File to draw into.", "bench.png"),
    ),
)
