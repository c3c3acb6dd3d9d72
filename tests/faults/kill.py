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
from typing import Any, NamedTuple

from tests.faults import jobs
from tests.faults.jobs import Job, Output, Reference


class Moment(NamedTuple):
    """When a job is killed: `more_s` after so many shards are finished (None: before the plan is there).

    Not after so many seconds, since two runs take differently long.
    """

    shards: int | None
    more_s: float

    @classmethod
    def draw(cls, chance: random.Random, number: int, expected: Reference) -> Moment:
        """Of the kill with this number: one in five before the plan, one in five before the first shard."""
        if number % 5 == 0:
            return cls(None, chance.uniform(0, expected.seconds["claim.json"] - expected.seconds["plan.json"]))
        shards = 0 if number % 5 == 1 else chance.randrange(1, jobs.SHARDS)
        return cls(shards, chance.uniform(0, expected.seconds["plan.json"] / jobs.SHARDS))

    def wait(self, job: Job) -> None:
        """Until it has come, or the job has ended."""
        if self.shards is None:
            job.wait_for("claim.json")
        else:
            job.wait_for("plan.json")
            job.wait_for_shards(self.shards)
        time.sleep(self.more_s)

    def __str__(self) -> str:
        return f"{self.more_s:5.2f} s after " + ("claim.json" if self.shards is None else f"{self.shards:2d} shards")


def kill_and_resume(images: Path, output: Output, mode: str, expected: Reference, moment: Moment, scratch: Path) -> str:
    """One kill; returns what was seen, or raises AssertionError if the same command doesn't make it good."""
    job = Job(images, output, mode)
    moment.wait(job)
    job.kill()
    return f"{moment!s:26}  {resume(images, output, mode, expected, scratch)}"


def resume(images: Path, output: Output, mode: str, expected: Reference, scratch: Path) -> str:
    """The same command after a kill; returns what was seen, or raises AssertionError if it doesn't make it good."""
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
        kinds = [(mode, mode, None, flags.runs) for mode in flags.modes]
        for title, mode, place, runs in [*kinds, ("gs://", "in_memory", server, flags.gs_runs)]:
            chance = random.Random(f"{flags.seed} {mode} {place is not None}")

            def act(
                number: int, output: Output, expected: Reference, scratch: Path, mode: str = mode, chance: Any = chance
            ) -> str:
                moment = Moment.draw(chance, number, expected)
                return kill_and_resume(images, output, mode, expected, moment, scratch) + "  same hash"

            failures += jobs.repeat(title, runs, images, place, act, mode)
    print(f"{failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
