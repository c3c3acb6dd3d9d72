"""Other libraries as `turns.Reader`s of the same stored bytes, and what writes their formats.

    build/peers/.venv/bin/python benchmarks/peers.py FORM FOLDER     # mds, array_record, beton or tars

Runs in the environment of peers_env.sh, which holds nothing of this package. Where a library leaves decoding to its
user, that is Pillow, in 2 worker processes that persist from iteration to iteration.
"""

from __future__ import annotations

import io
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import turns
from doors import sizes
from PIL import Image
from stored import BATCH, SHARDS, SHUFFLED, SIZE, WORKERS, stored


def decode(encoded: bytes) -> Any:
    """By Pillow, as a user of these libraries does."""
    return np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))


def _loader(dataset: Any, batch: int | None = BATCH) -> Any:
    import torch

    return torch.utils.data.DataLoader(dataset, batch_size=batch, num_workers=WORKERS, persistent_workers=True)


# --- WebDataset ---


def write_tars(images: list[bytes], labels: list[int], target: Path) -> None:
    """WebDataset's shards."""
    target.mkdir()
    for shard in range(SHARDS):
        with tarfile.open(target / f"{shard:05d}.tar", "w") as tar:
            for number in range(shard, len(images), SHARDS):
                for suffix, content in (("jpg", images[number]), ("cls", str(labels[number]).encode())):
                    entry = tarfile.TarInfo(f"{number:08d}.{suffix}")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))


def webdataset(folder: str) -> turns.Reader:
    """WebDataset's workers make the batches."""
    import webdataset as wds

    pattern = f"{folder}/tars/{{00000..{SHARDS - 1:05d}}}.tar"
    dataset = wds.WebDataset(pattern, shardshuffle=SHARDS, nodesplitter=None).shuffle(SHUFFLED).decode("rgb8")
    batches = dataset.to_tuple("jpg", "cls").batched(BATCH, partial=True)
    return sizes(wds.WebLoader(batches, batch_size=None, num_workers=WORKERS, persistent_workers=True))


# --- tfrecord ---


def _decode_features(features: dict[str, Any]) -> tuple[Any, int]:
    return decode(features["image"]), int(features["class"][0])


def tfrecord(url: str) -> turns.Reader:
    """The tfrecord package over our shards and their indexes."""
    from tfrecord.torch.dataset import MultiTFRecordDataset

    names = [path.name for path in Path(url).glob("bench-train.tfrecord-*")]
    dataset = MultiTFRecordDataset(
        f"{url}/{{}}",
        f"{url}/index/{{}}.idx",
        dict.fromkeys(names, 1 / len(names)),
        {"image": "byte", "class": "int"},
        shuffle_queue_size=SHUFFLED,
        transform=_decode_features,
        infinite=False,
    )
    return sizes(_loader(dataset))


# --- MosaicML streaming ---


def write_mds(images: list[bytes], labels: list[int], target: Path) -> None:
    """MosaicML's shards."""
    from streaming import MDSWriter

    with MDSWriter(out=str(target), columns={"image": "bytes", "class": "int"}) as writer:
        for image, label in zip(images, labels, strict=True):
            writer.write({"image": image, "class": label})


def streaming(folder: str) -> turns.Reader:
    """MosaicML's StreamingDataset, its default shuffle."""
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    class Decoded(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: int) -> tuple[Any, int]:
            sample = super().__getitem__(at)
            return decode(sample["image"]), sample["class"]

    clean_stale_shared_memory()
    return sizes(_loader(Decoded(local=f"{folder}/mds", shuffle=True, batch_size=BATCH)))


# --- Grain over ArrayRecord ---


def write_array_record(images: list[bytes], labels: list[int], target: Path) -> None:
    """One file, a record a group, as its authors advise for random access. A record is the label, then the image."""
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(target), "group_size:1,uncompressed")
    for image, label in zip(images, labels, strict=True):
        writer.write(label.to_bytes(4, "little") + image)
    writer.close()


def grain(folder: str, workers: int = 0) -> turns.Reader:
    """Grain, full shuffle, in its threads or in worker processes."""
    import grain

    def element(record: bytes) -> tuple[Any, int]:
        return decode(record[4:]), int.from_bytes(record[:4], "little")

    source = grain.sources.ArrayRecordDataSource(f"{folder}/array_record")
    dataset = grain.MapDataset.source(source).shuffle(seed=0).map(element)
    batches = dataset.to_iter_dataset().batch(BATCH, drop_remainder=True)
    if workers:
        batches = batches.mp_prefetch(grain.multiprocessing.MultiprocessingOptions(num_workers=workers))
    return sizes(batches)


# --- FFCV ---


def _stored_image() -> Any:
    from ffcv.fields import RGBImageField

    class StoredImage(RGBImageField):  # type: ignore[misc]
        """Takes encoded bytes as they are; FFCV would encode pixels once more."""

        def encode(self, destination: Any, image: bytes, malloc: Any) -> None:
            destination["mode"], destination["height"], destination["width"] = 0, SIZE, SIZE  # 0: JPEG
            destination["data_ptr"], storage = malloc(len(image))
            storage[:] = np.frombuffer(image, np.uint8)

    return StoredImage


def write_beton(images: list[bytes], labels: list[int], target: Path) -> None:
    """FFCV's file."""
    from ffcv.fields import IntField
    from ffcv.writer import DatasetWriter

    fields = {"image": _stored_image()(), "label": IntField()}
    DatasetWriter(str(target), fields, num_workers=1).from_indexed_dataset(list(zip(images, labels, strict=True)))


def ffcv(folder: str, is_cropped: bool = False) -> turns.Reader:
    """FFCV with 2 workers, which are threads; random order from the page cache.

    Its pixels differ from all others' by up to 9, as libjpeg-turbo's do with its fast DCT, which saves 2 %.
    """
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder, SimpleRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import ToTensor

    image = RandomResizedCropRGBImageDecoder((SIZE, SIZE)) if is_cropped else SimpleRGBImageDecoder()
    return sizes(
        Loader(
            f"{folder}/beton",
            batch_size=BATCH,
            num_workers=WORKERS,
            os_cache=True,
            order=OrderOption.RANDOM,
            pipelines={"image": [image, ToTensor()], "label": [IntDecoder(), ToTensor()]},
            custom_fields={"image": _stored_image()},
        )
    )


WRITERS: dict[str, Callable[[list[bytes], list[int], Path], None]] = {
    "tars": write_tars,
    "mds": write_mds,
    "array_record": write_array_record,
    "beton": write_beton,
}

if __name__ == "__main__":
    form, folder = sys.argv[1:]
    WRITERS[form](*stored(folder), Path(folder) / form)
