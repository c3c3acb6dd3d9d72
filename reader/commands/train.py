"""`python -m reader train`: its flags, and what it prints."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import warnings
from contextlib import redirect_stdout
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from reader.commands.flags import Command, Result
from reader.info import load_info
from reader.train.models import application_name
from reader.train.options import FLAGS, TrainOptions, check_backend


def _train(values: dict[str, Any]) -> Result:
    application_name(values["model"])  # a typo is told before all else
    check_backend(os.environ.get("KERAS_BACKEND", "tensorflow"))
    info = load_info(values["dataset"])
    if "KERAS_BACKEND" not in os.environ and find_spec("tensorflow") is None and find_spec("jax") is not None:
        os.environ["KERAS_BACKEND"] = "jax"  # Keras' own default is TensorFlow
    if find_spec("tensorflow") is not None:
        import reader.commands.quiet  # noqa: F401
    from reader.train.fit import train  # Keras and its backend, seconds: only for this command

    options = TrainOptions(**{flag.name[2:]: values[flag.name[2:]] for flag in FLAGS})
    command = shlex.join(["imageshards", *sys.argv[1:]])
    logging.getLogger("reader").setLevel(logging.ERROR)  # a batch larger than the split is told in the command's words
    warnings.filterwarnings("ignore", module="keras")
    if values["json"]:
        with redirect_stdout(sys.stderr):  # downloads tell of themselves
            return Result(asdict(train(info, options, command=command)), "")
    return Result({}, str(train(info, options, lambda line: print(line, flush=True), command)))


COMMAND = Command(
    "train",
    ("DATASET",),
    "Train an image classifier on a dataset, on a TPU if there is one, else on all GPUs, else on the CPU.",
    "Every default fits the dataset. A training that was stopped, by SIGTERM or Ctrl-C or a crash, continues from its "
    "last checkpoint when the same command runs again. KERAS_BACKEND=jax trains without TensorFlow, and on several "
    "hosts. OUT gets model.keras, classes.txt, metrics.jsonl (a line for each epoch), run.json, curves.png and "
    "confusion.png.",
    "datasets/photos/1.0.0 --model MobileNetV2 --weights imagenet",
    "0 trained, 1 stopped, or the dataset, its storage or the device failed",
    _train,
    FLAGS,
)
