"""What TensorFlow does with the records of a batch: parse, decode, label; and what is wrong with one that fails."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import tensorflow as tf

from beam_pipeline.errors import UsageError
from reader.decode import BatchDecoder, Tensor
from reader.features import Feature
from reader.info import DatasetInfo
from reader.parsing import RecordParser, parse_lists

Labels = Literal["int", "one_hot"]


class BatchGraph:
    """What TensorFlow does with the records of a batch (see `gaps.Graph`).

    Args:
        info: the dataset.
        features: what is wanted beside image and label.
        decode: makes what is handed out of encoded images.
        plain: decodes without augmentation, whose errors aren't the image's.
        labels: `int` or `one_hot`.
        has_weights: whether weights are handed out.
    """

    def __init__(
        self,
        info: DatasetInfo,
        features: dict[str, Feature],
        decode: BatchDecoder,
        plain: BatchDecoder,
        labels: Labels,
        has_weights: bool,
    ) -> None:
        if labels not in ("int", "one_hot"):
            raise UsageError(f"labels={labels!r}: int or one_hot")
        self._parser = RecordParser(info.image_key, info.class_key, features)
        self._features = features
        self._lists = {name: feature for name, feature in features.items() if feature.shape is None}
        self._decode = decode
        self._plain = plain
        self._class_ids = np.arange(info.num_classes)
        self._classes = info.num_classes if labels == "one_hot" else 0
        self._has_weights = has_weights

    def parse(self, records: Tensor) -> tuple[Tensor, ...]:
        if not self._lists:
            return self._parser(records)
        # Ragged tensors can't be cut into batches: what they are made of goes along and is parsed last. Here they only
        # have to parse, so that a record of which one doesn't is found where others are. (Asserted, since TensorFlow
        # drops what nothing depends on.)
        values = [tf.size(lists.flat_values) for lists in parse_lists(records, self._lists).values()]
        tf.debugging.Assert(tf.add_n(values) >= 0, ["lists hold values"])
        return (*self._parser(records), records)

    def prepare(self, seeds: Tensor, weights: Tensor, encoded: Tensor, classes: Tensor, *more: Tensor) -> Any:
        images = self._decode(encoded, seeds)
        classes = tf.gather(self._class_ids, classes)  # an error where there is no such class
        labels = tf.one_hot(classes, self._classes, dtype=tf.float32) if self._classes else classes
        return (images, labels, *([weights] if self._has_weights else ()), *more)

    def fault(self, record: bytes) -> str | None:
        if not record:
            return None  # its error is known
        try:
            encoded, classes, *_ = self._parser(tf.constant([record]))
            if self._lists:
                parse_lists(tf.constant([record]), self._lists)
        except (tf.errors.InvalidArgumentError, UnicodeDecodeError) as error:  # TensorFlow quotes the record's bytes
            return f"it isn't an Example with the dataset's features ({_first_line(error)})"
        try:
            self._plain(encoded)
        except tf.errors.InvalidArgumentError as error:
            return f"the image doesn't decode ({_first_line(error)})"
        label = int(classes[0])
        return None if 0 <= label < len(self._class_ids) else f"class {label}: there are {len(self._class_ids)}"

    def structure(self, images: Tensor, labels: Tensor, *more: Tensor) -> Any:
        """What is handed out, from what `prepare` makes: [b, …] each, the last of them serialized records if lists are
        wanted.
        """
        weights, more = (more[:1], more[1:]) if self._has_weights else ((), more)
        values = dict(zip(self._dense(), more, strict=False))
        lists = parse_lists(more[-1], self._lists) if self._lists else {}
        inputs = {"image": images, **{name: (values | lists)[name] for name in self._features}}
        return (inputs if self._features else images, labels, *weights)

    def _dense(self) -> list[str]:
        return [name for name, feature in self._features.items() if feature.shape is not None]

    @property
    def is_flat(self) -> bool:
        """Whether `prepare` makes what is handed out."""
        return not self._features


def _first_line(error: Exception) -> str:
    text = str(error).splitlines()[0].split("}} ")[-1].split(", value: ")[0]
    return "".join(filter(str.isprintable, text))[:200]
