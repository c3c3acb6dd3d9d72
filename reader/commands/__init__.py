"""The verbs of `python -m reader` and their exit codes; what each does and prints is in a file of its own."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from beam_pipeline.errors import EXIT_FAILED, EXIT_OK, ImageShardsError, UsageError, one_line
from reader.commands import bench, copy, index, info, show, train, verify


class _Verb(NamedTuple):
    name: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    has_json: bool
    help: str


_DATASET = "folder or URL of a version, such as datasets/photos/1.0.0"
_PATTERN = "TFRecord files, such as 'gs://bucket/*.tfrec'"

_VERBS = (
    _Verb("info", info.add_flags, info.run, True, "what a dataset holds; --hash reads every byte"),
    _Verb(
        "verify",
        verify.add_flags,
        verify.run,
        True,
        "read and check everything; exit code 1 on any fault",
    ),
    _Verb("show", show.add_flags, show.run, True, "a grid of images with labels and sizes"),
    _Verb("bench", bench.add_flags, bench.run, True, "how fast it is read, and what holds it back"),
    _Verb("copy", copy.add_flags, copy.run, True, "copy it to a local folder, every checksum checked"),
    _Verb("index", index.add_flags, index.run, True, "make anybody's TFRecord files such a dataset"),
    _Verb("train", train.add_flags, train.run, False, "train an image classifier on it"),
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    try:
        given = list(sys.argv[1:] if arguments is None else arguments)
        verbs, parsers = _parser()
        parsed, unknown = verbs.parse_known_args(given)
        if unknown:
            raise _unknown(unknown[0], parsers[parsed.verb])
        run: Callable[[argparse.Namespace], int] = parsed.run
        return run(parsed)
    except ImageShardsError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        return EXIT_OK
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return EXIT_FAILED


def _parser() -> tuple[_Parser, dict[str, _Parser]]:
    parser = _Parser(
        prog="python -m reader", description="Look at, check, measure and train on a dataset.", allow_abbrev=False
    )
    names = "|".join(verb.name for verb in _VERBS)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar=names, parser_class=_Parser)
    parsers = {}
    for verb in _VERBS:
        one = verbs.add_parser(verb.name, help=verb.help, description=verb.help, allow_abbrev=False)
        if verb.name == "index":
            one.add_argument("dataset", metavar="PATTERN", help=_PATTERN)
        else:
            one.add_argument("dataset", metavar="DATASET", help=_DATASET)
        verb.add_flags(one)
        if verb.has_json:
            one.add_argument("--json", action="store_true", help="for programs")
        one.set_defaults(run=verb.run)
        parsers[verb.name] = one
    return parser, parsers


def _unknown(argument: str, parser: argparse.ArgumentParser) -> UsageError:
    flag = argument.partition("=")[0]
    known = [name for action in parser._actions for name in action.option_strings]
    nearest = difflib.get_close_matches(flag, known, n=1, cutoff=0.5)
    return UsageError(f"unknown flag {flag!r}: {f'did you mean {nearest[0]}?' if nearest else 'see --help'}")
