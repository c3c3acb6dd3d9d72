"""`python -m reader index`: what it prints."""

from __future__ import annotations

import json
from typing import Any

from beam_pipeline.errors import EXIT_OK
from reader.commands.flags import REQUIRED, Command, Flag, one_of
from reader.commands.info import describe


def _run(values: dict[str, Any]) -> int:
    from reader.tools.index import index  # Pillow

    names = ("image_key", "class_key", "labels_file", "on_error")
    indexed = index(values["pattern"], values["out"], **{name: values[name] for name in names})
    document = {"dataset": indexed.info.url, "records": indexed.records, "left_out": dict(indexed.left_out)}
    print(json.dumps(document) if values["json"] else describe(indexed.info))
    return EXIT_OK


COMMAND = Command(
    "index",
    ("PATTERN…",),
    "Index existing TFRecord files so they can be used as a dataset; the files stay where they are.",
    "Every image is decoded once. A file's split is the word train, validation, val, test … in its name.",
    "'gs://bucket/*.tfrec' --out indexed",
    "0 indexed, 1 a file can't be read, or holds no valid record",
    _run,
    (
        Flag("--out", "DIR", "Local folder for the index, new or empty.", REQUIRED),
        Flag("--image_key", "NAME", "Feature that holds the encoded image (default: image or another common name)."),
        Flag("--class_key", "NAME", "Feature that holds the class id (default: class, label or another common name)."),
        Flag("--labels_file", "FILE", "Class names, one per line in order of their ids (default: the records')."),
        Flag(
            "--on_error",
            "skip|raise",
            "Leave out records that are corrupt or don't decode, and count them; or stop at the first.",
            "skip",
            one_of("skip", "raise"),
        ),
    ),
)
