"""Reading from gs:// with a latency on each request: beside the local disk, through caches, beside individual files.

    python benchmarks/remote_read.py [IMAGES] [--count 6400] [--latency_ms 50] [--repeats 7] [--apart]

A real fake-gcs-server (from `.[test]`) behind a proxy that sleeps before it forwards. Both run on this machine and take
their part of its CPUs, which is printed: the clock is pessimistic, and CPU seconds count the reader alone. With --apart
they have the last CPU for themselves, and all readers the others. One row has the latency without servers: local files
after a sleep. A run is two epochs of COUNT images. Bytes fetched are those of objects; bytes used are those of the
records that were handed out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).parent.parent))  # the server that tests use

import material
import psutil
import turns

import reader
from reader.bench.latency import delayed
from reader.limits import cpu_count
from tests import servers

SIZE, BATCH = 224, 64


def main() -> None:
    """Print a line a case, and what went over the wire."""
    parser = argparse.ArgumentParser()
    parser.add_argument("images", type=Path, nargs="?")
    parser.add_argument("--count", type=int, default=6400)
    parser.add_argument("--latency_ms", type=float, default=50)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--apart", action="store_true")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="imageshards-remote-") as folder:
        scratch = Path(folder)
        source = material.images(flags.images, scratch, flags.count)
        url = material.dataset(source, scratch)
        with servers.fake_gcs(scratch / "requests.log") as server:
            gcs = servers.Gcs(server, scratch / "requests.log")
            bucket = gcs.new_bucket()
            gcs.put_folder(bucket, "bench/1.0.0", Path(url))
            gcs.put_folder(bucket, "files", single_files(url, scratch))
            port = server.rpartition(":")[2]
            command = [sys.executable, str(Path(__file__).parent / "slow_proxy.py"), port, str(flags.latency_ms)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as proxy:
                assert proxy.stdout is not None
                try:
                    address = f"http://127.0.0.1:{proxy.stdout.readline().strip()}"
                    measure(url, f"gs://{bucket}", address, str(scratch / "cache"), flags)
                finally:
                    proxy.kill()


def single_files(url: str, scratch: Path) -> Path:
    """The records' images as files in class folders."""
    from reader.bench.material import prepare

    (scratch / "forms").mkdir()
    prepare(reader.load_info(url), "train", sys.maxsize, None, scratch / "forms")
    return scratch / "forms" / "files"


def measure(local: str, bucket: str, proxy: str, cache: str, flags: argparse.Namespace) -> None:
    """Run all cases and print."""
    os.environ["STORAGE_EMULATOR_HOST"] = proxy
    cases: dict[str, tuple[Callable[..., turns.Reader], tuple[Any, ...]]] = {
        "shards, local": (shards, (local,)),
        "shards, gs://": (shards, (f"{bucket}/bench/1.0.0",)),
        "shards, a sleep for each request": (slept, (local, flags.latency_ms / 1000)),
    }
    serving = psutil.Process().children(recursive=True)  # fake-gcs-server and the proxy
    if flags.apart:
        keep_apart(serving)
    before, servers_before_s = went_through(proxy), cpu_s(serving)
    images_a_run = 2 * flags.count
    runs = turns.in_turns(cases, images_a_run, flags.repeats)
    after, servers_s = went_through(proxy), cpu_s(serving) - servers_before_s
    images = sum(run.images for run in runs["shards, gs://"]) * (flags.repeats + 1) / flags.repeats  # and the warm-up
    info = reader.load_info(local)
    used = info.splits["train"].bytes / info.records("train") * images
    fetched = after["bytes"] - before["bytes"]
    print(f"{flags.latency_ms:g} ms a request, {images_a_run} images a run, {flags.repeats} runs in turns")
    print(turns.table(runs, "shards, gs://"))
    where = "of a CPU of their own" if flags.apart else f"of the same {cpu_count()} CPUs"
    print(f"server and proxy took {servers_s / images * 1000:.3f} CPU s/1,000 images {where}")
    print(f"fetched {fetched / 1e6:,.0f} MB, used {used / 1e6:,.0f} MB: {fetched / used:.3f} times")
    cached: dict[str, tuple[Callable[..., turns.Reader], tuple[Any, ...]]] = {
        "shards, gs://": cases["shards, gs://"],
        "cached in memory, filled": (shards, (f"{bucket}/bench/1.0.0", "memory")),
        "cached on disk, filled": (shards, (f"{bucket}/bench/1.0.0", cache)),
    }
    filled = turns.in_turns(cached, images_a_run, flags.repeats)  # the warm-up fills them
    print(turns.table(filled, "shards, gs://"))
    files: dict[str, tuple[Callable[..., turns.Reader], tuple[Any, ...]]] = {
        "shards, gs://": cases["shards, gs://"],
        "individual files, 32 at once": (individual, (f"{bucket}/files",)),
        "individual files, one by one": (one_by_one, (f"{bucket}/files",)),
    }
    few = turns.in_turns(files, min(flags.count, 128), min(flags.repeats, 3))
    print(turns.table(few, "shards, gs://"))


def went_through(proxy: str) -> dict[str, int]:
    """What the proxy counted so far."""
    with urllib.request.urlopen(f"{proxy}/proxied", timeout=10) as reply:
        return dict(json.load(reply))


def keep_apart(servers: list[psutil.Process]) -> None:
    """Run them on the last CPU, and this process with all that it starts from now on on the others."""
    *others, last = sorted(os.sched_getaffinity(0))
    if not others:
        sys.exit("--apart: there is one CPU only")
    for thread in (thread for server in servers for thread in server.threads()):
        os.sched_setaffinity(thread.id, {last})
    os.sched_setaffinity(0, others)


def cpu_s(processes: list[psutil.Process]) -> float:
    """CPU seconds that they have taken so far."""
    return float(sum(sum(process.cpu_times()[:2]) for process in processes))


def _counted(dataset: Any) -> turns.Reader:
    return lambda: (len(labels) for _, labels in dataset)


def shards(url: str, cache: str | None = None) -> turns.Reader:
    """`train_dataset`."""
    info = reader.load_info(url)
    return _counted(reader.train_dataset(info, "train", global_batch_size=BATCH, image_size=SIZE, cache=cache))


def slept(folder: str, latency_s: float) -> turns.Reader:
    """`train_dataset` of local files that wait as remote ones do."""
    return shards(delayed(folder, latency_s))


def individual(root: str) -> turns.Reader:
    """`image_files_dataset`."""
    return _counted(reader.image_files_dataset(root, batch_size=BATCH, image_size=SIZE))


def one_by_one(root: str) -> turns.Reader:
    """A plain loop: read a file, decode it, the next one."""
    from reader.pillow import decode, resize
    from reader.storage import open_storage

    storage = open_storage(root)
    files = [f"{root}/{path}" for path, _ in storage.files(root)]

    def read() -> Any:
        for file in files:
            resize(decode(storage.read(file), 3), SIZE, SIZE)
            yield 1

    return read


if __name__ == "__main__":
    main()
