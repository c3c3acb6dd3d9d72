"""Compares the compiled resize with Pillow's on random cases and prints those that differ.

    python benchmarks/resample_cases.py [--count 1000000] [--first 0] [--seed 0] [--workers 2] [--module FILE ...]

A case is decided by seed and number (tests/images/resamples.py), so each can be made again. Other builds of the kernel
(for CPUs without AVX2, by another compiler) are compared in the same run by `--module`. Exit code 1 if a case differs.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import multiprocessing
import sys
import time
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from beam_pipeline.images.resize import kernel
from tests.images.resamples import case, fails


@functools.cache
def kernels(paths: tuple[str, ...]) -> list[ModuleType]:
    """Builds of the kernel in these files; without any that of this installation, if it was compiled."""
    if not paths:
        return [module] if (module := kernel()) else []
    found = []
    for path in paths:
        spec = importlib.util.spec_from_file_location(Path(path).name.split(".")[0], path)
        assert spec and spec.loader
        found.append(importlib.util.module_from_spec(spec))
        spec.loader.exec_module(found[-1])
    return found


def differences(seed: int, paths: tuple[str, ...], number: int) -> list[str]:
    """What each kernel does otherwise than Pillow in a case."""
    some = case(seed, number)
    return [f"{line}: {some}" for line in fails(some, kernels(paths))]


def main() -> int:
    """Compare in `--workers` processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000, help="cases")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--module", action="append", default=[], help="another build of the kernel; repeatable")
    flags = parser.parse_args()
    if not kernels(tuple(flags.module)):
        print("error: the resize is not compiled here: install a C compiler, then this package again", file=sys.stderr)
        return 2
    began, found = time.monotonic(), 0
    numbers = range(flags.first, flags.first + flags.count)
    with multiprocessing.get_context("spawn").Pool(flags.workers) as workers:
        compare = functools.partial(differences, flags.seed, tuple(flags.module))
        for lines in workers.imap_unordered(compare, numbers, chunksize=500):
            found += len(lines)
            for line in lines:
                print(line, flush=True)
    print(f"{flags.count:,} cases, {found} differ, {time.monotonic() - began:.0f} s")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
