"""Split strings as TFDS has them: `train`, `train[:10%]`, `train[-500:]+validation`, `all`.

https://www.tensorflow.org/datasets/splits; percentages are rounded to the closest record, as TFDS does.
"""

from __future__ import annotations

import itertools
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from beam_pipeline.errors import UsageError
from beam_pipeline.text import meant

_PART = re.compile(r"(?P<split>\w+)(?:\[(?P<start>[^:\]]*):(?P<stop>[^:\]]*)\])?")
_BOUND = re.compile(r"(?P<value>-?[0-9]{1,15}|-?[0-9]{0,15}\.?[0-9]{1,15}(?=%))(?P<percent>%?)")
_EXAMPLES = "write train, train[:10%], train[100:-100] or train+validation"


class RecordRange(NamedTuple):
    """Records [start, stop) of one split, in file order."""

    split: str
    start: int
    stop: int


def overlap(ours: Iterable[RecordRange], theirs: Sequence[RecordRange]) -> bool:
    """Whether some record is in both."""
    pairs = itertools.product(ours, theirs)
    return any(a.split == b.split and max(a.start, b.start) < min(a.stop, b.stop) for a, b in pairs)


def parse_split(text: str, records: Mapping[str, int]) -> tuple[RecordRange, ...]:
    """The record ranges that a split string names.

    Args:
        text: the split string.
        records: number of records of each split of the dataset.

    Raises:
        UsageError: not a split string, an unknown split, a bound outside the split, or nothing is left.
    """
    if not isinstance(text, str):
        raise UsageError(f"split={_shown(text)}: {_EXAMPLES}")
    parts = [part.strip() for part in text.split("+")]
    if parts == ["all"] and "all" not in records:
        parts = list(records)
    ranges = tuple(_parse_part(part, records) for part in parts)
    if not sum(part.stop - part.start for part in ranges):
        raise UsageError(f"split {_shown(text)} holds no record: there are {_counts(records)}")
    return ranges


def _parse_part(text: str, records: Mapping[str, int]) -> RecordRange:
    match = _PART.fullmatch(text)
    if match is None:
        raise UsageError(f"split {_shown(text)} isn't understood: {_EXAMPLES}")
    split = match["split"]
    if split not in records:
        hint = meant(split.lower(), records, "")
        raise UsageError(f"there is no split {_shown(split)}{f' ({hint})' * bool(hint)}: there are {_counts(records)}")
    count = records[split]
    start = _bound(match["start"] or "", 0, count, text)
    stop = _bound(match["stop"] or "", count, count, text)
    return RecordRange(split, start, max(start, stop))


def _bound(text: str, default: int, count: int, part: str) -> int:
    if not text:
        return default
    match = _BOUND.fullmatch(text.replace("_", ""))
    if match is None:
        raise UsageError(
            f"{_shown(text)} in split {_shown(part)} isn't understood: write a number of records or a percentage"
        )
    value = float(match["value"]) * count / 100.0 if match["percent"] else int(match["value"])
    bound = round(value)
    if abs(bound) > count:
        raise UsageError(f"{text!r} in split {part!r} is outside the split's {count} records")
    return bound + count if bound < 0 else bound


def _counts(records: Mapping[str, int]) -> str:
    return ", ".join(f"{split} ({count} records)" for split, count in records.items()) or "no splits"


def _shown(value: Any) -> str:
    """A bad value on one line, long ones cut."""
    return repr(value) if isinstance(value, str) and len(value) <= 100 else reprlib.repr(value)


def first_records(ranges: Sequence[RecordRange], count: int) -> str:
    """The split string of the first so many records of some ranges: those of `train[:40]`, 16 → `train[:16]`."""
    parts = []
    for part in ranges:
        stop = min(part.stop, part.start + count)
        if stop > part.start:
            parts.append(f"{part.split}[{part.start or ''}:{stop}]")
            count -= stop - part.start
    return "+".join(parts)
