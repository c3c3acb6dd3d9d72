"""`python -m reader train`: its flags, and what it prints."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from importlib.util import find_spec
from typing import Any

from reader.commands.flags import Command, Flag, Result, between, positive, whole_number
from reader.info import load_info
from reader.train.models import MODULES, SMALL_CNN
from reader.train.options import AUGMENTS, TrainOptions

_DEFAULT = TrainOptions()


def _train(values: dict[str, Any]) -> Result:
    info = load_info(values["dataset"])
    if "KERAS_BACKEND" not in os.environ and find_spec("tensorflow") is None and find_spec("jax") is not None:
        os.environ["KERAS_BACKEND"] = "jax"  # Keras' own default is TensorFlow
    if find_spec("tensorflow") is not None:
        import reader.train.quiet  # noqa: F401

        if os.environ.get("KERAS_BACKEND") == "jax":  # Keras imports TensorFlow all the same
            from reader.jax_arrays import keep_tensorflow_off_accelerators

            keep_tensorflow_off_accelerators()
    from reader.train.fit import train  # Keras and its backend, seconds: only for this command

    options = TrainOptions(**{field.name: values[field.name] for field in dataclasses.fields(TrainOptions)})
    command = shlex.join(["imageshards", *sys.argv[1:]])
    if values["json"]:
        return Result(dataclasses.asdict(train(info, options, command=command)), "")
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
    (
        Flag("--out", "OUT", "Folder or URL for all that comes out (default: runs/NAME-N)."),
        Flag("--model", "MODEL", f"{SMALL_CNN}, {', '.join(MODULES)}; or package.module:function.", SMALL_CNN),
        Flag(
            "--weights",
            "WEIGHTS",
            "none, imagenet, or a file: .keras, or weights (.h5). With weights, --epochs train a new head on a "
            "frozen model, then --fine_tune_epochs all of it but BatchNormalization.",
            _DEFAULT.weights,
        ),
        Flag("--epochs", "N", "Epochs (default: 6, more for 150 updates).", None, whole_number(1)),
        Flag("--fine_tune_epochs", "N", "With weights (default: half of --epochs).", None, whole_number(0)),
        Flag("--batch_size", "N", "Images in a step, over all devices (default: 8 to 64).", None, whole_number(1)),
        Flag(
            "--image_size",
            "N",
            "Side in pixels of what the model sees (default: as stored; at most 96 for small_cnn).",
            None,
            whole_number(16),
        ),
        Flag("--learning_rate", "R", "Of Adam at its peak (default: by model and batch).", None, positive),
        Flag("--label_smoothing", "R", "Share of each label given to all classes.", 0.0, between(0, 0.99)),
        Flag("--augment", "|".join(AUGMENTS), "How training images are varied.", _DEFAULT.augment),
        Flag("--class_weights", "none|balanced", "balanced: all classes weigh the same.", _DEFAULT.class_weights),
        Flag(
            "--mixed_precision",
            "auto|none|bfloat16|float16",
            "auto: bfloat16 on TPUs and new GPUs, float16 on older ones, none on CPUs.",
            _DEFAULT.mixed_precision,
        ),
        Flag("--seed", "N", "Decides the order, the augmentation and the first weights.", 0, whole_number()),
        Flag("--eval_split", "SPLIT", "To validate on (default: validation, else val, else test)."),
        Flag(
            "--early_stopping",
            "N",
            "Stop after this many epochs without a lower validation loss.",
            None,
            whole_number(1),
        ),
        Flag(
            "--steps_per_execution",
            "N",
            "Steps without a look from Python (default: 1 on CPUs, else 8); lowered to a divisor of an epoch's steps.",
            None,
            whole_number(1),
        ),
        Flag("--cache", "DIR", "Keep what was read from remote storage in this folder, or in memory: memory."),
        Flag("--device", "auto|tpu|gpu|cpu", "What to train on.", _DEFAULT.device),
        Flag("--tpu", "NAME", "A Cloud TPU by its name, if it isn't this machine's."),
        Flag("--distributed", "", "This is one of several processes of JAX.", False),
        Flag("--checkpoint_minutes", "M", "How often a checkpoint is written.", _DEFAULT.checkpoint_minutes, positive),
        Flag("--checkpoint_steps", "N", "The same by steps instead.", None, whole_number(1)),
    ),
)
