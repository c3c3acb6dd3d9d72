"""`evaluate`: what a trained model gets right on a dataset, class by class, and its most confident mistakes."""

from __future__ import annotations

import heapq
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import json
from PIL import Image

from beam_pipeline import schema, storage
from beam_pipeline.errors import UsageError
from beam_pipeline.images import FLAG_NAMES, ImageOptions
from beam_pipeline.text import first_few, plural
from reader.batches import eval_batches
from reader.features import features_of
from reader.hosts import integer
from reader.info import DatasetInfo, load_info
from reader.select import Classes, as_renames
from reader.splits import overlap
from reader.stream import EvalBatches
from reader.tools.show import as_rgb, tiled
from reader.training.metrics import (
    CLASS_TABLE,
    MAX_CLASSES,
    ClassMetrics,
    class_metrics,
    confusion_counts,
    confusion_files,
)
from reader.training.options import EVAL_SPLITS, NO_VALIDATION
from reader.training.out_folder import usable
from reader.training.run import Run, as_run

_SPLITS = "test", *EVAL_SPLITS
_SHOWN_MISTAKES, _SHOWN_CLASSES, _TOP = 25, 20, 5
_PICTURE = "mistakes.png"
_TILE = 160  # pixels


class Mistake(NamedTuple):
    """An image that was taken for another class.

    Attributes:
        probability: that the model gave the wrong class.
        record: its number among those that were read.
        file: its path in the dataset's input; of third-party shards, "".
        label, predicted: the class that it has, and the one that it was taken for.
    """

    probability: float
    record: int
    file: str
    label: str
    predicted: str


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` found.

    Attributes:
        dataset, split: that were read.
        images: how many.
        accuracy, loss: share of correct predictions, and mean cross-entropy.
        top5: share of images whose class is among the five most probable; None for five classes or fewer.
        classes: of each class its images, precision and recall; none for more than 1,000 classes.
        mistakes: all of them, first the most confident.
        out: where the files are.
        warnings: why the numbers may say less than they seem to.
    """

    dataset: str
    split: str
    images: int
    accuracy: float
    loss: float
    top5: float | None
    classes: tuple[ClassMetrics, ...]
    mistakes: tuple[Mistake, ...] = field(repr=False)
    out: str
    warnings: tuple[str, ...]

    def __repr__(self) -> str:
        top5 = "" if self.top5 is None else f"top-5 {self.top5:.4f}, "
        head = f"{self.split}: {plural(self.images, 'image')}, accuracy {self.accuracy:.4f}, {top5}loss {self.loss:.4f}"
        return "\n".join((head, *self._table(), f"written to {self.out}"))

    def document(self) -> dict[str, Any]:
        """As metrics.json holds it."""
        lists = {name: [one._asdict() for one in getattr(self, name)] for name in ("classes", "mistakes")}
        return vars(self) | lists

    def _table(self) -> Iterator[str]:
        """The classes, those of the lowest recall first."""
        classes = sorted((one for one in self.classes if one.images), key=lambda one: (one.recall, one.name))
        if classes:
            width = max(len("class"), *(len(one.name) for one in classes[:_SHOWN_CLASSES]))
            yield f"{'class':{width}}  images  precision  recall"
        for one in classes[:_SHOWN_CLASSES]:
            precision = "-" if one.precision is None else f"{one.precision:.3f}"
            yield f"{one.name:{width}}  {one.images:6,}  {precision:>9}  {one.recall:6.3f}"
        if len(classes) > _SHOWN_CLASSES:
            yield f"… and {plural(len(classes) - _SHOWN_CLASSES, 'more class')} in {CLASS_TABLE}"


def evaluate(
    run: Run | str | os.PathLike[str],
    dataset: DatasetInfo | str | os.PathLike[str],
    *,
    split: str | None = None,
    classes: Classes = None,
    batch_size: int = 64,
    out: str | os.PathLike[str] | None = None,
) -> Evaluation:
    """Count what a trained model gets right and wrong on every record of a split, each exactly once.

    Writes metrics.json, per_class.csv, confusion.csv, confusion.png, and, if there are any, mistakes.png: the 25 most
    confident mistakes as the model saw them.

    Args:
        run: what `load_run` returned, or the folder or URL that `imageshards train` wrote to.
        dataset: what `load_info` returned, or the URL.
        split: TFDS split string; None for test, else validation, else val, else what the training was validated on.
        classes: read these classes only, or under other names, as in `train_batches`; they must be classes of the run.
            None for those of the training.
        batch_size: images that the model gets at once.
        out: folder or URL for the files; None for `evaluation` in the run's folder.

    Raises:
        UsageError: no such run, split or class; or `out` can't be a folder.
        ImageShardsError: the training isn't finished, or the dataset can't be read.
    """
    run, info = as_run(run), load_info(dataset)
    chosen = _classes(run, info, classes)
    split = split or _default_split(run, info)
    batch_size = min(integer("batch_size", batch_size, 1), info.records(split))
    given = storage.join(run.url, "evaluation") if out is None else os.fspath(out)
    folder = usable(given)
    features = [schema.FILENAME_KEY] if schema.FILENAME_KEY in features_of(info) else []
    size = run.preprocessing.shape[:2]
    if info.image.channels != run.preprocessing.shape[2]:
        raise UsageError(f"{info.url} has {plural(info.image.channels, 'channel')}, the run another number")
    which: dict[str, Any] = {"features": features, "classes": chosen, "image_size": size}
    found = _Found(run, eval_batches(info, split, global_batch_size=batch_size, **which))
    result = found.result(info.url, split, given, tuple(_warnings(run, info, split)))
    files = {"metrics.json": json.format(json.encode(result.document()), indent=1) + b"\n"}
    if found.counts is not None:
        files |= confusion_files(found.counts, run.classes, split)
    if result.mistakes:
        pixels = [pixels for *_, pixels in sorted(found.worst, reverse=True)]
        files[_PICTURE] = _picture(result.mistakes[: len(pixels)], pixels)
    store = storage.open_storage(folder)
    for name, data in files.items():
        store.write(storage.join(folder, name), data)
    if _PICTURE not in files:
        store.delete(storage.join(folder, _PICTURE))  # of an earlier evaluation
    return result


def _default_split(run: Run, info: DatasetInfo) -> str:
    if named := next((name for name in _SPLITS if name in info.splits), None):
        return named
    validated = run.configuration.get("eval_split")
    if run.configuration["dataset"] == info.manifest["self_sha256"] and validated not in (None, NO_VALIDATION):
        return str(validated)
    raise UsageError(f"--split is missing: {info.url} has no test or validation, only {first_few(list(info.splits))}")


def _classes(run: Run, info: DatasetInfo, given: Classes) -> Mapping[str, str] | None:
    """The `classes` to read with, as `train_batches` takes them."""
    names = given or run.configuration.get("classes") or {name: name for name in info.classes}
    new = as_renames(names)
    if given is None:
        new = {name: label for name, label in new.items() if name in info.classes}
    if unknown := sorted({*new.values()} - {*run.classes}) or (not new and [*info.classes]):
        fix = "leave them out or rename them with --classes NAMES, such as cat or tabby=cat"
        raise UsageError(f"the run has no class {first_few(unknown)}, only {first_few(run.classes)}: {fix}")
    return None if new == {name: name for name in info.classes} else new


def _warnings(run: Run, info: DatasetInfo, split: str) -> Iterator[str]:
    """Why the numbers may mislead."""
    is_same = run.configuration["dataset"] == info.manifest["self_sha256"]
    trained = run.configuration.get("train_split", "train")
    if is_same and overlap(info.ranges(trained), info.ranges(split)):
        yield f"--split {split}: the accuracy on images that were trained on says little of others"
    options = run.preprocessing.options
    if (options is None) != info.is_index:
        yield "one of the two datasets is an index of third-party shards: its images were made in another way"
    elif options is not None and FLAG_NAMES["size"] in info.manifest["configuration"]:
        theirs = ImageOptions.of(info.manifest["configuration"])
        if other := [
            name for name in ("size", "resize_mode", "resample") if getattr(theirs, name) != getattr(options, name)
        ]:
            flag = FLAG_NAMES.get(other[0], other[0])
            yield f"{info.url} was written with another --{flag} than the dataset that was trained on"


class _Found:
    """Reads all batches, and keeps sums, the mistakes, 256 bytes each, and the pixels of the worst."""

    def __init__(self, run: Run, batches: EvalBatches) -> None:
        self._names = run.classes
        self.counts = np.zeros((len(run.classes),) * 2, np.int64) if len(run.classes) <= MAX_CLASSES else None
        self.images, self.loss, self.correct, self.in_top = 0, 0.0, 0, 0
        self.mistakes: list[Mistake] = []
        self.worst: list[tuple[float, int, npt.NDArray[np.uint8]]] = []
        ids = np.array([run.classes.index(name) for name in batches.classes])
        for inputs, labels, weights in batches:
            images = inputs["image"] if isinstance(inputs, Mapping) else inputs
            files = inputs[schema.FILENAME_KEY] if isinstance(inputs, Mapping) else None
            valid = int(np.count_nonzero(weights))  # padding is behind all records
            self._add(run.probabilities(images)[:valid], ids[labels[:valid]], images, files)

    def _add(self, probabilities: Any, labels: Any, images: Any, files: Any) -> None:
        rows, predicted = np.arange(len(labels)), probabilities.argmax(axis=1)
        of_label, best = probabilities[rows, labels], probabilities[rows, predicted]
        if self.counts is not None:
            self.counts += confusion_counts(labels, predicted, len(self._names))
        self.loss -= float(np.log(np.maximum(of_label, np.finfo(np.float32).tiny), dtype=np.float64).sum())
        self.correct += int((predicted == labels).sum())
        self.in_top += int(((probabilities > of_label[:, None]).sum(axis=1) < _TOP).sum())
        for row in np.flatnonzero(predicted != labels).tolist():
            file = "" if files is None else files[row].decode(errors="replace")
            names = self._names[labels[row]], self._names[predicted[row]]
            self.mistakes.append(Mistake(round(float(best[row]), 6), self.images + row, file, *names))
            heapq.heappush(self.worst, (self.mistakes[-1].probability, -self.mistakes[-1].record, images[row].copy()))
            if len(self.worst) > _SHOWN_MISTAKES:
                heapq.heappop(self.worst)
        self.images += len(labels)

    def result(self, dataset: str, split: str, out: str, warnings: tuple[str, ...]) -> Evaluation:
        """All that was found."""
        self.mistakes.sort(key=lambda one: (-one.probability, one.record))
        classes = () if self.counts is None else tuple(class_metrics(self.counts, self._names))
        top5 = self.in_top / self.images if len(self._names) > _TOP else None
        shares = self.correct / self.images, self.loss / self.images, top5
        return Evaluation(dataset, split, self.images, *shares, classes, tuple(self.mistakes), out, warnings)


def _picture(mistakes: Sequence[Mistake], images: Sequence[npt.NDArray[np.uint8]]) -> bytes:
    tiles = []
    for one, pixels in zip(mistakes, images, strict=True):
        image = as_rgb(pixels)
        times = max(1, _TILE // max(image.size))
        image = image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST)
        name = one.file.rpartition("/")[2] or f"record {one.record}"
        tiles.append((image, f"{one.probability:.2f} {one.predicted}, is {one.label}", name))
    out = io.BytesIO()
    tiled(tiles).save(out, "PNG")
    return out.getvalue()
