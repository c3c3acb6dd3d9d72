"""The command line: every verb but `write`, its flags, what it prints, and its exit code.

A verb's flags are the parameters of its function in Python and of the function here that prints the result; `_HELP` has
a sentence on each. (`evaluate` and `predict` have all of theirs here: their own modules import Keras.)
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import sys
import time
from contextlib import redirect_stdout
from typing import Any

from beam_pipeline import schema, storage
from beam_pipeline.errors import EXIT_FAILED, EXIT_OK, NotPublishedError
from beam_pipeline.schema.manifest import FOREIGN_KEY
from beam_pipeline.text import name_line, one_line, plural, print_line
from reader.flags import Commands, Given
from reader.info import load_info
from reader.select import Classes
from reader.tools.describe import check_sizes, dataset_hash, describe
from reader.tools.out_file import published_file
from reader.tools.rejects import find_rejects
from reader.training.backend import import_backend, import_tensorflow_quietly
from reader.training.options import AUGMENTS, TrainOptions, application_name, check_backend

_PROGRESS_S = 60  # between lines of progress in a pipe
_SHOWN_FAULTS = 50

# What is no flag, and how often it may come.
_POSITIONAL = {
    "dataset": None,
    "run": None,
    "diff.other": "?",
    "index.patterns": "+",
    "predict.photos": "+",
}

# Of every parameter the placeholder of its value, and a sentence on it, to which its default is added; of one verb's
# only, if the verb's name is before it. Parameters that aren't here are for Python.
_HELP: dict[str, tuple[str, str]] = {
    "dataset": (
        "DATASET",
        "Folder or URL of a version; of all versions, datasets/photos, for the newest; or datasets/photos:1.*.*, for "
        "the newest that matches.",
    ),
    "split": ("SPLIT", "Split to read, such as train[:1000]."),
    "classes": ("NAMES", "Read these classes only, such as cat,dog; with new names: tabby=cat,tiger=cat."),
    "run": ("RUN", "Folder or URL that imageshards train wrote to, such as runs/photos."),
    "batch_size": ("N", "Images that the model gets at once."),
    "model": ("MODULE:FUNCTION", "Module to import if the model has layers of your own."),
    "hash": ("", "Print one SHA-256 over the manifest and all files that it names."),
    "decode": ("all|sample|none", "Which images are decoded; sample is one in 64."),
    "near": ("", "Find images that look the same instead, at any size, quality and brightness, mirrored ones too."),
    "duplicates.out": (
        "FILE",
        "File or URL for a list of all groups that imageshards write --exclude reads: one image of each is kept, the "
        "first path outside train, else the first; with several labels, the list leaves it to you.",
    ),
    "report.out": ("HTML", "File or URL to write (default: report.html in the dataset's folder)."),
    "strict": (
        "",
        "Exit with 1 for copies in several splits or with several labels, classes without a record, and class ids that "
        "moved since the version before.",
    ),
    "other": ("OTHER", "Another version, which is compared with the first (default: the first with the one before)."),
    "show.split": ("SPLIT", "Split to draw from, such as train[:100]."),
    "count": ("N", "How many images are shown."),
    "seed": ("N", "Decides which images are shown, and is augmentation's seed."),
    "augment": ("|".join(AUGMENTS), "Show what this augmentation of imageshards train makes of each image, too."),
    "show.image_size": ("N", "Side in pixels of the augmented images (default: as stored)."),
    "epochs": ("N", "How many augmented images of each."),
    "show.out": ("PNG", "File to write."),
    "images": (
        "N",
        "How many images each run reads, for 10 s at most; a smaller split is read again and again.",
    ),
    "bench.batch_size": ("N", "Images in a batch."),
    "image_size": ("N", "Side in pixels that images are resized to."),
    "repeats": ("N", "How many runs of each way count, after a batch to warm up."),
    "against": ("FOLDER", "Also read the image files in these class folders, one at a time and 32 at a time."),
    "latency_ms": (
        "N",
        "Every request to storage, single files included, waits so many milliseconds first: what a bucket would cost, "
        "without one.",
    ),
    "patterns": ("PATTERN", "File or URL, which may have wildcards."),
    "index.out": ("DIR", "Local folder for the index, new or empty."),
    "image_key": ("NAME", "Feature of the encoded image (default: image or another common name)."),
    "class_key": ("NAME", "Feature of the class: an integer, or a one-hot list (default: class, label …)."),
    "labels_file": ("FILE", "Class names, a line for each id in order (default: the records')."),
    "evaluate.split": (
        "SPLIT",
        "Split to read, such as test or train[90%:] (default: test, else validation, else that of the training).",
    ),
    "evaluate.out": ("OUT", "Folder or URL for the files (default: RUN/evaluation)."),
    "photos": ("PHOTO", "File or folder, or its URL."),
    "top": ("N", "How many classes of each photo."),
}

_COMMANDS = Commands(_HELP, _POSITIONAL)
_verb, parser, run = _COMMANDS.verb, _COMMANDS.parser, _COMMANDS.run


# --- the verbs


@_verb(
    "Say what a dataset holds: counts, classes, shards, sizes.",
    "With --hash, print one SHA-256 over its files instead, which reads every byte: equal hashes, equal datasets.",
    "datasets/photos/1.0.0 --hash",
    "0 done, 1 the dataset or its storage can't be read, or a file is missing",
)
def _info(given: Given, dataset: str, hash: bool = False) -> int:
    info = load_info(dataset)
    if hash:
        check_sizes(info)
        digest = dataset_hash(info)
        given.print({"hash": digest}, digest)
    else:
        given.print(dict(info.manifest), describe(info))
    return EXIT_OK


@_verb(
    "Read and check every file, record and image of a dataset, on all cores.",
    "A line for each fault names the file, and the record and its byte offset if it is a record's.",
    "gs://bucket/datasets/photos/1.0.0 --decode sample",
    "0 OK, 1 there is a fault",
    home="reader.tools.verify",
)
def _verify(given: Given) -> int:
    dataset, decode = given.arguments["dataset"], given.arguments["decode"]
    try:
        report = given.call()
    except NotPublishedError as error:
        if not given.json:
            raise
        file = storage.join(storage.normalize(dataset), schema.MANIFEST_FILE)
        fault = {"file": file, "record": None, "offset": None, "what": one_line(error)}
        given.print({"dataset": None, "records": None, "decode": decode, "faults": [fault]}, "")
        return EXIT_FAILED
    lines, more = list(map(str, report.faults[:_SHOWN_FAULTS])), len(report.faults) - _SHOWN_FAULTS
    lines += [f"… and {more:,} more; --json names them all"] * (more > 0)
    faults = list(map(dataclasses.asdict, report.faults))
    document = {"dataset": report.dataset, "records": report.records, "decode": decode, "faults": faults}
    given.print(document, "\n".join([*lines, str(report)]))
    return EXIT_OK if report else EXIT_FAILED


@_verb(
    "Say which images got no record and why, in groups of the same kind.",
    "rejects.jsonl in the dataset's folder names them all. Also of a job that failed for them.",
    "datasets/photos/1.0.0",
    "0 done, 1 the dataset or its storage can't be read",
    home="reader.tools.rejects",
)
def _rejects(given: Given) -> int:
    info, file = find_rejects(given.arguments["dataset"])
    groups, images = given.call(), info.manifest["images"] if info else None
    total = sum(group.count for group in groups)
    of = plural(total, "image") if images is None else f"{total:,} of {plural(images, 'image')}"
    lines = [f"{of} {'was' if total == 1 else 'were'} rejected"]
    lines += ["nothing is published: the job stopped for them"] * (info is None)
    for group in groups:
        lines.append(f"{group.what}: {group.count:,} ({group.reason})")
        more = f" and {group.count - len(group.paths):,} more" if group.count > len(group.paths) else ""
        lines += [f"  {', '.join(group.paths)}{more}"] * bool(group.paths)
    if any(group.paths for group in groups):
        lines.append(f"all of them: {file}")
    document = {"dataset": info.url if info else None, "images": images, "rejected": total}
    given.print({**document, "groups": list(map(dataclasses.asdict, groups))}, "\n".join(map(name_line, lines)))
    return EXIT_OK


@_verb(
    "Find images with the same bytes: copies, leaks between splits, contradicting labels.",
    "Compares the MD5s of the source files, which the record tables have, of all splits; rejected images have no "
    "record. An index of third-party files has no MD5s: there the bytes of the stored images are compared.",
    "datasets/photos/1.0.0 --out duplicates.jsonl",
    "0 there are none, 1 there are some, or the dataset or its storage can't be read",
    home="reader.tools.duplicates",
)
def _duplicates(given: Given) -> int:
    found, out = given.call(), given.arguments["out"]
    where = f"all of them: {out}" if out else "--out FILE writes a list of all of them"
    given.print(dataclasses.asdict(found), f"{found}\n{where}" if found else str(found))
    return EXIT_FAILED if found else EXIT_OK


@_verb(
    "Write a page on what is in a dataset and what of it needs a look: leaks, copies, odd pictures.",
    "One HTML file that asks no network for anything. It has lists for imageshards write --exclude. --json has every "
    "record's numbers, too.",
    "datasets/photos/1.0.0 --out report.html --strict",
    "0 written, 1 with --strict if there is a fault, or the dataset or its storage can't be read",
    home="reader.tools.report",
)
def _report(given: Given, strict: bool = False) -> int:
    made = given.call()
    given.print(made.as_json() if given.json else None, str(made))
    for fault in made.faults if strict else ():
        print_line(f"error: {name_line(fault)}", sys.stderr)
    return EXIT_FAILED if strict and made.faults else EXIT_OK


@_verb(
    "Show what differs between two versions of a dataset: images, classes, flags.",
    "An image that moved to another path is neither added nor removed. One version is compared with the one before.",
    "datasets/photos/1.0.0 datasets/photos/1.1.0",
    "0 they hold the same images, 1 they differ",
    home="reader.tools.diff",
)
def _diff(given: Given) -> int:
    difference = given.call()
    given.print(dataclasses.asdict(difference), str(difference))
    return EXIT_FAILED if difference else EXIT_OK


@_verb(
    "Draw a grid of a dataset's images with their labels, sizes and files.",
    "With --augment, what training makes of each image in its first epochs is to the right of it. "
    "Records are numbered from 0 in the split: train[17:18] is record 17 of train, in all commands and readers.",
    "datasets/photos/1.0.0 --split validation --out grid.png",
    "0 drawn, 1 the dataset or its storage can't be read",
    home="reader.tools.show",
)
def _show(given: Given, out: str = "show.png") -> int:
    from reader.tools.show import choose, grid  # Pillow

    records, split = choose(**given.arguments), given.arguments["split"]
    if not given.json:
        with published_file(out) as file:
            grid(records).save(file, "PNG")
    shown = [record.as_json() for record in records]
    given.print({"split": split, "records": shown}, f"{plural(len(records), 'image')} of {split} in {out}")
    return EXIT_OK


@_verb(
    "Measure how fast a dataset is read here, compared with decoding alone.",
    "Reads the same images with every adapter whose framework is installed, in turns; decoding alone is the same "
    "work on bytes in memory. It says first how long it takes.",
    "datasets/photos/1.0.0 --against photos --latency_ms 50",
    "0 measured, 1 the dataset or its storage can't be read",
    home="reader.tools.bench",
)
def _bench(given: Given) -> int:
    import_tensorflow_quietly()
    result = given.call(report=_Progress())
    given.print(result.as_json(), str(result))
    return EXIT_OK


class _Progress:
    """Shows lines of progress on stderr; one a minute at most if that is no terminal."""

    def __init__(self) -> None:
        self._shown_s = -math.inf

    def __call__(self, line: str) -> None:
        now_s = time.monotonic()
        if sys.stderr.isatty() or now_s - self._shown_s >= _PROGRESS_S:
            self._shown_s = now_s
            print_line(line, sys.stderr)


@_verb(
    "Index existing TFRecord files so they can be used as a dataset; the files stay where they are.",
    "Every image is decoded once. A file's split is the word train, validation, val, test … in its name, else in "
    "the nearest folder.",
    "'gs://bucket/*.tfrec' --out indexed",
    "0 indexed, 1 a file can't be read, or holds no valid record",
    home="reader.tools.index",
)
def _index(given: Given) -> int:
    indexed = given.call()
    document = {"dataset": indexed.info.url, "records": indexed.records, "left_out": dict(indexed.left_out)}
    keys = "  image in feature {image!r}, class in {class!r}".format_map(indexed.info.manifest[FOREIGN_KEY])
    lines = (describe(indexed.info), *(f"  split {source}" for source in indexed.sources), keys)
    given.print({**document, "sources": list(indexed.sources)}, "\n".join(lines))
    return EXIT_OK


@_verb(
    "Train an image classifier on a dataset, on a TPU if there is one, else on all GPUs, else on the CPU.",
    "Every default fits the dataset. A run that was stopped, by SIGTERM or Ctrl-C or a crash, resumes from its "
    "last checkpoint when the same command runs again. KERAS_BACKEND=jax trains without TensorFlow, and on several "
    "hosts. OUT gets model.keras (the best epoch), last.keras, classes.txt, metrics.jsonl (a line for each epoch), "
    "run.json, curves.png, the confusion matrix (confusion.png, confusion.csv) and per_class.csv.",
    "datasets/photos/1.0.0 --model MobileNetV2 --weights imagenet",
    "0 trained, 1 stopped, or the dataset, its storage or the device failed",
)
def _train(given: Given, dataset: str, **flags: Any) -> int:
    options = TrainOptions(**flags)
    check_backend(os.environ.get("KERAS_BACKEND", "tensorflow"))
    info = load_info(dataset)
    import_backend()
    application_name(options.model)  # a typo is reported before the devices are looked for
    from reader.training.fit import train  # Keras and its backend, seconds: only for this command

    logging.getLogger("reader").setLevel(logging.ERROR)  # `train` warns of a batch larger than the split itself
    if given.json:
        with redirect_stdout(sys.stderr):  # downloads print their progress
            result = train(info, options, command=given.command)
    else:
        result = train(info, options, print_line, given.command)
    given.print(dataclasses.asdict(result), str(result))
    return EXIT_OK


@_verb(
    "Count what a trained model gets right and wrong on a dataset, class by class.",
    "Every record is read exactly once, as in training. OUT gets metrics.json (all numbers, every mistake), "
    "per_class.csv (precision and recall of each class), confusion.csv, confusion.png and, if there are mistakes, "
    "mistakes.png: the 25 most confident with their file names.",
    "runs/photos datasets/photos/1.0.0 --split test",
    "0 evaluated, 1 the training isn't finished, or the dataset or its storage can't be read",
)
def _evaluate(
    given: Given,
    run: str,
    dataset: str,
    split: str | None = None,
    classes: Classes = None,
    batch_size: int = 64,
    model: str | None = None,
    out: str | None = None,
) -> int:
    info = load_info(dataset)
    import_backend()
    from reader.training.evaluate import evaluate
    from reader.training.run import load_run

    flags: dict[str, Any] = {"split": split, "classes": classes, "batch_size": batch_size, "out": out}
    result = evaluate(load_run(run, model=model), info, **flags)
    for line in result.warnings:
        print_line(f"warning: {line}", sys.stderr)
    given.print(result.document(), str(result))
    return EXIT_OK


@_verb(
    "Classify new photos with a trained model.",
    "Each photo is converted to the very bytes that the dataset's writer would store, and decoded as in training. "
    "Of a folder, all images in it and below are taken. A photo that can't be read is a line on stderr with the "
    "reason.",
    "runs/photos new.jpg folder gs://bucket/photos",
    "0 every photo has a prediction, 1 one has none, or the training isn't finished",
)
def _predict(
    given: Given, run: str, photos: list[str], top: int = 3, batch_size: int = 64, model: str | None = None
) -> int:
    import_backend()
    from reader.training.run import load_run, predict

    trained, code = load_run(run, model=model), EXIT_OK
    predictions = predict(trained, photos, top=top, batch_size=batch_size)
    if trained.preprocessing.mismatch_warning:
        print_line(f"warning: {trained.preprocessing.mismatch_warning}", sys.stderr)
    for one in predictions:
        if one.error:
            code = EXIT_FAILED
        if given.json:
            print_line(json.dumps({"file": one.file, "label": one.label, **dataclasses.asdict(one)}))
        else:
            print_line(f"warning: {one}" if one.error else str(one), sys.stderr if one.error else None)
    return code
