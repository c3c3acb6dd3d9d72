"""`load_run`: the model of a finished training, its classes, and how photos are prepared for it.

`predict`: what it says of new photos, read from files, folders and buckets in batches.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import keras
import numpy as np
import numpy.typing as npt
from msgspec import convert, defstruct

from beam_pipeline import storage
from beam_pipeline.errors import ImageShardsError, Reject, StorageError, UsageError
from beam_pipeline.images import check_size
from beam_pipeline.machine import cpu_count
from beam_pipeline.text import name_line, one_line
from reader.hosts import integer
from reader.pixels import Pixels
from reader.preprocess import PhotoError, Preprocessing, image_files, why
from reader.tools.checks import in_order
from reader.training.models import import_user_module
from reader.training.out_folder import LABELS_FILE, MODEL_FILE, RUN_FILE

Floats = npt.NDArray[np.float32]

_REMOTE_READS = 16  # photos of a bucket that are read at once
_BATCHES_AHEAD = 2  # that are prepared while the model has another

# What is read of run.json: of the dataset that was trained on, and of the training's configuration.
_Image = defstruct("_Image", [("format", str), ("channels", Literal[1, 3])])
_Dataset = defstruct(
    "_Dataset",
    [("is_index", bool), ("configuration", dict[str, Any]), ("image", _Image), ("codec", dict[str, str])],
)
_Configuration = defstruct(
    "_Configuration",
    [
        *(("model", str), ("image_size", int), ("dataset", str), ("train_split", str, "train")),
        *(("eval_split", str | None, None), ("classes", dict[str, str] | None, None)),
    ],
)
_Document = defstruct("_Document", [("finished", bool), ("configuration", _Configuration), ("dataset", _Dataset)])


class Run:
    """A finished run, ready for inference. Made by `load_run`; for any number of threads.

    Attributes:
        url: its folder, as it was given.
        classes: class names; an index of a probability is an index into it.
        model: of Keras, from uint8 [b, height, width, channels] to logits [b, classes].
        configuration: of the training, as run.json has it.
        preprocessing: from the content of a photo's file to pixels.
    """

    def __init__(self, url: str, document: dict[str, Any], classes: tuple[str, ...], model: Any) -> None:
        self.url, self.classes, self.model, self.configuration = url, classes, model, document["configuration"]
        side, dataset = self.configuration["image_size"], document["dataset"]
        self.preprocessing = Preprocessing(dataset, dataset["is_index"], (side, side))
        takes = (None, *self.preprocessing.shape), (None, len(classes))
        has = getattr(model, "input_shape", None), getattr(model, "output_shape", None)
        if has != takes:
            says = f"by {RUN_FILE} and {LABELS_FILE} {takes}"
            raise ImageShardsError(f"{url}: the shapes of its model are {has}, {says}: restore what train wrote")
        self._lock = threading.Lock()  # Keras builds its function in the first call

    def decode(self, photo: bytes) -> Pixels:
        """A photo's file as the model takes it, uint8 [height, width, channels]: as `imageshards.decode`.

        Raises:
            ValueError: the writer of the dataset would reject it; one line says why.
        """
        return self.preprocessing.decode(photo)

    def probabilities(self, images: Pixels) -> Floats:
        """float32 [b, classes], each row summing to 1, of uint8 [b, height, width, channels]."""
        with self._lock:
            logits = np.asarray(self.model.predict_on_batch(images), np.float32)
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares: Floats = powers / powers.sum(axis=1, keepdims=True)
        return shares


def load_run(run: str | os.PathLike[str], *, model: str | None = None) -> Run:
    """The model of a finished training, with all that it needs to know of new photos.

        run = imageshards.load_run("runs/photos")
        run.probabilities(run.decode(photo)[None])

    Args:
        run: folder or URL that `imageshards train` wrote to.
        model: `package.module:function` of your own model, whose module is imported only if the model has layers that
            Keras doesn't know. What the run itself names is never imported: the run may be a stranger's.

    Raises:
        UsageError: it is none, or `model` can't be imported.
        ImageShardsError: the training isn't finished, or its model can't be loaded.
    """
    given = os.fspath(run)
    url = storage.normalize(given)
    if why := storage.why_unusable(url):
        raise UsageError(f"{given}: {why}")
    store = storage.open_storage(url)
    try:
        document = json.loads(store.read(storage.join(url, RUN_FILE)))
        convert(document, _Document)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{given}: no {RUN_FILE} in it: give the folder that imageshards train wrote to") from None
    except (ValueError, RecursionError) as error:
        fix = f"it was written by an earlier version, or edited ({one_line(error)}): train again"
        raise UsageError(f"{given}: its {RUN_FILE} doesn't say how photos are prepared: {fix}") from None
    if not document["finished"]:
        raise ImageShardsError(f"{given}: this run isn't finished: run the same imageshards train command again")
    try:
        classes = tuple(store.read(storage.join(url, LABELS_FILE)).decode().split("\n")[:-1])
    except UnicodeDecodeError:
        raise UsageError(f"{given}: its {LABELS_FILE} isn't UTF-8: save it as such, a line for each class") from None
    trained = document["configuration"]["model"]
    return Run(given, document, classes, _load(given, store.read(storage.join(url, MODEL_FILE)), trained, model))


def _load(given: str, data: bytes, trained: str, model: str | None, known: dict[str, Any] | None = None) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, MODEL_FILE)
        path.write_bytes(data)
        try:
            return keras.saving.load_model(path, known, compile=False)
        except Exception as error:  # Keras and a user's layers raise what they like
            if model is not None and known is None:
                own = {
                    name: one for name, one in vars(import_user_module(model, False)).items() if isinstance(one, type)
                }
                return _load(given, data, trained, model, own)
            reason = f"{type(error).__name__}: {one_line(error).replace(folder, given)[:300]}"
            hint = f"; if you trust the module, give --model {trained} (model={trained!r} to load_run) to import it"
            hint = hint if model is None and ":" in trained else ""
            raise ImageShardsError(f"{given}/{MODEL_FILE} can't be loaded: {reason}{hint}") from error


def as_run(run: Run | str | os.PathLike[str]) -> Run:
    """What was given as `run`: loaded already, or its folder."""
    return run if isinstance(run, Run) else load_run(run)


# --- new photos


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction for a photo.

    Attributes:
        file: the photo, as it was given, or below the folder that was given.
        probabilities: the most probable classes with their probabilities, the first of them first.
        error: why there are none, in a line; else "".
    """

    file: str
    probabilities: dict[str, float]
    error: str = ""

    @property
    def label(self) -> str | None:
        """The most probable class, if the photo could be read."""
        return next(iter(self.probabilities), None)

    def __str__(self) -> str:
        shares = (f"{label} {share:.3f}" for label, share in self.probabilities.items())
        return f"{name_line(self.file)}: {self.error or ', '.join(shares)}"


class _Photo(NamedTuple):
    file: str  # as it is shown
    url: str
    bytes: int


def predict(
    run: Run | str | os.PathLike[str],
    photos: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    top: int = 3,
    batch_size: int = 64,
) -> Iterator[Prediction]:
    """Classify new photos: each is prepared exactly as those were that the model was trained on.

    Args:
        run: what `load_run` returned, or the folder or URL that `imageshards train` wrote to.
        photos: files and folders, or their URLs. Of a folder, all images in it and below are taken, in order of their
            names, but hidden ones.
        top: how many classes of each photo are returned.
        batch_size: photos that the model gets at once; three batches are in memory.

    Returns:
        A `Prediction` for each photo, in order, as they are made. One that can't be read has an `error`.

    Raises:
        UsageError: there is no such file or run, no image in a folder, or a number is out of range; at once.
        ImageShardsError: the training isn't finished, or, while iterating, a storage request failed.
    """
    integer("top", top, 1)
    integer("batch_size", batch_size, 1)
    given = [photos] if isinstance(photos, str | os.PathLike) else list(photos)
    found = [photo for one in given for photo in _find(os.fspath(one))]
    if not found:
        raise UsageError("no photos: give files, folders or URLs")
    return _predictions(as_run(run), found, top, min(batch_size, len(found)))


def _find(given: str) -> Iterator[_Photo]:
    """The photos that a path or URL names."""
    url = storage.normalize(given)
    if fault := "it is empty" if not given else storage.why_unusable(url, is_file=True):
        raise UsageError(f"{given!r}: {fault}")
    store = storage.open_storage(url)
    is_bucket = not (storage.is_local(url) or storage.bucket_and_name(url)[1])
    if not is_bucket and (file := store.stat(url)) is not None:
        yield _Photo(given, url, file.bytes)
        return
    for path, size in image_files(given).items():
        yield _Photo(storage.join(given, path), storage.join(url, path), size)


def _predictions(run: Run, photos: Sequence[_Photo], top: int, batch_size: int) -> Iterator[Prediction]:
    is_remote = any(not storage.is_local(photo.url) for photo in photos)
    pool = ThreadPoolExecutor(max(_REMOTE_READS, cpu_count()) if is_remote else cpu_count(), "reader-photos")
    prepared = in_order(pool, partial(_prepared, run), photos, _BATCHES_AHEAD * batch_size)
    pairs = zip(photos, prepared, strict=True)
    try:
        while batch := list(islice(pairs, batch_size)):
            yield from _classified(run, batch, top, batch_size)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _prepared(run: Run, photo: _Photo) -> Pixels | str:
    """A photo as the model takes it, or why it can't be."""
    store = storage.open_storage(photo.url)
    try:
        check_size(photo.bytes, run.preprocessing.limits)
        return run.decode(store.read(photo.url))
    except Reject as reject:
        return why(reject)
    except PhotoError as error:
        return str(error)
    except StorageError as error:  # one file; but a bucket that can't be reached is no photo's fault
        if isinstance(error, FileNotFoundError):
            return "not found"
        if store.is_remote:
            raise
        return one_line(error)


def _classified(
    run: Run, photos: Sequence[tuple[_Photo, Pixels | str]], top: int, batch_size: int
) -> Iterator[Prediction]:
    """The predictions of a batch; the last one is filled up, so that the model sees one shape."""
    images, rows = np.zeros((batch_size, *run.preprocessing.shape), np.uint8), 0
    for _, result in photos:
        if not isinstance(result, str):
            images[rows], rows = result, rows + 1
    probabilities = iter(run.probabilities(images)[:rows] if rows else np.zeros((0, 0)))
    for photo, result in photos:
        if isinstance(result, str):
            yield Prediction(photo.file, {}, result)
        else:
            row = next(probabilities)
            best = np.argsort(-row, kind="stable")[:top]
            yield Prediction(photo.file, {run.classes[index]: round(float(row[index]), 6) for index in best})
