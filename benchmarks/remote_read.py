"""Reading from gs:// with a latency on each request, beside the local disk: rates, bytes fetched, memory.

    python benchmarks/remote_read.py [IMAGES] [--count 20480] [--latency_ms 50] [--repeats 7] [--epochs 20]
    python benchmarks/remote_read.py --check FILES DATASET

Server and proxy run on this machine and take their part of its CPUs, which is printed: the clock is pessimistic, and
CPU µs count the reader alone. All cases are the NumPy door, `stub` with decoding replaced by nothing. Bytes fetched are
those of objects; bytes used are those of the records that were handed out. Memory is that of processes of their own,
after 1 and after EPOCHS epochs.

`--check` reads two rows of `experiment.py`, in turns: as it does, local files with its own wait, and from the
server behind the proxy. It fails if they differ by more than 15 %.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import doors
import experiment
import gs
import material
import psutil
import turns
import tutorial
from stored import BATCH, SIZE
from turns import Case

import reader
from tests.servers import Gcs

CHECKED_FILES, CHECKED_WITHIN = 2000, 0.15


def main() -> None:
    """Print rates, what went over the wire, and memory."""
    parser = turns.parser(__doc__, 20_480, 7)
    parser.add_argument("--latency_ms", type=float, default=50)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--check", nargs=2, metavar=("FILES", "DATASET"), help="compare with the experiment, and stop")
    flags = parser.parse_args()
    with gs.server() as gcs:
        bucket = gcs.new_bucket()
        if flags.check:
            sys.exit(check(gcs, bucket, *flags.check, flags.latency_ms, flags.repeats))
        url, _ = material.kept(flags.images, flags.count)
        gcs.put_folder(bucket, "bench/1.0.0", Path(url))
        print(f"{flags.latency_ms:g} ms a request, {flags.count:,} images a turn, {flags.repeats} turns")
        with gs.slowed(gcs, flags.latency_ms) as proxy:
            rates(url, f"gs://{bucket}/bench/1.0.0", proxy, flags.count, flags.repeats)
            memory(url, f"gs://{bucket}/bench/1.0.0", flags.count, flags.epochs)


def check(gcs: Gcs, bucket: str, given: str, dataset: str, latency_ms: float, repeats: int) -> str | None:
    """Print both ways, side by side; returns what differs too much."""
    info = reader.load_info(dataset)
    gcs.put_folder(bucket, "shards", Path(info.url))
    wrong = []
    with tempfile.TemporaryDirectory(prefix="imageshards-remote-") as scratch, gs.slowed(gcs, latency_ms):
        pictures = material.images(Path(given), Path(scratch), CHECKED_FILES)
        gcs.put_folder(bucket, "files", pictures)
        for name, make, images, here, there in (
            (experiment.FILES_AT_ONCE, "remote_read.files", CHECKED_FILES, str(pictures), f"gs://{bucket}/files"),
            (experiment.OURS, "remote_read.shards", info.records("train"), info.url, f"gs://{bucket}/shards"),
        ):
            cases = {
                f"{name}: experiment": Case(make, {"url": here, "latency_ms": latency_ms}),
                f"{name}: gs://": Case(make, {"url": there}),
            }
            runs = turns.in_turns(cases, images, repeats)
            print(turns.table(runs, [*cases][:1]))
            ratio = median(far.rate / near.rate for near, far in zip(*runs.values(), strict=True))
            wrong += [f"{name}, {ratio:.2f}"] if abs(ratio - 1) > CHECKED_WITHIN else []
    return f"more than {CHECKED_WITHIN:.0%} apart: {', '.join(wrong)}" if wrong else None


def files(url: str, latency_ms: float = 0) -> turns.Reader:
    """A row of the experiment: single files."""
    doors.delay(latency_ms)
    names = tutorial.list_files(url)
    return lambda: experiment.at_once(names, experiment.decoder(SIZE))


def shards(url: str, latency_ms: float = 0) -> turns.Reader:
    """A row of the experiment: ours."""
    doors.delay(latency_ms)
    info = reader.load_info(url)
    return lambda: experiment.ours(info, "train", SIZE, BATCH)


def rates(local: str, remote: str, proxy: gs.SlowProxy, count: int, repeats: int) -> None:
    """Rates, and what went through the proxy."""
    two = {"threads": 2, "kind": "nothing"}
    pairs = [
        {"local": Case("doors.numpy", {"url": local}), "gs://": Case("doors.numpy", {"url": remote})},
        {
            "local, stub": Case("doors.engine", {"url": local, **two}),
            "gs://, stub": Case("doors.engine", {"url": remote, **two}),
        },
    ]
    (server,) = psutil.Process().children()
    split = reader.load_info(local).splits["train"]
    record_bytes = sum(shard.bytes for shard in split.shards) / sum(shard.records for shard in split.shards)
    for cases in pairs:
        fetched, spent_s = proxy.bytes_sent, turns.cpu_s(server) + time.process_time()
        runs = turns.in_turns(cases, count, repeats)
        fetched, spent_s = proxy.bytes_sent - fetched, turns.cpu_s(server) + time.process_time() - spent_s
        near, far = cases
        images = sum(run.images for run in runs[far]) * (repeats + 1) / repeats  # and the warm-up
        used = record_bytes * images
        print(turns.table(runs, (near,)))
        print(f"server and proxy took {spent_s / images * 1e6:.0f} CPU µs per image of the same CPUs;", end=" ")
        print(f"fetched {fetched / 1e6:,.0f} MB, used {used / 1e6:,.0f} MB: {fetched / used:.3f} times\n", flush=True)


def memory(local: str, remote: str, count: int, epochs: int) -> None:
    """Peak RSS of a process, one after the other."""
    print("| peak MB | after 1 epoch | " + f"after {epochs} |\n|---|---|---|")
    for name, url in (("local", local), ("gs://", remote)):
        for batch in (64, 1024):
            case = {"": Case("doors.numpy", {"url": url, "batch": batch})}
            peaks = [turns.in_turns(case, count * n, 1, is_warm=False)[""][0].peak_rss_mb for n in (1, epochs)]
            print(f"| {name}, batch {batch:,} | {peaks[0]:,.0f} | {peaks[1]:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
