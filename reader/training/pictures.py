"""curves.png and confusion.png."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy as np

_MAX_NAMED, _MAX_NUMBERED = 60, 25


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
