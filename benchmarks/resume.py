"""A job that was stopped by Ctrl-C and is run again, compared with a fresh one: images per CPU second.

    python benchmarks/resume.py [IMAGES] [--count 4000] [--stopped_after 0.4] [--repeats 5]

All images are in one shard, of which nothing is kept, so the second run does what a fresh one does, and may not cost
more. The first is stopped after this share of the bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import material


def write(images: Path, output: Path, until_bytes: int | None = None) -> float:
    """CPU seconds of the command and its children; it gets a SIGINT when it has written so many bytes, if given."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    job = ["--input", str(images), "--output", str(output), "--name", "bench", "--num_shards", "1"]
    command = [sys.executable, "-m", "beam_pipeline", *job]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        if until_bytes is not None:
            while written_bytes(output) < until_bytes and process.poll() is None:
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    if bool(process.returncode) != (until_bytes is not None):
        sys.exit(errors or "it ended before it was stopped: take more images")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def written_bytes(folder: Path) -> int:
    """Bytes of all files, temporary ones included, some of which go while this looks."""
    sizes = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            sizes += path.stat().st_size
    return sizes


def main() -> None:
    """Print both rates and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path, nargs="?")
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--stopped_after", type=float, default=0.4)
    parser.add_argument("--repeats", type=int, default=5)
    flags = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    with tempfile.TemporaryDirectory(prefix="imageshards-bench-") as folder:
        images, output = material.images(flags.images, Path(folder), flags.count), Path(folder) / "out"
        runs = []
        for _ in range(flags.repeats):
            fresh = write(images, output)
            size = written_bytes(output)
            shutil.rmtree(output)
            write(images, output, int(flags.stopped_after * size))
            runs.append((flags.count / fresh, flags.count / write(images, output)))
            shutil.rmtree(output)
    stopped = f"stopped after {flags.stopped_after:g} of the bytes"
    print(f"{flags.count:,} images in one shard, {flags.repeats} turns, {stopped}")
    print("| | images per CPU second |")
    print("| --- | --- |")
    for name, rates in zip(("fresh", "resumed"), zip(*runs, strict=True), strict=True):
        print(f"| {name} | {median(rates):.0f} ({min(rates):.0f} – {max(rates):.0f}) |")
    ratios = [resumed / fresh for fresh, resumed in runs]
    print(f"resumed / fresh: {median(ratios):.3f} ({min(ratios):.3f} – {max(ratios):.3f})")


if __name__ == "__main__":
    main()
