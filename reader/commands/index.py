"""`python -m reader index`: its flags, and what it says."""

from __future__ import annotations

import argparse
import json

from beam_pipeline.errors import EXIT_OK
from reader.commands.info import describe


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags, but for `--json`."""
    parser.add_argument("more", metavar="PATTERN", nargs="*", help="More files.")
    parser.add_argument("--out", required=True, metavar="DIR", help="Local folder for the index, new or empty.")
    parser.add_argument(
        "--image_key",
        metavar="NAME",
        help="Feature that holds the encoded image (default: image, image/encoded or another name in common use).",
    )
    parser.add_argument(
        "--class_key",
        metavar="NAME",
        help="Feature that holds the class id (default: class, label, image/class/label or another in common use).",
    )
    parser.add_argument(
        "--labels_file", metavar="FILE", help="Class names, one per line in order of their ids (default: the records')."
    )
    parser.add_argument(
        "--on_error",
        choices=("raise", "skip"),
        default="raise",
        metavar="raise|skip",
        help="Stop at a damaged record, or index the others (default: raise).",
    )


def run(flags: argparse.Namespace) -> int:
    """Index the files; exit code 0."""
    from reader.index.dataset import index  # Pillow

    info = index(
        [flags.dataset, *flags.more],
        flags.out,
        image_key=flags.image_key,
        class_key=flags.class_key,
        labels_file=flags.labels_file,
        on_error=flags.on_error,
    )
    print(json.dumps({"dataset": info.url, "records": info.manifest["records"]}) if flags.json else describe(info))
    return EXIT_OK
