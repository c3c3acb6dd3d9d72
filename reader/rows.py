"""How a record of a dataset is parsed and decoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reader.example import ImageFinder
from reader.features import Feature, read_features
from reader.info import DatasetInfo
from reader.pixels import ImageDecoder
from reader.runs import InvalidRecordError, Parsed


class RecordRows:
    """How a record of a dataset is parsed and decoded (see `runs.Rows`).

    Args:
        info: the dataset.
        decode: (encoded image, row, seed) → None, fills the row: an `ImageDecoder`.
        features: those that are read in addition to image and class.
        labels: class id in the records → that of the batch, -1 for a class that isn't selected; None if they are equal.
    """

    def __init__(
        self,
        info: DatasetInfo,
        decode: ImageDecoder,
        features: Mapping[str, Feature],
        labels: Sequence[int] | None = None,
    ) -> None:
        self._find = ImageFinder(info.image_key, info.class_key)
        self._labels = range(info.num_classes) if labels is None else labels
        self._features = features
        self.decode: Callable[[Any, Any, int], Any] = decode
        self.shape: tuple[int, int, int] | None = decode.shape

    def parse(self, record: bytes) -> Parsed:
        """(encoded image, class id, features) of a record. Raises InvalidRecordError."""
        try:
            encoded, label = self._find(record)
            values = read_features(record, self._features) if self._features else ()
        except ValueError as error:
            raise InvalidRecordError(f"it isn't an Example with the dataset's features ({error})") from None
        if not 0 <= label < len(self._labels):
            raise InvalidRecordError(f"class {label}: there are {len(self._labels)}")
        if self._labels[label] < 0:
            raise InvalidRecordError(f"class {label} isn't selected, the record table has another one")
        return encoded, self._labels[label], values
