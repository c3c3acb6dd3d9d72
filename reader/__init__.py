"""imageshards, the read side: the `tf.data` pipeline over image shards, and what a trainer needs around it.

    import reader

    info = reader.load_info("gs://bucket/datasets/flowers/1.0.0")
    train = reader.train_dataset(info, "train", global_batch_size=1024, augment=reader.augment.flip_crop)

`import reader` is cheap and needs neither TensorFlow nor Beam: the first use of a dataset builder imports TensorFlow.
`reader.torch` needs PyTorch and no TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from reader.info import DatasetInfo, load_info
from reader.packages import explained
from reader.position import Position
from reader.skips import skipped

if TYPE_CHECKING:
    from reader import augment, pillow, torch
    from reader.bridges import as_jax, as_numpy, keep_tensorflow_off_accelerators
    from reader.dataset import eval_dataset, train_dataset
    from reader.files import image_files_dataset
    from reader.foreign import record_dataset

__all__ = [
    "DatasetInfo",
    "Position",
    "as_jax",
    "as_numpy",
    "augment",
    "eval_dataset",
    "image_files_dataset",
    "keep_tensorflow_off_accelerators",
    "load_info",
    "pillow",
    "record_dataset",
    "skipped",
    "torch",
    "train_dataset",
]

# What is loaded on first use (PEP 562), since it needs TensorFlow, PyTorch or Pillow: modules, functions of modules.
_MODULES = ("augment", "pillow", "torch")
_FUNCTIONS = {
    "as_jax": "bridges",
    "as_numpy": "bridges",
    "eval_dataset": "dataset",
    "image_files_dataset": "files",
    "keep_tensorflow_off_accelerators": "bridges",
    "record_dataset": "foreign",
    "train_dataset": "dataset",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES and name not in _FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"reader.{_FUNCTIONS.get(name, name)}")
    except ModuleNotFoundError as error:
        raise explained(error) from None
    return module if name in _MODULES else getattr(module, name)
