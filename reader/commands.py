"""The command line: every verb but `write`, its flags, what it prints, and its exit code.

`imageshards.main` calls `run` and prints its errors. From Python, the verbs are functions of `reader`.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import logging
import math
import os
import re
import shlex
import signal
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from beam_pipeline import __version__, schema, storage
from beam_pipeline.errors import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_USAGE,
    CorruptRecordError,
    ImageShardsError,
    NotPublishedError,
    UsageError,
)
from beam_pipeline.schema.manifest import FOREIGN_KEY
from beam_pipeline.text import first_few, name_line, one_line, plural, print_line, size_text
from reader import with_install_hint
from reader.info import DatasetInfo, load_info
from reader.select import parse_classes
from reader.tools.hash import checked_sizes, dataset_hash
from reader.tools.rejects import find_rejects, rejects
from reader.training.model_names import application_name
from reader.training.options import AUGMENTS, PRESETS, TrainOptions, check_backend, read_run

_WIDTH = 100
_PROGRESS_S = 60  # between lines of progress in a pipe
_SHOWN_FAULTS, _SHOWN_CLASSES = 50, 20
_DATASET: dict[str, Any] = {
    "metavar": "DATASET",
    "help": "Folder or URL of a version; of all versions, datasets/photos, for the newest; or datasets/photos:1.*.*, "
    "for the newest that matches.",
}

_CLASSES: dict[str, Any] = {
    "metavar": "NAMES",
    "type": parse_classes,
    "help": "Read these classes only, such as cat,dog; with new names: tabby=cat,tiger=cat.",
}

# --- the command line


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UsageError and takes no abbreviations."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.removeprefix('argument ')}; see --help")


def parser() -> tuple[Parser, list[str]]:
    """The parser of the command line, and the names of its commands; `write` is only listed, and parsed elsewhere."""
    root = Parser(
        prog="imageshards",
        description="Write, check, read and train on datasets of images in TFRecord shards.",
        epilog="Each command has its own --help.",
    )
    root.add_argument("--version", action="store_true", help="Show the version, and what resizes images.")
    verbs = root.add_subparsers(title="commands", metavar="COMMAND")
    verbs.add_parser("write", help="Convert images in class folders into TFRecord shards of equal size.")
    adds = (_add_info, _add_verify, _add_rejects, _add_duplicates, _add_diff, _add_show, _add_bench, _add_index)
    for add in (*adds, _add_train, _add_evaluate, _add_predict):
        add(verbs)
    return root, list(verbs.choices)


def _show_version() -> int:
    print(f"imageshards {__version__}")
    with suppress(ImportError):  # without Pillow nothing resizes
        from beam_pipeline.images.resize import described

        print(f"resize: {described()}")
    return EXIT_OK


def run(given: Sequence[str]) -> int:
    """Run a command other than `write`; returns the exit code.

    Raises:
        UsageError: bad usage, or a package that isn't installed.
        ImageShardsError: the command failed.
    """
    root, names = parser()
    if not given:
        root.print_help(sys.stderr)
        return EXIT_USAGE
    if given[0] not in (*names, "-h", "--help", "--version"):
        raise _unknown("command", given[0], names, f"choose one of {', '.join(names)}")
    if given[0] == "--version":
        return _show_version()
    values, rest = root.parse_known_args(list(map(_with_underscores, given)))
    if rest:
        name, flags = rest[0].partition("=")[0], re.findall(r"--\w+", values.parser.format_usage())
        if given[0] == "info" and not name.startswith("-"):
            raise UsageError(f"info takes one dataset; to compare two: imageshards diff {values.dataset} {rest[0]}")
        raise _unknown("flag" if name.startswith("-") else "argument", name, flags, "see --help")
    values.command = shlex.join(["imageshards", *given])
    try:
        return int(values.run(values))
    except CorruptRecordError as error:
        if "dataset" not in values:  # `index`, which reads no dataset yet
            raise
        raise ImageShardsError(f"{error}; imageshards verify {values.dataset} finds every fault") from None
    except ModuleNotFoundError as error:
        hint = with_install_hint(error)
        if hint is error:
            raise
        raise UsageError(hint) from None


def _with_underscores(argument: str) -> str:
    """`--image_size=3` for `--image-size=3`."""
    name, equals, value = argument.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}" if name.startswith("--") else argument


def _unknown(what: str, given: str, known: Sequence[str], otherwise: str) -> UsageError:
    nearest = difflib.get_close_matches(given, known, n=1)
    return UsageError(f"unknown {what} {given!r}: {f'did you mean {nearest[0]}?' if nearest else otherwise}")


def _add(
    verbs: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    details: str,
    example: str,
    exit_codes: str,
    json_help: str = "Print one JSON object.",
) -> Parser:
    parser: Parser = verbs.add_parser(
        name,
        help=summary,
        description=textwrap.fill(f"{summary} {details}", _WIDTH),
        epilog=f"example:\n  imageshards {name} {example}\n\nexit codes: {exit_codes}, 2 bad usage",
    )
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("--json", action="store_true", help=json_help)
    return parser


def _print(given: argparse.Namespace, document: Any, text: str) -> None:
    print_line(json.dumps(document) if given.json else text)


# --- the verbs


def _add_info(verbs: Any) -> None:
    flag = _add(
        verbs,
        "info",
        _info,
        "Say what a dataset holds: counts, classes, shards, sizes.",
        "With --hash, print one SHA-256 over its files instead, which reads every byte: equal hashes, equal datasets.",
        "datasets/photos/1.0.0 --hash",
        "0 done, 1 the dataset or its storage can't be read, or a file is missing",
    ).add_argument
    flag("dataset", **_DATASET)
    flag("--hash", action="store_true", help="Print one SHA-256 over the manifest and all files that it names.")


def _info(given: argparse.Namespace) -> int:
    info = load_info(given.dataset)
    if given.hash:
        checked_sizes(info)  # without a file the hash would be of something else
        digest = dataset_hash(info)
        _print(given, {"hash": digest}, digest)
    else:
        _print(given, dict(info.manifest), _describe(info))
    return EXIT_OK


def _describe(info: DatasetInfo) -> str:
    """A few lines on counts, classes, shards and sizes."""
    return "\n".join([f"{info.name} {info.version} at {info.url}", *(f"  {name_line(line)}" for line in _lines(info))])


def _lines(info: DatasetInfo) -> Iterator[str]:
    image, manifest = info.image, info.manifest
    classes = plural(info.num_classes, "class")
    yield f"{plural(manifest['records'], 'record')} of {plural(manifest['images'], 'image')}, {classes}"
    pixels = " to ".join(
        f"{height}x{width}" for height, width in sorted({*filter(None, (image.min_size, image.max_size))})
    )
    yield f"{image.format}, {plural(image.channels, 'channel')}, {pixels or 'no image'} (height x width)"
    if manifest["features"]:
        columns = (f"{one['name']} ({'list of ' * one['list']}{one['dtype']})" for one in manifest["features"])
        yield f"columns: {', '.join(columns)}"
    for split in info.splits.values():
        sizes = [shard.bytes for shard in split.shards]
        range_ = " to ".join(dict.fromkeys(map(size_text, (min(sizes), max(sizes)))))
        yield f"{split.name}: {plural(split.records, 'record')} in {plural(len(sizes), 'shard')} of {range_}"
    files = [shard.file for split in info.splits.values() for shard in split.shards]
    folders = sorted({file.rpartition("/")[0] for file in files if info.path(file) == file})
    if folders:
        yield f"this is an index: the shards are in {first_few(folders)}"
    for number, label in enumerate(info.classes[:_SHOWN_CLASSES]):
        counts = ", ".join(f"{split.name} {split.class_counts[number]:,}" for split in info.splits.values())
        yield f"class {number} {label!r}: {counts}"
    if info.num_classes > _SHOWN_CLASSES:
        yield f"… and {plural(info.num_classes - _SHOWN_CLASSES, 'more class')}; --json names them all"
    if image.mean:
        mean, std = (" ".join(f"{value:.4f}" for value in values) for values in (image.mean, image.std))
        yield f"mean {mean}, std {std} (of [0, 1], from {plural(manifest['image']['sampled_images'], 'image')})"
    rejects = manifest["rejects"]["by_reason"]
    if rejects:
        name = "left out" if FOREIGN_KEY in manifest else "rejected"
        yield f"{name}: {', '.join(f'{reason} {number:,}' for reason, number in sorted(rejects.items()))}"


def _add_verify(verbs: Any) -> None:
    flag = _add(
        verbs,
        "verify",
        _verify,
        "Read and check every file, record and image of a dataset, on all cores.",
        "A line for each fault names the file, and the record and its byte offset if it is a record's.",
        "gs://bucket/datasets/photos/1.0.0 --decode sample",
        "0 OK, 1 there is a fault",
    ).add_argument
    flag("dataset", **_DATASET)
    text = "Which images are decoded; sample is one in 64 (default: %(default)s)."
    flag("--decode", choices=("all", "sample", "none"), default="all", help=text)


def _verify(given: argparse.Namespace) -> int:
    try:
        info = load_info(given.dataset)
    except NotPublishedError as error:
        if not given.json:
            raise
        file = storage.join(storage.normalize(given.dataset), schema.MANIFEST_FILE)
        fault = {"file": file, "record": None, "offset": None, "what": one_line(error)}
        _print(given, {"dataset": None, "records": None, "decode": given.decode, "faults": [fault]}, "")
        return EXIT_FAILED
    from reader.tools.verify import verify  # Pillow

    report = verify(info, decode=given.decode)
    faults = list(map(dataclasses.asdict, report.faults))
    lines = list(map(str, report.faults[:_SHOWN_FAULTS]))
    if len(faults) > _SHOWN_FAULTS:
        lines.append(f"… and {len(faults) - _SHOWN_FAULTS:,} more; --json names them all")
    foreign = FOREIGN_KEY in info.manifest
    fix = "make it again with imageshards index" if foreign else "run the job again with --repair"
    lines.append(str(report) if report else f"{report}; {fix}")
    document = {"dataset": info.url, "records": report.records, "decode": given.decode, "faults": faults}
    _print(given, document, "\n".join(lines))
    return EXIT_OK if report else EXIT_FAILED


def _add_rejects(verbs: Any) -> None:
    _add(
        verbs,
        "rejects",
        _rejects,
        "Say which images got no record and why, in groups of the same kind.",
        "rejects.jsonl in the dataset's folder names them all. Also of a job that failed for them.",
        "datasets/photos/1.0.0",
        "0 done, 1 the dataset or its storage can't be read",
    ).add_argument("dataset", **_DATASET)


def _rejects(given: argparse.Namespace) -> int:
    info, file = find_rejects(given.dataset)
    groups, images = rejects(info or file), info.manifest["images"] if info else None
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
    _print(given, {**document, "groups": list(map(dataclasses.asdict, groups))}, "\n".join(map(name_line, lines)))
    return EXIT_OK


def _add_duplicates(verbs: Any) -> None:
    flag = _add(
        verbs,
        "duplicates",
        _duplicates,
        "Find images with the same bytes: copies, leaks between splits, contradicting labels.",
        "Compares the MD5s of the source files, which the record tables have, of all splits; rejected images have no "
        "record. An index of third-party files has no MD5s: there the bytes of the stored images are compared.",
        "datasets/photos/1.0.0 --out duplicates.jsonl",
        "0 there are none, 1 there are some, or the dataset or its storage can't be read",
    ).add_argument
    flag("dataset", **_DATASET)
    text = (
        "File or URL for a list of all groups that imageshards write --exclude reads: one image of each is kept, the "
    )
    text += "first path outside train, else the first; with several labels, the list leaves it to you."
    flag("--out", metavar="FILE", help=text)


def _duplicates(given: argparse.Namespace) -> int:
    from reader.tools.duplicates import duplicates

    found = duplicates(given.dataset, given.out)
    where = f"all of them: {given.out}" if given.out else "--out FILE writes a list of all of them"
    _print(given, dataclasses.asdict(found), f"{found}\n{where}" if found else str(found))
    return EXIT_FAILED if found else EXIT_OK


def _add_show(verbs: Any) -> None:
    flag = _add(
        verbs,
        "show",
        _show,
        "Draw a grid of a dataset's images with their labels and sizes.",
        "With --augment, what training makes of each image in its first epochs is to the right of it. "
        "Records are numbered from 0 in the split: train[17:18] is record 17 of train, in all commands and readers.",
        "datasets/photos/1.0.0 --split validation --out grid.png",
        "0 drawn, 1 the dataset or its storage can't be read",
    ).add_argument
    flag("dataset", **_DATASET)
    flag("--split", metavar="SPLIT", default="train", help="To draw from, such as train[:100] (default: %(default)s).")
    flag("--classes", **_CLASSES)
    flag("--count", metavar="N", type=int, default=20, help="How many images are shown (default: %(default)s).")
    text = "Decides which images are shown, and is augmentation's seed (default: %(default)s)."
    flag("--seed", metavar="N", type=int, default=0, help=text)
    text = "Show what this augmentation of imageshards train makes of each image, too."
    flag("--augment", choices=AUGMENTS, help=text)
    flag("--image_size", metavar="N", type=int, help="Side in pixels of the augmented images (default: as stored).")
    flag("--epochs", metavar="N", type=int, default=4, help="How many augmented images of each (default: %(default)s).")
    flag("--out", metavar="PNG", default="show.png", help="File to write (default: %(default)s).")


def _show(given: argparse.Namespace) -> int:
    from reader.augment import BY_NAME  # Pillow
    from reader.tools.show import choose, grid  # Pillow

    sizes = {"image_size": given.image_size, "epochs": given.epochs, "classes": given.classes}
    records = choose(
        load_info(given.dataset), given.split, given.count, given.seed, augment=BY_NAME.get(given.augment), **sizes
    )
    shown = [
        {"record": record.number, "label": record.label, "height": record.size[0], "width": record.size[1]}
        for record in records
    ]
    if not given.json:
        with _written("--out", given.out):
            grid(records).save(given.out, "PNG")
    text = f"{plural(len(records), 'image')} of {given.split} in {given.out}"
    _print(given, {"split": given.split, "records": shown}, text)
    return EXIT_OK


@contextmanager
def _written(flag: str, file: str) -> Iterator[None]:
    """Makes the folder of a file that is written. Raises UsageError if either fails."""
    try:
        os.makedirs(os.path.dirname(file) or ".", exist_ok=True)
        yield
    except OSError as error:
        raise UsageError(f"{flag} {file!r}: {error.strerror or error}; name a file that can be written") from None


def _add_bench(verbs: Any) -> None:
    flag = _add(
        verbs,
        "bench",
        _bench,
        "Measure how fast a dataset is read here, compared with decoding alone.",
        "Reads the same images with every adapter whose framework is installed, in turns; decoding alone is the same "
        "work on bytes in memory. It says first how long it takes.",
        "datasets/photos/1.0.0 --against photos --latency_ms 50",
        "0 measured, 1 the dataset or its storage can't be read",
    ).add_argument
    flag("dataset", **_DATASET)
    flag("--split", metavar="SPLIT", default="train", help="To read, such as train[:10000] (default: %(default)s).")
    flag("--classes", **_CLASSES)
    for name, default, text in (
        ("images", 6400, "How many images each run reads, for 10 s at most; a smaller split is read again and again"),
        ("batch_size", 64, "Images in a batch"),
        ("image_size", 224, "Side in pixels that images are resized to"),
        ("repeats", 3, "How many runs of each way count, after a batch to warm up"),
    ):
        flag(f"--{name}", metavar="N", type=int, default=default, help=f"{text} (default: {default}).")
    text = "Also read the image files in these class folders, one at a time and 32 at a time."
    flag("--against", metavar="FOLDER", help=text)
    flag(
        "--latency_ms",
        metavar="N",
        type=float,
        default=0,
        help="Every request to storage, single files included, waits so many milliseconds first: what a bucket would "
        "cost, without one (default: %(default)s).",
    )
    flag("--chart", metavar="PNG", default="bench.png", help="File to draw into (default: %(default)s).")


def _bench(given: argparse.Namespace) -> int:
    with suppress(ValueError):  # outside the main thread; as Ctrl-C, SIGTERM leaves no empty chart
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    _import_tensorflow_quietly()
    from reader.tools import bench

    flags = "split", "classes", "images", "batch_size", "image_size", "repeats", "against", "latency_ms"
    values = {name: getattr(given, name) for name in flags}
    can_draw = find_spec("matplotlib") is not None
    with _drawn("--chart", given.chart) if can_draw else nullcontext():
        result = bench.bench(load_info(given.dataset), **values, report=_Progress())
        if can_draw:
            result.draw(given.chart)
    note = f"chart: {given.chart}" if can_draw else "no chart: Matplotlib is not installed"
    _print(given, result.as_json(), f"{result}\n{note}")
    return EXIT_OK


@contextmanager
def _drawn(flag: str, file: str) -> Iterator[None]:
    """Checks that a file can be written before minutes are spent; if they fail, it leaves no empty file behind."""
    is_new = not os.path.lexists(file)
    with _written(flag, file):
        Path(file).touch()
    try:
        yield
    except BaseException:  # Ctrl-C too
        if is_new:
            Path(file).unlink(missing_ok=True)
        raise


class _Progress:
    """Shows lines of progress on stderr; one a minute at most if that is no terminal."""

    def __init__(self) -> None:
        self._shown_s = -math.inf

    def __call__(self, line: str) -> None:
        now_s = time.monotonic()
        if sys.stderr.isatty() or now_s - self._shown_s >= _PROGRESS_S:
            self._shown_s = now_s
            print_line(line, sys.stderr)


def _add_diff(verbs: Any) -> None:
    flag = _add(
        verbs,
        "diff",
        _diff,
        "Show what differs between two versions of a dataset: images, classes, flags.",
        "An image that moved to another path is neither added nor gone. One version is compared with the one before.",
        "datasets/photos/1.0.0 datasets/photos/1.1.0",
        "0 they hold the same images, 1 they differ",
    ).add_argument
    flag("dataset", metavar="A")
    flag("other", metavar="B", nargs="?")


def _diff(given: argparse.Namespace) -> int:
    from reader.tools.diff import diff

    difference = diff(given.dataset, given.other)
    _print(given, dataclasses.asdict(difference), str(difference))
    return EXIT_FAILED if difference else EXIT_OK


def _add_index(verbs: Any) -> None:
    flag = _add(
        verbs,
        "index",
        _index,
        "Index existing TFRecord files so they can be used as a dataset; the files stay where they are.",
        "Every image is decoded once. A file's split is the word train, validation, val, test … in its name, else in "
        "the nearest folder.",
        "'gs://bucket/*.tfrec' --out indexed",
        "0 indexed, 1 a file can't be read, or holds no valid record",
    ).add_argument
    flag("pattern", metavar="PATTERN", nargs="+")
    flag("--out", metavar="DIR", required=True, help="Local folder for the index, new or empty.")
    flag("--image_key", metavar="NAME", help="Feature of the encoded image (default: image or another common name).")
    flag(
        "--class_key",
        metavar="NAME",
        help="Feature of the class: an integer, or a one-hot list (default: class, label …).",
    )
    flag("--labels_file", metavar="FILE", help="Class names, a line for each id in order (default: the records').")


def _index(given: argparse.Namespace) -> int:
    from reader.tools.index import index  # Pillow

    names = ("image_key", "class_key", "labels_file")
    indexed = index(given.pattern, given.out, **{name: getattr(given, name) for name in names})
    document = {"dataset": indexed.info.url, "records": indexed.records, "left_out": dict(indexed.left_out)}
    keys = "  image in feature {image!r}, class in {class!r}".format_map(indexed.info.manifest[FOREIGN_KEY])
    lines = (_describe(indexed.info), *(f"  split {source}" for source in indexed.sources), keys)
    _print(given, {**document, "sources": list(indexed.sources)}, "\n".join(lines))
    return EXIT_OK


def _add_train(verbs: Any) -> None:
    flag = _add(
        verbs,
        "train",
        _train,
        "Train an image classifier on a dataset, on a TPU if there is one, else on all GPUs, else on the CPU.",
        "Every default fits the dataset. A run that was stopped, by SIGTERM or Ctrl-C or a crash, resumes from its "
        "last checkpoint when the same command runs again. KERAS_BACKEND=jax trains without TensorFlow, and on several "
        "hosts. OUT gets model.keras (the best epoch), last.keras, classes.txt, metrics.jsonl (a line for each epoch), "
        "run.json, curves.png, the confusion matrix (confusion.png, confusion.csv) and per_class.csv.",
        "datasets/photos/1.0.0 --model MobileNetV2 --weights imagenet",
        "0 trained, 1 stopped, or the dataset, its storage or the device failed",
    ).add_argument
    flag("dataset", nargs="?", **_DATASET)
    flag(
        "--preset",
        metavar="|".join(PRESETS),
        help="Defaults for a first look, or for a pre-trained model (default: quick).",
    )
    flag(
        "--config", metavar="RUN.JSON", help="Repeat the run of this file, also on another dataset or with other flags."
    )
    for option in dataclasses.fields(TrainOptions):
        text, metavar = option.metadata["help"] % {"default": option.default}, option.metadata["metavar"]
        how: dict[str, Any] = {"metavar": metavar} if metavar else {"action": "store_true"}
        flag(f"--{option.name}", help=text.replace("%", "%%"), default=argparse.SUPPRESS, **how)


def _train(given: argparse.Namespace) -> int:
    named = {option.name for option in dataclasses.fields(TrainOptions)}
    flags = {name: value for name, value in vars(given).items() if name in named}
    if given.preset is not None and given.config is not None:
        raise UsageError("--preset doesn't go with --config, which has every option")
    if given.dataset is None and given.config is None:
        raise UsageError("give a dataset, or --config; see --help")
    if given.config is not None:
        options = TrainOptions.of_run(given.config, **flags)
        given.dataset = given.dataset or read_run(given.config)["dataset"]["url"]
    else:
        options = TrainOptions.preset(given.preset or "quick", **flags)
    application_name(options.model)  # a typo is reported before anything else
    check_backend(os.environ.get("KERAS_BACKEND", "tensorflow"))
    info = load_info(given.dataset)
    _import_backend()
    from reader.training.fit import train  # Keras and its backend, seconds: only for this command

    logging.getLogger("reader").setLevel(logging.ERROR)  # `train` warns of a batch larger than the split itself
    if given.json:
        with redirect_stdout(sys.stderr):  # downloads print their progress
            result = train(info, options, command=given.command)
    else:
        result = train(info, options, print_line, given.command)
    _print(given, dataclasses.asdict(result), str(result))
    return EXIT_OK


_RUN: dict[str, Any] = {
    "metavar": "RUN",
    "help": "Folder or URL that imageshards train wrote to, such as runs/photos-1.",
}
_BATCH_SIZE: dict[str, Any] = {
    "metavar": "N",
    "type": int,
    "default": 64,
    "help": "Images that the model gets at once (default: %(default)s).",
}
_MODEL: dict[str, Any] = {"metavar": "MODULE:FUNCTION", "help": "Module to import if the model has layers of your own."}


def _add_evaluate(verbs: Any) -> None:
    flag = _add(
        verbs,
        "evaluate",
        _evaluate,
        "Count what a trained model gets right and wrong on a dataset, class by class.",
        "Every record is read exactly once, as in training. OUT gets metrics.json (all numbers, every mistake), "
        "per_class.csv (precision and recall of each class), confusion.csv, confusion.png and, if there are mistakes, "
        "mistakes.png: the 25 most confident with their file names.",
        "runs/photos-1 datasets/photos/1.0.0 --split test",
        "0 evaluated, 1 the training isn't finished, or the dataset or its storage can't be read",
    ).add_argument
    flag("training", **_RUN)
    flag("dataset", **_DATASET)
    text = "Split to read, such as test or train[90%%:] (default: test, else validation, else that of the training)."
    flag("--split", metavar="SPLIT", help=text)
    flag("--classes", **_CLASSES)
    flag("--batch_size", **_BATCH_SIZE)
    flag("--model", **_MODEL)
    flag("--out", metavar="OUT", help="Folder or URL for the files (default: RUN/evaluation).")


def _evaluate(given: argparse.Namespace) -> int:
    info = load_info(given.dataset)
    _import_backend()
    from reader.training.evaluate import evaluate
    from reader.training.run import load_run

    flags = {name: getattr(given, name) for name in ("split", "classes", "batch_size", "out")}
    result = evaluate(load_run(given.training, model=given.model), info, **flags)
    for line in result.warnings:
        print_line(f"warning: {line}", sys.stderr)
    _print(given, result.document(), str(result))
    return EXIT_OK


def _add_predict(verbs: Any) -> None:
    flag = _add(
        verbs,
        "predict",
        _predict,
        "Classify new photos with a trained model.",
        "Each photo is converted to the very bytes that the dataset's writer would store, and decoded as in training. "
        "Of a folder, all images in it and below are taken. A photo that can't be read is a line on stderr with the "
        "reason.",
        "runs/photos-1 new.jpg folder gs://bucket/photos",
        "0 every photo has a prediction, 1 one has none, or the training isn't finished",
        "Print a JSON object for each photo, a line each.",
    ).add_argument
    flag("training", **_RUN)
    flag("photos", metavar="PHOTO", nargs="+", help="File or folder, or its URL.")
    flag("--top", metavar="N", type=int, default=3, help="How many classes of each photo (default: %(default)s).")
    flag("--batch_size", **_BATCH_SIZE)
    flag("--model", **_MODEL)


def _predict(given: argparse.Namespace) -> int:
    _import_backend()
    from reader.training.predict import predict
    from reader.training.run import load_run

    run, code = load_run(given.training, model=given.model), EXIT_OK
    predictions = predict(run, given.photos, top=given.top, batch_size=given.batch_size)
    if run.preprocessing.doubt:
        print_line(f"warning: {run.preprocessing.doubt}", sys.stderr)
    for one in predictions:
        if one.error:
            code = EXIT_FAILED
        if given.json:
            print_line(json.dumps({"file": one.file, "label": one.label, **dataclasses.asdict(one)}))
        else:
            print_line(f"warning: {one}" if one.error else str(one), sys.stderr if one.error else None)
    return code


def _import_backend() -> None:
    """Import the framework that Keras runs on: JAX if TensorFlow, Keras' own default, isn't installed."""
    if "KERAS_BACKEND" not in os.environ and find_spec("tensorflow") is None and find_spec("jax") is not None:
        os.environ["KERAS_BACKEND"] = "jax"
    _import_tensorflow_quietly()
    warnings.filterwarnings("ignore", module="keras")


def _import_tensorflow_quietly() -> None:
    """Import TensorFlow, if it is installed, without the lines that its C++ side writes to stderr at any log level."""
    if find_spec("tensorflow") is None:
        return
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.stderr.flush()
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        import tensorflow

        tensorflow.config.list_physical_devices()
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
