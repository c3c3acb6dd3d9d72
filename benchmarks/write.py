"""Writing throughput: the whole job against a bare two-thread loop over the same codec function, side by side.

    python benchmarks/write.py [IMAGES] [--count 3000] [--rounds 7]

IMAGES is a folder of class folders (drawn pictures without); its files are repeated by hard links up to the count.
Each round runs both, each in a process of its own, in alternating order. The job is timed from the call of
`beam_pipeline.run` to its return, Beam being imported; the whole command's time stands beside it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from material import images

_JOB = """
import json, resource, sys, time
import apache_beam
import beam_pipeline
from beam_pipeline.cli import job
config = beam_pipeline.Config(input=sys.argv[1], output=sys.argv[2], name="bench")
wall, cpu = time.perf_counter(), time.process_time()
manifest = beam_pipeline.run(config)
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
print(json.dumps({"wall": wall, "cpu": cpu, "records": manifest.records,
                  "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
"""
_BARE = """
import json, os, sys, time
from concurrent.futures import ThreadPoolExecutor
import beam_pipeline
from beam_pipeline import images
options = beam_pipeline.Config(input=sys.argv[1], output="/tmp", name="bench").image_options
paths = [os.path.join(folder, name) for folder, _, names in os.walk(sys.argv[1]) for name in names]
def convert(path):
    with open(path, "rb") as file:
        return len(images.convert(file.read(), options).data)
with ThreadPoolExecutor(2) as pool:
    list(pool.map(convert, paths[:50]))
    wall, cpu = time.perf_counter(), time.process_time()
    records = sum(1 for _ in pool.map(convert, paths))
    print(json.dumps({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "records": records}))
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path, nargs="?")
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="imageshards-bench-") as scratch:
        source, output = images(arguments.images, Path(scratch), arguments.count), Path(scratch, "datasets")
        rounds = []
        for number in range(arguments.rounds):
            order = [measure_job, measure_bare] if number % 2 else [measure_bare, measure_job]
            results = {one.__name__: one(source, output) for one in order}
            rounds.append((results["measure_bare"], results["measure_job"]))
            print(line(*rounds[-1]), flush=True)
        summarize(rounds)


def measure_job(source: Path, output: Path) -> dict[str, float]:
    """The job, on FnApiRunner in memory."""
    shutil.rmtree(output, ignore_errors=True)
    start = time.perf_counter()
    result = run_python(_JOB, source, output)
    return {**result, "command": time.perf_counter() - start}


def measure_bare(source: Path, _: Path) -> dict[str, float]:
    """The codec alone, in two threads."""
    return run_python(_BARE, source)


def run_python(code: str, *arguments: Path) -> dict[str, float]:
    """The JSON that a piece of Python prints last."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(result.stdout.splitlines()[-1]))


def line(bare: dict[str, float], job: dict[str, float]) -> str:
    """One round as text."""
    return (
        f"bare {bare['records'] / bare['wall']:.0f} images/s ({bare['cpu']:.2f} CPU s) · "
        f"job {job['records'] / job['wall']:.0f} images/s ({job['cpu']:.2f} CPU s, {job['rss_mb']:.0f} MB, "
        f"whole command {job['command']:.1f} s) · ratio {bare['wall'] / job['wall']:.3f} by wall clock, "
        f"{bare['cpu'] / job['cpu']:.3f} by CPU"
    )


def summarize(rounds: list[tuple[dict[str, float], dict[str, float]]]) -> None:
    """Medians and spreads."""
    for name in ("wall", "cpu"):
        ratios = sorted(bare[name] / job[name] for bare, job in rounds)
        print(f"ratio by {name}: median {statistics.median(ratios):.3f}, from {ratios[0]:.3f} to {ratios[-1]:.3f}")
    print(f"peak RSS: {max(job['rss_mb'] for _, job in rounds):.0f} MB")


if __name__ == "__main__":
    main()
