"""Lets a job with `--overwrite` take over a version on gs:// from a live job with other flags, again and again.

    python -m tests.faults.race --rounds 40

fails unless each time there is one valid version with no file of another plan, and it is that of the job which was the
last to say "published". First each kind of upload of the first job is held until the second has taken over, and the
second's claim until the first has published. Then each job reaches the server by a proxy of its own, which delays every
request, by up to 120 ms; every second round the first job has `--overwrite` too.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import reader
from beam_pipeline import sample_data, schema
from tests import make, servers
from tests.faults import jobs
from tests.faults.jobs import Job, Output
from tests.faults.proxy import Proxy

FIRST = ("--image_size", "48", "--num_shards", "train=4,validation=2")
SECOND = ("--image_size", "32", "--num_shards", "train=3,validation=1", "--overwrite")
_MAX_DELAY_S = 0.12
_SHARD = r"^POST .*{}\.tfrecord-0000{}-of-0000{}\W"
FIRST_SHARD, SECOND_SHARD = _SHARD.format("train", 0, 4), _SHARD.format("train", 0, 3)
CLAIM = r"^POST .*_state/1\.0\.0/claim\.json"
# Uploads of the first job: what each matches.
HELD = {
    "its plan": r"^POST .*_state/1\.0\.0/plan\.json",
    "a shard that the other job has none of": _SHARD.format("train", 2, 4),
    "a record table": r"^POST .*index/photos-train\.tfrecord-00001-of-00004\.records\.npy",
    "an index": r"^POST .*index/photos-train\.tfrecord-00001-of-00004\.idx",
    "a sidecar": r"^POST .*_state/1\.0\.0/shards/validation-00000\.json",
    "metadata": r"^POST .*/features\.json",
    "its manifest": r"^POST .*/manifest\.json",
}
_OVERTAKEN = "the claim"
_LOST = ("another job has taken over this version; this one stops", "with other images or flags: wait until it")


class Delaying(Proxy):
    """Delays every request by a random time."""

    def __init__(self, upstream: str, seed: str) -> None:
        super().__init__(upstream, 0.0)
        self._chance = random.Random(seed)

    def before(self, request: str, body: bytes) -> None:
        time.sleep(self._chance.uniform(0, _MAX_DELAY_S))


class Holding(Proxy):
    """Holds the `number`-th request that matches a pattern, by its method, its address and what it uploads.

    Attributes:
        is_held: set when it has come.
        release: to be set, to pass it on.
    """

    def __init__(self, upstream: str, pattern: str, number: int = 1) -> None:
        super().__init__(upstream, 0.0)
        self.is_held, self.release = threading.Event(), threading.Event()
        self._pattern, self._left = re.compile(pattern.encode(), re.DOTALL), number
        self._counting = threading.Lock()

    def before(self, request: str, body: bytes) -> None:
        if self._pattern.search(f"{request} ".encode() + body[:2000]):
            with self._counting:
                self._left -= 1
                is_it = self._left == 0
            if is_it:
                self.is_held.set()
                self.release.wait(60)


def through(output: Output, proxy: Proxy) -> Output:
    """The same place, reached by a proxy."""
    return dataclasses.replace(output, server=proxy.url)


@contextmanager
def downloaded(output: Output) -> Iterator[Path]:
    """A copy of the version."""
    gcs = servers.Gcs(str(output.server))
    with tempfile.TemporaryDirectory() as folder:
        yield gcs.download(output.url.removeprefix("gs://"), jobs.VERSION.rstrip("/"), Path(folder) / "1.0.0")


def expected_hash(images: Path, output: Output, flags: tuple[str, ...]) -> str:
    """The hash of the dataset that a job alone makes."""
    result = Job(images, output, more=flags).result()
    assert result.code == 0, result
    with downloaded(output) as version:
        return make.dataset_hash(version)


def check(output: Output) -> str:
    """The hash of the version, which is valid and has nothing next to it; otherwise AssertionError."""
    with downloaded(output) as version:
        faults = reader.verify(version).faults
        assert not faults, faults
        listed = make.manifest(version)
        shards = {shard["file"] for split in listed["splits"].values() for shard in split["shards"]}
        names = {*listed["files"], *shards, *map(schema.table_file, shards), schema.RUN_FILE, schema.MANIFEST_FILE}
        assert set(make.files(version)) == names, set(make.files(version)) ^ names
        left = [name for name in output.files() if not name.startswith(jobs.VERSION)]
        assert not left, left
        return make.dataset_hash(version)


def hold(images: Path, output: Output, held: str, expected: str) -> None:
    """An upload of the first job arrives after the second has deleted what was there; or raises AssertionError."""
    upstream = str(output.server)
    with (
        servers.serving(Holding(upstream, held)) as of_first,
        servers.serving(Holding(upstream, SECOND_SHARD)) as of_second,
    ):
        first = Job(images, through(output, of_first), more=FIRST)
        assert of_first.is_held.wait(60), first.result()
        second = Job(images, through(output, of_second), more=SECOND)
        assert of_second.is_held.wait(60), second.result()
        of_first.release.set()
        lost = first.result()
        of_second.release.set()
        won = second.result()
    assert lost.code == 1 and any(text in lost.err for text in _LOST), lost
    assert won.code == 0, won
    assert check(output) == expected


def overtake(images: Path, output: Output, hashes: tuple[str, str]) -> None:
    """The first job publishes just before the second takes the claim; or raises AssertionError."""
    upstream = str(output.server)
    with (
        servers.serving(Holding(upstream, FIRST_SHARD)) as of_first,
        servers.serving(Holding(upstream, CLAIM, number=2)) as of_second,  # first it asks for one that nobody has
    ):
        first = Job(images, through(output, of_first), more=FIRST)
        assert of_first.is_held.wait(60), first.result()
        second = Job(images, through(output, of_second), more=SECOND)
        assert of_second.is_held.wait(60), second.result()
        of_first.release.set()
        assert first.result().code == 0
        assert check(output) == hashes[0]
        of_second.release.set()
        won = second.result()
    assert won.code == 0, won
    assert check(output) == hashes[1]


def race(images: Path, output: Output, hashes: tuple[str, str], chance: random.Random, both: bool) -> str:
    """One round; returns what was seen, or raises AssertionError."""
    apart_s = chance.uniform(0, 2)
    with jobs_proxies(output, chance) as (one, other):
        first = Job(images, one, more=(*FIRST, "--overwrite") if both else FIRST)
        time.sleep(apart_s)
        results = Job(images, other, more=SECOND), first
        second, first_result = results[0].result(), results[1].result()
    said = ["published" if one.code == 0 else one.err.strip().rpartition(": ")[2] for one in (first_result, second)]
    published = [digest for digest, one in zip(hashes, (first_result, second), strict=True) if one.code == 0]
    assert published, (first_result, second)
    assert both or second.code == 0, second
    assert check(output) in (published if both else hashes[1:]), (first_result, second)
    return f"begun {apart_s:4.2f} s apart{', both --overwrite' * both}: {said[0]} | {said[1]}"


@contextmanager
def jobs_proxies(output: Output, chance: random.Random) -> Iterator[tuple[Output, Output]]:
    """The same place twice, each with delays of its own."""
    seed = chance.random()
    upstream = str(output.server)
    with (
        servers.serving(Delaying(upstream, f"{seed} 1")) as one,
        servers.serving(Delaying(upstream, f"{seed} 2")) as two,
    ):
        yield through(output, one), through(output, two)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Let a job take over another one's version.")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=int, default=210)
    flags = parser.parse_args()
    chance, failures = random.Random(flags.seed), 0
    with tempfile.TemporaryDirectory(prefix="race-") as name, jobs.gcs_server(Path(name)) as server:
        images = Path(name) / "images"
        sample_data.draw_folder(images, images=flags.images, classes=3, broken=0)
        hashes = (
            expected_hash(images, _place(server, "first"), FIRST),
            expected_hash(images, _place(server, "second"), SECOND),
        )
        for number, name in enumerate([_OVERTAKEN, *HELD, *[""] * flags.rounds], start=1):
            place = _place(server, str(number))
            try:
                if name == _OVERTAKEN:
                    overtake(images, place, hashes)
                elif name:
                    hold(images, place, HELD[name], hashes[1])
                seen = name or race(images, place, hashes, chance, both=number % 2 == 0)
            except AssertionError as error:
                failures += 1
                seen = f"FAILED: {name} {error}"
            print(f"{number:3} {seen}", flush=True)
    print(f"{failures} failures")
    return 1 if failures else 0


def _place(server: str, name: str) -> Output:
    """A fresh output."""
    servers.Gcs(server).new_bucket(f"race-{name}")
    return Output(f"gs://race-{name}", server)


if __name__ == "__main__":
    sys.exit(main())
