"""One run of `bench`: material, rates in turns, breakdown, report."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import tensorflow as tf

from beam_pipeline.errors import EXIT_OK, UsageError
from reader.bench.breakdown import advise, parts
from reader.bench.cases import FLIP_CROP, PLAIN, Case, all_cases
from reader.bench.latency import delayed
from reader.bench.material import Material, prepare
from reader.bench.measure import Runnable, measure
from reader.bench.report import Row, chart, document, explain, table
from reader.info import DatasetInfo, load_info
from reader.limits import cpu_count
from reader.storage import LocalStorage, normalize
from reader.words import count

_PROFILED_STEPS = 50


def bench(flags: argparse.Namespace) -> int:
    """Measure what the flags of `reader.commands.bench` say and print it; returns the exit code.

    Raises:
        UsageError: no such split, the chart can't be written, or a latency for storage that isn't local.
    """
    _check_chart(flags.chart)  # before minutes are spent
    info = load_info(flags.dataset)
    with tempfile.TemporaryDirectory(prefix="imageshards-bench-") as scratch:
        against = normalize(flags.against) if flags.against else None
        material = prepare(info, flags.split, flags.images, against, Path(scratch))
        read_info, files = _slowed(info, material.files, flags.storage_latency_ms)
        cases = all_cases(
            material,
            read_info,
            files,
            size=flags.image_size,
            batch_size=min(flags.batch_size, len(material.records)),
            cache=str(Path(scratch) / "cache"),
            latency_s=flags.storage_latency_ms / 1000,
        )
        rows = _measure(cases, len(material.records), flags.repeats)
        if flags.profile:
            _profile(cases, flags.profile)
        by_name = {row.name: row for row in rows}
        plain, augmented = by_name[PLAIN], by_name[FLIP_CROP]
        assert plain.ceiling is not None and augmented.ceiling is not None
        found = parts(material, info, plain.rate, plain.ceiling, augmented.ceiling)
        advice = advise(found, plain.rate, plain.ceiling, read_info, flags.image_size)
    conditions = _conditions(flags, material)
    title = f"{info.name} {info.version}, {flags.image_size} px, {conditions['cores']} cores"
    if flags.storage_latency_ms:
        title += f", {flags.storage_latency_ms:g} ms a storage request"
    chart(rows, found, title, flags.chart)
    if flags.json:
        print(json.dumps(document(rows, found, advice, conditions)))
    else:
        asked = len(material.records)
        few = f" ({flags.images:,} asked, {flags.split} has {asked:,})" if asked < flags.images else ""
        runs = "1 run" if flags.repeats == 1 else f"median of {flags.repeats} runs in turns"
        print(f"{title}, {count(asked, 'image')} a run{few}, {runs}")
        print(table(rows), explain(found, advice), f"chart: {flags.chart}", sep="\n")
    return EXIT_OK


def _check_chart(path: str) -> None:
    """Make the chart's folder. Raises UsageError where that can't be, ModuleNotFoundError without Matplotlib."""
    import matplotlib  # noqa: F401

    folder = os.path.dirname(path) or "."
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--chart {path!r}: {error.strerror or error}; name a file that can be written") from None
    if os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise UsageError(f"--chart {path!r}: it can't be written; name a file that can be")


def _slowed(info: DatasetInfo, files: str, latency_ms: float) -> tuple[DatasetInfo, str]:
    """The dataset and the individual files where each storage request takes so much longer."""
    if not latency_ms:
        return info, files
    for folder in (info.url, files):
        if "://" in folder:
            raise UsageError(f"--storage_latency_ms: {folder} isn't local; copy it first (python -m reader copy)")
    if not isinstance(info.shard_storage, LocalStorage):
        raise UsageError(
            "--storage_latency_ms: the shards aren't local; copy the dataset first (python -m reader copy)"
        )
    return load_info(delayed(info.url, latency_ms / 1000)), delayed(files, latency_ms / 1000)


def _measure(cases: list[Case], images: int, repeats: int) -> list[Row]:
    """A row for each case; each ceiling is measured right behind its case."""
    runnable: dict[str, Runnable] = {}
    ceilings: dict[str, str] = {}
    for case in cases:
        runnable[case.name] = Runnable(case.make(), case.batch_size, case.is_cached)
        if case.make_ceiling is not None:
            ceilings[case.name] = f"ceiling of {case.name}"
            runnable[ceilings[case.name]] = Runnable(case.make_ceiling(), case.batch_size)
    rates = measure(runnable, images, repeats, _tell)
    return [Row(case.name, rates[case.name], rates.get(ceilings.get(case.name, ""))) for case in cases]


def _tell(line: str) -> None:
    """Progress, where somebody looks on."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


def _profile(cases: list[Case], folder: str) -> None:
    """Write a TensorBoard trace of `train_dataset`."""
    case = next(case for case in cases if case.name == PLAIN)
    os.makedirs(folder, exist_ok=True)
    tf.profiler.experimental.start(folder)
    for _ in case.make().take(_PROFILED_STEPS):
        pass
    tf.profiler.experimental.stop()


def _conditions(flags: argparse.Namespace, material: Material) -> dict[str, Any]:
    return {
        "dataset": material.info.url,
        "split": flags.split,
        "images": len(material.records),
        "batch_size": flags.batch_size,
        "image_size": flags.image_size,
        "repeats": flags.repeats,
        "storage_latency_ms": flags.storage_latency_ms,
        "against": flags.against,
        "cores": cpu_count(),
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
    }
