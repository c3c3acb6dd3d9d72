"""`python -m reader show`: its flags, and where the grid goes."""

from __future__ import annotations

import argparse
import json
import os
import sys

from beam_pipeline.errors import EXIT_OK, UsageError
from reader.commands.flags import whole_number
from reader.info import load_info
from reader.words import count


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags, but for `--json`."""
    parser.add_argument(
        "--split", default="train", help="Records to draw from, such as train[:100] (default: %(default)s)."
    )
    parser.add_argument(
        "--count",
        type=whole_number(1),
        default=20,
        metavar="N",
        help="How many images are shown (default: %(default)s).",
    )
    parser.add_argument(
        "--seed",
        type=whole_number(),
        default=0,
        metavar="N",
        help="Decides which images are shown (default: %(default)s).",
    )
    parser.add_argument("--out", default="show.png", metavar="PNG", help="File to write (default: %(default)s).")
    parser.add_argument("--terminal", action="store_true", help="Print blocks of colour and write no file.")


def run(flags: argparse.Namespace) -> int:
    """Draw the grid; exit code 0."""
    from reader.show import blocks, choose, grid  # Pillow

    records = choose(load_info(flags.dataset), flags.split, flags.count, flags.seed)
    if flags.json:
        shown = [
            {"record": record.number, "label": record.label, "height": record.size[0], "width": record.size[1]}
            for record in records
        ]
        print(json.dumps({"split": flags.split, "records": shown}))
        return EXIT_OK
    if flags.terminal:
        print(blocks(records))
        return EXIT_OK
    try:
        os.makedirs(os.path.dirname(flags.out) or ".", exist_ok=True)
        grid(records).save(flags.out, "PNG")
    except OSError as error:
        raise UsageError(f"--out {flags.out!r}: {error.strerror or error}; name a file that can be written") from None
    print(f"{count(len(records), 'image')} of {flags.split} in {flags.out}")
    if sys.stdout.isatty():
        print(blocks(records))
    return EXIT_OK
