"""Flips bits of a published dataset: `imageshards verify` must find each, `--repair` must repair them all.

    python -m tests.faults.flips [--flips 1000] [--seed 0] [--gs]

Draws a small dataset in a temporary folder, or in a bucket whose server keeps its objects there: with every kind of
file. Then, one at a time, the bits are flipped: the
files take turns, the place in a file is drawn by the seed. After each flip `imageshards verify` runs, as a
process would run it. In a shard it must name the record that holds the bit, and its byte offset. Afterwards `--repair`
must restore the hash: three bits in each kind of file, the manifest included, and 100 bits all over at once.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import io
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from beam_pipeline import sample_data, schema
from beam_pipeline.cli.main import main as write_command
from imageshards import main as reader_command
from reader.tools.describe import dataset_hash
from tests import servers


class Dataset:
    """A small published dataset, and the command that made it.

    Args:
        folder: empty; gets the pictures and the dataset.
        images: how many pictures are drawn.
        gcs: a server that keeps its objects below `folder`: the dataset is in a bucket of it.
    """

    def __init__(self, folder: Path, images: int = 120, gcs: servers.Gcs | None = None) -> None:
        self._gcs, self._bucket = gcs, gcs.new_bucket() if gcs else "out"
        sample_data.draw_folder(folder / "photos", images=images, classes=3, broken=1)
        output = f"gs://{self._bucket}" if gcs else f"{folder}/out"
        self._command = [f"--input={folder}/photos", f"--output={output}", "--name=photos", "--image_size=24"]
        self._command += ["--splits=train=0.8,validation=0.2", "--num_shards=2"]
        self.url, self.folder = f"{output}/photos/1.0.0", folder / self._bucket / "photos/1.0.0"
        assert self.make() == 0
        self.hash = dataset_hash(self.url)

    def make(self, *flags: str) -> int:
        """Run the command, quietly; returns its exit code."""
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return write_command([*self._command, *flags])

    def files(self) -> list[Path]:
        """Every file that the hash covers and that has a bit to flip."""
        found = sorted(path for path in self.folder.rglob("*") if path.is_file() and path.stat().st_size)
        return [path for path in found if path.name not in schema.UNHASHED_FILES]

    def records(self, shard: Path) -> list[int]:
        """Where each record of a shard begins, by its published index."""
        lines = (self.folder / schema.INDEX_FOLDER / f"{shard.name}.idx").read_text().splitlines()
        return [int(line.split()[0]) for line in lines]

    def flip(self, path: Path, bit: int) -> None:
        """Flip one bit of a file, by its number from the file's start; an object is uploaded again."""
        data = bytearray(path.read_bytes())
        data[bit // 8] ^= 1 << bit % 8
        if self._gcs:
            name = path.relative_to(self.folder.parent.parent).as_posix()
            self._gcs.put(self._bucket, name, bytes(data))
        else:
            path.write_bytes(data)

    def verify(self) -> list[tuple[str, int | None, int | None]]:
        """(file name, record, offset) of every fault that `imageshards verify` tells, and its exit code has to fit."""
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = reader_command(["verify", self.url, "--json"])
        faults = json.loads(out.getvalue())["faults"]
        assert code == (1 if faults else 0), f"exit code {code} with {len(faults)} faults"
        return [(Path(fault["file"]).name, fault["record"], fault["offset"]) for fault in faults]


def kind(path: Path) -> str:
    """A file's name without what numbers it."""
    return re.sub(r"-of-\d+|-\d{5}|(?:train|validation)[.-]", "", path.name)


def places(files: list[Path], flips: int, seed: int) -> Iterator[tuple[Path, int]]:
    """(file, bit): files take turns, places are drawn."""
    draw = random.Random(seed)
    for number in range(flips):
        path = files[number % len(files)]
        yield path, draw.randrange(8 * path.stat().st_size)


def flip_one_by_one(dataset: Dataset, flips: int, seed: int) -> Counter[str]:
    """Flips found, by kind of file.

    Raises:
        AssertionError: one was not found, or not placed; names file and bit.
    """
    found: Counter[str] = Counter()
    for path, bit in places(dataset.files(), flips, seed):
        dataset.flip(path, bit)
        faults = dataset.verify()
        dataset.flip(path, bit)
        where = f"bit {bit} of {path.name}"
        assert any(name == path.name for name, _, _ in faults), f"{where} isn't found: {faults}"
        if schema.ShardName.parse(path.name):
            starts = dataset.records(path)
            record = bisect.bisect_right(starts, bit // 8) - 1
            assert (path.name, record, starts[record]) in faults, f"{where} isn't record {record}: {faults}"
        found[kind(path)] += 1
    return found


def repair(dataset: Dataset, damage: list[tuple[Path, int]]) -> None:
    """Flip all these bits, run `--repair`.

    Raises:
        AssertionError: the job failed, or the dataset isn't what it was.
    """
    for path, bit in damage:
        dataset.flip(path, bit)
    assert dataset.verify(), "nothing is corrupt"
    code = dataset.make("--repair")
    assert code == 0, f"--repair ended with {code} after {damage}"
    assert dataset_hash(dataset.url) == dataset.hash, f"another hash after {damage}"
    assert dataset.verify() == []


def main() -> None:
    """Flip, verify, repair, and say how many of each kind were found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gs", action="store_true", help="in a bucket of a server here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as opened:
        gcs = None
        if arguments.gs:
            url = opened.enter_context(servers.fake_gcs(Path(scratch) / "gcs.log", Path(scratch)))
            os.environ["STORAGE_EMULATOR_HOST"] = url
            gcs = servers.Gcs(url)
        dataset = Dataset(Path(scratch), gcs=gcs)
        start = time.perf_counter()
        found = flip_one_by_one(dataset, arguments.flips, arguments.seed)
        seconds = time.perf_counter() - start
        for name, count in sorted(found.items()):
            print(f"{count:5}  {name}")
        print(f"{found.total()} flips, each found and placed, in {seconds:.0f} s")
        for name in sorted(found):
            some = [path for path in dataset.files() if kind(path) == name]
            repair(dataset, list(places(some, 3, arguments.seed)))
            print(f"3 flips in {name}: repaired")
        without = [path for path in dataset.files() if path.name != schema.MANIFEST_FILE]
        repair(dataset, list(places(without, 100, arguments.seed)))
        repair(dataset, list(places(dataset.files(), 100, arguments.seed)))
        print("100 flips at once, without and with the manifest: repaired")
        print(f"hash {dataset.hash}")


if __name__ == "__main__":
    sys.exit(main())
