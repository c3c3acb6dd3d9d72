"""Memory and time to the first batch of a training iterator on an index of a million records.

    python benchmarks/scale.py [--shards 100] [--steps 400] [--batch_size 64]

Drawn 224-pixel images: one shard of 10,000 records, hard-linked under the names of all shards. Memory is the process'
RSS beyond what it has after TensorFlow has run a small dataset of its own; time is from `load_info` to the first batch.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).parent.parent))

import google_crc32c
import numpy as np
import psutil
import tensorflow as tf

import reader
from beam_pipeline import schema
from tests.reading.shards import make_dataset

RECORDS = 10_000  # in a shard: the usual 130 MB
DRAWN = 64


def main() -> None:
    """Print both numbers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shards", type=int, default=100)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch_size", type=int, default=64)
    flags = parser.parse_args()
    assert reader.train_dataset  # its imports
    with tempfile.TemporaryDirectory(prefix="imageshards-scale-") as scratch:
        maker = get_context("spawn").Process(target=make, args=(Path(scratch), flags.shards))  # whose memory isn't ours
        maker.start()
        maker.join()
        for _ in tf.data.Dataset.range(640).batch(64).map(lambda x: tf.zeros([64, 224, 224, 3], tf.uint8)):
            pass
        before = rss()
        begin = time.perf_counter()
        info = reader.load_info(f"{scratch}/1.0.0")
        dataset = reader.train_dataset(info, "train", global_batch_size=flags.batch_size)
        iterator = iter(dataset)
        next(iterator)
        print(f"{info.splits['train'].records:,} records: first batch after {time.perf_counter() - begin:.2f} s")
        most = 0
        for step in range(flags.steps):
            next(iterator)
            if step % 20 == 0:
                most = max(most, rss())
        print(f"RSS {most - before} MB beyond TensorFlow's own {before} MB, over {flags.steps} batches")


def rss() -> int:
    """This process' memory in MB."""
    return int(psutil.Process().memory_info().rss >> 20)


def make(scratch: Path, shards: int) -> None:
    """A dataset of `shards` shards that are one file."""
    folder = Path(make_dataset(scratch / "1.0.0", {"train": [DRAWN]}, size=(224, 224)))
    (small,) = folder.glob("*.tfrecord-*")
    manifest = schema.open_manifest((folder / schema.MANIFEST_FILE).read_bytes(), "")
    frames = small.read_bytes()
    data = frames * (RECORDS // DRAWN) + b"".join(
        schema.frame(r) for r in list(schema.unframe(frames))[: RECORDS % DRAWN]
    )
    lengths = [len(record) + schema.FRAME_BYTES for record in schema.unframe(data)]
    names = [schema.ShardName("photos", "train", number, shards) for number in range(shards)]
    (folder / names[0].file).write_bytes(data)
    for name in names[1:]:
        os.link(folder / names[0].file, folder / name.file)
    rows = np.array([row for number in range(shards) for row in schema.run_rows(number, lengths)], schema.RUN_DTYPE)
    buffer = io.BytesIO()
    np.save(buffer, rows)
    (folder / schema.runs_file("train")).write_bytes(buffer.getvalue())
    manifest["files"][schema.runs_file("train")] = schema.sha256(buffer.getvalue())
    split = manifest["splits"]["train"]
    entry = {**split["shards"][0], "records": RECORDS, "bytes": len(data), "crc32c": google_crc32c.value(data)}
    split |= {"records": RECORDS * shards, "shards": [{**entry, "file": name.file} for name in names]}
    (folder / schema.MANIFEST_FILE).write_bytes(schema.seal_manifest(manifest))


if __name__ == "__main__":
    main()
