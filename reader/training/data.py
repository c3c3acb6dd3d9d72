"""Which records are trained on, and which are validated on: a split, or the last tenth of train that is held out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from beam_pipeline.errors import UsageError
from beam_pipeline.schema.manifest import FOREIGN_KEY
from beam_pipeline.text import first_few
from reader.info import DatasetInfo
from reader.select import Classes, Selection, select
from reader.splits import overlap
from reader.tables import read_columns

NO_VALIDATION = "none"
EVAL_SPLITS = "validation", "val"
_HELD_OUT = "90%"  # and the rest


class TrainingData(NamedTuple):
    """What is trained on, and validated on.

    Attributes:
        train, evaluation: split strings; `evaluation` is None without validation.
        is_held_out: whether nobody named `evaluation`, which is a part of the split that is trained on.
        selected, validated: which of their records; None for all.
        classes: names of those that are trained.
        images, validation_images: how many there are.
    """

    train: str
    evaluation: str | None
    is_held_out: bool
    selected: Selection | None
    validated: Selection | None
    classes: tuple[str, ...]
    images: int
    validation_images: int


def choose_data(info: DatasetInfo, train: str, evaluation: str | None, classes: Classes) -> TrainingData:
    """Fill in what `--train_split`, `--eval_split` and `--classes` leave to the dataset.

    Without a split `validation` or `val`, and unless `evaluation` names one or is `none`, a tenth of `train` is held
    out if that is the name of a split of shuffled shards. `test` is never chosen.

    Raises:
        UsageError: there is no such split or class.
    """
    if train == "train" and "train" not in info.splits:
        raise UsageError(f"{info.url} has no split 'train': it has {first_few(list(info.splits))}; give --train_split")
    for flag, split in (("train_split", train), ("eval_split", evaluation)):
        if split is not None and (flag, split) != ("eval_split", NO_VALIDATION):
            try:
                info.records(split)
            except UsageError as error:
                raise UsageError(f"--{flag} {split!r}: {error}") from None
    chosen = evaluation or next((name for name in EVAL_SPLITS if name in info.splits), None)
    is_held_out = chosen is None and train in info.splits and FOREIGN_KEY not in info.manifest
    if is_held_out := is_held_out and round(0.9 * info.records(train)) < info.records(train):
        train, chosen = f"{train}[:{_HELD_OUT}]", f"{train}[{_HELD_OUT}:]"
    chosen = None if chosen == NO_VALIDATION else chosen
    selected, validated = select(info, train, classes), None if chosen is None else select(info, chosen, classes)
    images, validation_images = (
        part.size if part else info.records(split) if split else 0
        for part, split in ((selected, train), (validated, chosen))
    )
    names = selected.classes if selected else info.classes
    return TrainingData(train, chosen, is_held_out, selected, validated, names, images, validation_images)


def class_counts(info: DatasetInfo, data: TrainingData, at_most: bool = False) -> list[int]:
    """How many images of each class are trained on: of a part of a split, by the record tables; or `at_most`."""
    new = np.array(range(info.num_classes) if data.selected is None else data.selected.labels)
    known, count = new >= 0, len(data.classes)
    old = np.sum([info.splits[part.split].class_counts for part in info.ranges(data.train)], axis=0)
    counts = np.bincount(new[known], old[known], count).astype(np.int64)
    if at_most or counts.sum() == data.images:
        return list(map(int, counts))
    counts, begin = np.zeros(count, np.int64), 0
    mask = np.ones(info.records(data.train), np.bool_) if data.selected is None else data.selected.mask()
    for columns in read_columns(info, data.train, ["class"]):
        labels = new[columns["class"]][mask[begin : begin + columns.records]]
        counts, begin = counts + np.bincount(labels, minlength=count), begin + columns.records
    return list(map(int, counts))


def warnings(info: DatasetInfo, data: TrainingData) -> Iterator[str]:
    """Why validation says less than it seems to."""
    if data.is_held_out and info.manifest["configuration"].get("split_by"):
        fix = "write the dataset with --splits, or give --eval_split none"
        yield f"{data.evaluation} is held out at random, so a group of --split_by may be in both parts: {fix}"
    if data.evaluation is None:
        fix, part = "--eval_split names what to validate on", f"{data.train}[{{}}]"
        if FOREIGN_KEY in info.manifest and data.train in info.splits:
            held = f"--train_split {part.format(':90%')} --eval_split {part.format('90%:')}"
            fix = f"if the files are shuffled, {held} holds out a tenth"
        yield f"no validation, so model.keras is the last epoch's: {fix}"
    elif not data.is_held_out and overlap(info.ranges(data.train), info.ranges(data.evaluation)):
        yield f"--eval_split {data.evaluation}: the accuracy on images that were trained on says little of others"
