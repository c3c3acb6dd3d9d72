"""`python -m reader train`: its flags; TensorFlow is loaded when it runs."""

from __future__ import annotations

import argparse
import dataclasses
import json

from beam_pipeline.errors import EXIT_OK
from reader.commands.flags import number, one_of, whole_number
from reader.info import load_info

_MODELS = ("small_cnn", "mobilenet_v2")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags, but for `--json`."""
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="Folder that metrics.jsonl and model.keras are written to."
    )
    parser.add_argument(
        "--model",
        type=one_of(_MODELS),
        default=_MODELS[0],
        metavar="|".join(_MODELS),
        help="What to train (default: %(default)s).",
    )
    parser.add_argument(
        "--epochs",
        type=whole_number(1),
        default=5,
        metavar="N",
        help="How many times to read the train split (default: %(default)s).",
    )
    parser.add_argument(
        "--batch_size",
        type=whole_number(1),
        default=64,
        metavar="N",
        help="Images in a step, over all devices (default: %(default)s).",
    )
    parser.add_argument(
        "--image_size",
        type=whole_number(16),
        metavar="N",
        help="Side in pixels of what the model sees (default: the stored size).",
    )
    parser.add_argument(
        "--learning_rate",
        type=number(0, is_more=True),
        default=3e-3,
        metavar="R",
        help="Adam's at its peak; it falls to 0 by a cosine (default: %(default)s).",
    )
    parser.add_argument(
        "--seed",
        type=whole_number(),
        default=0,
        metavar="N",
        help="Decides the order, the augmentation and the first weights (default: %(default)s).",
    )
    parser.add_argument(
        "--weights",
        default="none",
        metavar="none|imagenet|FILE",
        help="What to begin with; imagenet goes with mobilenet_v2 and is downloaded (default: %(default)s).",
    )


def run(flags: argparse.Namespace) -> int:
    """Train, print the result; exit code 0."""
    import reader.train.quiet  # noqa: F401
    from reader.train.fit import TrainOptions, train  # TensorFlow, 4 s: only for this verb

    options = {field.name: getattr(flags, field.name) for field in dataclasses.fields(TrainOptions)}
    info = load_info(flags.dataset)
    if flags.json:
        print(json.dumps(dataclasses.asdict(train(info, TrainOptions(**options)))))
        return EXIT_OK
    print(train(info, TrainOptions(**options), lambda line: print(line, flush=True)))
    return EXIT_OK
