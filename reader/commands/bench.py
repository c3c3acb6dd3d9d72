"""`python -m reader bench`: its flags; TensorFlow is loaded when it runs."""

from __future__ import annotations

import argparse

from reader.commands.flags import number, whole_number


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags, but for `--json`."""
    parser.add_argument(
        "--split", default="train", help="Records to read, such as train[:10000] (default: %(default)s)."
    )
    for name, default, what in (
        ("images", 6400, "How many images each run reads"),
        ("batch_size", 64, "Images in a batch"),
        ("image_size", 224, "Side in pixels that images are resized to"),
        ("repeats", 7, "How many runs of each way count, after one to warm up"),
    ):
        parser.add_argument(
            f"--{name}", type=whole_number(1), default=default, metavar="N", help=f"{what} (default: %(default)s)."
        )
    parser.add_argument(
        "--against",
        metavar="DIR",
        help="Original images in class folders for the rows of individual files (default: the records' own images).",
    )
    parser.add_argument(
        "--storage_latency_ms",
        type=number(0),
        default=0.0,
        metavar="N",
        help="Let each storage request sleep so long first, in this process: it costs no CPU, where a real client's "
        "HTTP does (default: 0).",
    )
    parser.add_argument("--chart", default="bench.png", metavar="PNG", help="File to draw into (default: %(default)s).")
    parser.add_argument("--profile", metavar="DIR", help="Also write a TensorBoard trace of train_dataset there.")


def run(flags: argparse.Namespace) -> int:
    """Measure and tell; exit code 0."""
    import reader.train.quiet  # noqa: F401
    from reader.bench.run import bench

    return bench(flags)
