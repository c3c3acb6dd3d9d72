"""`train_dataset` beside other readers of the same images: full shuffle or each one's own, 224 px, batch 64, uint8.

    pip install webdataset tfrecord
    python benchmarks/peers_read.py [IMAGES] [--count 6400] [--repeats 7] [--only NAME,…]

IMAGES is a folder of class folders (drawn pictures without); its files are repeated up to the count and converted once.
All readers get the same encoded bytes. A peer that isn't installed is left out with a line.

The ceiling decodes the same bytes from memory with `tf.io.decode_jpeg` in the same batched map. The tutorial's way is
GZIP, interleave, a parse for each record, float32, single images, as it has them; its plain form with batches of 64
comes beside it. WebDataset and tfrecord decode with Pillow in 2 worker processes that persist.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import material
import numpy as np
import turns

import reader
from beam_pipeline import schema
from reader.picking import pick
from reader.runs import RunReader

SIZE, BATCH, WORKERS, SHARDS = 224, 64, 2, 8
SHUFFLED = 2048  # records in the shuffle buffers of the readers that have one


def main() -> None:
    """Print a line for each reader."""
    parser = argparse.ArgumentParser()
    parser.add_argument("images", type=Path, nargs="?")
    parser.add_argument("--count", type=int, default=6400)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", default="", help="names of readers, separated by commas")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="imageshards-peers-") as scratch:
        source = material.images(flags.images, Path(scratch), flags.count)
        url = material.dataset(source, Path(scratch))
        other_forms(url, Path(scratch))
        cases: dict[str, tuple[Callable[..., turns.Reader], tuple[Any, ...]]] = {
            "train_dataset": (ours, (url,)),
            "ceiling": (ceiling, (url,)),
            "random_resized_crop": (ours_cropped, (url,)),
            "ceiling of random_resized_crop": (ceiling, (url, True)),
            "tutorial GZIP": (tutorial_gzip, (f"{scratch}/gzip-*",)),
            "tutorial plain at batch 64": (tutorial_plain, (f"{url}/bench-train.tfrecord-*",)),
            "tfds.load": (tfds_load, (url,)),
            "webdataset": (webdataset, (f"{scratch}/web-{{00000..{SHARDS - 1:05d}}}.tar",)),
            "tfrecord": (tfrecord, (url,)),
            "ShardDataset in threads": (ours_torch, (url, 0)),
            "ShardDataset with 2 workers": (ours_torch, (url, WORKERS)),
        }
        needs = {"tfds.load": "tensorflow_datasets", "webdataset": "webdataset", "tfrecord": "tfrecord"}
        needs |= {name: "torch" for name in cases if name.startswith("ShardDataset")}
        for name, module in needs.items():
            if importlib.util.find_spec(module) is None:
                del cases[name]
                print(f"{name}: {module} isn't installed")
        wanted = flags.only.split(",") if flags.only else list(cases)
        runs = turns.in_turns({name: cases[name] for name in wanted}, flags.count, flags.repeats)
        print(f"{flags.count} images a run, {flags.repeats} runs in turns")
        print(turns.table(runs, wanted[0]))


def other_forms(url: str, scratch: Path) -> None:
    """The dataset's records as GZIP shards and as WebDataset's tar files, written once."""
    info = reader.load_info(url)
    table = info.run_table("train")
    records = RunReader(info.storage, table).read(np.arange(table.total))
    for shard in range(SHARDS):
        packer = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
        data = b"".join(map(schema.frame, records[shard::SHARDS]))
        (scratch / f"gzip-{shard:05d}").write_bytes(packer.compress(data) + packer.flush())
        with tarfile.open(scratch / f"web-{shard:05d}.tar", "w") as tar:
            for number, record in enumerate(records[shard::SHARDS]):
                image, label = pick(record, b"image", b"class")
                for suffix, content in (("jpg", image), ("cls", str(label).encode())):
                    entry = tarfile.TarInfo(f"{shard:05d}{number:08d}.{suffix}")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))


def sizes(dataset: Iterable[Any]) -> turns.Reader:
    """A reader of a dataset of (images, labels) batches; checks that they are what was asked for."""

    def read() -> Iterable[int]:
        for images, _ in dataset:
            assert SIZE in images.shape and len(images) <= BATCH
            yield len(images)

    return read


def ours(url: str, **options: Any) -> turns.Reader:
    """`train_dataset` with its defaults."""
    info = reader.load_info(url)
    return sizes(reader.train_dataset(info, "train", global_batch_size=BATCH, image_size=SIZE, **options))


def ours_cropped(url: str) -> turns.Reader:
    """With RandomResizedCrop."""
    return ours(url, augment=reader.augment.random_resized_crop())


def ceiling(url: str, is_cropped: bool = False) -> turns.Reader:
    """Decoding alone, from memory."""
    from reader.bench.ceilings import of_images
    from reader.decode import batch_decoder

    info = reader.load_info(url)
    table = info.run_table("train")
    records = RunReader(info.storage, table).read(np.arange(table.total))
    images = [pick(record, b"image", b"class")[0] for record in records]
    work = batch_decoder(info.image, SIZE, augment=reader.augment.random_resized_crop() if is_cropped else None)
    dataset = of_images(images, work, BATCH)()
    return lambda: (len(batch) for batch in dataset)


def _example(record: Any) -> Any:
    import tensorflow as tf

    keys = {"image": tf.io.FixedLenFeature([], tf.string), "class": tf.io.FixedLenFeature([], tf.int64)}
    parsed = tf.io.parse_single_example(record, keys)
    image = tf.ensure_shape(tf.io.decode_jpeg(parsed["image"], channels=3), [SIZE, SIZE, 3])
    return image, parsed["class"]


def tutorial_gzip(pattern: str) -> turns.Reader:
    """GZIP, interleave, a parse for each record, float32, single images."""
    import tensorflow as tf

    def as_float(image: Any, label: Any) -> Any:
        return tf.cast(image, tf.float32) / 255.0, label

    names = tf.data.Dataset.list_files(pattern)
    records = names.interleave(
        lambda name: tf.data.TFRecordDataset(name, compression_type="GZIP"), num_parallel_calls=tf.data.AUTOTUNE
    )
    examples = records.shuffle(SHUFFLED).map(_example, tf.data.AUTOTUNE).map(as_float, tf.data.AUTOTUNE)
    return sizes(examples.batch(1).prefetch(tf.data.AUTOTUNE))


def tutorial_plain(pattern: str) -> turns.Reader:
    """Plain shards read in parallel, uint8, batches of 64."""
    import tensorflow as tf

    records = tf.data.TFRecordDataset(tf.io.gfile.glob(pattern), num_parallel_reads=tf.data.AUTOTUNE)
    examples = records.shuffle(SHUFFLED).map(_example, num_parallel_calls=tf.data.AUTOTUNE)
    return sizes(examples.batch(BATCH).prefetch(tf.data.AUTOTUNE))


def tfds_load(url: str) -> turns.Reader:
    """TFDS without its cache."""
    import tensorflow as tf
    import tensorflow_datasets as tfds

    builder = tfds.builder_from_directory(url)
    config = tfds.ReadConfig(try_autocache=False)
    dataset = builder.as_dataset(split="train", shuffle_files=True, as_supervised=True, read_config=config)
    return sizes(dataset.shuffle(SHUFFLED).batch(BATCH).prefetch(tf.data.AUTOTUNE))


def webdataset(pattern: str) -> turns.Reader:
    """WebDataset in 2 workers, which make the batches."""
    import webdataset as wds

    dataset = wds.WebDataset(pattern, shardshuffle=SHARDS, nodesplitter=None).shuffle(SHUFFLED).decode("rgb8")
    batches = dataset.to_tuple("jpg", "cls").batched(BATCH, partial=True)
    return sizes(wds.WebLoader(batches, batch_size=None, num_workers=WORKERS, persistent_workers=True))


def _decode(features: dict[str, Any]) -> tuple[Any, int]:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(features["image"])).convert("RGB")), int(features["class"][0])


def tfrecord(url: str) -> turns.Reader:
    """The tfrecord package with indexes, in 2 workers."""
    import torch
    from tfrecord.torch.dataset import MultiTFRecordDataset

    names = [path.name for path in Path(url).glob("bench-train.tfrecord-*")]
    dataset = MultiTFRecordDataset(
        f"{url}/{{}}",
        f"{url}/index/{{}}.idx",
        dict.fromkeys(names, 1 / len(names)),
        {"image": "byte", "class": "int"},
        shuffle_queue_size=SHUFFLED,
        transform=_decode,
        infinite=False,
    )
    return sizes(torch.utils.data.DataLoader(dataset, batch_size=BATCH, num_workers=WORKERS, persistent_workers=True))


def ours_torch(url: str, workers: int) -> turns.Reader:
    """`reader.torch.ShardDataset`, in threads or workers."""
    import torch

    dataset = reader.torch.ShardDataset(reader.load_info(url), "train", batch_size=BATCH, image_size=SIZE)
    return sizes(
        torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    )


if __name__ == "__main__":
    main()
