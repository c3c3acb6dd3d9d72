"""`python -m reader show`: where the grid goes."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from beam_pipeline.errors import EXIT_OK, UsageError
from reader.commands.flags import Command, Flag, whole_number
from reader.info import load_info
from reader.words import count


def _run(values: dict[str, Any]) -> int:
    from reader.tools.show import blocks, choose, grid  # Pillow

    split, out = values["split"], values["out"]
    records = choose(load_info(values["dataset"]), split, values["count"], values["seed"])
    if values["json"]:
        shown = [
            {"record": record.number, "label": record.label, "height": record.size[0], "width": record.size[1]}
            for record in records
        ]
        print(json.dumps({"split": split, "records": shown}))
        return EXIT_OK
    if not values["terminal"]:
        try:
            os.makedirs(os.path.dirname(out) or ".", exist_ok=True)
            grid(records).save(out, "PNG")
        except OSError as error:
            raise UsageError(f"--out {out!r}: {error.strerror or error}; name a file that can be written") from None
        print(f"{count(len(records), 'image')} of {split} in {out}")
    if values["terminal"] or sys.stdout.isatty():
        print(blocks(records))
    return EXIT_OK


COMMAND = Command(
    "show",
    ("DATASET",),
    "Draw a grid of a dataset's images with their labels and sizes.",
    "Records are numbered from 0 in the split: train[17:18] is record 17 of train, in every command and every reader.",
    "datasets/photos/1.0.0 --split validation --out grid.png",
    "0 drawn, 1 the dataset or its storage can't be read",
    _run,
    (
        Flag("--split", "SPLIT", "Records to draw from, such as train[:100].", "train"),
        Flag("--count", "N", "How many images are shown.", 20, whole_number(1)),
        Flag("--seed", "N", "Decides which images are shown.", 0, whole_number()),
        Flag("--out", "PNG", "File to write.", "show.png"),
        Flag("--terminal", "", "Print blocks of colour and write no file.", False),
    ),
)
