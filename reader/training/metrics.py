"""What a classifier gets wrong: a confusion matrix, and precision and recall of each class."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from beam_pipeline.text import name_line
from reader.training import pictures

MAX_CLASSES = 1000  # of a confusion matrix
CLASS_TABLE = "per_class.csv"


def confusion_counts(labels: npt.NDArray[Any], predicted: npt.NDArray[Any], classes: int) -> npt.NDArray[np.int64]:
    """How many of these images are of each class and predicted to be of each: int64 [classes, classes]."""
    return np.bincount(labels * classes + predicted, minlength=classes**2).reshape(classes, classes).astype(np.int64)


class ClassMetrics(NamedTuple):
    """How well one class is recognized.

    Attributes:
        name: of the class.
        images: of this class.
        predicted: images that were predicted to be of it.
        precision: share of those that are; None if there are none.
        recall: share of its images that were predicted to be of it; None if it has none.
    """

    name: str
    images: int
    predicted: int
    precision: float | None
    recall: float | None


def class_metrics(counts: npt.NDArray[Any], classes: Sequence[str]) -> list[ClassMetrics]:
    """Precision and recall of each class, from counts [class, predicted class]."""
    columns = (counts.diagonal(), counts.sum(1), counts.sum(0))
    return [
        ClassMetrics(name, images, predicted, _share(correct, predicted), _share(correct, images))
        for name, correct, images, predicted in zip(classes, *(column.tolist() for column in columns), strict=True)
    ]


def _share(part: int, of: int) -> float | None:
    return round(part / of, 6) if of else None


def confusion_files(counts: npt.NDArray[Any], classes: Sequence[str], split: str) -> dict[str, bytes]:
    """Name → content of the files on which class was taken for which."""
    return {
        CLASS_TABLE: classes_csv(class_metrics(counts, classes)),
        "confusion.csv": confusion_csv(counts, classes),
        "confusion.png": pictures.confusion(counts, classes, split),
    }


def classes_csv(metrics: Sequence[ClassMetrics]) -> bytes:
    """A line for each class: name, images, predicted, precision, recall; a share that isn't defined is empty."""
    return _csv([("class", *ClassMetrics._fields[1:]), *metrics])


def confusion_csv(counts: npt.NDArray[Any], classes: Sequence[str]) -> bytes:
    """A line for each class, a column for each predicted class."""
    return _csv([("class", *classes), *((name, *row) for name, row in zip(classes, counts.tolist(), strict=True))])


def _csv(rows: Sequence[Sequence[Any]]) -> bytes:
    # No spreadsheet computes a name, and no terminal obeys it: https://owasp.org/www-community/attacks/CSV_Injection
    text, formulas = io.StringIO(), ("=", "+", "-", "@", "\t", "\r")
    for row in rows:
        cells = ("'" * one.startswith(formulas) + name_line(one) if isinstance(one, str) else one for one in row)
        csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()
