"""A new version with a base compared with the same one without: CPU of the complete command, and one hash.

    python benchmarks/growth.py [IMAGES] [--count 6000] [--repeats 3] [--image_size 224] [--only more,killed] [--gs]

IMAGES is a folder of class folders (drawn pictures without), repeated up to the count. A change is made to the input of
version 1.0.0, or to the flags; in some rows the job with a base is killed, or its base is corrupt. From the CPU of each
start of a command that of a job of ten images is subtracted. With --gs input and output are on fake-gcs-server (from
`.[test]`), 1 % of the images are new, and the requests of the job with a base are counted.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import material

from beam_pipeline import storage
from beam_pipeline.inputs.references import sample_size
from reader.tools.describe import dataset_hash
from tests import servers

CHANGES: dict[str, Callable[[list[Path]], list[str]]] = {}
FLAGS = ["--splits", "train=0.8,validation=0.2", "--num_shards", "train=6,validation=3"]
KILLS = {"killed": 3}
FLIPPED = {"flipped_records": "*.tfrecord-*", "flipped_table": "index/*.tfrecord-*.npy"}
VERSIONS = {"four_versions": 4}
PIECE_BYTES = 8 << 20  # of a base shard that one request reads


def change(function: Callable[[list[Path]], list[str]]) -> Callable[[list[Path]], list[str]]:
    """One of the changes: of every hundredth file, or of the flags, which it returns."""
    CHANGES[function.__name__] = function
    return function


@change
def nothing(files: list[Path]) -> list[str]:
    """Not a thing."""
    return []


@change
def more(files: list[Path]) -> list[str]:
    """One percent more images."""
    for file in files:
        taken = len([*file.parent.glob(f"new-*-{file.name}")])
        shutil.copy(file, file.with_name(f"new-{taken}-{file.name}"))
    return []


@change
def fewer(files: list[Path]) -> list[str]:
    """One percent fewer."""
    for file in files:
        file.unlink()
    return []


@change
def excluded(files: list[Path]) -> list[str]:
    """One percent left out by a list."""
    images = files[0].parent.parent
    gone = images.with_name(f"{images.name}.txt")
    gone.write_text("\n".join(file.relative_to(images).as_posix() for file in files))
    return ["--exclude", str(gone)]


@change
def relabelled(files: list[Path]) -> list[str]:
    """One percent in another class folder."""
    folders = sorted({file.parent for file in files})
    for file in files:
        file.rename(folders[folders.index(file.parent) - 1] / f"moved-{file.name}")
    return []


@change
def replaced(files: list[Path]) -> list[str]:
    """By the picture of the next, in as many bytes if there is room behind it."""
    contents = [file.read_bytes() for file in files]
    for file, own, other in zip(files, contents, [*contents[1:], contents[0]], strict=True):
        file.unlink()  # a link
        file.write_bytes(other.ljust(len(own), b"\0"))
    return []


@change
def class_inserted(files: list[Path]) -> list[str]:
    """A class before all others, so that every id changes."""
    folder = files[0].parent.with_name("0 first")
    folder.mkdir()
    shutil.copy(files[0], folder)
    return []


@change
def other_shares(files: list[Path]) -> list[str]:
    """Other splits."""
    return ["--splits", "train=0.7,validation=0.3"]


@change
def other_shards(files: list[Path]) -> list[str]:
    """Other shards."""
    return ["--num_shards", "train=9,validation=2"]


@change
def four_versions(files: list[Path]) -> list[str]:
    """The last of four versions in a row: each has one percent more and the one before as its base."""
    return more(files)


@change
def killed(files: list[Path]) -> list[str]:
    """One percent more; the job with a base is killed three times, each time after another shard, and run again."""
    return more(files)


@change
def flipped_records(files: list[Path]) -> list[str]:
    """One percent more; a bit of a shard of the base is flipped."""
    return more(files)


@change
def flipped_table(files: list[Path]) -> list[str]:
    """One percent more; a bit of a record table of the base is flipped."""
    return more(files)


def write(images: str, output: str, *more: str, kills: int = 0) -> float:
    """CPU seconds of the command and its children; killed so many times after another shard, and run again."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "beam_pipeline", "--input", images, "--output", output, "--name", "bench"]
    for _ in range(kills):
        with subprocess.Popen([*command, *FLAGS, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            shards = finished_shards(output)
            while finished_shards(output) == shards and process.poll() is None:
                time.sleep(0.01)
            process.kill()
        if process.returncode == 0:
            sys.exit("it ended before it was killed: take more images")
    done = subprocess.run([*command, *FLAGS, *more], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def finished_shards(output: str) -> int:
    """How many shards of the new version there are."""
    return len([*Path(output).glob("bench/1.1.0/*.tfrecord-*")])


@contextmanager
def bit_flipped(file: Path) -> Iterator[None]:
    """A file with a flipped bit in its middle."""
    content = file.read_bytes()
    middle = len(content) // 2
    file.write_bytes(content[:middle] + bytes((content[middle] ^ 1,)) + content[middle + 1 :])
    yield
    file.write_bytes(content)


def write_with_base(case: str, images: str, output: str, flags: list[str]) -> float:
    """The same of the job with a base, and with what disturbs it."""
    files = sorted(Path(output).glob(f"bench/1.0.0/{FLIPPED[case]}")) if case in FLIPPED else []
    with bit_flipped(files[0]) if files else nullcontext():
        return write(images, output, *flags, kills=KILLS.get(case, 0))


def compare(
    case: str, ten: float, repeats: int, plain: Callable[[], float], based: Callable[[], float], *urls: str
) -> None:
    """Run both jobs in turns, print a row, and delete what they wrote."""
    runs, hashes = [], set()
    for _ in range(repeats):
        runs.append((plain() - ten, based() - ten * (1 + KILLS.get(case, 0))))
        for url in urls:
            hashes.add(dataset_hash(url))
            store = storage.open_storage(url)
            for file in list(store.files(url)):
                store.delete(storage.join(url, file.path))
    ratios = sorted(ours / theirs for theirs, ours in runs)
    seconds = " | ".join(f"{median(column):.1f}" for column in zip(*runs, strict=True))
    spread = f"{median(ratios):.3f} ({ratios[0]:.3f} – {ratios[-1]:.3f})"
    print(f"| {case} | {seconds} | {spread} | {len(hashes) == 1} |", flush=True)


def head(count: int, ten: float, repeats: int) -> None:
    """Print the head of the table."""
    print(f"{count:,} images, {repeats} turns; CPU of ten images: {ten:.2f} s, subtracted")
    print("| change | without a base, s | with, s | ratio | one hash |")
    print("| --- | --- | --- | --- | --- |")


def local(flags: argparse.Namespace, images: Path, few: Path, scratch: Path) -> None:
    """A row for each change, on this machine."""
    size = ["--image_size", flags.image_size]
    ten = median(write(str(few), f"{scratch}/ten{turn}", *size) for turn in range(3))
    write(str(images), f"{scratch}/base", *size)
    head(flags.count, ten, flags.repeats)
    for case in flags.only.split(","):
        changed, plain, base = scratch / case, f"{scratch}/plain", f"{scratch}/base-{case}"
        shutil.copytree(images, changed, copy_function=os.link)
        shutil.copytree(scratch / "base", base, copy_function=os.link)
        files = sorted(path for path in changed.rglob("*") if path.is_file())[::100]
        for number in range(1, VERSIONS.get(case, 1)):
            more(files)
            write(str(changed), base, *size, "--version", f"1.0.{number}")
        version = [*size, *CHANGES[case](files), "--version", "1.1.0"]

        without = partial(write, str(changed), plain, *version, "--base", "none")
        based = partial(write_with_base, case, str(changed), base, version)
        compare(case, ten, flags.repeats, without, based, f"{plain}/bench/1.1.0", f"{base}/bench/1.1.0")
        shutil.rmtree(changed)
        shutil.rmtree(base)


def on_gs(flags: argparse.Namespace, images: Path, few: Path, log: Path) -> None:
    """One percent more on fake-gcs-server, and the requests of the job with a base."""
    with servers.fake_gcs(log) as server:
        os.environ["STORAGE_EMULATOR_HOST"] = server
        gcs = servers.Gcs(server, log)
        bucket, size = gcs.new_bucket(), ["--image_size", flags.image_size]
        url = f"gs://{bucket}"
        gcs.put_folder(bucket, "few", few)
        gcs.put_folder(bucket, "images", images)
        ten = median(write(f"{url}/few", f"{url}/ten{turn}", *size) for turn in range(3))
        write(f"{url}/images", f"{url}/base", *size)
        files = sorted(path for path in images.rglob("*") if path.is_file())[::100]
        for file in files:
            gcs.put(bucket, f"images/{file.parent.name}/new-{file.name}", file.read_bytes())
        version = ["--version", "1.1.0", *size]
        reads: list[str] = []

        def based() -> float:
            before = len(gcs.requests())
            seconds = write(f"{url}/images", f"{url}/base", *version)
            reads[:] = [request.object_read or "" for request in gcs.requests()[before:]]
            return seconds

        head(flags.count, ten, flags.repeats)
        without = partial(write, f"{url}/images", f"{url}/plain", *version, "--base", "none")
        compare("more", ten, flags.repeats, without, based, f"{url}/plain/bench/1.1.0", f"{url}/base/bench/1.1.0")
        of_images = sum(name.startswith("images/") for name in reads)
        sample = sample_size(flags.count + len(files))
        print(f"{of_images:,} reads of images: {len(files):,} are new, {sample:,} are in the sample")
        for shard in storage.open_storage(url).files(f"{url}/base/bench/1.0.0"):
            if shard.path.startswith("bench-"):
                count = sum(name.startswith("base/bench/1.0.0/") and shard.path in name for name in reads)
                print(f"{count} reads of {shard.path} and its table, at most {6 + shard.bytes / PIECE_BYTES:.0f}")


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path, nargs="?")
    parser.add_argument("--count", type=int, default=6000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--image_size", default="224")
    parser.add_argument("--only", default=",".join(CHANGES))
    parser.add_argument("--gs", action="store_true")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="imageshards-bench-") as folder:
        scratch = Path(folder)
        images = material.images(flags.images, scratch / "first", flags.count)
        few = material.images(flags.images, scratch / "few", 10)
        if flags.gs:
            on_gs(flags, images, few, scratch / "requests.log")
        else:
            local(flags, images, few, scratch)


if __name__ == "__main__":
    main()
