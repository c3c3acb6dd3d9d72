"""Why files in a bucket are read slowly, and what each remedy brings, on files that are here: docs/why.md's figures.

    python benchmarks/experiment.py DATASET PHOTOS [--latency_ms 50] [--images 6400] [--repeats 3]

PHOTOS is a folder of the original images in class folders. It prints results/experiment.json, with what the first and
the last row do in a second; pictures.py draws it. Every request of our storage layer waits first, also those for single
files. Only latency is added: bandwidth stays that of this machine. TensorFlow's own gs:// can't be pointed at anything
else, so its pipelines read through `tf.numpy_function` over the same layer.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import itertools
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import material
import numpy as np
import tutorial
from stored import BATCH, SHARDS, SIZE
from traces import Trace, TracedDecoder, Tracer
from tutorial import AT_ONCE, decoder, list_files

import reader
from beam_pipeline import schema, storage
from beam_pipeline.machine import cpu_count
from beam_pipeline.text import plural
from reader.example import ImageFinder
from reader.info import DatasetInfo
from reader.pixels import ImageDecoder
from reader.rows import RecordRows
from reader.splits import first_records
from reader.tools.bench import Batches, BenchResult, Row, read_pass
from reader.tools.read import checked_table, read_records
from reader.tools.requests import Request, SlowStorage

_FILES = 2000  # that a pass reads: 3 s of 32 at a time at 50 ms, and 300 MB of cached pixels
_SLOW_S = 3.0  # of waiting in a pass that reads few files at a time: it takes some of them only
TRAINED_PER_S = 8000  # images, by the accelerator that some rows feed
ONE_AT_A_TIME, PARALLEL_MAP = "files, one at a time", "files, tf.data's parallel map"
FILES_AT_ONCE = f"files, {AT_ONCE} at a time"
FAIR, OURS = f"files of the stored images, {AT_ONCE} at a time", "imageshards, train_batches"
Decode = ImageDecoder | TracedDecoder


class Forms(NamedTuple):
    """The same images in several forms: a folder of class folders with a file an image, and shards."""

    files: Path
    plain: list[Path]
    zipped: list[Path]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("photos")
    parser.add_argument("--latency_ms", type=float, default=50)
    parser.add_argument("--images", type=int, default=6400)
    parser.add_argument("--repeats", type=int, default=3)
    flags = parser.parse_args()
    result, traces = experiment(reader.load_info(flags.dataset), flags)
    print(json.dumps(result.as_json() | {"traces": [trace.as_json() for trace in traces]}))


def experiment(info: DatasetInfo, flags: argparse.Namespace) -> tuple[BenchResult, list[Trace]]:
    """Read images in ways from the slowest to ours, with a latency on each request."""
    split = first_records(info.ranges("train"), flags.images)
    with tempfile.TemporaryDirectory(prefix="imageshards-experiment-") as scratch:
        table = checked_table(info, split, np.arange(info.records(split)))
        records = list(read_records(table, lambda _, record: record))
        forms = write_forms(info, records, Path(scratch))
        folder = str(material.images(Path(flags.photos), Path(scratch), min(_FILES, len(records))))
        requests: list[Request] = []
        with storage.wrapped(lambda store: SlowStorage(store, flags.latency_ms / 1000, requests.append)):
            rows = ways(info, split, forms, folder, flags.latency_ms)
            for repeat, row in itertools.product(range(flags.repeats), rows):
                print(f"repeat {repeat + 1} of {flags.repeats}: {row.name}", file=sys.stderr)
                row.passes.append(read_pass(row.open(), sys.maxsize, requests))
        traces = _traces(info, list_files(folder), flags.latency_ms)
    conditions = {**vars(flags), "dataset": info.url, "images": len(records), "left_out": {}, "cores": cpu_count()}
    conditions |= {"image_size": SIZE, "batch_size": BATCH}
    title = f"{info.name} {info.version}, {SIZE} px, {plural(cpu_count(), 'core')}, {flags.latency_ms:g} ms a request"
    return BenchResult(title, conditions, rows), traces


def write_forms(info: DatasetInfo, records: Sequence[bytes], scratch: Path) -> Forms:
    """Write records of a dataset into an empty folder, in other forms."""
    forms = Forms(scratch / "files", [], [])
    for number, (image, label) in enumerate(map(ImageFinder(info.image_key, info.class_key), records)):
        path = forms.files / f"{label:06d}" / f"{number:08d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image)
    for number in range(min(SHARDS, len(records))):
        data = b"".join(map(schema.frame, records[number::SHARDS]))
        for paths, name, content in ((forms.plain, "plain", data), (forms.zipped, "gzip", gzip.compress(data, 6))):
            paths.append(scratch / f"{name}-{number:05d}")
            paths[-1].write_bytes(content)
    return forms


# --- the rows


def ways(info: DatasetInfo, split: str, forms: Forms, folder: str, latency_ms: float) -> list[Row]:
    """Every way to read; `folder` has the original images in class folders, `forms` the records in other forms."""
    originals = random.Random(0).sample(found := list_files(folder), len(found))  # few of them are of all classes
    stored = list_files(str(forms.files))[: len(originals)]
    few = max(16, int(1000 * _SLOW_S / max(1.0, latency_ms)))
    step_s = BATCH / TRAINED_PER_S
    cache_folder = str(forms.files.parent / "cache")
    memory, disk = "", f"{cache_folder}/images"
    filled: dict[str, Any] = {}  # datasets whose caches are

    def first_epoch(cache: str) -> Batches:
        shutil.rmtree(cache_folder, ignore_errors=True)
        filled.pop(cache, None)
        os.makedirs(cache_folder)
        dataset = tutorial.files_at_once(folder, BATCH, SIZE, cache)

        def read() -> Batches:
            yield from _sizes(dataset)
            filled[cache] = dataset

        return read()

    def second_epoch(cache: str) -> Batches:
        if cache not in filled:
            sys.exit("the first epoch of cached files takes more than 10 s: give fewer --images")
        return _sizes(filled[cache])

    plain = functools.partial(tutorial.shards, forms.plain, BATCH)
    zipped = functools.partial(tutorial.shards, forms.zipped, BATCH, is_gzip=True)
    fed = f"plain shards, interleave, {1000 * step_s:g} ms of training a batch"
    opens: dict[str, Callable[[], Batches]] = {
        ONE_AT_A_TIME: lambda: at_once(originals[:few], decoder(SIZE), 1),
        PARALLEL_MAP: lambda: _sizes(tutorial.files(originals[: few * cpu_count()], BATCH, decoder(SIZE))),
        FILES_AT_ONCE: lambda: at_once(originals, decoder(SIZE)),
        FAIR: lambda: at_once(stored, decoder(SIZE)),
        "files cached in memory, first epoch": lambda: first_epoch(memory),
        "files cached in memory, second epoch": lambda: second_epoch(memory),
        "files cached on disk, first epoch": lambda: first_epoch(disk),
        "files cached on disk, second epoch": lambda: second_epoch(disk),
        "GZIP shards, one after the other": lambda: _sizes(zipped(interleaved=1)),
        "GZIP shards, interleave": lambda: _sizes(zipped()),
        "plain shards, one after the other": lambda: _sizes(plain(interleaved=1)),
        "plain shards, interleave": lambda: _sizes(plain()),
        f"{fed}, no prefetch": lambda: _sizes(plain(prefetch=False), step_s),
        f"{fed}, prefetch": lambda: _sizes(plain(), step_s),
        OURS: lambda: ours(info, split, SIZE, BATCH),
    }
    return [Row(name, open, expected_s=0.0) for name, open in opens.items()]


def at_once(files: Sequence[str], decode: Decode, count: int = AT_ONCE) -> Batches:
    """Read and decode images, each in one of so many threads."""
    read = storage.open_storage(files[0]).read

    def load(file: str) -> None:
        decode(read(file), np.empty(decode.shape, np.uint8), 0)

    with ThreadPoolExecutor(count) as threads:
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


# --- measuring


def _traces(info: DatasetInfo, files: Sequence[str], latency_ms: float) -> list[Trace]:
    """What the first and the last row do in their first second, while an accelerator trains on their batches."""
    found = []

    def traced(name: str, open: Callable[[Tracer], Batches]) -> None:
        tracer = Tracer()

        def saw(one: Request) -> None:
            tracer.add("reads", one.begin, one.end)

        with storage.wrapped(lambda store: SlowStorage(store, latency_ms / 1000, saw)):
            found.append(tracer.record(name, open(tracer), BATCH, BATCH / TRAINED_PER_S))

    traced(ONE_AT_A_TIME, lambda tracer: at_once(files, TracedDecoder(decoder(SIZE), tracer), 1))
    traced(OURS, lambda tracer: _traced_engine(info, tracer))
    return found


def _traced_engine(info: DatasetInfo, tracer: Tracer) -> Batches:
    """What `train_batches` reads, with a decoder that is watched."""

    def watched(rows: RecordRows) -> RecordRows:
        rows.decode = TracedDecoder(rows.decode, tracer)
        return rows

    batches = reader.train_batches(info, "train", global_batch_size=BATCH, image_size=SIZE).with_rows(watched)
    tracer.restart()
    for _, labels in batches:
        yield len(labels)


if __name__ == "__main__":
    main()
