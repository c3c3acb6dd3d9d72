"""Writing from and to gs://: the requests of one job against what is promised, and the rate with a latency on each.

    python benchmarks/remote_write.py [IMAGES] [--count 20480] [--latency_ms 50] [--repeats 7]

The rates are with `--fetch_concurrency 64`, through the proxy with the latency and with none. Server and proxies take
their part of this machine's CPUs. Promised: one object read an image, one a sampled image, the listing pages and
nothing else in the input's bucket. Exits 1 if a count differs.
"""

from __future__ import annotations

import re
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

import gs
import material
import turns
from turns import Case

from beam_pipeline.inputs.references import sample_size
from tests.servers import Request


def main() -> int:
    """Print requests, then rates."""
    parser = turns.parser(__doc__, 20_480, 7)
    parser.add_argument("--latency_ms", type=float, default=50)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="imageshards-remote-") as folder, gs.server() as gcs:
        source, target = gcs.new_bucket(), gcs.new_bucket()
        gcs.put_folder(source, "images", material.images(flags.images, Path(folder), flags.count))

        def job(output: str, server: str, is_kept: bool = False) -> Case:
            places = {"images": f"gs://{source}/images", "output": f"gs://{target}/{output}", "emulator": server}
            return Case("write.job", {**places, "fetch_concurrency": 64, "is_kept": is_kept})

        before = len(gcs.requests())
        turns.in_turns({"": job("counted", gcs.url, True)}, flags.count, 1, is_warm=False)
        is_kept = report(gcs.requests()[before:], source, flags.count)
        with gs.slowed(gcs, 0) as near, gs.slowed(gcs, flags.latency_ms) as far:
            cases = {"0 ms": job("near", near.url), f"{flags.latency_ms:g} ms": job("far", far.url)}
            runs = turns.in_turns(cases, flags.count, flags.repeats)
            print(turns.table(runs, ("0 ms",)))
            near_s, far_s = (statistics.median(run.wall_s for run in own) for own in runs.values())
            print(f"{far_s - near_s:.1f} s longer in {near_s:.1f} s")
    return 0 if is_kept else 1


def report(requests: Sequence[Request], source: str, images: int) -> bool:
    """Print how many there are, and whether those of the input's bucket are as promised."""
    of_input = [request for request in requests if is_of(request, source)]
    reads = Counter(request.object_read for request in of_input if request.object_read)
    pages = Counter(request.listed_prefix for request in of_input if request.listed_prefix is not None)
    others, sampled = len(of_input) - reads.total() - pages.total(), sample_size(images)
    print(
        f"{reads.total():,} object reads of {len(reads):,} images: promised {images:,}, and {sampled:,} of the sample"
    )
    print(f"{pages.total()} listing pages of {len(pages)} folders; {others} other requests of the input's bucket")
    print(f"{len(requests) - len(of_input):,} requests of the output's bucket\n", flush=True)
    return (len(reads), reads.total(), others) == (images, images + sampled, 0)


def is_of(request: Request, bucket: str) -> bool:
    """Whether it concerns a bucket, by either client's way to write it."""
    path = unquote(request.target)
    return re.match(rf"/+(?:(?:upload/|download/)?storage/v1/b/)?{bucket}(?:[/?]|$)", path) is not None


if __name__ == "__main__":
    sys.exit(main())
