"""`python -m beam_pipeline.sample_data`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from beam_pipeline.errors import EXIT_OK, ImageShardsError, UsageError, one_line
from beam_pipeline.sample_data import DEFAULT_CLASSES, DEFAULT_IMAGES, draw_folder
from beam_pipeline.sample_data.scenes import SHAPES


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as the pipeline does."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.removeprefix('argument ')}; see python -m beam_pipeline.sample_data --help")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m beam_pipeline.sample_data",
        description="Draw a folder of photo-like pictures in class folders, to try the pipeline on.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="new or empty folder")
    parser.add_argument("--images", type=int, default=DEFAULT_IMAGES, metavar="N", help="pictures in all (%(default)s)")
    parser.add_argument(
        "--classes",
        type=int,
        default=DEFAULT_CLASSES,
        metavar="K",
        help=f"the first 1 to {len(SHAPES)} of {', '.join(SHAPES)} (%(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="another seed, other pictures (%(default)s)")
    parser.add_argument(
        "--broken", type=int, metavar="N", help="files that can't be decoded, beside them (1 in 200 images, at most 3)"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The command: returns its exit code."""
    started = time.monotonic()
    try:
        flags = _parse(argv)
        broken = draw_folder(flags.folder, flags.images, flags.classes, flags.seed, flags.broken)
    except ImageShardsError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: can't draw into {flags.folder}: {one_line(error)}", file=sys.stderr)
        return ImageShardsError.exit_code
    labels = ", ".join(list(SHAPES)[: flags.classes])
    seconds = time.monotonic() - started
    print(f"{flags.folder}: {flags.images} pictures of {labels}; {broken} broken files ({seconds:.1f} s)")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
