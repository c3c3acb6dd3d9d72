"""Kills a job with -9 at each single change that it makes to its output, and runs the same command again.

    python -m tests.faults.steps                 every step of every case, about 20 minutes
    python -m tests.faults.steps --steps 5       so many steps of each case, drawn by --seed

fails unless the same command then gives the same bytes and leaves nothing else. A step is a file or a folder that is
made, renamed or deleted, as Python's audit events tell it, or a request that changes something in gs://, whose kill
comes before it is sent or before its answer is heard. One process imports Beam; each job is a fork of it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from apache_beam.runners.portability.fn_api_runner import fn_runner  # noqa: F401  imported once, by all forks
from google.auth.transport.requests import AuthorizedSession

from beam_pipeline.cli.main import main as write_command
from tests import make, servers
from tests.faults import jobs
from tests.faults.jobs import VERSION, Output

_FLAGS = ("--name", "photos", "--image_size", "8", "--splits", "train=0.5,validation=0.5", "--num_shards", "2")
_MORE = ("--max_reject_fraction", "0.5")


class Ended(NamedTuple):
    """One job: its exit code, or None for a killed one; what it said; how many steps it made."""

    code: int | None
    said: str
    steps: int


def run(images: Path, output: Output, more: tuple[str, ...] = (), kill_at: int = 0) -> Ended:
    """A job in a fork of this process, which kills itself at a step; 0 for none."""
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as counted:
        if (child := os.fork()) == 0:
            try:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
                if output.server:
                    os.environ["STORAGE_EMULATOR_HOST"] = output.server
                steps = _count_steps(output, kill_at)
                code = write_command(["--input", str(images), "--output", output.url, *_FLAGS, *_MORE, *more])
                sys.stdout.flush()
                os.pwrite(counted.fileno(), str(steps()).encode(), 0)
                os._exit(code)
            finally:
                os._exit(70)  # never back into the parent's work
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        said.seek(0)
        counted.seek(0)
        killed = code == -signal.SIGKILL
        return Ended(None if killed else code, said.read().decode(), int(counted.read() or 0))


def _count_steps(output: Output, kill_at: int) -> Callable[[], int]:
    """From now on this process counts its steps, and is killed at one of them."""
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    if output.server is None:
        sys.addaudithook(lambda event, arguments: step() if _changes(output.url, event, arguments) else None)
    else:
        send = AuthorizedSession.request

        def counted(self: Any, method: str, *arguments: Any, **more: Any) -> Any:
            if method == "GET":
                return send(self, method, *arguments, **more)
            step()
            reply = send(self, method, *arguments, **more)
            step()
            return reply

        AuthorizedSession.request = counted
    return lambda: count


# https://docs.python.org/3/library/audit_events.html: which argument is the path that changes, which its folder
_EVENTS = {"os.mkdir": (0, 2), "os.rmdir": (0, 1), "os.remove": (0, 1), "os.rename": (1, 3), "os.link": (1, 3)}
_EVENTS |= {"os.truncate": (0, None), "open": (0, None)}


def _changes(folder: str, event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether an audit event says that something of a folder is about to change."""
    if event not in _EVENTS or (event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR)):
        return False
    at, folder_at = _EVENTS[event]
    path = arguments[at]
    if isinstance(path, int):
        path = os.readlink(f"/proc/self/fd/{path}")
    path = os.fsdecode(path)
    if folder_at is not None and arguments[folder_at] >= 0:
        path = os.path.join(os.readlink(f"/proc/self/fd/{arguments[folder_at]}"), path)
    if not f"{path}/".startswith(f"{folder}/"):
        return False
    is_there = os.path.lexists(path)
    return not is_there if event == "os.mkdir" else is_there or event not in ("os.remove", "os.rmdir")


@dataclass(frozen=True)
class Case:
    """What is in the output before the command, and what the command has besides."""

    name: str
    prepare: Callable[[Path, Output], None]
    more: tuple[str, ...] = ()
    remote: bool = False


def _another_version(images: Path, output: Output) -> None:
    assert run(images, output, ("--seed", "1")).code == 0


def _half_of_another_plan(images: Path, output: Output) -> None:
    kill_at = 60 if output.server is None else 30
    assert run(images, output, ("--seed", "1"), kill_at).code is None


def _damage(images: Path, output: Output) -> None:
    assert run(images, output).code == 0
    version = Path(output.url) / VERSION
    shard = make.shard_files(version)[0]
    shard.write_bytes(shard.read_bytes()[:-1])
    for name in ("index/train.runs.npy", "rejects.jsonl", "features.json"):
        (version / name).unlink()


CASES = (
    Case("fresh", lambda *_: None),
    Case("overwrite", _another_version, ("--overwrite",)),
    Case("another plan", _half_of_another_plan),
    Case("repair", _damage),
    Case("fresh gs", lambda *_: None, remote=True),
    Case("another plan gs", _half_of_another_plan, ("--restart",), remote=True),
)


def names(output: Output, folders: bool = True) -> frozenset[str]:
    """Every file and, on a disk, every folder."""
    if output.server is not None:
        return frozenset(output.files())
    paths = (path for path in Path(output.url).rglob("*") if folders or path.is_file())
    return frozenset(path.relative_to(output.url).as_posix() for path in paths)


class Places(NamedTuple):
    """Where outputs are made, each a fresh one: a bucket, or a folder."""

    folder: Path
    server: str
    numbers: Iterator[int] = itertools.count()

    def new(self, remote: bool) -> Output:
        """An empty one."""
        name = f"output-{next(self.numbers)}"
        if not remote:
            return Output(str(self.folder / name))
        servers.Gcs(self.server).new_bucket(name)
        return Output(f"gs://{name}", self.server)

    def prepared(self, images: Path, case: Case) -> Iterator[Output]:
        """Outputs as the case wants them, without end; local ones are copies of a first one."""
        first = self.new(case.remote)
        case.prepare(images, first)
        while True:
            output = self.new(case.remote)
            if case.remote:
                case.prepare(images, output)
            elif os.path.exists(first.url):
                shutil.copytree(first.url, output.url)
            yield output


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Kill a job at every step.")
    parser.add_argument("--steps", type=int, help="so many of each case; all without")
    parser.add_argument("--cases", nargs="*", default=[case.name for case in CASES], help="all without")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    failures = 0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="steps-")))
        tempfile.tempdir = os.environ["TMPDIR"] = str(folder)  # what killed jobs leave there
        places = Places(folder, stack.enter_context(jobs.gcs_server(folder)))
        images = make.class_folders(folder / "images", {"ant": 4, "bee": 3})
        (images / "ant" / "broken.jpg").write_bytes(b"no image")
        shutil.copy(images / "bee" / "0000.jpg", images / "bee" / "again.jpg")
        undisturbed = places.new(remote=False)
        assert (ended := run(images, undisturbed)).code == 0, ended.said
        for case in CASES:
            if case.name in flags.cases:
                failures += _check(case, places, images, undisturbed, flags)
    print(f"{failures} failures")
    return 1 if failures else 0


def _check(case: Case, places: Places, images: Path, undisturbed: Output, flags: argparse.Namespace) -> int:
    outputs = places.prepared(images, case)
    total = run(images, next(outputs), case.more).steps
    chance = random.Random(f"{flags.seed} {case.name}")
    steps = range(1, total + 1)
    # Every third job is killed once more when it is run again.
    kills = [(step, chance.choice(steps) if step % 3 == 0 else 0) for step in steps]
    if flags.steps is not None:
        kills = sorted(chance.sample(kills, flags.steps))
    failures = killed = 0
    for kill_at in kills:
        output = next(outputs)
        try:
            ended = run(images, output, case.more, kill_at[0])
            # How many steps a job makes depends a little on its threads.
            assert ended.code is None or ended.steps < kill_at[0], "not killed"
            killed += ended.code is None
            if kill_at[1]:
                run(images, output, case.more, kill_at[1])  # it may have less to do, and end before that
            ended = run(images, output, case.more)
            assert ended.code == 0, ended.said
            with tempfile.TemporaryDirectory(dir=places.folder) as scratch:
                assert output.hash(Path(scratch)) == undisturbed.hash(Path(scratch)), "another hash"
            expected = names(undisturbed, folders=not case.remote)
            assert names(output) == expected, names(output) ^ expected
        except AssertionError as error:
            failures += 1
            print(f"{case.name}, killed at steps {kill_at} of {total}: {error}", flush=True)
        if not case.remote:
            shutil.rmtree(output.url)
    print(f"{case.name}: killed at {killed} of {total} steps, {failures} failures", flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main())
