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

from beam_pipeline import sample_data
from tests import make, servers
from tests.faults import jobs
from tests.faults.jobs import Job, Output, Reference

_REFUSED = re.compile(
    r"error: \S+/1\.0\.0 is being written by another job"
    r"( \(process \d+ on \S+, since .* UTC\))?: wait for it to finish\n"
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
    first.kill()
    said = [_said(output, second.result()), _said(output, Job(images, output).result())]
    assert said[1] != "refused"
    expected.check(output, scratch)
    return f"first killed after {shards} of {jobs.SHARDS} shards: {said[0]}, then {said[1]}"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Start two jobs on one output.")
    parser.add_argument("--runs", type=int, default=20, help="times on a local output, and as often on gs://")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=int, default=300)
    flags = parser.parse_args()
    chance, failures = random.Random(flags.seed), 0
    with tempfile.TemporaryDirectory(prefix="collide-") as name, jobs.gcs_server(Path(name)) as server:
        folder = Path(name)
        sample_data.draw_folder(folder / "images", images=flags.images, classes=5, broken=flags.images // 200)
        images = folder / "images"
        for kind in ("local", "gs"):
            expected = jobs.reference(images, _place(folder, kind, 0, server), folder / f"{kind}-0-down")
            for number in range(1, flags.runs + 1):
                output, scratch = _place(folder, kind, number, server), folder / f"{kind}-{number}-down"
                try:
                    if number % 4:
                        seen = collide(images, output, expected, chance.choice((0.0, chance.uniform(0, 1))), scratch)
                    else:
                        seen = take_over(images, output, expected, chance.randrange(jobs.SHARDS), scratch)
                except AssertionError as error:
                    failures += 1
                    seen = f"FAILED: {error}"
                print(f"{kind:6} {seen}", flush=True)
    print(f"{failures} failures")
    return 1 if failures else 0


def _place(folder: Path, kind: str, number: int, server: str) -> Output:
    """A fresh output."""
    if kind == "local":
        return Output(str(folder / f"local-{number}"))
    servers.Gcs(server).new_bucket(f"collide-{number}")
    return Output(f"gs://collide-{number}", server)


if __name__ == "__main__":
    sys.exit(main())
