"""Mixes beside one stream of the same records: CPU, and bytes read.

python benchmarks/mixes.py [IMAGES] [--count 5120] [--repeats 7]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import doors
import material
import turns
from stored import BATCH
from turns import Case

from beam_pipeline import storage
from reader.tools.requests import Request, SlowStorage

MIXES: Mapping[str, Mapping[str, int]] = {
    "two, 3:1": {"train[:50%]": 3, "train[50%:]": 1},
    "two, 99:1": {"train[:50%]": 99, "train[50%:]": 1},
    "ten": {f"train[{at}0%:{at + 1}0%]": 1 for at in range(10)},
}
READ = 500_000  # records over which bytes are counted


def mixed(url: str, shares: Mapping[str, int]) -> Any:
    """A mix of parts of the dataset."""
    import reader

    return reader.mix([((url, split), weight) for split, weight in shares.items()], global_batch_size=BATCH)


def mix(url: str, shares: Mapping[str, int]) -> turns.Reader:
    """A case."""
    return doors.sizes(mixed(url, shares))


def asked(url: str, shares: Mapping[str, int]) -> float:
    """Bytes that a mix asks for, as a multiple of those of a record."""
    found: list[Request] = []
    with storage.wrapped(lambda store: SlowStorage(store, 0, found.append)):
        batches = mixed(url, shares).with_rows(doors.stubbed("nothing"))
        iterator = batches.repeat()
        for _ in range(READ // BATCH):
            next(iterator)
    info = batches._parts[0].info
    return sum(one.bytes_read for one in found) / (READ * info.splits["train"].bytes / info.records("train"))


def main() -> None:
    """Measure and print."""
    flags = turns.parser(__doc__, 5120, 7).parse_args()
    url, _ = material.kept(flags.images, flags.count)
    cases = {"one stream": Case("doors.numpy", {"url": url})}
    cases |= {name: Case("mixes.mix", {"url": url, "shares": shares}) for name, shares in MIXES.items()}
    print(turns.table(turns.in_turns(cases, flags.count, flags.repeats), ["one stream"]))
    for name, shares in MIXES.items():
        print(f"{name}: {asked(url, shares):.3f} × the bytes of {READ:,} records")


if __name__ == "__main__":
    main()
