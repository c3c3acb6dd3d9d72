"""Feeds corrupt image files to the codec, each worker in a process of its own, and reports what goes wrong.

    python benchmarks/fuzz_images.py [--count 200000] [--first 0] [--seed 0] [--workers 2] [--digests FILE]

A case is decided by seed and number (tests/images/mutations.py), so each finding can be made again. Limits are a job's
default ones. It is a finding when an image raises anything but a reject, kills the process, takes more than 20 s,
lets it grow by more than 1 GiB, or has another shape than was promised. Exit code 1 if there is one. What depends on
memory that nobody wrote to shows in the digests of two runs whose fresh memory differs (glibc; the first setting
makes the second count for small blocks):

    export GLIBC_TUNABLES=glibc.malloc.tcache_count=0
    MALLOC_PERTURB_=85 python benchmarks/fuzz_images.py --digests a
    MALLOC_PERTURB_=170 python benchmarks/fuzz_images.py --digests b; diff <(sort a) <(sort b)
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import multiprocessing
import resource
import sys
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import beam_pipeline
from beam_pipeline.images import ImageOptions
from tests.images.mutations import case, outcome

MAX_SECONDS, MAX_BYTES = 20.0, 1 << 30
# Enough for a limit of the address space to be no limit of 1 GiB; a decoder that asks for more gets a MemoryError.
ADDRESS_SPACE = 8 << 30


def options() -> ImageOptions:
    """Those of a job by default."""
    return beam_pipeline.Config(input="in", output="out", name="fuzz").image_options


def grown() -> int:
    """The most bytes of memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def work(seed: int, first: int, last: int, step: int, out: Connection) -> None:
    """Convert the cases of one worker, saying before each one which it is."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    limits = options()
    case(seed, first, limits)  # the first makes all files
    before = grown()
    for number in range(first, last, step):
        out.send(("begin", number))
        some = case(seed, number, limits)
        start, what, digest = time.perf_counter(), "", ""
        try:
            what, digest = outcome(some)
        except BaseException:
            out.send(("finding", (number, some.kind, traceback.format_exc(limit=-4))))
        seconds = time.perf_counter() - start
        growth = grown() - before
        out.send(("end", (number, some.kind, what, digest, seconds, growth)))
        if growth > MAX_BYTES:
            out.send(("finding", (number, some.kind, f"the process grew by {growth >> 20} MiB")))
            return
    out.send(("done", None))


class Worker:
    """A process, its pipe, and where it is."""

    def __init__(self, arguments: argparse.Namespace, first: int, last: int) -> None:
        self.arguments, self.first, self.last = arguments, first, last
        self.number, self.since, self.done = first, math.inf, False  # its start doesn't count
        self.pipe, end = multiprocessing.Pipe(duplex=False)
        self.process = multiprocessing.get_context("spawn").Process(
            target=work, args=(arguments.seed, first, last, arguments.workers, end), daemon=True
        )
        self.process.start()
        end.close()

    def after(self) -> Worker:
        """A new process for what is left behind the current case."""
        self.process.kill()
        self.process.join()
        return Worker(self.arguments, self.number + self.arguments.workers, self.last)


def main() -> int:
    """Run the workers, watch them, and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--digests", type=Path, help="file for what came out of each case")
    arguments = parser.parse_args()
    digests = arguments.digests.open("w") if arguments.digests else None
    last = arguments.first + arguments.count
    workers = [Worker(arguments, arguments.first + number, last) for number in range(arguments.workers)]
    outcomes: collections.Counter[str] = collections.Counter()
    findings: list[tuple[int, str, str]] = []

    def found(number: int, kind: str, what: str) -> None:
        findings.append((number, kind, what))
        print(number, kind, what, flush=True)

    slowest, largest, ended = (0.0, -1, ""), 0, 0
    began = time.monotonic()
    while workers:
        ready = wait([worker.pipe for worker in workers], timeout=1)
        for place, worker in reversed(list(enumerate(workers))):
            try:
                while worker.pipe in ready and worker.pipe.poll():
                    kind, value = worker.pipe.recv()
                    if kind == "begin":
                        worker.number, worker.since = value, time.monotonic()
                    elif kind == "finding":
                        found(*value)
                    elif kind == "end":
                        number, name, what, digest, seconds, growth = value
                        outcomes[what] += 1
                        ended += 1
                        if digests:
                            print(number, name, what, digest, file=digests)
                        slowest, largest = max(slowest, (seconds, number, name)), max(largest, growth)
                        if ended % 10_000 == 0:
                            spent = time.monotonic() - began
                            print(
                                f"{ended:,} in {spent:.0f} s, {len(findings)} findings, {largest >> 20} MiB", flush=True
                            )
                    else:
                        worker.done = True
            except EOFError:
                if not worker.done and worker.number + arguments.workers < last:
                    if worker.process.exitcode != 0:
                        found(worker.number, "?", f"the process ended with {worker.process.exitcode}")
                    workers[place] = worker.after()
                    continue
                workers.pop(place)
                continue
            if time.monotonic() - worker.since > MAX_SECONDS:
                found(worker.number, "?", f"longer than {MAX_SECONDS:g} s")
                workers[place] = worker.after()
    document = {
        "inputs": sum(outcomes.values()),
        "seconds": round(time.monotonic() - began),
        "outcomes": dict(sorted(outcomes.items())),
        "slowest": {"seconds": round(slowest[0], 3), "number": slowest[1], "kind": slowest[2]},
        "most_memory_mib": largest >> 20,
        "findings": len(findings),
    }
    print(json.dumps(document, indent=1))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
