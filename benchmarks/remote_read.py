"""Reading from gs:// with a latency on each request, beside the local disk: rates, bytes fetched, memory.

    python benchmarks/remote_read.py [IMAGES] [--count 20480] [--latency_ms 50] [--repeats 7] [--epochs 50]
    python benchmarks/remote_read.py --check FILES DATASET

A real fake-gcs-server (from `.[test]`) behind a proxy that sleeps before it forwards. Both run on this machine and take
their part of its CPUs, which is printed: the clock is pessimistic, and CPU µs count the reader alone. All cases are the
NumPy door, `stub` with decoding replaced by nothing. Bytes fetched are those of objects; bytes used are those of the
records that were handed out. Memory is that of processes of their own, after 1 and after EPOCHS epochs.

`--check` reads two rows of `experiment.py`, in turns: as it does, local files with its own wait, and from the
server behind the proxy. It fails if they differ by more than 15 %.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))  # the server that tests use

import experiment
import material
import psutil
import turns
from stored import BATCH, SIZE
from turns import Case

import reader
from beam_pipeline import schema, storage
from beam_pipeline.schema.manifest import open_manifest
from reader.tools.bench import list_files
from reader.tools.requests import SlowStorage
from tests import servers

CHECKED_FILES, CHECKED_WITHIN = 2000, 0.15


def main() -> None:
    """Print rates, what went over the wire, and memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path, nargs="?")
    parser.add_argument("--count", type=int, default=20_480)
    parser.add_argument("--latency_ms", type=float, default=50)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--check", nargs=2, metavar=("FILES", "DATASET"), help="compare with the experiment, and stop")
    flags = parser.parse_args()
    if flags.check:
        sys.exit(check(*flags.check, flags.latency_ms, flags.repeats))
    url, _ = material.kept(flags.images, flags.count)
    with tempfile.TemporaryDirectory(prefix="imageshards-remote-") as folder, servers.fake_gcs(log(folder)) as server:
        gcs = servers.Gcs(server, log(folder))
        bucket = gcs.new_bucket()
        gcs.put_folder(bucket, "bench/1.0.0", Path(url))
        with slowed(server, flags.latency_ms) as proxy:
            os.environ["STORAGE_EMULATOR_HOST"] = proxy
            remote = f"gs://{bucket}/bench/1.0.0"
            print(f"{flags.latency_ms:g} ms a request, {flags.count:,} images a turn, {flags.repeats} turns")
            rates(url, remote, proxy, flags.count, flags.repeats)
            memory(url, remote, flags.count, flags.epochs)


def check(files: str, dataset: str, latency_ms: float, repeats: int) -> str | None:
    """Print rates and CPU of both ways, side by side; returns what differs too much."""
    dataset = reader.load_info(dataset).url
    with tempfile.TemporaryDirectory(prefix="imageshards-remote-") as folder, servers.fake_gcs(log(folder)) as server:
        gcs = servers.Gcs(server, log(folder))
        bucket = gcs.new_bucket()
        gcs.put_folder(bucket, "shards", Path(dataset))
        sources = list_files(storage.normalize(files))
        pictures = [Path(sources[number % len(sources)]) for number in range(CHECKED_FILES)]
        for number, path in enumerate(pictures):
            gcs.put(bucket, f"files/{number}{path.suffix}", path.read_bytes())
        urls = [f"gs://{bucket}/files/{number}{path.suffix}" for number, path in enumerate(pictures)]
        with slowed(server, latency_ms) as proxy:
            os.environ["STORAGE_EMULATOR_HOST"] = proxy
            wait = partial(SlowStorage, latency_s=latency_ms / 1000)
            rates: dict[str, list[tuple[float, float]]] = {}
            for _ in range(repeats):
                for name, here, there in (
                    (experiment.FILES_AT_ONCE, partial(_files, list(map(str, pictures))), partial(_files, urls)),
                    (experiment.OURS, partial(_shards, dataset), partial(_shards, f"gs://{bucket}/shards")),
                ):
                    with storage.wrapped(wait):
                        rates.setdefault(f"{name}: experiment", []).append(_rate(here()))
                    rates.setdefault(f"{name}: gs://", []).append(_rate(there()))
    print(f"{latency_ms:g} ms a request, medians of {repeats} turns (lowest to highest)")
    for name, found in rates.items():
        clock, cpu = zip(*found, strict=True)
        print(
            f"{name}: {median(clock):,.0f} images/s ({min(clock):,.0f} to {max(clock):,.0f}), {median(cpu):,.0f} CPU µs"
        )
    wrong = []
    for name in (experiment.FILES_AT_ONCE, experiment.OURS):
        pairs = zip(rates[f"{name}: experiment"], rates[f"{name}: gs://"], strict=True)
        ratio = median(there[0] / here[0] for here, there in pairs)
        print(f"{name}: gs:// is {ratio:.2f} × the experiment")
        wrong += [name] if abs(ratio - 1) > CHECKED_WITHIN else []
    return f"more than {CHECKED_WITHIN:.0%} apart: {', '.join(wrong)}" if wrong else None


def _files(urls: list[str]) -> Iterator[int]:
    return experiment.at_once(urls, experiment.decoder(SIZE))


def _shards(url: str) -> Iterator[int]:
    return experiment.ours(reader.load_info(url), "train", SIZE, BATCH)


def _rate(batches: Iterator[int]) -> tuple[float, float]:
    """Images/s, and CPU µs of this process an image."""
    begin, cpu = time.perf_counter(), time.process_time()
    images = sum(batches)
    return images / (time.perf_counter() - begin), 1e6 * (time.process_time() - cpu) / images


def log(folder: str) -> Path:
    """Where the server writes its requests."""
    return Path(folder) / "requests.log"


@contextmanager
def slowed(server: str, latency_ms: float) -> Iterator[str]:
    """The address of a proxy in front of `server`."""
    command = [sys.executable, str(Path(__file__).parent / "slow_proxy.py"), server.rpartition(":")[2], str(latency_ms)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as proxy:
        assert proxy.stdout is not None
        try:
            yield f"http://127.0.0.1:{proxy.stdout.readline().strip()}"
        finally:
            proxy.kill()


def rates(local: str, remote: str, proxy: str, count: int, repeats: int) -> None:
    """Rates, and what went through the proxy."""
    two = {"threads": 2, "kind": "nothing"}
    pairs = [
        {"local": Case("doors.numpy", {"url": local}), "gs://": Case("doors.numpy", {"url": remote})},
        {
            "local, stub": Case("doors.engine", {"url": local, **two}),
            "gs://, stub": Case("doors.engine", {"url": remote, **two}),
        },
    ]
    servers_there = psutil.Process().children()  # fake-gcs-server and the proxy
    splits = open_manifest((Path(local) / schema.MANIFEST_FILE).read_bytes(), local)["splits"]
    for cases in pairs:
        before, servers_s = went_through(proxy), sum(map(turns.cpu_s, servers_there))
        runs = turns.in_turns(cases, count, repeats)
        after, servers_s = went_through(proxy), sum(map(turns.cpu_s, servers_there)) - servers_s
        _, far = cases
        images = sum(run.images for run in runs[far]) * (repeats + 1) / repeats  # and the warm-up
        used = sum(shard["bytes"] for shard in splits["train"]["shards"]) / splits["train"]["records"] * images
        fetched = after["bytes"] - before["bytes"]
        print(turns.table(runs, (next(iter(cases)),)))
        print(f"server and proxy took {servers_s / images * 1e6:.0f} CPU µs per image of the same CPUs;", end=" ")
        print(f"fetched {fetched / 1e6:,.0f} MB, used {used / 1e6:,.0f} MB: {fetched / used:.3f} times\n", flush=True)


def went_through(proxy: str) -> dict[str, int]:
    """What the proxy counted so far."""
    with urllib.request.urlopen(f"{proxy}/proxied", timeout=10) as reply:
        return dict(json.load(reply))


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
