"""`python -m reader train`: its flags; TensorFlow is loaded when it runs."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from beam_pipeline.errors import EXIT_OK
from reader.commands.flags import REQUIRED, Command, Flag, number, one_of, whole_number
from reader.info import load_info


def _run(values: dict[str, Any]) -> int:
    import reader.train.quiet  # noqa: F401
    from reader.train.fit import TrainOptions, train  # TensorFlow, 4 s: only for this command

    options = TrainOptions(**{field.name: values[field.name] for field in dataclasses.fields(TrainOptions)})
    info = load_info(values["dataset"])
    if values["json"]:
        print(json.dumps(dataclasses.asdict(train(info, options))))
    else:
        print(train(info, options, lambda line: print(line, flush=True)))
    return EXIT_OK


_MODELS = ("small_cnn", "mobilenet_v2")
_RATE = "Peak learning rate (Adam, cosine decay to 0)."
_WEIGHTS = "What to begin with; imagenet goes with mobilenet_v2 and is downloaded."

COMMAND = Command(
    "train",
    ("DATASET",),
    "Train an image classifier on a dataset, on a TPU if there is one, else on all GPUs, else on the CPU.",
    "Writes metrics.jsonl, a line for each epoch, and model.keras. Loss and accuracy are means over the records.",
    "datasets/photos/1.0.0 --out runs/1 --epochs 10",
    "0 trained, 1 the dataset or its storage can't be read",
    _run,
    (
        Flag("--out", "DIR", "Folder that metrics.jsonl and model.keras are written to.", REQUIRED),
        Flag("--model", "|".join(_MODELS), "What to train.", _MODELS[0], one_of(*_MODELS)),
        Flag("--epochs", "N", "How many times to read the train split.", 5, whole_number(1)),
        Flag("--batch_size", "N", "Images in a step, over all devices.", 64, whole_number(1)),
        Flag(
            "--image_size",
            "N",
            "Side in pixels of what the model sees (default: the stored size).",
            None,
            whole_number(16),
        ),
        Flag("--learning_rate", "R", _RATE, 3e-3, number(0, is_more=True)),
        Flag("--seed", "N", "Decides the order, the augmentation and the first weights.", 0, whole_number()),
        Flag("--weights", "none|imagenet|FILE", _WEIGHTS, "none"),
    ),
)
