"""Commands from the same class folders to shards of 224-pixel JPEGs of quality 90: this package and img2dataset.

    benchmarks/peers_env.sh write                             # img2dataset, once
    python benchmarks/write_peers.py [IMAGES] [--count 6000] [--repeats 7]

The commands run one at a time, in turns; imports and starting processes are part of them. CPU is that of all processes
of a command, peak the most that they held together. img2dataset can't stretch, so it crops, as `ours, crop` does, and
decodes with OpenCV.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tarfile
import tempfile
from pathlib import Path

import material
import memory
import turns
from turns import Run

from beam_pipeline import schema

ROOT = Path(__file__).parent.parent
PEER = ROOT / "build" / "peers" / "write" / ".venv" / "bin" / "python"
# Else every turn compiles this package again; img2dataset would look for a GPU and for updates.
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "PYTHONDONTWRITEBYTECODE": "",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "CUDA_VISIBLE_DEVICES": "",
    "NO_ALBUMENTATIONS_UPDATE": "1",
}
SIZE, SHARDS = 224, 8
OURS, CROP = "ours", "ours, crop"
# From file:// to shards. Its processes decode one image at a time, its threads read.
IMG2DATASET = """
import os, sys
from pathlib import Path
import img2dataset
images, output, form, size, shards = *sys.argv[1:4], *map(int, sys.argv[4:])
files = sorted(os.path.join(folder, name) for folder, _, names in os.walk(images) for name in names)
os.makedirs(output)
urls = Path(output, "urls.txt")
urls.write_text("\\n".join(Path(path).as_uri() for path in files))
img2dataset.download(
    url_list=str(urls), output_folder=f"{output}/{form}", output_format=form, image_size=size,
    resize_mode="center_crop", encode_quality=90, processes_count=2, thread_count=4,
    number_sample_per_shard=-(-len(files) // shards), compute_hash=None, extract_exif=False,
)
"""


def main() -> None:
    """Print a table."""
    flags = turns.parser(__doc__, 6000, 7).parse_args()
    with tempfile.TemporaryDirectory(prefix="imageshards-bench-") as name:
        images, output = material.images(flags.images, Path(name), flags.count), Path(name, "out")
        cases = commands(str(images), str(output))
        print(f"{flags.count:,} images, {flags.repeats} turns", flush=True)
        runs: dict[str, list[Run]] = {name: [] for name in cases}
        more: dict[str, dict[str, str]] = {"shards": {}, "lost": {}}
        for _ in range(flags.repeats):
            for name in list(runs):
                try:
                    usage = memory.watch(cases[name], output.with_suffix(".log"), ENVIRONMENT)
                except RuntimeError as error:
                    print(f"{name} failed: {error}", flush=True)
                    del runs[name]
                    continue
                runs[name].append(Run(flags.count, usage.seconds, usage.cpu_s, 0, usage.rss / 1e6))
                for column, cell in written(output, flags.count).items():
                    more[column][name] = cell
                shutil.rmtree(output)
        print(turns.table(runs, (OURS,), more))
        for name, own in runs.items():
            if name.startswith("img2dataset") and CROP in runs:
                print(f"{name} compared with {CROP}: {turns.ratio(own, runs[CROP])}")


def commands(images: str, output: str) -> dict[str, list[str]]:
    """The command of every row."""
    ours = [sys.executable, "-m", "imageshards", "write", f"--input={images}", f"--output={output}", "--name=bench"]
    ours += [f"--num_shards={SHARDS}"]
    found = {OURS: ours, CROP: [*ours, "--resize_mode=crop"]}
    if not PEER.exists():
        print("img2dataset isn't installed: benchmarks/peers_env.sh write does it")
        return found
    for form in ("tfrecord", "webdataset"):
        command = [str(PEER), "-c", IMG2DATASET, images, output, form, str(SIZE), str(SHARDS)]
        found[f"img2dataset, {form}, crop"] = command
    return found


def written(output: Path, images: int) -> dict[str, str]:
    """Number, mean size and worst deviation of the shards; images that aren't there."""
    files = [path for path in output.rglob("*") if path.is_file() and path.parent.name != "index"]
    shards = [path for path in files if ".tfrecord" in path.name or path.suffix == ".tar"]
    if not shards:
        return {"lost": str(images)}
    sizes = [path.stat().st_size for path in shards]
    mean = statistics.fmean(sizes)
    return {
        "shards": f"{len(sizes)} × {mean / 1e6:.1f} MB ± {max(abs(size / mean - 1) for size in sizes):.1%}",
        "lost": str(images - sum(map(count, shards))),
    }


def count(shard: Path) -> int:
    """How many images a shard holds."""
    if shard.suffix != ".tar":
        return sum(1 for _ in schema.unframe(shard.read_bytes()))
    with tarfile.open(shard) as tar:
        return sum(name.endswith(".jpg") for name in tar.getnames())


if __name__ == "__main__":
    main()
