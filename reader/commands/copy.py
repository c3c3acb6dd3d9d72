"""`python -m reader copy`: its flags, and what it says."""

from __future__ import annotations

import argparse
import dataclasses
import json

from beam_pipeline.errors import EXIT_OK, UsageError
from reader.info import load_info


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags, but for `--json`."""
    parser.add_argument("folder", metavar="DIR", help="local folder, new or of an earlier copy that was stopped")
    parser.add_argument("--files_at_once", type=int, default=8, metavar="N", help="under way at a time (%(default)s)")


def run(flags: argparse.Namespace) -> int:
    """Copy; exit code 0 when all files are there and right."""
    from reader.copy import copy_dataset

    if flags.files_at_once < 1:
        raise UsageError(f"--files_at_once {flags.files_at_once}: at least 1")
    copied = copy_dataset(load_info(flags.dataset), flags.folder, flags.files_at_once)
    if flags.json:
        print(json.dumps(dataclasses.asdict(copied)))
    else:
        kept = f", {copied.kept} of them there already" if copied.kept else ""
        print(f"{copied.files} files, {copied.bytes / 1e6:,.1f} MB in {copied.folder}{kept}; every checksum is right")
    return EXIT_OK
