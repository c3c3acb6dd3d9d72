"""How the commands read their command lines: every error is one line with the bad value and the fix."""

from __future__ import annotations

import difflib
import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from beam_pipeline.errors import UsageError

_LIKENESS = 0.6  # below this share of equal letters a suggestion is no help: `--width` isn't `--split`
_WIDTH, _INDENT = 100, 22


class Flag(NamedTuple):
    """One flag.

    Attributes:
        name: `--image_size`; dashes work, too.
        metavar: what stands for its value; "" for a switch.
        help: a sentence.
        default: its value if it isn't given; `REQUIRED` if it has to be.
        read: makes the value of the text, or raises ValueError with what to give.
    """

    name: str
    metavar: str
    help: str
    default: Any = None
    read: Callable[[str], Any] = str


REQUIRED = object()
JSON = Flag("--json", "", "Print one JSON object.", False)


class Command(NamedTuple):
    """One command of `python -m reader`.

    Attributes:
        name: as the user writes it.
        arguments: names of what has to be given; a last one that ends in `…` may be given several times.
        summary, details: sentences for the help.
        example: what may follow the name.
        exit_codes: what 0 and 1 mean; 2 is bad usage everywhere.
        run: of the values by name; returns the exit code.
        flags: besides `--json`.
    """

    name: str
    arguments: tuple[str, ...]
    summary: str
    details: str
    example: str
    exit_codes: str
    run: Callable[[dict[str, Any]], int]
    flags: tuple[Flag, ...] = ()

    def parse(self, given: Sequence[str]) -> dict[str, Any]:
        """Name → value of all arguments and flags. Raises UsageError."""
        flags = {flag.name: flag for flag in (*self.flags, JSON)}
        values = {flag.name[2:]: flag.default for flag in flags.values()}
        arguments: list[str] = []
        rest = iter(given)
        for one in rest:
            if not one.startswith("-"):
                arguments.append(one)
                continue
            name, is_joined, text = one.partition("=")
            flag = flags.get(f"--{name[2:].replace('-', '_')}") if name.startswith("--") else None
            if flag is None:
                raise UsageError(f"unknown flag {name!r}: {suggestion(name, flags)}")
            if not flag.metavar:
                if is_joined:
                    raise UsageError(f"{flag.name} takes no value; see --help")
                values[flag.name[2:]] = True
                continue
            value = text if is_joined else next(rest, None)
            if value is None or (not is_joined and value.startswith("--")):
                raise UsageError(f"{flag.name} lacks its value; see --help")
            try:
                values[flag.name[2:]] = flag.read(value)
            except ValueError as error:
                raise UsageError(f"{flag.name} {value!r}: {error}") from None
        return {**self._named(arguments), **self._checked(values)}

    def _named(self, arguments: list[str]) -> dict[str, Any]:
        if len(arguments) < len(self.arguments):
            raise UsageError(f"{self.arguments[len(arguments)].rstrip('…')} is missing; see --help")
        names = [name.rstrip("…").lower() for name in self.arguments]
        if self.arguments[-1].endswith("…"):
            return {**dict(zip(names, arguments, strict=False)), names[-1]: arguments[len(names) - 1 :]}
        if len(arguments) > len(names):
            raise UsageError(
                f"unexpected argument {arguments[len(names)]!r}: every value belongs to a flag; see --help"
            )
        return dict(zip(names, arguments, strict=True))

    def _checked(self, values: dict[str, Any]) -> dict[str, Any]:
        for name, value in values.items():
            if value is REQUIRED:
                raise UsageError(f"--{name} is missing; see --help")
        return values

    def help(self) -> str:
        """What `--help` prints."""
        lines = [f"usage: python -m reader {' '.join((self.name, *self.arguments))} [--flag VALUE …]", ""]
        lines += [*textwrap.wrap(f"{self.summary} {self.details}", _WIDTH), ""]
        for flag in (*self.flags, JSON):
            default = (
                f" (default: {flag.default})" if isinstance(flag.default, (str, int, float)) and flag.metavar else ""
            )
            head, text = f"  {flag.name} {flag.metavar}", f"{flag.help.rstrip('.')}{default}."
            wrapped = textwrap.wrap(text, _WIDTH - _INDENT)
            lines += [head] if len(head) > _INDENT - 2 else [f"{head:{_INDENT}}{wrapped.pop(0)}"]
            lines += [" " * _INDENT + line for line in wrapped]
        example = f"example:\n  python -m reader {self.name} {self.example}"
        return "\n".join([*lines, "", example, "", f"exit codes: {self.exit_codes}, 2 bad usage"])


def suggestion(given: str, known: Sequence[str] | dict[str, Any]) -> str:
    """`did you mean …?`, of the names that are like it; dashes count for nothing."""
    by_letters = {name.lstrip("-"): name for name in known}
    nearest = difflib.get_close_matches(given.lstrip("-").replace("-", "_"), by_letters, n=1, cutoff=_LIKENESS)
    return f"did you mean {by_letters[nearest[0]]}?" if nearest else "see --help"


def whole_number(least: int | None = None) -> Callable[[str], int]:
    """Reads a whole number, from `least` on."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or (least is not None and value < least):
            raise ValueError(f"give a whole number{'' if least is None else f' from {least}'}")
        return value

    return read


def number(least: float, is_more: bool = False) -> Callable[[str], float]:
    """Reads a finite number, from `least` on, or above it."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < least or (is_more and value == least):
            raise ValueError(f"give a number {'above' if is_more else 'from'} {least:g}")
        return value

    return read


def one_of(*choices: str) -> Callable[[str], str]:
    """Reads one of some words."""

    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"choose one of {', '.join(choices)}")
        return text

    return read
