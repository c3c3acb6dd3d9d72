"""Numbers as people read them."""

from __future__ import annotations

_UNITS = ("bytes", "kB", "MB", "GB", "TB")


def count(number: int, noun: str, plural: str = "") -> str:
    """`1 shard`, `1,200 shards`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def size(number: int) -> str:
    """`512 bytes`, `4.2 kB`, `131 MB`: three digits, decimal units."""
    if number < 1000:
        return count(number, "byte")
    value, unit = float(number), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:,.{max(0, 3 - len(str(int(value))))}f} {_UNITS[unit]}"


def size_range(least: int, most: int) -> str:
    """`4.2 kB`, or `4.1 to 5.0 MB` if they differ."""
    low, high = size(least), size(most)
    if low == high:
        return high
    return f"{low.split(' ')[0]} to {high}" if low.split(" ")[1] == high.split(" ")[1] else f"{low} to {high}"
