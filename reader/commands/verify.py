"""`python -m reader verify`: its flags, what it prints, its exit code."""

from __future__ import annotations

import argparse
import json
from typing import Any

from beam_pipeline import schema
from beam_pipeline.errors import EXIT_FAILED, EXIT_OK, NotPublishedError, UsageError, one_line
from reader.info import DatasetInfo, load_info
from reader.storage import cpu_count, normalize
from reader.verify.dataset import verify
from reader.verify.faults import Fault, of_file
from reader.verify.shard import DECODE

_SHOWN_FAULTS = 50
_DECODED = {"all": "every image decodes", "sample": "one image in 64 decodes", "none": "no image was decoded"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags, but for `--json`."""
    parser.add_argument(
        "--decode", choices=DECODE, default="all", help="images to decode; sample is one in 64 (%(default)s)"
    )
    parser.add_argument("--processes", type=int, default=0, metavar="N", help="that read shards at a time (cores)")


def run(flags: argparse.Namespace) -> int:
    """Check and tell; exit code 1 on any fault."""
    if flags.processes < 0:
        raise UsageError(f"--processes {flags.processes}: give a number from 1, or 0 for one a core")
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
        shards = sum(len(split.shards) for split in info.splits.values())
        return f"{info.url} is whole: {info.manifest['records']:,} records in {shards} shards, {_DECODED[decode]}"
    lines = [str(fault) for fault in faults[:_SHOWN_FAULTS]]
    if len(faults) > _SHOWN_FAULTS:
        lines.append(f"… and {len(faults) - _SHOWN_FAULTS} more; --json names them all")
    lines.append(f"{len(faults)} fault{'s' * (len(faults) > 1)} in {info.url}; run the job again with --repair")
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
