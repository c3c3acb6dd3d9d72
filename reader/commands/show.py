"""`python -m reader show`: its flags, and where the grid goes."""

from __future__ import annotations

import argparse
import json
import sys

from beam_pipeline.errors import EXIT_OK, UsageError
from reader.info import load_info


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags, but for `--json`."""
    parser.add_argument("--split", default="train", help="such as train[:100] (%(default)s)")
    parser.add_argument("--count", type=int, default=20, metavar="N", help="images (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which ones (%(default)s)")
    parser.add_argument("--out", default="show.png", metavar="PNG", help="file to write (%(default)s)")
    parser.add_argument("--terminal", action="store_true", help="print blocks of colour and write no file")


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
        grid(records).save(flags.out, "PNG")
    except OSError as error:
        raise UsageError(f"--out {flags.out}: {error.strerror or error}") from None
    print(f"{len(records)} images of {flags.split} in {flags.out}")
    if sys.stdout.isatty():
        print(blocks(records))
    return EXIT_OK
