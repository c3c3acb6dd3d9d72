"""`load_run`: the model of a finished training, its classes, and how photos are prepared for it."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
from msgspec import Struct, convert

from beam_pipeline import storage
from beam_pipeline.errors import ImageShardsError, UsageError
from beam_pipeline.text import one_line
from reader.pixels import Pixels
from reader.preprocess import Preprocessing
from reader.training.model_names import import_users
from reader.training.out_folder import LABELS_FILE, MODEL_FILE, RUN_FILE

Floats = npt.NDArray[np.float32]


class _Dataset(Struct):
    """What run.json says of the dataset that was trained on."""

    is_index: bool
    configuration: dict[str, Any]
    image: dict[str, Any]
    codec: dict[str, str]


class _Document(Struct):
    """What is read of run.json."""

    finished: bool
    configuration: dict[str, Any]
    dataset: _Dataset


class Run:
    """A finished training, ready to be asked. Made by `load_run`; for any number of threads.

    Attributes:
        url: its folder, as it was given.
        classes: class names; an index of a probability is an index into it.
        model: of Keras, from uint8 [b, height, width, channels] to logits [b, classes].
        configuration: of the training, as run.json has it.
        preprocessing: from the content of a photo's file to pixels.
    """

    def __init__(self, url: str, document: _Document, classes: tuple[str, ...], model: Any) -> None:
        self.url, self.classes, self.model, self.configuration = url, classes, model, document.configuration
        side, dataset = document.configuration["image_size"], document.dataset
        self.preprocessing = Preprocessing(
            {"configuration": dataset.configuration, "image": dataset.image, "codec": dataset.codec},
            dataset.is_index,
            (side, side),
        )
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


def load_run(run: str | os.PathLike[str]) -> Run:
    """The model of a finished training, with all that it needs to know of new photos.

        run = imageshards.load_run("runs/photos-1")
        run.probabilities(run.decode(photo)[None])

    Args:
        run: folder or URL that `imageshards train` wrote to.

    Raises:
        UsageError: it is none.
        ImageShardsError: the training isn't finished, or its model can't be loaded.
    """
    given = os.fspath(run)
    url = storage.normalize(given)
    if why := storage.why_unusable(url):
        raise UsageError(f"{given}: {why}")
    store = storage.open_storage(url)
    try:
        document = convert(json.loads(store.read(storage.join(url, RUN_FILE))), _Document)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{given}: no {RUN_FILE} in it: give the folder that imageshards train wrote to") from None
    except ValueError:
        fix = "it was written by an earlier version: train again"
        raise UsageError(f"{given}: its {RUN_FILE} doesn't say how photos are prepared: {fix}") from None
    if not document.finished:
        raise ImageShardsError(f"{given}: this training isn't finished: run the same imageshards train command again")
    classes = tuple(store.read(storage.join(url, LABELS_FILE)).decode().split("\n")[:-1])
    return Run(given, document, classes, _load(given, store.read(storage.join(url, MODEL_FILE)), document))


def _load(given: str, data: bytes, document: _Document) -> Any:
    module, missing = str(document.configuration["model"]).rpartition(":")[0], ""
    if module:  # your own model may have layers of its own, which are known once it is imported
        try:
            import_users(module)
        except ImportError:
            missing = f"; maybe it needs the module {module}, which can't be imported here"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, MODEL_FILE)
        path.write_bytes(data)
        try:
            return keras.saving.load_model(path, compile=False)
        except Exception as error:  # Keras and a user's layers raise what they like
            reason = f"{type(error).__name__}: {one_line(error).replace(folder, given)[:300]}"
            raise ImageShardsError(f"{given}/{MODEL_FILE} can't be loaded: {reason}{missing}") from error


def as_run(run: Run | str | os.PathLike[str]) -> Run:
    """What was given as `run`: loaded already, or its folder."""
    return run if isinstance(run, Run) else load_run(run)
