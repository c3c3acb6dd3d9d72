"""Which features of third-party records hold the image, its class id and its class name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from beam_pipeline import schema
from beam_pipeline.errors import CorruptRecordError, ImageShardsError, UsageError
from reader.example import Value
from reader.record_files import read_examples
from reader.tools.scan import only_bytes, only_integer, type_name

# Names in use for the image, its class id and its class name: ours and the TFRecord tutorial's, TFDS', TF-Slim's and
# the object detection API's, then what people write by hand. The first that a file has is taken.
IMAGE_KEYS = (schema.IMAGE_KEY, "image/encoded", "image_raw", "image_bytes", "img", "jpeg", "jpg", "png")
CLASS_KEYS = (schema.CLASS_KEY, "label", "image/class/label", "class_id", "label_id", "cls", "target")
NAME_KEYS = (schema.LABEL_KEY, "image/class/text", "class_name", "label_name", schema.CLASS_KEY)
_SEARCHED_RECORDS = 100  # in which the names are looked for: a first one may lack its class


class Keys(NamedTuple):
    """Which features hold an image, its class id, and its class name ("" if none does)."""

    image: str
    label: str
    name: str


def find_keys(files: Sequence[str], image_key: str | None, class_key: str | None) -> Keys:
    """The keys of image and class in the first record that has both."""
    first: tuple[str, dict[str, Value]] | None = None
    errors: list[CorruptRecordError] = []
    for file in files:
        for _, _, features in islice(read_examples(file, errors.append), _SEARCHED_RECORDS):
            image, label, name = _keys_in(features, image_key, class_key)
            if image and label:
                return Keys(image, label, name)
            first = first or (file, features)
    if first is None:
        raise errors[0] if errors else ImageShardsError(f"{files[0]}: no record in {len(files)} files")
    file, features = first
    image, *_ = _keys_in(features, image_key, class_key)
    missing = "a class id (one int64 value)" if image else "an image (one bytes value)"
    flag = "--class_key" if image else "--image_key"
    there = ", ".join(f"{key} ({type_name(value)}, {len(value)})" for key, value in sorted(features.items()))
    raise UsageError(f"{file}: no feature is known to hold {missing}; name it by {flag} among: {there or 'nothing'}")


def _keys_in(features: Mapping[str, Value], image_key: str | None, class_key: str | None) -> Keys:
    """The features that hold these things in one record, "" for those that it lacks."""
    texts = [key for key in features if only_bytes(features, key) is not None]
    numbers = [key for key in features if only_integer(features, key) is not None]
    image = next((key for key in ([image_key] if image_key else IMAGE_KEYS) if key in texts), "")
    label = next((key for key in ([class_key] if class_key else CLASS_KEYS) if key in numbers), "")
    return Keys(image, label, next((key for key in NAME_KEYS if key in texts and key != image), ""))
