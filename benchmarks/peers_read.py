"""Our doors beside a ceiling and other libraries: the same stored bytes, 224 px, batch 64, shuffled.

    benchmarks/peers_env.sh                                   # the other libraries, once
    python benchmarks/peers_read.py [IMAGES] [--count 20480] [--repeats 7] [--rows ours|peers|all]

IMAGES is a folder of class folders (drawn pictures without); its files are repeated up to the count and converted once,
for other formats too, into build/bench. A library that isn't installed has a row that says so.

Base is `tf.io.decode_jpeg` of the same bytes from memory in a batched map, the better of two ways, turn by turn. `bare`
is simplejpeg in a thread a core on the same bytes in memory.
"""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path

import material
import turns
from stored import SHARDS, WORKERS
from turns import Case

from beam_pipeline import schema

ROOT = Path(__file__).parent.parent
PEERS = ROOT / "build" / "peers" / ".venv" / "bin" / "python"
MISSING = ROOT / "build" / "peers" / "missing.txt"
CEILINGS = ("ceiling", "ceiling, AUTOTUNE")
PAIRS = (
    ("NumPy", "bare"),
    ("PyTorch", "NumPy"),
    ("JAX", "NumPy"),
    ("NumPy", f"FFCV, {WORKERS} workers"),
    ("NumPy, random crop", f"FFCV, {WORKERS} workers, random crop"),
)
FORMS = {"webdataset": "tars", "streaming": "mds", "grain": "array_record", "ffcv": "beton", "tfrecord": ""}


def main() -> None:
    """Print a table."""
    parser = turns.parser(__doc__, 20_480, 7)
    parser.add_argument("--rows", choices=("ours", "peers", "all"), default="all")
    flags = parser.parse_args()
    url, folder = material.kept(flags.images, flags.count)
    cases = ceilings(str(folder))
    if flags.rows != "peers":
        cases |= ours(url)
    if flags.rows != "ours":
        cases |= tensorflows(url, folder) | individual_files(flags.images) | peers(url, folder)
    print(f"{flags.count:,} images a turn, {flags.repeats} turns; base: the better of {' and '.join(CEILINGS)}")
    runs = turns.in_turns(cases, flags.count, flags.repeats)
    print(turns.table(runs, CEILINGS))
    for one, other in PAIRS:
        if one in runs and other in runs:
            print(f"{one} beside {other}: {turns.ratio(runs[one], runs[other])}")


def ceilings(folder: str) -> dict[str, Case]:
    """From memory."""
    return {
        CEILINGS[0]: Case("doors.ceiling", {"folder": folder, "is_autotuned": False}),
        CEILINGS[1]: Case("doors.ceiling", {"folder": folder, "is_autotuned": True}),
        "bare": Case("doors.bare", {"folder": folder}),
    }


def ours(url: str) -> dict[str, Case]:
    """Every door."""
    return {
        "TensorFlow": Case("doors.tensorflow", {"url": url}),
        "NumPy": Case("doors.numpy", {"url": url}),
        "PyTorch": Case("doors.torch", {"url": url}),
        "JAX": Case("doors.jax", {"url": url}),
        "TensorFlow, random crop": Case("doors.tensorflow", {"url": url, "is_cropped": True}),
        "NumPy, random crop": Case("doors.numpy", {"url": url, "is_cropped": True}),
    }


def tensorflows(url: str, folder: Path) -> dict[str, Case]:
    """TensorFlow's own ways."""
    if not (folder / "gzip").exists():
        write_gzip(Path(url), folder / "gzip")
    return {
        "tutorial: GZIP, single images": Case("doors.tutorial_gzip", {"pattern": f"{folder}/gzip/*"}),
        "tutorial: plain, batch 64": Case("doors.tutorial_plain", {"pattern": f"{url}/bench-train.tfrecord-*"}),
        "tfds.load": Case("doors.tfds", {"url": url}),
    }


def individual_files(images: Path | None) -> dict[str, Case]:
    """The original files, larger than what is stored: what training without shards decodes."""
    return {} if images is None else {"individual files, local": Case("doors.files", {"root": str(images)})}


def write_gzip(url: Path, target: Path) -> None:
    """The dataset's records as GZIP shards."""
    target.mkdir()
    shards = sorted(url.glob("bench-train.tfrecord-*"))
    records = [record for shard in shards for record in schema.unframe(shard.read_bytes())]
    for shard in range(SHARDS):
        packer = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
        packed = packer.compress(b"".join(map(schema.frame, records[shard::SHARDS]))) + packer.flush()
        (target / f"{shard:05d}").write_bytes(packed)


def peers(url: str, folder: Path) -> dict[str, Case]:
    """Other libraries; those that aren't there are named."""
    at, python = {"folder": str(folder)}, str(PEERS)
    cases = {
        f"WebDataset, {WORKERS} workers": Case("peers.webdataset", at, python),
        f"tfrecord, {WORKERS} workers": Case("peers.tfrecord", {"url": url}, python),
        f"MosaicML streaming, {WORKERS} workers": Case("peers.streaming", at, python),
        "Grain over ArrayRecord, threads": Case("peers.grain", at, python),
        f"Grain over ArrayRecord, {WORKERS} workers": Case("peers.grain", {**at, "workers": WORKERS}, python),
        f"FFCV, {WORKERS} workers": Case("peers.ffcv", at, python),
        f"FFCV, {WORKERS} workers, random crop": Case("peers.ffcv", {**at, "is_cropped": True}, python),
    }
    if not PEERS.exists():
        sys.exit(f"{PEERS.relative_to(ROOT)} isn't there: run benchmarks/peers_env.sh, or give --rows ours")
    missing = dict(line.split(": ", 1) for line in MISSING.read_text().splitlines())
    for library, form in FORMS.items():
        if library in missing:
            print(f"{library} isn't installed: {missing[library]}")
            cases = {name: case for name, case in cases.items() if case.make != f"peers.{library}"}
        elif form and not (folder / form).exists():
            subprocess.run([python, str(ROOT / "benchmarks" / "peers.py"), form, str(folder)], check=True)
    return cases


if __name__ == "__main__":
    main()
