"""`python -m reader copy`: its flags, and what it says."""

from __future__ import annotations

import argparse
import dataclasses
import json

from beam_pipeline.errors import EXIT_OK
from reader.commands.flags import whole_number
from reader.copy import Copied, copy_dataset
from reader.info import load_info
from reader.words import count, size


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags, but for `--json`."""
    parser.add_argument(
        "folder", metavar="DIR", help="Local folder: new, empty, or of an earlier copy of the same dataset."
    )
    parser.add_argument(
        "--files_at_once",
        type=whole_number(1),
        default=8,
        metavar="N",
        help="How many files are copied at a time (default: %(default)s).",
    )


def run(flags: argparse.Namespace) -> int:
    """Copy; exit code 0 when all files are there and right."""
    copied = copy_dataset(load_info(flags.dataset), flags.folder, flags.files_at_once)
    print(json.dumps(dataclasses.asdict(copied)) if flags.json else _text(copied))
    return EXIT_OK


def _text(copied: Copied) -> str:
    kept = {0: "", copied.files: ", all of them there already"}.get(
        copied.kept, f", {copied.kept:,} of them there already"
    )
    return f"{count(copied.files, 'file')}, {size(copied.bytes)} in {copied.folder}{kept}; every checksum is right"
