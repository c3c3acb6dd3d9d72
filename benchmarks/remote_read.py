"""Reading from gs:// with a latency on each request, beside the local disk: rates, bytes fetched, memory.

    python benchmarks/remote_read.py [IMAGES] [--count 20480] [--latency_ms 50] [--repeats 7] [--epochs 50]

A real fake-gcs-server (from `.[test]`) behind a proxy that sleeps before it forwards. Both run on this machine and take
their part of its CPUs, which is printed: the clock is pessimistic, and CPU µs count the reader alone. All cases are the
NumPy door, `stub` with decoding replaced by nothing. Bytes fetched are those of objects; bytes used are those of the
records that were handed out. Memory is that of processes of their own, after 1 and after EPOCHS epochs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # the server that tests use

import material
import psutil
import turns
from turns import Case

from beam_pipeline import schema
from beam_pipeline.schema.manifest import open_manifest
from tests import servers


def main() -> None:
    """Print rates, what went over the wire, and memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path, nargs="?")
    parser.add_argument("--count", type=int, default=20_480)
    parser.add_argument("--latency_ms", type=float, default=50)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--epochs", type=int, default=50)
    flags = parser.parse_args()
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
        print(f"server and proxy took {servers_s / images * 1e6:.0f} CPU µs an image of the same CPUs;", end=" ")
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
