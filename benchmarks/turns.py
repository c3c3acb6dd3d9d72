"""Readers in processes of their own, measured in turns: none has another's threads, and a slow minute hits all."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import psutil

Reader = Callable[[], Iterable[int]]  # each call is a pass: it yields the number of images in each batch


class Run(NamedTuple):
    """One pass: images, seconds by the clock, CPU seconds with those of children, peak RSS so far in MB."""

    images: int
    wall_s: float
    cpu_s: float
    peak_rss_mb: float


def in_turns(
    cases: Mapping[str, tuple[Callable[..., Reader], tuple[Any, ...]]], images: int, repeats: int
) -> dict[str, list[Run]]:
    """Measure every case `repeats` times after a warm-up.

    Args:
        cases: name → a function of this program's main module, and its arguments; called in the case's process, it
            makes the reader.
        images: read in each run, at least; a reader that ends before is begun again.
    """
    context = multiprocessing.get_context("spawn")
    workers = {}
    for name, (make, arguments) in cases.items():
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(there, make, arguments))
        process.start()
        workers[name] = here, process
    runs: dict[str, list[Run]] = {name: [] for name in cases}
    try:
        for repeat in range(repeats + 1):
            for name, (connection, process) in workers.items():
                connection.send(images)
                while not connection.poll(1):
                    if not process.is_alive():
                        raise RuntimeError(f"{name} ended with exit code {process.exitcode}")
                run = connection.recv()
                if repeat:
                    runs[name].append(run)
    finally:
        for _, process in workers.values():
            for child in psutil.Process(process.pid).children(recursive=True) if process.is_alive() else ():
                child.kill()
            process.kill()
    return runs


def _serve(connection: Connection, make: Callable[..., Reader], arguments: tuple[Any, ...]) -> None:
    """A case's process: a pass for each number that it is sent."""
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)  # TensorFlow and PyTorch write there whatever they are told
        try:
            _read(connection, make(*arguments))
        except EOFError:
            pass  # the measurement is over
        except BaseException:
            log.seek(0)
            print(log.read().decode(), flush=True)
            traceback.print_exc(file=sys.stdout)
            raise


def _read(connection: Connection, reader: Reader) -> None:
    while True:
        wanted = connection.recv()
        wall, cpu, count = time.perf_counter(), _cpu_s(), 0
        while count < wanted:
            for size in (batches := iter(reader())):
                count += size
                if count >= wanted:
                    break
        wall, cpu = time.perf_counter() - wall, _cpu_s() - cpu
        del batches  # where tf.data autotunes, closing may take as long as reading did: isn't counted
        connection.send(Run(count, wall, cpu, _peak_rss_mb()))


def _cpu_s() -> float:
    """CPU seconds of this process, of its children, and of those that have ended."""
    own = psutil.Process()
    children = [child.cpu_times() for child in own.children(recursive=True)]
    times = own.cpu_times()
    return float(
        times.user
        + times.system
        + times.children_user
        + times.children_system
        + sum(c.user + c.system for c in children)
    )


def _peak_rss_mb() -> float:
    """Peak RSS of this process in 10⁶ bytes; not by getrusage, which begins with what the parent process had."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024 / 1e6


def table(runs: Mapping[str, list[Run]], base: str) -> str:
    """A line a case: medians, spread, and how much faster `base` is, by clock and by CPU, repeat by repeat."""
    width = max(map(len, runs))
    lines = [f"{'':{width}}  images/s (slowest to fastest)  CPU s/1,000  peak MB   {base} is faster: clock   CPU"]
    for name, own in runs.items():
        rates = [run.images / run.wall_s for run in own]
        cpu = statistics.median(run.cpu_s / run.images * 1000 for run in own)
        line = f"{name:{width}} {statistics.median(rates):9,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"
        line = f"{line:{width + 33}} {cpu:10.3f} {max(run.peak_rss_mb for run in own):8,.0f}"
        pairs = list(zip(runs[base], own, strict=True))
        by_clock = statistics.median((b.images / b.wall_s) / (o.images / o.wall_s) for b, o in pairs)
        by_cpu = statistics.median((o.cpu_s / o.images) / (b.cpu_s / b.images) for b, o in pairs)
        lines.append(f"{line} {by_clock:24.2f} {by_cpu:5.2f}")
    return "\n".join(lines)
