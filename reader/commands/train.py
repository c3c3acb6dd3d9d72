"""`python -m reader train`: its flags; TensorFlow is loaded when it runs."""

from __future__ import annotations

import argparse

from beam_pipeline.errors import EXIT_OK
from reader.info import load_info


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    parser.add_argument("--model", choices=("small_cnn", "mobilenet_v2"), default="small_cnn", help="(%(default)s)")
    parser.add_argument("--epochs", type=int, default=5, metavar="N", help="(%(default)s)")
    parser.add_argument("--out", required=True, metavar="DIR", help="for metrics.jsonl and model.keras")
    parser.add_argument(
        "--batch_size", type=int, default=64, metavar="N", help="global, over all devices (%(default)s)"
    )
    parser.add_argument(
        "--image_size", type=int, metavar="N", help="side in pixels that the model sees (the stored size)"
    )
    parser.add_argument("--learning_rate", type=float, default=3e-3, metavar="R", help="(%(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of order, augmentation and weights (%(default)s)"
    )
    parser.add_argument("--weights", default="none", metavar="none|imagenet|PATH", help="to begin with (%(default)s)")


def run(flags: argparse.Namespace) -> int:
    """Train, print the result; exit code 0."""
    import reader.train.quiet  # noqa: F401
    from reader.train.fit import TrainOptions, train  # TensorFlow, 4 s: only for this verb

    options = {name: value for name, value in vars(flags).items() if name not in ("verb", "run", "dataset")}
    print(train(load_info(flags.dataset), TrainOptions(**options)))
    return EXIT_OK
