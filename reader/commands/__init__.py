"""The verbs of `python -m reader` and their exit codes; what each does and prints is in a file of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

from beam_pipeline.errors import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_USAGE,
    CorruptRecordError,
    ImageShardsError,
    UsageError,
    one_line,
)
from reader.commands import bench, copy, index, info, show, train, verify
from reader.commands.flags import Parser, suggestion, unknown
from reader.packages import explained


class _Verb(NamedTuple):
    """One verb.

    Attributes:
        module: has `add_flags(parser)` and `run(flags)`, which returns the exit code.
        summary: a sentence for the list of all verbs.
        details: what else there is to say.
        example: arguments after the verb.
        exit_codes: what 0 and 1 mean; 2 is bad usage everywhere.
    """

    module: ModuleType
    summary: str
    details: str
    example: str
    exit_codes: str

    @property
    def name(self) -> str:
        """As the user writes it."""
        return self.module.__name__.rpartition(".")[2]


_CAN_T_READ = "1 the dataset or its storage can't be read"
_VERSION = "datasets/photos/1.0.0"

_VERBS = (
    _Verb(
        info,
        "Say what a dataset holds: counts, classes, shards, sizes.",
        "With --hash, print one SHA-256 over every file instead, which reads every byte: equal hashes, equal datasets.",
        f"{_VERSION} --hash",
        f"0 done, {_CAN_T_READ} or isn't whole",
    ),
    _Verb(
        verify,
        "Read and check every file, record and image of a dataset.",
        "A line for each fault names the file, and the record and its byte offset where it is a record's.",
        "gs://bucket/datasets/photos/1.0.0 --decode sample",
        "0 the dataset is whole, 1 there is any fault",
    ),
    _Verb(
        show,
        "Draw a grid of a dataset's images with their labels and sizes.",
        "Records are numbered from 0 in the split: train[17:18] is record 17 of train, in every verb and every reader.",
        f"{_VERSION} --split validation --out grid.png",
        f"0 drawn, {_CAN_T_READ}",
    ),
    _Verb(
        bench,
        "Measure how fast a dataset is read here, and what holds it back.",
        "Reads the same images in every way people read images, in turns, each beside its ceiling: the same decoding, "
        "resizing and augmentation of bytes that are in memory already. Figures worth quoting need the defaults.",
        f"{_VERSION} --storage_latency_ms 50",
        f"0 measured, {_CAN_T_READ}",
    ),
    _Verb(
        copy,
        "Copy a dataset to a local folder and compare every checksum.",
        "The same command again goes on where a copy was stopped, and checks what is there.",
        "gs://bucket/datasets/photos/1.0.0 /data/photos",
        "0 every file is there and right, 1 a file can't be read or isn't the published one",
    ),
    _Verb(
        index,
        "Make anybody's plain TFRecord files a dataset, by an index; the files stay where they are.",
        "A file's split is the word train, validation, val, test … in its name.",
        "'gs://bucket/*.tfrec' --out indexed",
        "0 indexed, 1 a file can't be read or is damaged",
    ),
    _Verb(
        train,
        "Train an image classifier on a dataset, on a TPU if there is one, else on all GPUs, else on the CPU.",
        "Writes metrics.jsonl, a line for each epoch, and model.keras. Loss and accuracy are means over the records.",
        f"{_VERSION} --out runs/1 --epochs 10",
        f"0 trained, {_CAN_T_READ}",
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except ImageShardsError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        told = explained(error)
        if told is error:
            raise
        print(f"error: {told}", file=sys.stderr)
        return EXIT_USAGE
    except BrokenPipeError:
        return EXIT_OK
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return EXIT_FAILED


def _run(given: list[str]) -> int:
    parser, parsers = _parser()
    names = [verb.name for verb in _VERBS]
    if not given:
        raise UsageError(f"a verb is missing: choose one of {', '.join(names)}; see --help")
    if given[0].startswith("-") and given[0] not in ("-h", "--help"):
        raise UsageError(f"{given[0]!r} stands where a verb is expected: python -m reader VERB … {given[0]}")
    if not given[0].startswith("-") and given[0] not in names:
        raise UsageError(f"unknown verb {given[0]!r}: {suggestion(given[0], names)}")
    parsed, rest = parser.parse_known_args(given)
    if rest:
        raise unknown(rest[0], parsers[parsed.verb])
    try:
        code: int = parsed.run(parsed)
    except CorruptRecordError as error:
        if parsed.verb == "index":  # which reads no dataset yet
            raise
        raise ImageShardsError(f"{error}; python -m reader verify {parsed.dataset} finds every fault") from None
    return code


def _parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser of everything, and that of each verb."""
    parser = Parser(
        prog="python -m reader",
        description="Look at, check, copy, measure and train on a dataset that beam_pipeline published.",
        epilog="Each verb has its own --help.",
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=Parser)
    parsers = {}
    for verb in _VERBS:
        one = verbs.add_parser(
            verb.name,
            help=verb.summary,
            description=f"{verb.summary} {verb.details}",
            epilog=f"example:\n  python -m reader {verb.name} {verb.example}\n\n"
            f"exit codes: {verb.exit_codes}, 2 bad usage",
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
        )
        one.add_argument("dataset", metavar="PATTERN" if verb.module is index else "DATASET", help=_what(verb))
        verb.module.add_flags(one)
        one.add_argument("--json", action="store_true", help="Print one JSON object.")
        one.set_defaults(run=verb.module.run)
        parsers[verb.name] = one
    return parser, parsers


def _what(verb: _Verb) -> str:
    if verb.module is index:
        return "TFRecord files, such as 'gs://bucket/*.tfrec'."
    return f"Folder or URL of one version of a dataset, such as {_VERSION}."


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Fills the description and leaves the lines of the epilog as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("example:"):
            return super()._fill_text(text, width, indent)
        return argparse.HelpFormatter._fill_text(self, text, width, indent)
