"""What a classifier gets wrong: a confusion matrix, precision and recall of each class; and curves of its training."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple
from warnings import catch_warnings, simplefilter

import numpy as np
import numpy.typing as npt

from beam_pipeline.text import name_line

MAX_CLASSES = 1000  # of a confusion matrix
CLASS_TABLE = "per_class.csv"
_MAX_NAMED, _MAX_NUMBERED = 60, 25  # classes in confusion.png


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
    rows = ((name, *row) for name, row in zip(classes, counts.tolist(), strict=True))
    return {
        CLASS_TABLE: _csv([("class", *ClassMetrics._fields[1:]), *class_metrics(counts, classes)]),
        "confusion.csv": _csv([("class", *classes), *rows]),  # a column for each predicted class
        "confusion.png": confusion(counts, classes, split),
    }


def _csv(rows: Sequence[Sequence[Any]]) -> bytes:
    # No spreadsheet computes a name, and no terminal obeys it: https://owasp.org/www-community/attacks/CSV_Injection
    text, formulas = io.StringIO(), ("=", "+", "-", "@", "\t", "\r")
    for row in rows:
        cells = ("'" * one.startswith(formulas) + name_line(one) if isinstance(one, str) else one for one in row)
        csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


# --- pictures


def curves(lines: list[dict[str, Any]], best: int, split: str) -> bytes:
    """Loss and accuracy by epoch, as PNG, on train and the split that was validated on, "" if none was.

    The best epoch, whose weights model.keras has, is marked.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    epochs = [line["epoch"] for line in lines]
    for axes, name in zip(figure.subplots(1, 2), ("loss", "accuracy"), strict=True):
        for key, label in ((name, "training"), (f"val_{name}", f"validation on {split}")):
            values = [line[key] for line in lines if key in line]
            axes.plot(epochs[: len(values)], values, marker=".", label=label if values else "no validation")
        for before, line in pairwise(lines):
            if before["phase"] != line["phase"]:
                axes.axvline(before["epoch"] + 0.5, color="gray", linestyle=":", label="fine-tuning begins")
        axes.axvline(best, color="green", alpha=0.4, label=f"best epoch: {best}")
        axes.set(xlabel="epoch", title=name)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend()
    return _png(figure)


def confusion(counts: np.ndarray[Any, Any], classes: Sequence[str], split: str) -> bytes:
    """As PNG: which class was taken for which: each row sums to 1; a field of few classes holds its count."""
    from matplotlib.figure import Figure

    side = min(4 + 0.3 * len(classes), 20)
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.subplots()
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    accuracy = np.trace(counts) / max(counts.sum(), 1)
    axes.set(xlabel="predicted", ylabel="class", title=f"{split}: accuracy {accuracy:.3f}")
    if len(classes) <= _MAX_NAMED:
        names = [name.replace("$", r"\$") for name in classes]  # a pair of them would be a formula
        axes.set_xticks(range(len(classes)), names, rotation=90)
        axes.set_yticks(range(len(classes)), names)
    if len(classes) <= _MAX_NUMBERED:
        for row, column in np.argwhere(counts):
            color = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, f"{counts[row, column]:.0f}", ha="center", va="center", color=color, fontsize=8)
    figure.colorbar(image, ax=axes, shrink=0.8, label="share of the class")
    return _png(figure)


def _png(figure: Any) -> bytes:
    file = io.BytesIO()
    with catch_warnings():
        simplefilter("ignore", UserWarning)  # a class's name has letters that the font lacks
        figure.savefig(file, format="png", dpi=120)
    return file.getvalue()
