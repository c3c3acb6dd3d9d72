"""`predict`: what a trained model says of new photos, read from files, folders and buckets in batches."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from beam_pipeline import storage
from beam_pipeline.errors import Reject, StorageError, UsageError
from beam_pipeline.images import check_size
from beam_pipeline.text import name_line, one_line
from reader.hosts import integer
from reader.machine import cpu_count
from reader.pixels import Pixels
from reader.preprocess import PhotoError, image_files, why
from reader.training.run import Run, as_run

_REMOTE_READS = 16  # photos of a bucket that are read at once
_BATCHES_AHEAD = 2  # that are prepared while the model has another


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
    ahead: deque[tuple[Sequence[_Photo], list[Future[Pixels | str]]]] = deque()
    try:
        for first in range(0, len(photos), batch_size):
            batch = photos[first : first + batch_size]
            ahead.append((batch, [pool.submit(_prepared, run, photo) for photo in batch]))
            if len(ahead) > _BATCHES_AHEAD:
                yield from _classified(run, *ahead.popleft(), top, batch_size)
        while ahead:
            yield from _classified(run, *ahead.popleft(), top, batch_size)
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
    run: Run, photos: Sequence[_Photo], prepared: Sequence[Future[Pixels | str]], top: int, batch_size: int
) -> Iterator[Prediction]:
    """The predictions of a batch; the last one is filled up, so that the model sees one shape."""
    images, rows = np.zeros((batch_size, *run.preprocessing.shape), np.uint8), 0
    results = [future.result() for future in prepared]
    for result in results:
        if not isinstance(result, str):
            images[rows], rows = result, rows + 1
    probabilities = iter(run.probabilities(images)[:rows] if rows else np.zeros((0, 0)))
    for photo, result in zip(photos, results, strict=True):
        if isinstance(result, str):
            yield Prediction(photo.file, {}, result)
        else:
            row = next(probabilities)
            best = np.argsort(-row, kind="stable")[:top]
            yield Prediction(photo.file, {run.classes[index]: round(float(row[index]), 6) for index in best})
