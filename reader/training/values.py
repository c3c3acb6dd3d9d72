"""Readers of options' values, from text or Python; each raises a ValueError that says what to give."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def number(kind: type[int] | type[float], wanted: str, fits: Callable[[Any], bool]) -> Callable[[object], Any]:
    """Reads a number, which may be text; the error says what to give."""

    def read(value: object) -> Any:
        with suppress(ValueError):
            read_value = kind(str(value))
            if fits(read_value):
                return read_value
        raise ValueError(f"give {wanted}")

    return read


def integer_from(least: int) -> Callable[[object], int]:
    """Reads an integer that is no smaller."""
    return number(int, f"an integer from {least}", lambda value: value >= least)


INTEGER = number(int, "an integer", lambda value: True)
POSITIVE = number(float, "a number above 0", lambda value: 0 < value < math.inf)


def one_of(choices: str) -> Callable[[object], object]:
    """Reads one of the words `a|b|c`."""

    def read(value: object) -> object:
        if value not in choices.split("|"):
            raise ValueError(f"choose one of {choices.replace('|', ', ')}")
        return value

    return read
