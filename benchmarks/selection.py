"""Selected and balanced reading, with the plain reader: CPU, bytes, requests, and how long the first batch takes.

    python benchmarks/selection.py [IMAGES] [--repeats 7] [--latency_ms 50] [--count 20350]
    python benchmarks/selection.py --first_batch 1281167 100000000

A dataset of 100 classes whose sizes are as 732 to 1,300, made of IMAGES again and again. Bytes are those that the
engine asks for, as a share of those of the records handed out. `--first_batch` measures how long the first batch
takes of a split string that names the dataset so often that it has so many records.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gs
import material
import numpy as np
import turns
from stored import BATCH, SIZE
from turns import Case

import reader
from beam_pipeline import storage
from reader.stream import State

CLASSES, LEAST, MOST = 100, 732, 1300
TIMES, RARE_TIMES, RARE_IMAGES = 10, 50, 12_800  # a short run would measure what it reads ahead
THINNED = {f"{number:03d}": "many" for number in range(CLASSES // 2)} | {"050": "some", "051": "one"}
# name → arguments of `train_batches`
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "half of the classes": {"classes": [f"{number:03d}" for number in range(CLASSES // 2)]},
    "1 class of 100": {"classes": ["050"]},
    "balance": {"balance": "classes"},
    "balance, 1000:10:1": {"balance": "classes", "where": "thinned", "classes": THINNED},
}


def main() -> None:
    """Print tables."""
    parser = turns.parser(__doc__, 20_350, 7)
    parser.add_argument("--latency_ms", type=float, default=50)
    parser.add_argument("--first_batch", type=int, nargs="+", metavar="RECORDS")
    flags = parser.parse_args()
    url = dataset(flags.images, flags.count)
    if flags.first_batch:
        for records in flags.first_batch:
            first_batch(url, records)
        return
    cases = {name: Case("selection.numpy", {"url": url, "way": name}) for name in WAYS}
    runs = turns.in_turns(cases, 6400, flags.repeats)
    print(turns.table(runs, ("plain",), {"bytes": {name: f"{asked(url, name):.2f}" for name in WAYS}}))
    remote(url, flags.latency_ms, flags.repeats)


def dataset(given: Path | None, count: int) -> str:
    """The dataset, kept under build/."""
    folder = material.KEPT / f"select-{count}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="making-", dir=material.KEPT) as scratch:
            files = [path for path in material.images(given, Path(scratch), 300).rglob("*") if path.is_file()]
            sizes = np.linspace(LEAST, MOST, CLASSES)
            for label, size in enumerate(np.round(sizes / sizes.sum() * count).astype(int).tolist()):
                (Path(scratch) / "classes" / f"{label:03d}").mkdir(parents=True)
                for number in range(size):
                    os.link(
                        files[(label * 7 + number) % len(files)],
                        Path(scratch) / "classes" / f"{label:03d}" / f"{number}.jpg",
                    )
            material.dataset(Path(scratch) / "classes", folder)
    return str(folder / "datasets" / "bench" / "1.0.0")


def batches_of(url: str, way: str, times: int = TIMES) -> Any:
    """What a way reads."""
    options = dict(WAYS[way])
    if options.get("where"):  # 8,704 records of the first, 1/100 and 1/1000 of that
        kept = np.array([*[1000] * 50, 430, 43, *[0] * 48])
        options["where"] = lambda columns: columns["name"] % 1000 < kept[columns["class"]]
    split = "+".join(["train"] * times)  # so that one class of 100 fills more than a few batches
    return reader.train_batches(url, split, global_batch_size=BATCH, image_size=SIZE, seed=0, **options)


def numpy(url: str, way: str, times: int = TIMES) -> turns.Reader:
    """A case: batches of a way."""
    batches = batches_of(url, way, times)

    def read() -> Iterable[int]:
        for _, labels in batches:
            yield len(labels)

    return read


def requests(url: str, way: str) -> turns.Reader:
    """A case: 32 threads that do nothing but read the same ranges."""
    batches = batches_of(url, way, RARE_TIMES)
    sources = batches._content.open()
    run_reader, total = sources[0].reader, sources[0].reader.table.total
    store, pool = storage.open_storage(url), ThreadPoolExecutor(32)
    (windows,) = batches._windows(sources, State(batches.start, 0))

    def read() -> Iterable[int]:
        pieces, images = [], 0
        while images < RARE_IMAGES:
            numbers = next(windows).numbers % total
            pieces += run_reader.pieces_of(numbers)[0]
            images += len(numbers)
        share = images / len(pieces)
        for number, _ in enumerate(pool.map(lambda one: store.read_range(one.path, one.start, one.stop), pieces)):
            yield round(share * (number + 1)) - round(share * number)

    return read


def asked(url: str, way: str) -> float:
    """Bytes of the pieces of some epochs, as a share of those of their records."""
    batches = batches_of(url, way)
    sources = batches._content.open()
    run_reader = sources[0].reader
    table = run_reader.table
    size = table.bytes / table.records if not hasattr(table, "size") else None
    fetched = used = drawn = 0.0
    (windows,) = batches._windows(sources, State(batches.start, 0))
    for window in windows:
        numbers = window.numbers % table.total
        pieces, *_ = run_reader.pieces_of(numbers)
        fetched += sum(piece.stop - piece.start for piece in pieces)
        used += float(size[table.runs_of(numbers)].sum() if size is not None else table.size[numbers].sum())
        drawn += len(numbers)
        if drawn >= 2 * batches.start.records and drawn > 20_000:
            break
    return fetched / used


def remote(url: str, latency_ms: float, repeats: int) -> None:
    """One class from gs:// behind a proxy that waits, and threads that only fetch."""
    with gs.server() as gcs:
        bucket = gcs.new_bucket()
        gcs.put_folder(bucket, "bench/1.0.0", Path(url))
        with gs.slowed(gcs, latency_ms):
            there = f"gs://{bucket}/bench/1.0.0"
            rare = {"url": there, "way": "1 class of 100"}
            two = {"32 reads": Case("selection.requests", rare)}
            two["ours"] = Case("selection.numpy", rare | {"times": RARE_TIMES})
            print(turns.table(turns.in_turns(two, RARE_IMAGES, repeats), ("32 reads",)))


def first_batch(url: str, records: int) -> None:
    """How long the first batch of a selection takes, of the dataset so often that it has so many records."""
    times = -(-records // reader.load_info(url).records("train"))
    for way in ("plain", "half of the classes", "1 class of 100", "balance"):
        begin, cpu = time.perf_counter(), time.process_time()
        next(iter(batches_of(url, way, times)))
        seconds, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
        peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1e6
        print(
            f"{records:,} records, {way}: {seconds:.2f} s, {cpu_s:.2f} s of CPU; peak {peak:.2f} GB so far", flush=True
        )


if __name__ == "__main__":
    main()
