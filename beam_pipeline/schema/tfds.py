"""`features.json` and `dataset_info.json`, which make a published version a TFDS dataset, written without TFDS.

https://www.tensorflow.org/datasets/external_tfrecord#load_dataset_with_tfds
https://github.com/tensorflow/datasets/blob/master/tensorflow_datasets/core/proto/feature.proto
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from beam_pipeline.schema import CLASS_KEY, FILENAME_KEY, IMAGE_KEY, LABEL_KEY, ONE_HOT_KEY, SIZE_KEY
from beam_pipeline.schema.manifest import Column

_FEATURES = "tensorflow_datasets.core.features"
_DTYPES = {"int64": "int64", "float32": "float32", "bytes": "string"}


def features_document(
    image_format: str, image_shape: Sequence[int | None], class_count: int, one_hot: bool, columns: Iterable[Column]
) -> dict[str, Any]:
    """The content of `features.json`.

    Args:
        image_format: jpeg or png.
        image_shape: (height, width, channels); None for a side that differs from image to image.
        class_count, one_hot: number of classes, and whether records hold `one_hot_class`.
        columns: a manifest's features.
    """
    image = {"dtype": "uint8", "encodingFormat": image_format, "shape": _shape(image_shape)}
    features = {
        IMAGE_KEY: {"pythonClassName": f"{_FEATURES}.image_feature.Image", "image": image},
        CLASS_KEY: {
            "pythonClassName": f"{_FEATURES}.class_label_feature.ClassLabel",
            "classLabel": {"numClasses": str(class_count)},
        },
        LABEL_KEY: {"pythonClassName": f"{_FEATURES}.text_feature.Text", "text": {}},
        SIZE_KEY: _tensor("int64", (2,)),
        FILENAME_KEY: _tensor("string", ()),
    }
    if one_hot:
        features[ONE_HOT_KEY] = _tensor("float32", (class_count,))
    for column in columns:
        features[column.name] = _tensor(_DTYPES[column.dtype], (None,) if column.list else ())
    return {"pythonClassName": f"{_FEATURES}.features_dict.FeaturesDict", "featuresDict": {"features": features}}


def dataset_info_document(name: str, version: str, splits: Mapping[str, tuple[int, Sequence[int]]]) -> dict[str, Any]:
    """The content of `dataset_info.json`; `splits` is split → (bytes of its shards, records of each in order)."""
    return {
        "fileFormat": "tfrecord",
        "moduleName": "imageshards",
        "name": name,
        "version": version,
        "splits": [
            {
                "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
                "name": split,
                "numBytes": str(byte_count),
                "shardLengths": [str(records) for records in shard_records],
            }
            for split, (byte_count, shard_records) in sorted(splits.items())
        ],
        "supervisedKeys": {"tuple": {"items": [{"featureKey": IMAGE_KEY}, {"featureKey": CLASS_KEY}]}},
    }


def _tensor(dtype: str, shape: Sequence[int | None]) -> dict[str, Any]:
    return {
        "pythonClassName": f"{_FEATURES}.tensor_feature.Tensor",
        "tensor": {"dtype": dtype, "encoding": "none", "shape": _shape(shape)},
    }


def _shape(shape: Sequence[int | None]) -> dict[str, Any]:
    return {"dimensions": ["-1" if side is None else str(side) for side in shape]} if shape else {}
