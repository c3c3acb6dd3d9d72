"""`python -m reader verify`: its flags, what it prints, its exit code."""

from __future__ import annotations

import argparse
import json
from typing import Any

from beam_pipeline import schema
from beam_pipeline.errors import EXIT_FAILED, EXIT_OK, NotPublishedError, one_line
from reader.commands.flags import one_of, whole_number
from reader.info import DatasetInfo, load_info
from reader.limits import cpu_count
from reader.storage import normalize
from reader.verify.dataset import verify
from reader.verify.faults import Fault, of_file
from reader.verify.shard import DECODE
from reader.words import count

_SHOWN_FAULTS = 50
_DECODED = {"all": "every image decodes", "sample": "one image in 64 decodes", "none": "no image was decoded"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags, but for `--json`."""
    parser.add_argument(
        "--decode",
        type=one_of(DECODE),
        default="all",
        metavar="|".join(DECODE),
        help="Which images are decoded; sample is one in 64 (default: %(default)s).",
    )
    parser.add_argument(
        "--processes",
        type=whole_number(0),
        default=0,
        metavar="N",
        help="How many processes read shards at a time (default: 0, one for each core).",
    )


def run(flags: argparse.Namespace) -> int:
    """Check and tell; exit code 1 on any fault."""
    try:
        info = load_info(flags.dataset)
    except NotPublishedError as error:
        if not flags.json:
            raise
        manifest = f"{normalize(flags.dataset)}/{schema.MANIFEST_FILE}"
        print(_json(None, [of_file(manifest, one_line(error))], flags.decode))
        return EXIT_FAILED
    faults = verify(info, decode=flags.decode, processes=flags.processes or cpu_count())
    if flags.json:
        print(_json(info, faults, flags.decode))
    else:
        print(_text(info, faults, flags.decode))
    return EXIT_FAILED if faults else EXIT_OK


def _text(info: DatasetInfo, faults: list[Fault], decode: str) -> str:
    if not faults:
        shards = count(sum(len(split.shards) for split in info.splits.values()), "shard")
        return f"{info.url} is whole: {count(info.manifest['records'], 'record')} in {shards}, {_DECODED[decode]}"
    lines = [str(fault) for fault in faults[:_SHOWN_FAULTS]]
    if len(faults) > _SHOWN_FAULTS:
        lines.append(f"… and {len(faults) - _SHOWN_FAULTS:,} more; --json names them all")
    mend = (
        "make it again with python -m reader index"
        if schema.FOREIGN_KEY in info.manifest
        else "run the job again with --repair"
    )
    lines.append(f"{count(len(faults), 'fault')} in {info.url}; {mend}")
    return "\n".join(lines)


def _json(info: DatasetInfo | None, faults: list[Fault], decode: str) -> str:
    document: dict[str, Any] = {
        "dataset": info.url if info else None,
        "records": info.manifest["records"] if info else None,
        "decode": decode,
        "faults": [
            {"file": fault.file, "record": fault.record, "offset": fault.offset, "what": fault.what} for fault in faults
        ],
    }
    return json.dumps(document)
