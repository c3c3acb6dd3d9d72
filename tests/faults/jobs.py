"""Jobs as processes of their own, on a local output or on gs://, and what can be seen of them from outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests import make, servers

VERSION, STATE = "photos/1.0.0/", "photos/_state/1.0.0/"
FLAGS = ("--name", "photos", "--splits", "train=0.8,validation=0.2", "--num_shards", "8")
SHARDS = 16  # of both splits
MODES = {"in_memory": (), "multi_processing": ("--direct_running_mode=multi_processing", "--direct_num_workers=2")}


@dataclass(frozen=True)
class Output:
    """A place that jobs write to: the value of `--output`, and for gs:// the GCS server's URL."""

    url: str
    server: str | None = None

    def files(self) -> dict[str, str]:
        """Path → what changes when it is written again: inode and time, or generation."""
        if self.server is None:
            found = {}
            for folder, _, names in os.walk(self.url):  # folders come and go meanwhile
                for path in (Path(folder) / name for name in names):
                    with contextlib.suppress(FileNotFoundError):
                        stat = path.stat()
                        found[path.relative_to(self.url).as_posix()] = f"{stat.st_ino} {stat.st_mtime_ns}"
            return found
        bucket = self.url.removeprefix("gs://")
        with urllib.request.urlopen(f"{self.server}/storage/v1/b/{bucket}/o?maxResults=5000", timeout=10) as reply:
            return {item["name"]: item["generation"] for item in json.load(reply).get("items", ())}

    def hash(self, scratch: Path) -> str:
        """The dataset's hash as `imageshards info --hash` gives it."""
        if self.server is None:
            return make.dataset_hash(Path(self.url) / VERSION)
        gcs = servers.Gcs(self.server)
        return make.dataset_hash(gcs.download(self.url.removeprefix("gs://"), VERSION.rstrip("/"), scratch))

    def finished_shards(self) -> dict[str, str]:
        """Shards with a sidecar: path → inode and time, or generation."""
        files = self.files()
        found = {}
        for name in files:
            if name.startswith(f"{STATE}shards/") and name.endswith(".json"):
                split, _, number = name.removeprefix(f"{STATE}shards/").removesuffix(".json").rpartition("-")
                shard = f"{VERSION}photos-{split}.tfrecord-{number}-of-00008"
                if shard in files:
                    found[shard] = files[shard]
        return found


class Job:
    """One command as a process group; `prefix` is a command that runs it."""

    def __init__(
        self,
        images: Path | str,
        output: Output,
        mode: str = "in_memory",
        more: Sequence[str] = (),
        prefix: Sequence[str] = (),
    ) -> None:
        command = [*prefix, sys.executable, "-m", "beam_pipeline", "--input", str(images), "--output", output.url]
        environment = {**os.environ, "PYTHONPATH": str(make.ROOT)}
        if output.server:
            environment["STORAGE_EMULATOR_HOST"] = output.server
        self.output = output
        command += [*FLAGS, *MODES[mode], *more]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=True
        )

    def wait_for(self, file: str) -> None:
        """Until a file of its state is there, or it has ended."""
        while STATE + file not in self.output.files() and self._process.poll() is None:
            time.sleep(0.002 if self.output.server is None else 0.02)

    def wait_for_shards(self, count: int) -> None:
        """Until so many are finished, or it has ended."""
        while len(self.output.finished_shards()) < count and self._process.poll() is None:
            time.sleep(0.005)

    def kill(self) -> None:
        """-9, to all of its processes that haven't ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def kill_launcher(self) -> None:
        """-9, to the command alone."""
        self._process.kill()
        self._process.wait()

    def processes(self) -> list[int]:
        """Its processes that are there."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
                found += [int(stat.parent.name)] * (int(group) == self._process.pid and state != "Z")
        return found

    def result(self) -> make.Finished:
        """Wait for its end."""
        out, err = self._process.communicate(timeout=300)
        return make.Finished(self._process.returncode, out, err)


class Reference(NamedTuple):
    """What an undisturbed job gives: its dataset's hash, its files."""

    hash: str
    names: frozenset[str]

    def check(self, output: Output, scratch: Path) -> None:
        """The dataset is this one, to the byte, and nothing else is there; otherwise AssertionError."""
        assert output.hash(scratch) == self.hash, "another hash"
        assert frozenset(output.files()) == self.names, frozenset(output.files()) ^ self.names


def reference(images: Path, output: Output, scratch: Path, more: Sequence[str] = ()) -> Reference:
    """Run a job undisturbed."""
    result = Job(images, output, more=more).result()
    assert result.code == 0, result
    return Reference(output.hash(scratch), frozenset(output.files()))


@contextmanager
def gcs_server(folder: Path) -> Iterator[str]:
    """A GCS server; yields its URL."""
    with servers.fake_gcs(folder / "gcs.log") as url:
        yield url
