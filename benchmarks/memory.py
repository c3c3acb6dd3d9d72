"""Peak memory of a job, all its processes together, by number and by size of the images.

    python -m benchmarks.memory

First table: tiny images (hard links to 300 files of 16×16 pixels), so that what grows is what a reference costs; the
slope is (peak of the most − peak of the fewest) / (their difference in images). Second table: photos of 12 megapixels,
4 MB each, on FnApiRunner: the peak must not grow with their number.

RSS is the sum over all processes, read 20 times a second; PSS, read less often, counts a page that two share once.
"""

from __future__ import annotations

import io
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
from PIL import Image

from tools.engines import pieces, processes

_EVERY_S = 0.05
_PSS_EVERY = 10  # samples: the kernel walks every page for it
_FILES = 300
_CLASSES = 100
ENGINES: dict[str, Callable[[], Sequence[str]]] = {
    "FnApiRunner": lambda: (),
    "multi_processing": lambda: ("--direct_running_mode=multi_processing", "--direct_num_workers=2"),
    "Prism": lambda: ("--runner=PrismRunner", f"--prism_location={pieces.prism()}"),
}


class Usage(NamedTuple):
    """The most memory that a job held, in bytes, and the seconds that it took, by the clock and of CPU."""

    rss: int
    pss: int
    seconds: float
    cpu_s: float


def main() -> None:
    """Measure and print both tables."""
    with tempfile.TemporaryDirectory(prefix="imageshards-bench-") as name:
        _references((3_000, 30_000, 300_000), Path(name))
        _photos((100, 400, 1_600), Path(name))


def _references(counts: Sequence[int], scratch: Path) -> None:
    """Print peaks and slopes for tiny images."""
    print(f"{'engine':18}" + "".join(f"{count:>24,}" for count in counts) + "   slope RSS, PSS")
    folders = {count: linked_images(scratch / f"tiny-{count}", count, 16, 16) for count in counts}
    for engine, flags in ENGINES.items():
        peaks = []
        print(f"{engine:18}", end="", flush=True)
        for count in counts:
            peaks.append(measure(folders[count], scratch / "out", "--image_size=16", *flags()))
            print(f"{_cell(peaks[-1]):>24}", end="", flush=True)
        images = max(1, counts[-1] - counts[0])
        slopes = [(last - first) / images / 1000 for first, last in zip(peaks[0][:2], peaks[-1][:2], strict=True)]
        print(f"   {slopes[0]:.2f}, {slopes[1]:.2f} kB a reference", flush=True)
    for folder in folders.values():
        shutil.rmtree(folder)


def _photos(counts: Sequence[int], scratch: Path) -> None:
    """Print peaks for photos of 12 megapixels."""
    print(f"\n{'12 MP photos':18}" + "".join(f"{count:>24,}" for count in counts))
    print(f"{'FnApiRunner':18}", end="", flush=True)
    for count in counts:
        folder = linked_images(scratch / f"photos-{count}", count, 4000, 3000)
        print(f"{_cell(measure(folder, scratch / 'out')):>24}", end="", flush=True)
        shutil.rmtree(folder)
    print()


def _cell(peak: Usage) -> str:
    return f"{peak.rss / 1e6:,.0f} / {peak.pss / 1e6:,.0f} MB {peak.seconds:,.0f} s"


def linked_images(folder: Path, count: int, width: int, height: int) -> Path:
    """`count` JPEGs in 100 class folders with names as ImageNet's, hard links to at most 300 files."""
    files = folder.parent / f"{width}x{height}"
    if not files.exists():
        files.mkdir()
        for number in range(_FILES if width < 1000 else 8):
            (files / f"{number}.jpg").write_bytes(_picture(number, width, height))
    sources = sorted(files.iterdir())
    for number in range(count):
        label = f"n{number % _CLASSES:08d}"
        link = folder / label / f"{label}_{number:06d}.JPEG"
        if number < _CLASSES:
            link.parent.mkdir(parents=True)
        os.link(sources[number % len(sources)], link)
    return folder


def _picture(seed: int, width: int, height: int) -> bytes:
    """A JPEG of about a third of a byte a pixel: coarse shapes, and noise as a sensor's."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((width, height))
    noisy = np.asarray(coarse, np.int16) + rng.integers(-12, 13, (height, width, 1), dtype=np.int16)
    out = io.BytesIO()
    Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8)).save(out, "JPEG", quality=90)
    return out.getvalue()


def measure(images: Path, output: Path, *flags: str) -> Usage:
    """Run the job on a folder; it gives way to other programs."""
    shutil.rmtree(output, ignore_errors=True)
    command = ["nice", "-n", "10", sys.executable, "-m", "beam_pipeline"]
    command += [f"--input={images}", f"--output={output}", "--name=bench", *flags]
    usage = watch(command, output.with_suffix(".log"))
    shutil.rmtree(output)
    return usage


def watch(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> Usage:
    """Run a command and measure it with all its processes.

    Raises:
        RuntimeError: it failed; says its last line.
    """
    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    job = processes.start(command, log, environment)
    samples, rss, pss = 0, 0, 0
    while job.poll() is None:
        rss = max(rss, _held(job.pid, "rss"))
        if samples % _PSS_EVERY == 0:
            pss = max(pss, _held(job.pid, "pss"))
        samples += 1
        time.sleep(_EVERY_S)
    seconds = time.monotonic() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processes.kill(job)
    if job.returncode != 0:
        raise RuntimeError(f"exit {job.returncode}: {log.read_text(errors='replace').splitlines()[-1:]}")
    return Usage(rss, pss, seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def _held(process_id: int, kind: str) -> int:
    """Bytes of a process and its children; 0 for those that have ended."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        leader = psutil.Process(process_id)
        for process in (leader, *leader.children(recursive=True)):
            with suppress(psutil.Error):
                total += getattr(process.memory_info() if kind == "rss" else process.memory_full_info(), kind)
    return total


if __name__ == "__main__":
    main()
