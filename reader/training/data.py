"""Which records are trained on, and which are validated on: split strings, or a part of train that is held out."""

from __future__ import annotations

import dataclasses
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
_HELD_OUT, _HOLDOUT_STRIDE = "90%", 10  # the last tenth, or every tenth run of 64 records


class Data(NamedTuple):
    """What is trained on, and validated on.

    Attributes:
        train, evaluation: split strings; `evaluation` is None without validation.
        selected, validated: which of their records; None for all.
        held_out: what is held out of train, in words; "" if nothing is.
        classes: names of those that are trained.
        images, validation_images: how many there are.
    """

    train: str
    evaluation: str | None
    selected: Selection | None
    validated: Selection | None
    held_out: str
    classes: tuple[str, ...]
    images: int
    validation_images: int

    def overlaps(self, info: DatasetInfo) -> bool:
        """Whether images are validated on that are trained on, too."""
        if self.evaluation is None or self.held_out:
            return False
        return overlap(info.ranges(self.train), info.ranges(self.evaluation))


def choose_data(info: DatasetInfo, train: str, evaluation: str | None, classes: Classes) -> Data:
    """Fill in what `--train_split`, `--eval_split` and `--classes` leave to the dataset.

    Without a split `validation` or `val`, and unless `evaluation` names one or is `none`, a tenth of `train` is held
    out if that is the name of a split. `test` is never chosen.

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
    chosen: str | None = next((name for name in EVAL_SPLITS if name in info.splits), None)
    if evaluation is not None:
        chosen = None if evaluation == NO_VALIDATION else evaluation
    elif chosen is None and train in info.splits:
        held = _every_tenth_run(info, train, classes) if FOREIGN_KEY in info.manifest else None
        if held:
            return _data(info, train, train, held[:2], f"every tenth {held[2]} of {train}")
        records = info.splits[train].records
        if FOREIGN_KEY not in info.manifest and round(0.9 * records) < records:
            train, chosen = f"{train}[:{_HELD_OUT}]", f"{train}[{_HELD_OUT}:]"
            return _data(info, train, chosen, _selected(info, train, chosen, classes), chosen)
    return _data(info, train, chosen, _selected(info, train, chosen, classes), "")


_Selections = tuple[Selection | None, Selection | None]


def _selected(info: DatasetInfo, train: str, evaluation: str | None, classes: Classes) -> _Selections:
    return select(info, train, classes), None if evaluation is None else select(info, evaluation, classes)


def _data(info: DatasetInfo, train: str, evaluation: str | None, of: _Selections, held_out: str) -> Data:
    images, validation_images = (
        part.size if part else info.records(split) if split else 0
        for part, split in zip(of, (train, evaluation), strict=True)
    )
    classes = of[0].classes if of[0] else info.classes
    return Data(train, evaluation, *of, held_out, classes, images, validation_images)


def _every_tenth_run(info: DatasetInfo, split: str, classes: Classes) -> tuple[Selection, Selection, str] | None:
    """Of third-party files, which nobody shuffled: (train, evaluation, "run"), or None if either has no record.

    Of fewer than ten runs it is every tenth record.
    """
    selection = select(info, split, classes, or_all=True)
    assert selection is not None
    first, mask = info.run_table(split).first, selection.mask()
    numbers = np.arange(len(mask))
    runs = np.searchsorted(first, numbers, "right") - 1
    unit = "run" if len(first) > _HOLDOUT_STRIDE else "record"
    held = (runs if unit == "run" else numbers) % _HOLDOUT_STRIDE == _HOLDOUT_STRIDE - 1
    parts = [mask & ~held, mask & held]
    if not all(map(np.any, parts)):
        return None
    train, evaluation = (
        dataclasses.replace(selection, size=int(np.count_nonzero(part)), bits=np.packbits(part).tobytes())
        for part in parts
    )
    return train, evaluation, unit


def class_counts(info: DatasetInfo, data: Data, at_most: bool = False) -> list[int]:
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


def warnings(info: DatasetInfo, data: Data) -> Iterator[str]:
    """Why validation says less than it seems to."""
    fix = "write the dataset with --splits, or give --eval_split none"
    if data.held_out and info.manifest["configuration"].get("split_by"):
        yield f"{data.held_out} is held out at random, so a group of --split_by may be in both parts: {fix}"
    if data.evaluation is None:
        yield "no validation, so model.keras is the last epoch's: --eval_split names what to validate on"
    elif data.overlaps(info):
        yield f"--eval_split {data.evaluation}: the accuracy on images that were trained on says little of others"
