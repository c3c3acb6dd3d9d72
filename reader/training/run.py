"""`load_run`: the model of a finished training, its classes, and how photos are prepared for it."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np
import numpy.typing as npt
from msgspec import convert, defstruct

from beam_pipeline import storage
from beam_pipeline.errors import ImageShardsError, UsageError
from beam_pipeline.text import one_line
from reader.pixels import Pixels
from reader.preprocess import Preprocessing
from reader.training.models import import_user_module
from reader.training.out_folder import LABELS_FILE, MODEL_FILE, RUN_FILE

Floats = npt.NDArray[np.float32]


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
