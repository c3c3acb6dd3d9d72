"""`python -m reader index`: its flags, and what it says."""

from __future__ import annotations

import argparse
import json

from beam_pipeline.errors import EXIT_OK
from reader.commands.info import describe


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags, but for `--json`."""
    parser.add_argument("more", metavar="PATTERN", nargs="*", help="more files")
    parser.add_argument("--out", required=True, metavar="DIR", help="new local folder for the index")
    parser.add_argument("--image_key", metavar="NAME", help="feature that holds the encoded image (the usual names)")
    parser.add_argument("--class_key", metavar="NAME", help="feature that holds the class id (the usual names)")
    parser.add_argument("--labels_file", metavar="FILE", help="class names, one a line, in order of their ids")


def run(flags: argparse.Namespace) -> int:
    """Index the files; exit code 0."""
    from reader.index.dataset import index

    info = index(
        [flags.dataset, *flags.more],
        flags.out,
        image_key=flags.image_key,
        class_key=flags.class_key,
        labels_file=flags.labels_file,
    )
    print(json.dumps({"dataset": info.url, "records": info.manifest["records"]}) if flags.json else describe(info))
    return EXIT_OK
