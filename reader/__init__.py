"""imageshards, the read side: batches of sharded image datasets for any trainer, and the tools around them.

    import imageshards

    info = imageshards.load_info("gs://bucket/datasets/flowers/1.0.0")
    train = imageshards.train_dataset(info, "train", global_batch_size=1024, augment=imageshards.augment.flip_crop)

`import imageshards` has these names too, tools in `imageshards.tools`. Importing either is cheap and loads no
framework: the first use of a name does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from beam_pipeline import __version__
from beam_pipeline.names import homes

if TYPE_CHECKING:
    from reader import augment as augment
    from reader import keras as keras
    from reader.batches import eval_batches as eval_batches
    from reader.batches import train_batches as train_batches
    from reader.foreign import record_dataset as record_dataset
    from reader.info import DatasetInfo as DatasetInfo
    from reader.info import load_info as load_info
    from reader.jax import as_jax as as_jax
    from reader.map import Records as Records
    from reader.map import records as records
    from reader.mixing import mix as mix
    from reader.position import Position as Position
    from reader.preprocess import decode as decode
    from reader.stream import EvalBatches as EvalBatches
    from reader.stream import TrainBatches as TrainBatches
    from reader.tensorflow import as_tf as as_tf
    from reader.tensorflow import eval_dataset as eval_dataset
    from reader.tensorflow import train_dataset as train_dataset
    from reader.tools.bench import bench as bench
    from reader.tools.diff import diff as diff
    from reader.tools.duplicates import duplicates as duplicates
    from reader.tools.index import index as index
    from reader.tools.rejects import rejects as rejects
    from reader.tools.report import report as report
    from reader.tools.show import show as show
    from reader.tools.verify import verify as verify
    from reader.torch import as_torch as as_torch
    from reader.training.evaluate import Evaluation as Evaluation
    from reader.training.evaluate import evaluate as evaluate
    from reader.training.fit import train as train
    from reader.training.options import TrainOptions as TrainOptions
    from reader.training.predict import Prediction as Prediction
    from reader.training.predict import predict as predict
    from reader.training.run import load_run as load_run

_HOMES = homes("reader")  # loaded on first use (PEP 562)
__all__ = ["__version__", *_HOMES]

# What `import` calls it → what people call it, and the extra that brings it.
_PACKAGES = {
    "PIL": ("Pillow", "reader"),
    "jax": ("JAX", "jax"),
    "jinja2": ("Jinja2", "reader"),
    "keras": ("Keras", "train"),
    "matplotlib": ("Matplotlib", "train"),
    "obstore": ("obstore", "reader"),
    "simplejpeg": ("simplejpeg", "reader"),
    "tensorflow": ("TensorFlow", "tensorflow"),
    "torch": ("PyTorch", "torch"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(_HOMES[name])
        value = getattr(module, name) if module.__name__ != __name__ else importlib.import_module(f"reader.{name}")
    except ModuleNotFoundError as error:
        raise with_install_hint(error) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def with_install_hint(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The error with a text that says how to install the package, if an extra brings it; else unchanged."""
    package = (error.name or "").partition(".")[0]
    if package not in _PACKAGES:
        return error
    name, extra = _PACKAGES[package]
    return ModuleNotFoundError(f"{name} is not installed: pip install 'imageshards[{extra}]'", name=error.name)
