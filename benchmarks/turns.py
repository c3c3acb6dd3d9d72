"""Readers in processes of their own, measured in turns: none has another's threads, and a slow minute hits all.

A case may run under a Python of its own, with other libraries.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import psutil

Reader = Callable[[], Iterable[int]]  # each call is an iteration: it yields the number of images in each batch


class Case(NamedTuple):
    """A reader to measure.

    Args:
        make: "module.function" of this folder; called in the case's process, it makes the `Reader`.
        arguments: of that function; JSON.
        python: the interpreter that runs it.
    """

    make: str
    arguments: Mapping[str, Any] = {}
    python: str = sys.executable


class Run(NamedTuple):
    """One turn: images, seconds by the clock, CPU seconds of the process and its children, and their peak RSS so far.

    `between_s` is the CPU time that they took since their turn before: closing an iteration, and work in advance.
    """

    images: int
    wall_s: float
    cpu_s: float
    between_s: float
    peak_rss_mb: float

    @property
    def rate(self) -> float:
        """Images/s by the clock."""
        return self.images / self.wall_s

    @property
    def cpu_us(self) -> float:
        """CPU µs per image."""
        return self.cpu_s / self.images * 1e6


def in_turns(cases: Mapping[str, Case], images: int, repeats: int, is_warm: bool = True) -> dict[str, list[Run]]:
    """Measure every case `repeats` times, by complete iterations, after one that isn't counted.

    Args:
        cases: by name. One that fails is reported and left out.
        images: read in each turn, give or take 5 %; a reader that ends before is iterated again.
        repeats: turns of each case.
        is_warm: False counts a process's first iteration too.
    """
    runs: dict[str, list[Run]] = {name: [] for name in cases}
    with ExitStack() as stack:
        workers = {name: stack.enter_context(_Worker(case)) for name, case in cases.items()}
        for repeat in range(repeats + is_warm):
            for name in list(workers):
                try:
                    run = workers[name].turn(images)
                except EOFError:
                    print(f"{name} failed: {workers.pop(name).error()}", flush=True)
                    continue
                if repeat or not is_warm:
                    runs[name].append(run)
    return {name: own for name, own in runs.items() if len(own) == repeats}


class _Worker:
    """A case's process."""

    def __init__(self, case: Case) -> None:
        command = [case.python, __file__, case.make, json.dumps(case.arguments)]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
            text=True,
        )

    def __enter__(self) -> _Worker:
        return self

    def turn(self, images: int) -> Run:
        """One turn; EOFError if the process has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(images, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise EOFError from None
        if not (line := self._process.stdout.readline()):
            raise EOFError
        return Run(*json.loads(line))

    def error(self) -> str:
        """What it last said."""
        self._log.seek(0)
        return "\n".join(self._log.read().decode(errors="replace").splitlines()[-12:])

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            for child in psutil.Process(self._process.pid).children(recursive=True):
                child.kill()
            self._process.kill()
        self._process.wait()
        self._log.close()


def parser(description: str | None, count: int, repeats: int) -> argparse.ArgumentParser:
    """What most programs are given: a folder of images, how many are used, and how often each case is measured."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("images", type=Path, nargs="?", help="folder of class folders; drawn pictures without")
    found.add_argument("--count", type=int, default=count, help=f"images, again and again if there are fewer ({count})")
    found.add_argument("--repeats", type=int, default=repeats, help=f"turns of each case ({repeats})")
    return found


def main() -> None:
    """A case's process: a turn for each number of images that it is sent."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print isn't an answer
    module, _, function = sys.argv[1].rpartition(".")
    _serve(getattr(importlib.import_module(module), function)(**json.loads(sys.argv[2])), answers)


def _serve(reader: Reader, answers: IO[str]) -> None:
    end = cpu_s()
    for line in sys.stdin:
        wanted, count = int(line), 0
        begin, begin_s = cpu_s(), time.perf_counter()
        while count < 0.95 * wanted:
            for size in (batches := iter(reader())):
                count += size
                if count >= wanted:
                    break
        wall_s, spent_s = time.perf_counter() - begin_s, cpu_s() - begin
        run = Run(count, wall_s, spent_s, begin - end, _peak_rss_mb())
        end = begin + spent_s
        del batches  # with tf.data's autotuning, closing may take as long as reading did: `between_s` has it
        print(json.dumps(run), file=answers, flush=True)


def cpu_s(parent: psutil.Process | None = None) -> float:
    """CPU seconds of a process, this one by default, of its children, and of those that have ended."""
    parent = parent or psutil.Process()
    total = 0.0
    for process in (parent, *parent.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # one that ended just now counts among its parent's children
            total += sum(process.cpu_times()[:4])
    return total


def _peak_rss_mb() -> float:
    """Peak RSS of this process and its children in 10⁶ bytes; pages that they share count for each.

    Not by getrusage, which begins with what the parent process had.
    """
    own = psutil.Process()
    return sum(_peak_kb(process.pid) for process in (own, *own.children(recursive=True))) * 1024 / 1e6


def _peak_kb(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def table(
    runs: Mapping[str, Sequence[Run]], base: Sequence[str], more: Mapping[str, Mapping[str, str]] | None = None
) -> str:
    """A Markdown line a case: medians, in brackets the slowest and the fastest turn, and the ratio to `base`.

    Args:
        base: cases of which the best is 1.00, turn by turn, each time by clock and by CPU.
        more: further columns: name → case → cell.
    """
    columns = ["", "images/s", "CPU µs per image", "peak MB", *(["× base by clock", "× base by CPU"] if base else [])]
    columns += more or {}
    lines = [_line(columns), _line(["---"] * len(columns))]
    bases = [name for name in base if name in runs]
    for name, own in runs.items():
        cells = [name, f"{spread([run.rate for run in own])}", f"{spread([run.cpu_us for run in own])}"]
        if (between := sum(r.between_s for r in own) / sum(r.cpu_s for r in own)) > 0.03:
            cells[2] += f" + {between:.0%} between turns"
        cells.append(f"{max(run.peak_rss_mb for run in own):,.0f}")
        turns = range(min([len(own), *(len(runs[b]) for b in bases)]))
        if bases:
            clock = [own[turn].rate / max(runs[b][turn].rate for b in bases) for turn in turns]
            cpu = [min(runs[b][turn].cpu_us for b in bases) / own[turn].cpu_us for turn in turns]
            cells += [spread(clock, ".2f"), spread(cpu, ".2f")]
        lines.append(_line([*cells, *(column.get(name, "") for column in (more or {}).values())]))
    return "\n".join(lines)


def ratio(one: Sequence[Run], other: Sequence[Run]) -> str:
    """How much faster `one` is, turn by turn."""
    pairs = list(zip(one, other, strict=True))
    clock = spread([a.rate / b.rate for a, b in pairs], ".2f")
    return f"{clock} × by clock, {spread([b.cpu_us / a.cpu_us for a, b in pairs], '.2f')} × by CPU"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def spread(values: Sequence[float], form: str = ",.0f") -> str:
    """Median (least – most)."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} – {max(values):{form}})"


if __name__ == "__main__":
    main()
