"""What a classifier gets wrong: a confusion matrix counted on the device, and precision and recall of each class."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import numpy.typing as npt
from keras import ops

from beam_pipeline.text import name_line

MAX_CLASSES = 1000  # of a confusion matrix


class ConfusionMatrix(keras.metrics.Metric):  # type: ignore[misc]
    """Counts of (class, predicted class): float32 [classes, classes], exact up to 16 million images a cell."""

    def __init__(self, classes: int) -> None:
        super().__init__(name="confusion")
        self._classes = classes
        self.counts = self.add_variable((classes, classes), "zeros", name="counts")

    def update_state(self, labels: Any, logits: Any, sample_weight: Any = None) -> None:
        """Count a batch; records of weight 0 don't count."""
        labels = ops.one_hot(ops.cast(ops.reshape(labels, (-1,)), "int32"), self._classes)
        if sample_weight is not None:
            labels = labels * ops.cast(ops.reshape(sample_weight, (-1, 1)), labels.dtype)
        predicted = ops.one_hot(ops.argmax(logits, axis=-1), self._classes)
        self.counts.assign(self.counts + ops.matmul(ops.transpose(labels), predicted))

    def result(self) -> Any:
        """The counts."""
        return ops.convert_to_tensor(self.counts)


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
    numbers = np.rint(counts).astype(np.int64)
    columns = (numbers.diagonal(), numbers.sum(1), numbers.sum(0))
    return [
        ClassMetrics(name, images, predicted, _share(correct, predicted), _share(correct, images))
        for name, correct, images, predicted in zip(classes, *(column.tolist() for column in columns), strict=True)
    ]


def _share(part: int, of: int) -> float | None:
    return round(part / of, 6) if of else None


def classes_csv(metrics: Sequence[ClassMetrics]) -> bytes:
    """A line for each class: name, images, predicted, precision, recall; a share that isn't defined is empty."""
    return _csv([("class", *ClassMetrics._fields[1:]), *metrics])


def confusion_csv(counts: npt.NDArray[Any], classes: Sequence[str]) -> bytes:
    """A line for each class, a column for each predicted class."""
    rows = np.rint(counts).astype(np.int64).tolist()
    return _csv([("class", *classes), *((name, *row) for name, row in zip(classes, rows, strict=True))])


def _csv(rows: Sequence[Sequence[Any]]) -> bytes:
    # No spreadsheet computes a name, and no terminal obeys it: https://owasp.org/www-community/attacks/CSV_Injection
    text, formulas = io.StringIO(), ("=", "+", "-", "@", "\t", "\r")
    for row in rows:
        cells = ("'" * one.startswith(formulas) + name_line(one) if isinstance(one, str) else one for one in row)
        csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()
