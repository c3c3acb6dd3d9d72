"""How the verbs read their command lines: values are checked here, and every error is one line that says the fix."""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Callable, Sequence
from typing import NoReturn

from beam_pipeline.errors import UsageError

# Below this share of equal letters a suggestion is no help: `--width` is no `--split`.
_LIKENESS = 0.6
_ARGUMENT = re.compile(r"argument (?P<flag>\S+): (?P<text>.*)", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """argparse whose errors are `UsageError`s, `--flag 'value': fix`."""

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong in our words."""
        required = message.removeprefix("the following arguments are required: ")
        if required != message:
            raise UsageError(f"{required.split(', ')[0]} is missing; see --help")
        match = _ARGUMENT.fullmatch(message)
        if match is None:
            raise UsageError(f"{message}; see --help")
        if match["text"].startswith("expected "):
            raise UsageError(f"{match['flag']} lacks its value; see --help")
        if match["text"].startswith("ignored explicit argument"):
            raise UsageError(f"{match['flag']} takes no value; see --help")
        raise UsageError(f"{match['flag']} {match['text']}")


def whole_number(least: int | None = None) -> Callable[[str], int]:
    """What argparse calls for a flag of a whole number, from `least` on."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or (least is not None and value < least):
            raise argparse.ArgumentTypeError(
                f"{text!r}: give a whole number{'' if least is None else f' from {least}'}"
            )
        return value

    return read


def number(least: float = -math.inf, is_more: bool = False) -> Callable[[str], float]:
    """What argparse calls for a flag of a finite number, from `least` on, or above it where `is_more`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < least or (is_more and value == least):
            raise argparse.ArgumentTypeError(f"{text!r}: give a number {'above' if is_more else 'from'} {least:g}")
        return value

    return read


def one_of(choices: Sequence[str]) -> Callable[[str], str]:
    """What argparse calls for a flag of some words."""

    def read(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"{text!r}: choose one of {', '.join(choices)}")
        return text

    return read


def unknown(argument: str, parser: argparse.ArgumentParser) -> UsageError:
    """The error for an argument that a verb hasn't."""
    flag = argument.partition("=")[0]
    if not flag.startswith("-"):
        return UsageError(f"unexpected argument {flag!r}: every value belongs to a flag; see --help")
    known = [name for action in parser._actions for name in action.option_strings]
    return UsageError(f"unknown flag {flag!r}: {suggestion(flag, known)}")


def suggestion(given: str, known: Sequence[str]) -> str:
    """`did you mean …?`, of the names that are like it; dashes count for nothing."""
    by_letters = {name.lstrip("-"): name for name in known}
    nearest = difflib.get_close_matches(given.lstrip("-"), by_letters, n=1, cutoff=_LIKENESS)
    return f"did you mean {by_letters[nearest[0]]}?" if nearest else "see --help"
