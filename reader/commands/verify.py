"""`python -m reader verify`: what it prints, and its exit code."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from beam_pipeline import schema, storage
from beam_pipeline.errors import EXIT_FAILED, EXIT_OK, NotPublishedError, one_line
from reader.commands.flags import Command, Flag, one_of
from reader.info import DatasetInfo, load_info

_SHOWN_FAULTS = 50


def _run(values: dict[str, Any]) -> int:
    url, decode = values["dataset"], values["decode"]
    try:
        info = load_info(url)
    except NotPublishedError as error:
        if not values["json"]:
            raise
        fault = {"file": storage.join(storage.normalize(url), schema.MANIFEST_FILE), "record": None, "offset": None}
        faults = [{**fault, "what": one_line(error)}]
        print(json.dumps({"dataset": None, "records": None, "decode": decode, "faults": faults}))
        return EXIT_FAILED
    return _verify(info, decode, values["json"])


def _verify(info: DatasetInfo, decode: str, as_json: bool) -> int:
    from reader.tools.verify import verify  # Pillow

    report = verify(info, decode=decode)
    if as_json:
        document = {"dataset": info.url, "records": report.records, "decode": decode}
        print(json.dumps({**document, "faults": [dataclasses.asdict(fault) for fault in report.faults]}))
        return EXIT_OK if report else EXIT_FAILED
    for fault in report.faults[:_SHOWN_FAULTS]:
        print(fault)
    if len(report.faults) > _SHOWN_FAULTS:
        print(f"… and {len(report.faults) - _SHOWN_FAULTS:,} more; --json names them all")
    foreign = schema.FOREIGN_KEY in info.manifest
    fix = "make it again with python -m reader index" if foreign else "run the job again with --repair"
    print(report if report else f"{report}; {fix}")
    return EXIT_OK if report else EXIT_FAILED


COMMAND = Command(
    "verify",
    ("DATASET",),
    "Read and check every file, record and image of a dataset, on all cores.",
    "A line for each fault names the file, and the record and its byte offset if it is a record's.",
    "gs://bucket/datasets/photos/1.0.0 --decode sample",
    "0 OK, 1 there is a fault",
    _run,
    (
        Flag(
            "--decode",
            "all|sample|none",
            "Which images are decoded; sample is one in 64.",
            "all",
            one_of("all", "sample", "none"),
        ),
    ),
)
