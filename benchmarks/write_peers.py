"""Commands from the same class folders to shards of 224-pixel JPEGs of quality 90: this package and other ways.

    benchmarks/peers_env.sh write                             # img2dataset, once
    python benchmarks/write_peers.py [IMAGES] [--count 6000] [--repeats 7] [--only NAME,…] [--rows ours|here|all]

IMAGES is a folder of class folders (drawn pictures without); its files are repeated by hard links up to the count. The
commands run one at a time, in turns; imports and starting processes are part of them. CPU is that of all processes of a
command, peak the most that they held together. `here` are ours and the rows of writers.py that .venv can run; `bare` is
the codec alone in two threads. img2dataset can't stretch, so it crops, as `ours, crop` does, and decodes with OpenCV.
"""

from __future__ import annotations

import argparse
import io
import shutil
import statistics
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import material
import memory
import turns
import writers
from PIL import Image
from turns import Run

from beam_pipeline import schema

ROOT = Path(__file__).parent.parent
PEER = ROOT / "build" / "peers" / "write" / ".venv" / "bin" / "python"
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": ""}  # else every turn compiles this package again
OURS = ("ours", "ours, crop", "bare")
HERE = {
    "TFDS generator": "tfds_generator",
    "TFDS on Beam": "tfds_beam",
    "tf.io.TFRecordWriter in a loop": "tutorial",
    "ParDo, WriteToTFRecord": "write_to_tfrecord",
}
OTHERS = {
    "img2dataset, tfrecord, crop": "img2dataset_tfrecord",
    "img2dataset, webdataset, crop": "img2dataset_webdataset",
}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path, nargs="?")
    parser.add_argument("--count", type=int, default=6000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rows", choices=("ours", "here", "all"), default="all")
    parser.add_argument("--only", default="", help="parts of names, separated by commas")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="imageshards-bench-") as name:
        images, output = material.images(flags.images, Path(name), flags.count), Path(name, "out")
        cases = commands(flags.rows, str(images), str(output))
        wanted = [part.strip() for part in flags.only.split(",")]
        cases = {name: command for name, command in cases.items() if any(part in name for part in wanted)}
        print(f"{flags.count:,} images, {flags.repeats} turns", flush=True)
        runs: dict[str, list[Run]] = {name: [] for name in cases}
        more: dict[str, dict[str, str]] = {"shards": {}, "kB per image": {}, "lost": {}}
        for _ in range(flags.repeats):
            for name in list(runs):
                try:
                    usage = memory.watch(cases[name], output.with_suffix(".log"), ENVIRONMENT)
                except RuntimeError as error:
                    print(f"{name} failed: {error}", flush=True)
                    del runs[name]
                    continue
                runs[name].append(Run(flags.count, usage.seconds, usage.cpu_s, 0, usage.rss / 1e6))
                for column, cell in written(output, flags.count).items() if name != "bare" else ():
                    more[column][name] = cell
                shutil.rmtree(output)
        print(turns.table(runs, OURS[:1], more))
        for name in OTHERS:
            if name in runs and OURS[1] in runs:
                print(f"{name} compared with {OURS[1]}: {turns.ratio(runs[name], runs[OURS[1]])}")
    if flags.rows == "all" and not PEER.exists():
        print(
            f"img2dataset isn't installed: benchmarks/peers_env.sh write makes {PEER.parent.parent.relative_to(ROOT)}"
        )


def commands(rows: str, images: str, output: str) -> dict[str, list[str]]:
    """The command of every row."""
    ours = [sys.executable, "-m", "imageshards", "write", f"--input={images}", f"--output={output}", "--name=bench"]
    ours += [f"--num_shards={writers.SHARDS}"]
    own, crop, bare = OURS

    def writer(function: str, python: str = sys.executable) -> list[str]:
        return [python, writers.__file__, function, images, output]

    found = {own: ours, crop: [*ours, "--resize_mode=crop"], bare: writer("bare")}
    if rows != "ours":
        found |= {name: writer(function) for name, function in HERE.items()}
    if rows == "all" and PEER.exists():
        found |= {name: writer(function, str(PEER)) for name, function in OTHERS.items()}
    return found


def written(output: Path, images: int) -> dict[str, str]:
    """Number, mean size and worst deviation of the shards; bytes per stored image; images that aren't there."""
    sizes, stored = [], []
    for path in shards(output):
        sizes.append(path.stat().st_size)
        stored += [jpeg(record) for record in records(path)]
    if not stored:
        return {"lost": str(images)}
    assert all(Image.open(io.BytesIO(one)).size == (writers.SIZE, writers.SIZE) for one in stored[:100])
    mean = statistics.fmean(sizes)
    worst = max(abs(size / mean - 1) for size in sizes)
    return {
        "shards": f"{len(sizes)} × {mean / 1e6:.1f} MB ± {worst:.1%}",
        "kB per image": f"{statistics.fmean(map(len, stored)) / 1e3:.1f}",
        "lost": str(images - len(stored)),
    }


def shards(output: Path) -> list[Path]:
    """Every file of records."""
    files = [path for path in output.rglob("*") if path.is_file() and path.parent.name != "index"]
    return [path for path in files if ".tfrecord" in path.name or path.suffix == ".tar"]


def records(path: Path) -> Iterator[bytes]:
    """What a shard holds."""
    if path.suffix != ".tar":
        yield from schema.unframe(path.read_bytes())
        return
    with tarfile.open(path) as tar:
        for entry in tar:
            if entry.name.endswith(".jpg"):
                file = tar.extractfile(entry)
                assert file is not None
                yield file.read()


def jpeg(record: bytes) -> bytes:
    """The image in a record, whatever its keys are."""
    start = record.index(b"\xff\xd8\xff")
    return record[start : record.rindex(b"\xff\xd9") + 2]


if __name__ == "__main__":
    main()
