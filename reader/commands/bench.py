"""`python -m reader bench`: its flags; TensorFlow is loaded when it runs."""

from __future__ import annotations

import argparse

from beam_pipeline.errors import UsageError


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags, but for `--json`."""
    parser.add_argument("--split", default="train", help="such as train[:10000] (%(default)s)")
    parser.add_argument("--images", type=int, default=6400, metavar="N", help="read in each run (%(default)s)")
    parser.add_argument("--batch_size", type=int, default=64, metavar="N", help="(%(default)s)")
    parser.add_argument("--image_size", type=int, default=224, metavar="N", help="side in pixels (%(default)s)")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="of each row, in turns (%(default)s)")
    parser.add_argument("--against", metavar="DIR", help="original images in class folders (the records' own images)")
    parser.add_argument(
        "--storage_latency_ms",
        type=float,
        default=0.0,
        metavar="N",
        help="added to each request, by a local HTTP server",
    )
    parser.add_argument("--chart", default="bench.png", metavar="PNG", help="file to draw into (%(default)s)")
    parser.add_argument("--profile", metavar="DIR", help="write a TensorBoard trace of train_dataset")


def run(flags: argparse.Namespace) -> int:
    """Measure and tell; exit code 0."""
    for name in ("images", "batch_size", "image_size", "repeats"):
        if getattr(flags, name) < 1:
            raise UsageError(f"--{name} {getattr(flags, name)}: at least 1")
    if flags.storage_latency_ms < 0:
        raise UsageError(f"--storage_latency_ms {flags.storage_latency_ms}: at least 0")
    import reader.train.quiet  # noqa: F401
    from reader.bench.run import bench

    return bench(flags)
