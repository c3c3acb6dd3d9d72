"""`python -m reader verify`, `show`, `copy`, `index`, `train`: their flags, and what they print."""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

from beam_pipeline import schema, storage
from beam_pipeline.errors import EXIT_FAILED, EXIT_OK, NotPublishedError, UsageError, one_line
from reader.commands.flags import REQUIRED, Command, Flag, Result, positive, whole_number
from reader.commands.info import describe
from reader.info import load_info
from reader.tools.copy import FILES_AT_ONCE, copy
from reader.words import count, size

_SHOWN_FAULTS = 50


def _verify(values: dict[str, Any]) -> Result:
    url, decode = values["dataset"], values["decode"]
    try:
        info = load_info(url)
    except NotPublishedError as error:
        if not values["json"]:
            raise
        file = storage.join(storage.normalize(url), schema.MANIFEST_FILE)
        fault = {"file": file, "record": None, "offset": None, "what": one_line(error)}
        return Result({"dataset": None, "records": None, "decode": decode, "faults": [fault]}, "", EXIT_FAILED)
    from reader.tools.verify import verify  # Pillow

    report = verify(info, decode=decode)
    faults = list(map(dataclasses.asdict, report.faults))
    lines = list(map(str, report.faults[:_SHOWN_FAULTS]))
    if len(faults) > _SHOWN_FAULTS:
        lines.append(f"… and {len(faults) - _SHOWN_FAULTS:,} more; --json names them all")
    foreign = schema.FOREIGN_KEY in info.manifest
    fix = "make it again with python -m reader index" if foreign else "run the job again with --repair"
    lines.append(str(report) if report else f"{report}; {fix}")
    document = {"dataset": info.url, "records": report.records, "decode": decode, "faults": faults}
    return Result(document, "\n".join(lines), EXIT_OK if report else EXIT_FAILED)


def _show(values: dict[str, Any]) -> Result:
    from reader.tools.show import blocks, choose, grid  # Pillow

    split, out = values["split"], values["out"]
    records = choose(load_info(values["dataset"]), split, values["count"], values["seed"])
    shown = [
        {"record": record.number, "label": record.label, "height": record.size[0], "width": record.size[1]}
        for record in records
    ]
    lines = []
    if not values["terminal"] and not values["json"]:
        try:
            os.makedirs(os.path.dirname(out) or ".", exist_ok=True)
            grid(records).save(out, "PNG")
        except OSError as error:
            raise UsageError(f"--out {out!r}: {error.strerror or error}; name a file that can be written") from None
        lines.append(f"{count(len(records), 'image')} of {split} in {out}")
    if values["terminal"] or sys.stdout.isatty():
        lines.append(blocks(records))
    return Result({"split": split, "records": shown}, "\n".join(lines))


def _copy(values: dict[str, Any]) -> Result:
    copied = copy(values["dataset"], values["dir"], files_at_once=values["files_at_once"])
    there = "all of them" if copied.kept == copied.files else f"{copied.kept:,} of them"
    kept = f", {there} already there" if copied.kept else ""
    text = f"OK: {count(copied.files, 'file')}, {size(copied.bytes)} in {copied.folder}{kept}; all checksums match"
    return Result(dataclasses.asdict(copied), text)


def _index(values: dict[str, Any]) -> Result:
    from reader.tools.index import index  # Pillow

    names = ("image_key", "class_key", "labels_file", "on_error")
    indexed = index(values["pattern"], values["out"], **{name: values[name] for name in names})
    document = {"dataset": indexed.info.url, "records": indexed.records, "left_out": dict(indexed.left_out)}
    return Result(document, describe(indexed.info))


def _train(values: dict[str, Any]) -> Result:
    import reader.train.quiet  # noqa: F401
    from reader.train.fit import TrainOptions, train  # TensorFlow, 4 s: only for this command

    options = TrainOptions(**{field.name: values[field.name] for field in dataclasses.fields(TrainOptions)})
    info = load_info(values["dataset"])
    if values["json"]:
        return Result(dataclasses.asdict(train(info, options)), "")
    return Result({}, str(train(info, options, lambda line: print(line, flush=True))))


VERIFY = Command(
    "verify",
    ("DATASET",),
    "Read and check every file, record and image of a dataset, on all cores.",
    "A line for each fault names the file, and the record and its byte offset if it is a record's.",
    "gs://bucket/datasets/photos/1.0.0 --decode sample",
    "0 OK, 1 there is a fault",
    _verify,
    (Flag("--decode", "all|sample|none", "Which images are decoded; sample is one in 64.", "all"),),
)

SHOW = Command(
    "show",
    ("DATASET",),
    "Draw a grid of a dataset's images with their labels and sizes.",
    "Records are numbered from 0 in the split: train[17:18] is record 17 of train, in every command and every reader.",
    "datasets/photos/1.0.0 --split validation --out grid.png",
    "0 drawn, 1 the dataset or its storage can't be read",
    _show,
    (
        Flag("--split", "SPLIT", "Records to draw from, such as train[:100].", "train"),
        Flag("--count", "N", "How many images are shown.", 20, whole_number(1)),
        Flag("--seed", "N", "Decides which images are shown.", 0, whole_number()),
        Flag("--out", "PNG", "File to write.", "show.png"),
        Flag("--terminal", "", "Print blocks of colour and write no file.", False),
    ),
)

COPY = Command(
    "copy",
    ("DATASET", "DIR"),
    "Copy a dataset to a local folder and compare every checksum.",
    "DIR is new, empty, or of an earlier copy of the same dataset, which is checked and completed.",
    "gs://bucket/datasets/photos/1.0.0 /data/photos",
    "0 every file is there and intact, 1 a file can't be read or isn't the published one",
    _copy,
    (Flag("--files_at_once", "N", "How many files are copied at a time.", FILES_AT_ONCE, whole_number(1)),),
)

INDEX = Command(
    "index",
    ("PATTERN…",),
    "Index existing TFRecord files so they can be used as a dataset; the files stay where they are.",
    "Every image is decoded once. A file's split is the word train, validation, val, test … in its name.",
    "'gs://bucket/*.tfrec' --out indexed",
    "0 indexed, 1 a file can't be read, or holds no valid record",
    _index,
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
        ),
    ),
)

TRAIN = Command(
    "train",
    ("DATASET",),
    "Train an image classifier on a dataset, on a TPU if there is one, else on all GPUs, else on the CPU.",
    "Writes metrics.jsonl, a line for each epoch, and model.keras. Loss and accuracy are means over the records.",
    "datasets/photos/1.0.0 --out runs/1 --epochs 10",
    "0 trained, 1 the dataset or its storage can't be read",
    _train,
    (
        Flag("--out", "DIR", "Folder that metrics.jsonl and model.keras are written to.", REQUIRED),
        Flag("--model", "small_cnn|mobilenet_v2", "What to train.", "small_cnn"),
        Flag("--epochs", "N", "How many times to read the train split.", 5, whole_number(1)),
        Flag("--batch_size", "N", "Images in a step, over all devices.", 64, whole_number(1)),
        Flag(
            "--image_size", "N", "Side in pixels of what the model sees (default: as stored).", None, whole_number(16)
        ),
        Flag("--learning_rate", "R", "Peak learning rate (Adam, cosine decay to 0).", 3e-3, positive),
        Flag("--seed", "N", "Decides the order, the augmentation and the first weights.", 0, whole_number()),
        Flag(
            "--weights",
            "none|imagenet|FILE",
            "What to begin with; imagenet goes with mobilenet_v2 and is downloaded.",
            "none",
        ),
    ),
)
