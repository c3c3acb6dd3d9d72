"""Compares the compiled resize with Pillow's on random cases and prints those that differ.

    python benchmarks/resample_cases.py [--count 1000000] [--first 0] [--seed 0] [--workers 2] [--module FILE ...]

A case is decided by seed and number (tests/images/resamples.py), so each can be made again. Other builds of the kernel
(for CPUs without AVX2, by another compiler) are compared in the same run by `--module`. Exit code 1 if a case differs.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import json
import multiprocessing
import sys
import time
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.images.resamples import LARGE_EVERY, case, fails


def load(path: str) -> ModuleType:
    """A build of the kernel that isn't the installed one."""
    spec = importlib.util.spec_from_file_location(Path(path).name.split(".")[0], path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def installed() -> list[ModuleType]:
    """The kernel of this installation, if it was compiled."""
    from beam_pipeline.images.resize import kernel

    module = kernel()
    return [module] if module else []


def work(arguments: argparse.Namespace, worker: int) -> tuple[dict[str, int], list[str]]:
    """Compare the cases of one worker."""
    kernels = [load(path) for path in arguments.module] or installed()
    counts: collections.Counter[str] = collections.Counter()
    differing: list[str] = []
    numbers = range(arguments.first + worker, arguments.first + arguments.count, arguments.workers)
    for number in numbers:
        some = case(arguments.seed, number)
        found = fails(some, kernels)
        counts.update((some.source, some.pixels, *["large"] * (number % LARGE_EVERY == 0)))
        for line in found:
            counts["differ"] += 1
            differing.append(f"{line}: {some}")
            print(differing[-1], flush=True)
    return counts, differing


def main() -> int:
    """Compare in `--workers` processes and print how many cases of each kind there were."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000, help="cases")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--module", action="append", default=[], help="another build of the kernel; repeatable")
    arguments = parser.parse_args()
    if not arguments.module and not installed():
        print("error: the resize is not compiled here: install a C compiler, then this package again", file=sys.stderr)
        return 2
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(arguments.workers) as workers:
        parts = workers.starmap(work, [(arguments, worker) for worker in range(arguments.workers)], chunksize=1)
    counts = sum((collections.Counter(part) for part, _ in parts), collections.Counter())
    differing = [line for _, lines in parts for line in lines]
    document = {"cases": dict(counts), "differ": len(differing), "seconds": round(time.monotonic() - began)}
    print(json.dumps(document, indent=1))
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
