"""Where the time of `train_dataset` goes, and which one change would help most."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from beam_pipeline import schema
from reader.bench.material import Material
from reader.bench.measure import Rate
from reader.info import DatasetInfo
from reader.parsing import RecordParser

# Above these shares of the time something is worth a change.
_IDLE_SHARE = 0.25
_AUGMENT_SHARE = 0.2
_HAND_OVER_SHARE = 0.15
_LARGER_BY = 1.5  # pixels stored, for one trained on
# Below these a run tells more of starts and of other programs than of the dataset.
_LEAST_IMAGES, _LEAST_REPEATS = 1000, 3
_PARSED_AT_ONCE = 512  # as train_dataset does


DECODE, AUGMENT, HAND_OVER = "decode", "augment (flip_crop)", "hand-over"


class Part(NamedTuple):
    """One part of the work: CPU seconds for 1,000 images."""

    name: str
    cpu_per_1000: float


class Advice(NamedTuple):
    """The change that would help most: what to do, and by which factor the rate would grow at most."""

    text: str
    factor: float


def parts(material: Material, info: DatasetInfo, ours: Rate, decode: Rate, augmented: Rate) -> list[Part]:
    """The CPU time of `train_dataset` with flip_crop, part by part.

    Args:
        ours, decode, augmented: rates of `train_dataset`, of its ceiling, and of the ceiling with flip_crop.
    """
    count = len(material.records)
    table = info.run_table(material.split)
    runs = int((table.first < count).sum()) - (table.first[-1] < count)
    storage = info.shard_storage

    def read() -> None:
        for run in range(runs):
            begin = int(table.offset[run])
            storage.read(table.files[table.file[run]], begin, begin + int(table.bytes[run]))

    frames = [schema.frame(record) for record in material.records]

    def check() -> None:
        for frame in frames:
            for _ in schema.unframe(frame):
                pass

    parse = RecordParser(info.image_key, info.class_key, {})

    def parse_all() -> None:
        for start in range(0, count, _PARSED_AT_ONCE):
            parse(tf.constant(list(material.records[start : start + _PARSED_AT_ONCE])))

    storage_s = _cpu_of(read) / (int(table.first[runs]) or 1) * 1000
    parse_s = (_cpu_of(check) + _cpu_of(parse_all)) / count * 1000
    rest = ours.cpu_per_1000 - storage_s - parse_s - decode.cpu_per_1000
    return [
        Part("storage", storage_s),
        Part("CRC + parse", parse_s),
        Part(DECODE, decode.cpu_per_1000),
        Part(AUGMENT, max(0.0, augmented.cpu_per_1000 - decode.cpu_per_1000)),
        Part(HAND_OVER, max(0.0, rest)),
    ]


def advise(found: list[Part], ours: Rate, decode: Rate, info: DatasetInfo, size: int) -> Advice:
    """The one change that would help most, by how much the rate could grow.

    Args:
        found: of `parts`.
        ours, decode: rates of `train_dataset` and of its ceiling.
        info: of the dataset, where it was read.
        size: side in pixels that is trained on.
    """
    if ours.images < _LEAST_IMAGES or len(ours.wall_s) < _LEAST_REPEATS:
        enough = f"{_LEAST_IMAGES:,} images in each of {_LEAST_REPEATS} repeats"
        return Advice(f"these runs are too short to judge, it takes {enough}", 1.0)
    total = sum(part.cpu_per_1000 for part in found)
    share_of = {part.name: part.cpu_per_1000 / total for part in found}
    options = [Advice(f"decoding is {share_of[DECODE]:.0%} of the work and little else to gain: more CPU cores", 1.0)]
    # How much worked, of what the ceiling got: other programs may have had the rest of the CPUs.
    busy = min(1.0, ours.cpu_per_1000 * ours.images_per_s / (decode.cpu_per_1000 * decode.images_per_s))
    if busy < 1 - _IDLE_SHARE and info.shard_storage.is_remote:
        near = "copy the dataset to a local disk (python -m reader copy) or train with cache=DIR"
        options.append(Advice(f"the CPUs wait {1 - busy:.0%} of the time for storage: {near}", 1 / busy))
    stored = info.image.max_size
    if stored and stored[0] * stored[1] > _LARGER_BY * size * size:
        spared = share_of[DECODE] * (1 - size * size / (stored[0] * stored[1]))
        text = f"images are stored at up to {stored[0]}x{stored[1]}: write the dataset with --image_size {size}"
        options.append(Advice(text, 1 / (1 - spared)))
    for name, least, text in (
        (AUGMENT, _AUGMENT_SHARE, "augment on the device with reader.augment.on_device"),
        (HAND_OVER, _HAND_OVER_SHARE, "larger batches"),
    ):
        if share_of[name] > least:
            options.append(Advice(f"{name} is {share_of[name]:.0%} of the work: {text}", 1 / (1 - share_of[name])))
    return max(options, key=lambda advice: advice.factor)


def _cpu_of(work: Callable[[], None]) -> float:
    """CPU seconds of a second run of `work`."""
    work()
    start = time.process_time()
    work()
    return time.process_time() - start
