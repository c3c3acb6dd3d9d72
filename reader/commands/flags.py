"""How the commands read their command lines: every error is one line with the bad value and the fix."""

from __future__ import annotations

import difflib
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from beam_pipeline.errors import EXIT_OK, UsageError

_LIKENESS = 0.6  # below this share of equal letters a suggestion is no help: `--width` isn't `--split`
_WIDTH, _INDENT = 100, 22
REQUIRED = object()


class Flag(NamedTuple):
    """One flag.

    Attributes:
        name: `--image_size`; dashes work, too.
        metavar: what stands for its value; "" for a switch. Small words, as in `all|none`, are the only values.
        help: a sentence.
        default: its value if it isn't given; `REQUIRED` if it has to be.
        read: makes the value of the text, or raises ValueError with what to give.
    """

    name: str
    metavar: str
    help: str
    default: Any = None
    read: Callable[[str], Any] = str

    def value(self, text: str) -> Any:
        """The value of what was given. Raises UsageError."""
        try:
            if "|" in self.metavar and self.metavar.islower() and text not in self.metavar.split("|"):
                raise ValueError(f"choose one of {self.metavar.replace('|', ', ')}")
            return self.read(text)
        except ValueError as error:
            raise UsageError(f"{self.name} {text!r}: {error}") from None


class Result(NamedTuple):
    """What a command prints: `document` with --json, else `text`."""

    document: Any
    text: str
    exit_code: int = EXIT_OK


class Command(NamedTuple):
    """One command of `python -m reader`.

    Attributes:
        name: as the user writes it.
        arguments: names of what has to be given; a last one that ends in `…` may be given several times.
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

    def every_flag(self) -> tuple[Flag, ...]:
        """Its own, and those that all commands have."""
        return (*self.flags, Flag("--json", "", "Print one JSON object.", False))

    def parse(self, given: Sequence[str]) -> dict[str, Any]:
        """Name → value of all arguments and flags. Raises UsageError."""
        flags = {flag.name: flag for flag in self.every_flag()}
        values = {flag.name[2:]: flag.default for flag in flags.values()}
        arguments: list[Any] = []
        rest = iter(given)
        for one in rest:
            if not one.startswith("-"):
                arguments.append(one)
                continue
            name, is_joined, text = one.partition("=")
            flag = flags.get(f"--{name[2:].replace('-', '_')}") if name.startswith("--") else None
            if flag is None:
                raise UsageError(f"unknown flag {name!r}: {suggestion(name, flags)}")
            if is_joined and not flag.metavar:
                raise UsageError(f"{flag.name} takes no value; see --help")
            if flag.metavar and not is_joined:
                text = next(rest, "--")
                if text.startswith("--"):
                    raise UsageError(f"{flag.name} lacks its value; see --help")
            values[flag.name[2:]] = flag.value(text) if flag.metavar else True
        names = [name.rstrip("…") for name in self.arguments]
        if len(arguments) < len(names):
            raise UsageError(f"{names[len(arguments)]} is missing; see --help")
        if self.arguments[-1].endswith("…"):
            arguments[len(names) - 1 :] = [arguments[len(names) - 1 :]]
        if len(arguments) > len(names):
            unexpected = arguments[len(names)]
            raise UsageError(f"unexpected argument {unexpected!r}: every value belongs to a flag; see --help")
        missing = next((name for name, value in values.items() if value is REQUIRED), None)
        if missing:
            raise UsageError(f"--{missing} is missing; see --help")
        return {**values, **{name.lower(): value for name, value in zip(names, arguments, strict=True)}}

    def help(self) -> str:
        """What `--help` prints."""
        lines = [f"usage: python -m reader {' '.join((self.name, *self.arguments))} [--flag VALUE …]", ""]
        lines += [*textwrap.wrap(f"{self.summary} {self.details}", _WIDTH), ""]
        for flag in self.every_flag():
            has_default = flag.metavar and flag.default not in (None, REQUIRED)
            text = flag.help.rstrip(".") + (f" (default: {flag.default})." if has_default else ".")
            head, wrapped = f"  {flag.name} {flag.metavar}", textwrap.wrap(text, _WIDTH - _INDENT)
            lines += [head] if len(head) > _INDENT - 2 else [f"{head:{_INDENT}}{wrapped.pop(0)}"]
            lines += [" " * _INDENT + line for line in wrapped]
        example = f"example:\n  python -m reader {self.name} {self.example}"
        return "\n".join([*lines, "", example, "", f"exit codes: {self.exit_codes}, 2 bad usage"])


def suggestion(given: str, known: Iterable[str]) -> str:
    """`did you mean …?`, of the names that are like it; dashes count for nothing."""
    by_letters = {name.lstrip("-"): name for name in known}
    nearest = difflib.get_close_matches(given.lstrip("-").replace("-", "_"), by_letters, n=1, cutoff=_LIKENESS)
    return f"did you mean {by_letters[nearest[0]]}?" if nearest else "see --help"


def whole_number(least: float = -math.inf) -> Callable[[str], int]:
    """Reads a whole number, from `least` on."""

    def read(text: str) -> int:
        if not text.removeprefix("-").isdecimal() or int(text) < least:
            raise ValueError(f"give a whole number{f' from {least}' if least > -math.inf else ''}")
        return int(text)

    return read


def positive(text: str) -> float:
    """Reads a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ValueError("give a number above 0")
    return value
