"""Time to the first batch of a million records, and memory: from the local disk, and from gs:// with a latency.

    python benchmarks/scale.py [--shards 100] [--steps 400] [--batch_size 64] [--latency_ms 50]

Drawn 224-pixel images: one shard of 10,000 records, hard-linked under the names of all shards. Each row is the NumPy
door in a process of its own; time is from `load_info` to the first batch, imports aside; memory is the process's peak.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import google_crc32c
import numpy as np
from remote_read import slowed

from beam_pipeline import schema
from beam_pipeline.schema.manifest import open_manifest, seal_manifest
from tests import servers
from tests.reading.shards import make_dataset

RECORDS = 10_000  # in a shard: the usual 130 MB
DRAWN = 64
READ = """
import json, sys, time
from pathlib import Path
import reader
url, batch, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
def peak_mb():
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024 / 1e6
assert reader.train_batches
imported_mb, begin = peak_mb(), time.perf_counter()
batches = reader.train_batches(reader.load_info(url), "train", global_batch_size=batch)
made_s = time.perf_counter() - begin
iterator = iter(batches)
next(iterator)
first_s, first_mb = time.perf_counter() - begin, peak_mb()
for _ in range(steps - 1):
    next(iterator)
print(json.dumps([made_s, first_s, imported_mb, first_mb, peak_mb()]))
"""


def main() -> None:
    """Print a row for each storage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=100)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--latency_ms", type=float, default=50)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="imageshards-scale-") as scratch:
        local = make(Path(scratch) / "1.0.0", flags.shards)
        print(f"{flags.shards * RECORDS:,} records, batch {flags.batch_size}")
        print(f"| | train_batches, s | first batch, s | imported, MB | first batch, MB | {flags.steps} batches, MB |")
        print("|---|---|---|---|---|---|")
        arguments = [str(flags.batch_size), str(flags.steps)]
        print(row("local", [str(local), *arguments]), flush=True)
        with served(local, Path(scratch) / "served") as server, slowed(server, flags.latency_ms) as proxy:
            os.environ["STORAGE_EMULATOR_HOST"] = proxy
            print(row(f"gs://, {flags.latency_ms:g} ms", ["gs://bench/1.0.0", *arguments]))


def row(name: str, arguments: list[str]) -> str:
    """Read in a process of its own; a line of the table."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", READ, *arguments], stdout=subprocess.PIPE, text=True, check=True, env=environment
    )
    made_s, first_s, *megabytes = json.loads(done.stdout)
    return f"| {name} | {made_s:.2f} | {first_s:.2f} | " + " | ".join(f"{mb:.0f}" for mb in megabytes) + " |"


@contextmanager
def served(folder: Path, root: Path) -> Iterator[str]:
    """Run fake-gcs-server over files, the dataset in its bucket `bench`; its shards stay links to one file."""
    root.mkdir()
    log = root.with_suffix(".log")
    with servers.fake_gcs(log, root) as url:
        shards, gcs = sorted(folder.glob("*.tfrecord-*")), servers.Gcs(url)
        gcs.new_bucket("bench")
        for path in [shards[0], *(path for path in folder.rglob("*") if path.is_file() and path not in shards)]:
            gcs.put("bench", f"1.0.0/{path.relative_to(folder)}", path.read_bytes())
        for shard in shards[1:]:
            os.link(root / "bench" / "1.0.0" / shards[0].name, root / "bench" / "1.0.0" / shard.name)
        yield url


def make(folder: Path, shards: int) -> Path:
    """A dataset of `shards` shards that are one file."""
    make_dataset(folder, {"train": [DRAWN]}, size=(224, 224))
    (small,) = folder.glob("*.tfrecord-*")
    manifest = open_manifest((folder / schema.MANIFEST_FILE).read_bytes(), "")
    frames = small.read_bytes()
    rest = [schema.frame(record) for record in list(schema.unframe(frames))[: RECORDS % DRAWN]]
    data = frames * (RECORDS // DRAWN) + b"".join(rest)
    lengths = [len(record) + schema.FRAME_BYTES for record in schema.unframe(data)]
    names = [schema.ShardName("photos", "train", number, shards) for number in range(shards)]
    (folder / names[0].file).write_bytes(data)
    for name in names[1:]:
        os.link(folder / names[0].file, folder / name.file)
    small.unlink(missing_ok=shards == 1)
    rows = np.array([row for number in range(shards) for row in schema.run_rows(number, lengths)], schema.RUN_DTYPE)
    buffer = io.BytesIO()
    np.save(buffer, rows)
    (folder / schema.runs_file("train")).write_bytes(buffer.getvalue())
    manifest["files"][schema.runs_file("train")] = schema.sha256(buffer.getvalue())
    split = manifest["splits"]["train"]
    entry = {**split["shards"][0], "records": RECORDS, "bytes": len(data), "crc32c": google_crc32c.value(data)}
    counts = [count * RECORDS * shards // DRAWN for count in split["class_counts"]]
    counts[0] += RECORDS * shards - sum(counts)
    split |= {"records": RECORDS * shards, "bytes": len(data) * shards, "class_counts": counts}
    split["shards"] = [{**entry, "file": name.file} for name in names]
    manifest["images"] = manifest["records"] = RECORDS * shards
    (folder / schema.MANIFEST_FILE).write_bytes(seal_manifest(manifest))
    return folder


if __name__ == "__main__":
    main()
