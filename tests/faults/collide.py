"""Starts two commands on one output, again and again.

    python -m tests.faults.collide --runs 50

fails unless each time the bytes are those of a command alone and nothing else is left. On a local output exactly one of
them publishes, whatever their flags, and the other says in one line that it doesn't; on gs:// both work on one plan and
end well. Every fourth time the first is killed, on a local output under another host name and in another pid space, and
a third command has to publish, on a local output with other flags every second time.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from beam_pipeline import sample_data
from tests import make, servers
from tests.faults import jobs
from tests.faults.jobs import Job, Output, Reference

APART_S = (0.0, 0.3, 3.0)
SLOWLY = ("--decode_threads", "1")  # so that the first runs when the second comes
OTHER = ("--seed", "1")
_MAX_REFUSAL_S = 10.0  # half a second on an idle machine; tests run on busy ones
_REFUSED = re.compile(
    r"error: \S+/1\.0\.0 is being written by another job"
    r"( \(process \d+ on \S+, since .* UTC\))?: wait for it to finish\n"
)
# A command with other flags that comes when the first has published.
_LATE = re.compile(r"error: --seed 1: \S+/1\.0\.0 is published with 0; choose --version 2\.0\.0 or --overwrite\n")
_ELSEWHERE = ("unshare", "--uts", "--pid", "--fork", "sh", "-c", 'hostname elsewhere && exec "$@"', "sh")
References = Mapping[tuple[str, ...], Reference]  # flags → what a command alone gives


@cache
def elsewhere() -> tuple[str, ...]:
    """What begins a command under another host name and in another pid space; nothing without the right to."""
    is_allowed = subprocess.run([*_ELSEWHERE, "true"], capture_output=True).returncode == 0
    return _ELSEWHERE if is_allowed else ()


def collide(
    images: Path, output: Output, expected: References, apart_s: float, scratch: Path, more: tuple[str, ...] = ()
) -> str:
    """Two commands, begun `apart_s` apart, the second with more flags; returns what was seen, or AssertionError."""
    first = Job(images, output, more=SLOWLY)
    time.sleep(apart_s)
    second, begun = Job(images, output, more=(*SLOWLY, *more)), time.monotonic()
    result = second.result()
    took_s = time.monotonic() - begun
    results = first.result(), result
    said = [_said(output, one) for one in results]
    assert "published" in said, results
    if output.server is None:
        assert sorted(said) in (["published", "refused"], ["already published", "published"]), results
        assert said[1] != "refused" or took_s < _MAX_REFUSAL_S, f"refused after {took_s:.1f} s"
    winner = () if said[0] == "published" else more
    expected[winner].check(output, scratch)
    with_more = f" with {' '.join(more)}" * bool(more)
    return f"begun {apart_s:4.2f} s apart{with_more}: {said[0]}, {said[1]}, which took {took_s:.2f} s"


def _said(output: Output, result: make.Finished) -> str:
    """What one of the two says, which has to be one of three things."""
    if result.code == 1 and not output.server and _REFUSED.fullmatch(result.err):
        return "refused"
    if result.code == 2 and _LATE.fullmatch(result.err):
        return "already published"
    assert result.code == 0, result
    return "already published" if result.out.startswith("already published") else "published"


def take_over(
    images: Path, output: Output, expected: References, shards: int, scratch: Path, more: tuple[str, ...] = ()
) -> str:
    """A command is killed after some shards, while a second one has begun; a third, with more flags, publishes.

    On a local output the first is under another host name and in another pid space, if that is allowed. With its flags
    the shards that it had finished aren't written again.
    """
    first = Job(images, output, prefix=elsewhere() if output.server is None else ())
    first.wait_for("claim.json")
    second = Job(images, output)
    first.wait_for_shards(shards)
    first.kill()
    finished = output.finished_shards()
    said = [_said(output, second.result())]
    more = more if said == ["refused"] else ()
    said += [_said(output, Job(images, output, more=more).result())]
    assert said[1] != "refused"
    expected[more].check(output, scratch)
    assert more or finished.items() <= output.files().items(), "written again"
    return f"first killed after {shards} of {jobs.SHARDS} shards: {said[0]}, then {' '.join((said[1], *more))}"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Start two commands on one output.")
    parser.add_argument("--runs", type=int, default=20, help="times on a local output, and as often on gs://")
    parser.add_argument("--kinds", nargs="*", default=["local", "gs"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=int, default=1200, help="where the second command comes late")
    flags = parser.parse_args()
    chance, failures = random.Random(flags.seed), 0
    if not elsewhere():
        print("unshare isn't allowed here: nothing is killed under another host name", flush=True)
    with tempfile.TemporaryDirectory(prefix="collide-") as name, jobs.gcs_server(Path(name)) as server:
        folder = Path(name)
        few, many = folder / "few", folder / "many"
        for images, count in ((few, 60), (many, flags.images)):
            sample_data.draw_folder(images, images=count, classes=5, broken=count // 200)
        for kind in flags.kinds:
            choices = ((), OTHER) if kind == "local" else ((),)
            expected = {
                images: {more: _alone(folder, kind, images, server, more) for more in choices} for images in (few, many)
            }
            for number in range(1, flags.runs + 1):
                output, scratch = _place(folder, f"{kind}-{number}", server), folder / f"{kind}-{number}-down"
                more, apart_s = choices[number // 4 % len(choices)], (*APART_S, None)[number % 4 - 1]
                try:
                    if apart_s is None:
                        shards = chance.randrange(jobs.SHARDS)
                        seen = take_over(many, output, expected[many], shards, scratch, more)
                    else:
                        images = few if apart_s < 1 else many
                        seen = collide(images, output, expected[images], apart_s, scratch, more)
                except AssertionError as error:
                    failures += 1
                    seen = f"FAILED: {error}"
                print(f"{kind:6} {seen}", flush=True)
    print(f"{failures} failures")
    return 1 if failures else 0


def _alone(folder: Path, kind: str, images: Path, server: str, more: tuple[str, ...]) -> Reference:
    name = f"{kind}-{images.name}{len(more)}"
    return jobs.reference(images, _place(folder, name, server), folder / f"{name}-down", more)


def _place(folder: Path, name: str, server: str) -> Output:
    """A fresh output."""
    if name.startswith("local"):
        return Output(str(folder / name))
    servers.Gcs(server).new_bucket(f"collide-{name}")
    return Output(f"gs://collide-{name}", server)


if __name__ == "__main__":
    sys.exit(main())
