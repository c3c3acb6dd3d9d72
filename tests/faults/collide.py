"""Starts two jobs together on one output, again and again.

    python -m tests.faults.collide --runs 20

fails unless each time the bytes are those of a job alone and nothing else is left. On a local output exactly one of
them publishes, and the other says that in one line; on gs:// both work on the same plan and end well. Every fourth time
the first is killed, and a third command has to publish.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import time
from pathlib import Path

from tests import make
from tests.faults import jobs
from tests.faults.jobs import Job, Output, Reference

_REFUSED = re.compile(
    r"error: \S+/1\.0\.0 is being written by another job \(process \d+ on \S+, since .* UTC\): wait for it to finish\n"
)


def collide(images: Path, output: Output, expected: Reference, apart_s: float, scratch: Path) -> str:
    """Two jobs, begun `apart_s` apart; returns what was seen, or raises AssertionError."""
    first = Job(images, output)
    time.sleep(apart_s)
    results = [job.result() for job in (first, Job(images, output))]
    said = [_said(output, result) for result in results]
    assert "published" in said, results
    assert output.server or said.count("published") == 1, results
    expected.check(output, scratch)
    return f"begun {apart_s:4.2f} s apart: {said[0]}, {said[1]}"


def _said(output: Output, result: make.Finished) -> str:
    """What one of the two says, which has to be one of three things."""
    if result.code == 1 and not output.server and _REFUSED.fullmatch(result.err):
        return "refused"
    assert result.code == 0, result
    return "already published" if result.out.startswith("already published") else "published"


def take_over(images: Path, output: Output, expected: Reference, shards: int, scratch: Path) -> str:
    """A job is killed after some shards, while a second one has begun; a third publishes, or it is AssertionError."""
    first = Job(images, output)
    first.wait_for("claim.json")
    second = Job(images, output)
    first.wait_for_shards(shards)
    phase = output.phase()
    first.kill()
    said = [_said(output, second.result()), _said(output, Job(images, output).result())]
    assert said[1] != "refused"
    expected.check(output, scratch)
    return f"first killed at {phase!r}: {said[0]}, then {said[1]}"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Start two jobs on one output.")
    parser.add_argument("--runs", type=int, default=20, help="times on a local output, and as often on gs://")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=int, default=300)
    flags = parser.parse_args()
    chance = random.Random(flags.seed)
    with tempfile.TemporaryDirectory(prefix="collide-") as folder, jobs.gcs_server(Path(folder)) as server:
        images = jobs.draw(Path(folder) / "images", flags.images)

        def act(number: int, output: Output, expected: Reference, scratch: Path) -> str:
            if number % 4:
                return collide(images, output, expected, chance.choice((0.0, chance.uniform(0, 1))), scratch)
            return take_over(images, output, expected, chance.randrange(jobs.SHARDS), scratch)

        kinds = (("local", None), ("gs://", server))
        failures = sum(jobs.repeat(title, flags.runs, images, place, act, "in_memory") for title, place in kinds)
    print(f"{failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
