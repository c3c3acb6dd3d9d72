"""Starts two jobs together on one output, again and again.

    python -m tests.faults.collide --runs 20

fails unless each time exactly one of them publishes, the other says that in one line, and the bytes are those of a job
alone. Every fourth time the owner is killed, and a third command has to take over.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import time
from pathlib import Path

from tests import servers
from tests.faults import jobs
from tests.faults.jobs import Job, Output, Reference

_REFUSED = re.compile(
    r"error: \S+/photos/1\.0\.0 (is being written by another job \(process \d+\), .*|"
    r"was published by another job meanwhile; run the command again)\n"
)


def collide(images: Path, output: Output, expected: Reference, apart_s: float, scratch: Path) -> str:
    """Two jobs, begun `apart_s` apart; returns what was seen.

    Raises:
        AssertionError: not exactly one published, or not the right bytes.
    """
    first = Job(images, output)
    time.sleep(apart_s)
    results = [job.result() for job in (first, Job(images, output))]
    winners = [result for result in results if result.out.startswith("published ")]
    others = [result for result in results if result not in winners]
    assert len(winners) == 1, results
    (other,) = others
    late = other.code == 0 and other.out.startswith("already published")
    assert late or (other.code == 1 and _REFUSED.fullmatch(other.err)), results
    expected.check(output, scratch)
    number = 1 + results.index(winners[0])
    return (
        f"begun {apart_s:4.2f} s apart: job {number} published, the other: {(other.err or other.out).splitlines()[0]}"
    )


def take_over(images: Path, output: Output, expected: Reference, shards: int, scratch: Path) -> str:
    """A job owns the output, a second is refused, the first is killed after some shards, a third publishes.

    Raises:
        AssertionError: otherwise.
    """
    owner = Job(images, output)
    owner.wait_for("owner.json")
    refused = Job(images, output)
    owner.wait_for_shards(shards)
    phase = output.phase()
    owner.kill()
    told = refused.result()
    result = Job(images, output).result()
    assert result.code == 0, result
    assert told.code == 0 or _REFUSED.fullmatch(told.err), told
    expected.check(output, scratch)
    return f"owner killed at {phase!r}: {(told.err or told.out).splitlines()[0][:60]}… / then {result.out.split()[0]}"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Start two jobs on one output.")
    parser.add_argument("--runs", type=int, default=20, help="times on a local output, and as often on gs://")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=int, default=300)
    flags = parser.parse_args()
    chance = random.Random(flags.seed)
    failures = 0
    with tempfile.TemporaryDirectory(prefix="collide-") as folder, jobs.gcs_server(Path(folder)) as server:
        images = jobs.draw(Path(folder) / "images", flags.images)
        for remote in (False, True):
            expected = None
            for number in range(flags.runs + 1):
                name = f"output-{number}"
                if remote:
                    servers.make_bucket(server, name)
                output = Output(f"gs://{name}", server) if remote else Output(f"{folder}/{name}")
                scratch = Path(folder) / f"scratch-{remote}-{number}"
                if expected is None:
                    expected = jobs.reference(images, output, scratch)
                    continue
                try:
                    if number % 4:
                        seen = collide(images, output, expected, chance.choice((0.0, chance.uniform(0, 1))), scratch)
                    else:
                        seen = take_over(images, output, expected, chance.randrange(jobs.SHARDS), scratch)
                    print(f"{'gs://' if remote else 'local':6}  {seen}", flush=True)
                except AssertionError as error:
                    failures += 1
                    print(f"{'gs://' if remote else 'local':6}  FAILED: {error}", flush=True)
    print(f"{failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
