"""How the commands read their command lines, by argparse: every error is one line with the bad value and the fix."""

from __future__ import annotations

import argparse
import difflib
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

from beam_pipeline.errors import EXIT_OK, UsageError

_LIKENESS = 0.6  # below this share of equal letters a suggestion is no help: `--width` isn't `--split`
_WIDTH = 100
REQUIRED = object()


class Flag(NamedTuple):
    """One flag.

    Attributes:
        name: `--image_size`; dashes work, too.
        metavar: what stands for its value; "" for a switch. In lower case, as in `all|none`, the only values.
        help: a sentence.
        default: its value if it isn't given; `REQUIRED` if it has to be.
        read: makes the value of the text, or raises argparse.ArgumentTypeError with the text and what to give.
    """

    name: str
    metavar: str
    help: str
    default: Any = None
    read: Callable[[str], Any] = str

    @property
    def reader(self) -> Callable[[str], Any]:
        """`read`, or what takes the only values."""
        return _one_of(*self.metavar.split("|")) if self.metavar.islower() else self.read


_JSON = Flag("--json", "", "Print one JSON object.")


class Result(NamedTuple):
    """What a command prints: `document` with --json, else `text`."""

    document: Any
    text: str
    exit_code: int = EXIT_OK


class Command(NamedTuple):
    """One command of `python -m reader`.

    Attributes:
        name: as the user writes it.
        arguments: names of what has to be given; one that ends in `…` may be given several times.
        summary, details: sentences for the help.
        example: what may follow the name.
        exit_codes: what 0 and 1 mean; 2 is bad usage everywhere.
        run: of the values by name.
        flags: besides `--json`.
    """

    name: str
    arguments: tuple[str, ...]
    summary: str
    details: str
    example: str
    exit_codes: str
    run: Callable[[dict[str, Any]], Result]
    flags: tuple[Flag, ...] = ()

    def parser(self) -> argparse.ArgumentParser:
        """What reads the arguments after the name, and prints the help."""
        parser = _Parser(
            prog=f"python -m reader {self.name}",
            description=textwrap.fill(f"{self.summary} {self.details}", _WIDTH),
            epilog=f"example:\n  python -m reader {self.name} {self.example}\n\n"
            f"exit codes: {self.exit_codes}, 2 bad usage",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        for argument in self.arguments:
            name = argument.rstrip("…")
            parser.add_argument(name.lower(), metavar=name, nargs="+" if argument.endswith("…") else None)
        for flag in (*self.flags, _JSON):
            options: dict[str, Any] = {"action": "store_true"}
            if flag.metavar:
                options = {"metavar": flag.metavar, "default": flag.default, "type": flag.reader}
            has_default = flag.metavar and flag.default not in (None, REQUIRED)
            shown = f"{flag.help[:-1]} (default: {flag.default})." if has_default else flag.help
            parser.add_argument(flag.name, help=shown, required=flag.default is REQUIRED, **options)
        return parser

    def parse(self, given: Sequence[str]) -> dict[str, Any]:
        """Name → value of all arguments and flags. Raises UsageError."""
        values, unknown = self.parser().parse_known_args(list(map(_with_underscores, given)))
        if unknown and unknown[0].startswith("-"):
            name = unknown[0].partition("=")[0]
            raise UsageError(f"unknown flag {name!r}: {suggestion(name, [flag.name for flag in self.flags])}")
        if unknown:
            raise UsageError(f"unexpected argument {unknown[0]!r}: every value belongs to a flag; see --help")
        return vars(values)


class _Parser(argparse.ArgumentParser):
    """One whose errors are ours."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError: `argument --count: '0': give …`, or `the following arguments are required: --out`."""
        name, _, what = message.removeprefix("argument ").partition(": ")
        raise UsageError(f"{name} {what}" if message.startswith("argument ") else f"{what} is missing; see --help")


def _with_underscores(argument: str) -> str:
    name, separator, value = argument.partition("=")
    return f"--{name[2:].replace('-', '_')}{separator}{value}" if name.startswith("--") else argument


def suggestion(given: str, known: Iterable[str]) -> str:
    """`did you mean …?`, of the names that are like it."""
    nearest = difflib.get_close_matches(given, list(known), n=1, cutoff=_LIKENESS)
    return f"did you mean {nearest[0]}?" if nearest else "see --help"


def _one_of(*choices: str) -> Callable[[str], str]:
    """Reads one of some words."""

    def read(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"{text!r}: choose one of {', '.join(choices)}")
        return text

    return read


def whole_number(least: float = -math.inf) -> Callable[[str], int]:
    """Reads a whole number, from `least` on."""

    def read(text: str) -> int:
        if not text.removeprefix("-").isdecimal() or int(text) < least:
            minimum = f" from {least}" if least > -math.inf else ""
            raise argparse.ArgumentTypeError(f"{text!r}: give a whole number{minimum}")
        return int(text)

    return read


def positive(text: str) -> float:
    """Reads a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number above 0")
    return value


def between(least: float, most: float) -> Callable[[str], float]:
    """Reads a number from `least` to `most`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r}: give a number from {least} to {most}")
        return value

    return read
