"""Mixes beside one stream of the same records: CPU, and bytes read.

python benchmarks/mixes.py ../photos --before ../other_checkout
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import material
import turns
from turns import Case

BATCH = 64
MIXES: Mapping[str, Mapping[str, int]] = {
    "two, 3:1": {"train[:50%]": 3, "train[50%:]": 1},
    "two, 99:1": {"train[:50%]": 99, "train[50%:]": 1},
    "ten": {f"train[{at}0%:{at + 1}0%]": 1 for at in range(10)},
}


def batches_of(url: str, shares: Mapping[str, int] | None) -> Any:
    """Batches of one stream, or of a mix of parts of the dataset."""
    import reader

    if shares is None:
        return reader.train_batches(url, "train", global_batch_size=BATCH)
    return reader.mix([((url, split), weight) for split, weight in shares.items()], global_batch_size=BATCH)


def read(url: str, shares: Mapping[str, int] | None = None) -> turns.Reader:
    """A case."""
    batches = batches_of(url, shares)
    return lambda: (len(labels) for _, labels in batches)


def asked(url: str, shares: Mapping[str, int], records: int) -> float:
    """Bytes that a mix asks for while it reads so many records, as a multiple of those that the records have."""
    from reader.runs import RunReader

    counted, plain = [0], RunReader.read

    def counting(self: RunReader, piece: Any, out: Any = None) -> Any:
        counted[0] += piece.stop - piece.start
        return plain(self, piece, out)

    RunReader.read = counting  # type: ignore[method-assign]
    batches, sizes = batches_of(url, shares), []
    for (info, split, *_), part in zip(batches._parts, batches.position_at(records // BATCH).parts, strict=True):
        table = info.run_table(split)
        sizes.append((part.epoch * part.records + part.read) * table.read_bytes / table.total)
    batches = batches.with_rows(_undecoded)
    left = iter(batches.repeat())
    for _ in range(records // BATCH):
        next(left)
    RunReader.read = plain  # type: ignore[method-assign]
    return counted[0] / sum(sizes)


def _undecoded(rows: Any) -> Any:
    rows.decode = lambda encoded, row, seed: None
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", nargs="?", type=Path)
    parser.add_argument("--before", type=Path, help="another checkout, whose single stream is measured, too")
    parser.add_argument("--count", type=int, default=5120)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--records", type=int, default=500_000, help="over which bytes are counted")
    flags = parser.parse_args()
    url, _ = material.kept(flags.images, flags.count)
    cases = {"one stream": Case("mixes.read", {"url": url})}
    if flags.before:
        cases["before"] = cases["one stream"]._replace(path=str(flags.before))
    cases |= {name: Case("mixes.read", {"url": url, "shares": shares}) for name, shares in MIXES.items()}
    print(turns.table(turns.in_turns(cases, flags.count, flags.repeats), ["one stream"]))
    for name, shares in MIXES.items():
        print(f"{name}: {asked(url, shares, flags.records):.3f} × the bytes of {flags.records:,} records")


if __name__ == "__main__":
    main()
