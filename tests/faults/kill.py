"""Kills jobs with -9 at seeded random moments and runs the same command again.

    python -m tests.faults.kill --runs 20 --gs_runs 5

prints a line for each kill and fails unless every second command publishes the same bytes, leaves finished shards as
they were, and leaves nothing else behind.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from tests import servers
from tests.faults import jobs
from tests.faults.jobs import Job, Output, Reference


def kill_and_resume(
    images: Path, output: Output, mode: str, expected: Reference, moment: tuple[str, float], scratch: Path
) -> str:
    """One kill, some seconds after a file of the job's state is there; returns what was seen.

    Raises:
        AssertionError: the same command doesn't make it good.
    """
    file, delay_s = moment
    job = Job(images, output, mode)
    job.wait_for(file)
    time.sleep(delay_s)
    job.kill()
    return f"{delay_s:5.2f} s after {file:10}  {resume(images, output, mode, expected, scratch)}"


def resume(images: Path, output: Output, mode: str, expected: Reference, scratch: Path) -> str:
    """The same command after a kill; returns what was seen.

    Raises:
        AssertionError: it doesn't make it good.
    """
    phase, finished = output.phase(), output.finished_shards()
    start = time.monotonic()
    result = Job(images, output, mode).result()
    seconds = time.monotonic() - start
    assert result.code == 0, f"killed at {phase!r}: {result}"
    assert "error" not in result.err, f"killed at {phase!r}: {result.err}"
    expected.check(output, scratch)
    after = output.files()
    rewritten = [name for name, trace in finished.items() if after[name] != trace]
    assert not rewritten, f"killed at {phase!r}: written again {rewritten}"
    return f"{phase:22}  {len(finished):2d} kept  {seconds:5.1f} s  {result.out.split()[0]}"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Kill jobs at random moments and resume them.")
    parser.add_argument("--runs", type=int, default=20, help="kills of local jobs in each mode")
    parser.add_argument("--gs_runs", type=int, default=5, help="kills of jobs that write to gs://")
    parser.add_argument("--modes", nargs="*", choices=list(jobs.MODES), default=list(jobs.MODES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=int, default=800)
    flags = parser.parse_args()
    failures = 0
    print("mode              killed                     at                               resumed")
    with tempfile.TemporaryDirectory(prefix="kill-") as folder, jobs.gcs_server(Path(folder)) as server:
        images = jobs.draw(Path(folder) / "images", flags.images)
        kinds = [(mode, False, flags.runs) for mode in flags.modes] + [("in_memory", True, flags.gs_runs)]
        for mode, remote, runs in kinds:
            if not runs:
                continue
            places = (_place(Path(folder), server, mode, remote, number) for number in range(runs + 1))
            chance = random.Random(f"{flags.seed} {mode} {remote}")
            expected = None
            for number, output in enumerate(places):
                scratch = Path(folder) / f"scratch-{mode}-{remote}-{number}"
                if expected is None:
                    expected = jobs.reference(images, output, scratch, mode)
                    continue
                title = "gs://" if remote else mode
                try:
                    # Three in four while shards are written: starting Beam takes longer than a small job's work.
                    file = jobs.MOMENTS[number % 4 > 0]
                    moment = file, chance.uniform(0, expected.seconds[file])
                    seen = kill_and_resume(images, output, mode, expected, moment, scratch)
                    print(f"{title:16}  {seen}  same hash", flush=True)
                except AssertionError as error:
                    failures += 1
                    print(f"{title:16}  FAILED: {error}", flush=True)
    print(f"{failures} failures")
    return 1 if failures else 0


def _place(folder: Path, server: str, mode: str, remote: bool, number: int) -> Output:
    if not remote:
        return Output(str(folder / f"{mode}-{number}"))
    servers.make_bucket(server, f"kill-{number}")
    return Output(f"gs://kill-{number}", server)


if __name__ == "__main__":
    sys.exit(main())
