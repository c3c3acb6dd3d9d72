"""The front door: what a trainer needs, and the command `imageshards`.

    import imageshards

    imageshards.write(imageshards.Config(input="photos", output="datasets", name="photos"))
    train = imageshards.train_batches("datasets/photos/1.0.0", "train", global_batch_size=64)

`imageshards.tools` looks at datasets, `imageshards.beam` has the transforms for your own pipelines. Importing any of
them is cheap: each name is loaded on first use, so nobody needs the packages of the other side. Nothing defined here is
ever pickled: workers unpickle `beam_pipeline`'s own modules.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import beam_pipeline
from beam_pipeline.errors import EXIT_OK, ImageShardsError, UsageError, print_error
from beam_pipeline.names import SHELVES, no_attribute

if TYPE_CHECKING:  # for editors
    from beam_pipeline.config import Config as Config
    from beam_pipeline.errors import ImageShardsError as ImageShardsError
    from beam_pipeline.schema.manifest import Manifest as Manifest
    from imageshards import beam as beam
    from imageshards import tools as tools
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
    from reader.torch import as_torch as as_torch
    from reader.training.evaluate import Evaluation as Evaluation
    from reader.training.evaluate import evaluate as evaluate
    from reader.training.fit import train as train
    from reader.training.options import TrainOptions as TrainOptions
    from reader.training.run import Prediction as Prediction
    from reader.training.run import load_run as load_run
    from reader.training.run import predict as predict

    write = beam_pipeline.run
else:  # a type checker would take any name for one that exists

    def __getattr__(name: str) -> Any:
        if name in ("beam", "tools"):
            return importlib.import_module(f"imageshards.{name}")
        if name == "__all__":
            return __dir__()
        return public("imageshards", name)


__version__ = beam_pipeline.__version__


def __dir__() -> list[str]:
    return sorted([*SHELVES["imageshards"], "__version__", "beam", "tools"])


def public(shelf: str, name: str) -> Any:
    """A public name of a shelf, loaded on first use."""
    if name not in SHELVES[shelf]:
        raise no_attribute(shelf, name)
    if SHELVES[shelf][name].startswith("reader"):
        return getattr(_reader(), name)
    return getattr(beam_pipeline, "run" if name == "write" else name)


def _reader() -> ModuleType:
    """Our package `reader`, with none of its frameworks.

    Raises:
        UsageError: another package of that name is found in its place.
    """
    import reader

    if "load_info" not in dir(reader):
        raise UsageError(
            f"{reader.__file__ or next(iter(reader.__path__))} is another package named reader, such as PyPI's: "
            "uninstall it, then install imageshards again"
        )
    return reader


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line, of `python -m reader` too; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given[:1] == ["write"]:
            from beam_pipeline.cli.command import command

            return command(given[1:])
        _reader()
        from reader import commands

        return commands.run(given)
    except ImageShardsError as error:
        return print_error(error)
    except BrokenPipeError:
        return EXIT_OK
    except KeyboardInterrupt:
        return print_error(ImageShardsError("interrupted"))
    except SystemExit as done:  # argparse, after --help
        return int(done.code or EXIT_OK)
