"""imageshards, the read side: the `tf.data` pipeline over image shards, and what a trainer needs around it.

    import reader

    info = reader.load_info("gs://bucket/datasets/flowers/1.0.0")
    train = reader.train_dataset(info, "train", global_batch_size=1024, augment=reader.augment.flip_crop)

`import reader` is cheap and needs neither TensorFlow nor Beam: the first use of a dataset builder imports TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from reader.info import DatasetInfo, load_info
from reader.position import Position

if TYPE_CHECKING:
    from reader import augment
    from reader.dataset import eval_dataset, train_dataset
    from reader.foreign import record_dataset

__all__ = ["DatasetInfo", "Position", "augment", "eval_dataset", "load_info", "record_dataset", "train_dataset"]

_NEEDS_TENSORFLOW = {"train_dataset": "dataset", "eval_dataset": "dataset", "record_dataset": "foreign"}


def __getattr__(name: str) -> Any:
    """Load what needs TensorFlow on first use (PEP 562)."""
    if name == "augment":
        return importlib.import_module("reader.augment")
    if name in _NEEDS_TENSORFLOW:
        return getattr(importlib.import_module(f"reader.{_NEEDS_TENSORFLOW[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
