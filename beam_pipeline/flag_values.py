"""Reads the values of flags: text, as a user writes it, to what the job works with."""

from __future__ import annotations

import decimal
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction

from PIL import ImageColor

from beam_pipeline.errors import UsageError
from beam_pipeline.images.colour import Rgb
from beam_pipeline.schema import NAME_PATTERN

REST = "rest"
_LONGEST_SIDE = 16_384
_BYTE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_DECIMAL = re.compile(r"\d+(\.\d*)?|\.\d+")


def wrong(flag: str, value: object, fix: str) -> UsageError:
    """The one form of every message about a value: flag, value as given, fix."""
    return UsageError(f"{flag} {str(value)!r}: {fix}")


def parse_choice(flag: str, value: object, choices: Sequence[object]) -> object:
    """One of a few values, which may be numbers."""
    for choice in choices:
        if str(value) == str(choice):
            return choice
    raise wrong(flag, value, f"choose one of {', '.join(map(str, choices))}")


def parse_number(flag: str, value: object, whole: bool, least: float, most: float) -> float:
    """A number, an int where it is to be `whole`."""
    try:
        number = int(str(value)) if whole else float(str(value))
    except ValueError:
        number = None
    if number is None or not least <= number <= most:  # a NaN is in no range
        raise wrong(flag, value, f"give a {'whole ' * whole}number from {least} to {most}")
    return number


def parse_splits(text: str) -> dict[str, Fraction]:
    """`train=0.9,validation=rest` as exact fractions that sum to 1."""
    fix = "write train=0.9,validation=0.1 with shares that sum to 1, one of them may be 'rest'"
    shares: dict[str, Fraction] = {}
    rest = None
    for part in text.split(","):
        name, _, share = (piece.strip() for piece in part.partition("="))
        if not NAME_PATTERN.fullmatch(name) or name in shares or (share == REST and rest):
            raise wrong("--splits", text, fix)
        if share == REST:
            rest, shares[name] = name, Fraction(0)
        elif _DECIMAL.fullmatch(share):
            shares[name] = Fraction(share)
        else:
            raise wrong("--splits", text, fix)
    if rest is not None:
        shares[rest] = 1 - sum(shares.values(), Fraction(0))
    if sum(shares.values()) != 1 or any(share <= 0 for share in shares.values()):
        raise wrong("--splits", text, fix)
    if "train" not in shares:
        raise wrong("--splits", text, "one split must be named train")
    return shares


def splits_text(fractions: Mapping[str, Fraction]) -> str:
    """The one way to write `--splits`: exact decimals, `rest` spelled out."""
    context = decimal.Context(prec=200)
    shares = {
        name: context.divide(decimal.Decimal(share.numerator), decimal.Decimal(share.denominator))
        for name, share in fractions.items()
    }
    return ",".join(f"{name}={share.normalize(context):f}" for name, share in shares.items())


def parse_pattern(text: str) -> re.Pattern[str]:
    """`--split_by`: a regular expression with a group."""
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise wrong("--split_by", text, f"not a regular expression: {error}") from None
    if pattern.groups < 1:
        raise wrong("--split_by", text, "put the part that stays together in a group: '([^/]+)_\\d+'")
    return pattern


def parse_shards(value: str | int) -> int | dict[str, int]:
    """`8` or `train=64,validation=4`."""
    fix = "write 8 or train=64,validation=4"
    text = str(value)
    if text.isdecimal() and int(text) > 0:
        return int(text)
    counts: dict[str, int] = {}
    for part in text.split(","):
        name, _, count = (piece.strip() for piece in part.partition("="))
        if not NAME_PATTERN.fullmatch(name) or name in counts or not (count.isdecimal() and int(count) > 0):
            raise wrong("--num_shards", text, fix)
        counts[name] = int(count)
    return counts


def parse_bytes(flag: str, value: str | int) -> int:
    """`128MiB`, `200MB` or a plain number, as bytes."""
    match = _BYTES.fullmatch(str(value).strip())
    unit = _BYTE_UNITS.get(match[2].upper()) if match else None
    byte_count = int(Fraction(match[1]) * unit) if match and unit else 0
    if byte_count < 1:
        raise wrong(flag, value, "write a size such as 128MiB, 200MB or 1000000")
    return byte_count


def parse_size(value: str | int) -> tuple[int, int] | None:
    """`224`, `HxW` or `none` as (height, width) in pixels, or None."""
    text = str(value).strip().lower()
    if text == "none":
        return None
    sides = [int(side) if side.isdecimal() else 0 for side in text.split("x")]
    if len(sides) <= 2 and all(sides) and max(sides) > _LONGEST_SIDE:
        raise wrong("--image_size", value, f"a side has at most {_LONGEST_SIDE} pixels")
    if len(sides) > 2 or not all(sides):
        raise wrong("--image_size", value, "write 224, 224x320 (height x width) or none")
    return sides[0], sides[-1]


def parse_colour(value: str) -> Rgb:
    """`#rrggbb` or a CSS name, as (red, green, blue)."""
    try:
        red, green, blue, *alpha = ImageColor.getrgb(value.strip())
    except ValueError:
        alpha = [0]
    if alpha:
        raise wrong("--background", value, "write a colour such as white or '#ff8000'")
    return red, green, blue


def parse_extensions(value: str) -> tuple[str, ...]:
    """`jpg,.PNG` as suffixes in lower case without dots."""
    suffixes = tuple(part.strip().lower().removeprefix(".") for part in value.split(","))
    if not all(suffix and not set(suffix) & set("./* ") for suffix in suffixes):
        raise wrong("--extensions", value, "write suffixes such as jpg,jpeg,png")
    return suffixes
