"""Writing from and to gs://: the requests of one job against what is promised, and the rate with a latency on each.

    python benchmarks/remote_write.py [IMAGES] [--count 20480] [--latency_ms 50] [--repeats 7]

A real fake-gcs-server (from `.[test]`), which logs every request; the rates are with `--fetch_concurrency 64`, through
the proxy of `slow_proxy.py` with the latency and with none. Server and proxies take their part of this machine's CPUs.
Promised: one object read an image, one a sampled image, the listing pages and nothing else in the input's bucket; with
50 ms a request 0.9 of the rate. Exits 1 if a count differs.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

sys.path.insert(0, str(Path(__file__).parent.parent))  # the server that tests use

import material
import turns
from remote_read import log, slowed
from turns import Case

from beam_pipeline.inputs.references import sample_size
from tests import servers
from tests.servers import Request


def main() -> int:
    """Print requests by kind, then rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path, nargs="?")
    parser.add_argument("--count", type=int, default=20_480)
    parser.add_argument("--latency_ms", type=float, default=50)
    parser.add_argument("--repeats", type=int, default=7)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="imageshards-remote-") as folder, servers.fake_gcs(log(folder)) as server:
        gcs = servers.Gcs(server, log(folder))
        source, target = gcs.new_bucket(), gcs.new_bucket()
        images = material.images(flags.images, Path(folder), flags.count)
        gcs.put_folder(source, "images", images)
        job = {"images": f"gs://{source}/images", "output": f"gs://{target}/counted", "fetch_concurrency": 64}
        before = len(gcs.requests())
        turns.in_turns(
            {"": Case("write.job", {**job, "emulator": server, "is_kept": True})}, flags.count, 1, is_warm=False
        )
        is_kept = report(gcs.requests()[before:], source, flags.count, sum(path.is_dir() for path in images.iterdir()))
        with slowed(server, 0) as near, slowed(server, flags.latency_ms) as far:
            cases = {
                name: Case("write.job", {**job, "output": f"gs://{target}/{number}", "emulator": proxy})
                for number, (name, proxy) in enumerate({"0 ms": near, f"{flags.latency_ms:g} ms": far}.items())
            }
            runs = turns.in_turns(cases, flags.count, flags.repeats)
            print(turns.table(runs, ("0 ms",)))
            near_s, far_s = (statistics.median(run.wall_s for run in own) for own in runs.values())
            print(f"{far_s - near_s:.1f} s longer in {near_s:.1f} s")
    return 0 if is_kept else 1


def report(requests: Sequence[Request], source: str, images: int, classes: int) -> bool:
    """Print how many there are of each kind, and whether those of the input's bucket are as promised."""
    kinds = Counter((kind(request, source), request.status) for request in requests)
    print("| requests of one job | status | number |\n|---|---|---|")
    for (name, status), count in sorted(kinds.items()):
        print(f"| {name} | {status} | {count:,} |")
    of_input = [request for request in requests if is_of(request, source)]
    reads = Counter(request.object_read for request in of_input if request.object_read)
    pages = Counter(request.listed_prefix for request in of_input if request.listed_prefix is not None)
    others = len(of_input) - reads.total() - pages.total()
    sampled = sample_size(images)
    print(
        f"\n{reads.total():,} object reads of {len(reads):,} images: promised {images:,} and {sampled:,} of the sample"
    )
    print(
        f"{pages.total()} listing pages of {len(pages)} folders, {classes} of them classes; {others} others\n",
        flush=True,
    )
    return (len(reads), reads.total(), others) == (images, images + sampled, 0)


def is_of(request: Request, bucket: str) -> bool:
    """Whether it concerns a bucket, by either client's way to write it."""
    path = unquote(request.target)
    return re.match(rf"/+(?:(?:upload/|download/)?storage/v1/b/)?{bucket}(?:[/?]|$)", path) is not None


def kind(request: Request, source: str) -> str:
    """Which bucket, what, and which kind of object of the output; an upload's first request names none."""
    where = "input" if is_of(request, source) else "output"
    if request.listed_prefix is not None:
        return f"{where}: listing page"
    if where == "input" and request.object_read:
        return "input: object read"
    path = unquote(request.target).partition("?")[0]
    found = re.search(r"/1\.0\.0/([^/]+)", path)
    name = re.sub(r"-\d{5}-of-\d{5}", "", found[1]) if found else "an object"
    state = "_state/" if "/_state/" in path else ""
    return f"{where}: {request.method}{' its content' * bool(request.object_read)} {state}{name}"


if __name__ == "__main__":
    sys.exit(main())
