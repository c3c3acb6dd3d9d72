"""`python -m reader copy`: what it prints."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from beam_pipeline.errors import EXIT_OK
from reader.commands.flags import Command, Flag, whole_number
from reader.tools.copy import FILES_AT_ONCE, copy
from reader.words import count, size


def _run(values: dict[str, Any]) -> int:
    copied = copy(values["dataset"], values["dir"], files_at_once=values["files_at_once"])
    there = "all of them" if copied.kept == copied.files else f"{copied.kept:,} of them"
    kept = f", {there} already there" if copied.kept else ""
    text = f"OK: {count(copied.files, 'file')}, {size(copied.bytes)} in {copied.folder}{kept}; all checksums match"
    print(json.dumps(dataclasses.asdict(copied)) if values["json"] else text)
    return EXIT_OK


COMMAND = Command(
    "copy",
    ("DATASET", "DIR"),
    "Copy a dataset to a local folder and compare every checksum.",
    "DIR is new, empty, or of an earlier copy of the same dataset, which is checked and completed.",
    "gs://bucket/datasets/photos/1.0.0 /data/photos",
    "0 every file is there and intact, 1 a file can't be read or isn't the published one",
    _run,
    (Flag("--files_at_once", "N", "How many files are copied at a time.", FILES_AT_ONCE, whole_number(1)),),
)
