"""`imageshards.records` in PyTorch's `DataLoader` and `as_torch`: the same stored bytes, 224 px, batch 64, shuffled.

    python benchmarks/records.py [IMAGES] [--count 5120] [--repeats 7]

IMAGES and `--count` as in peers_read.py. From the local disk, then with 50 ms before each request, as to a bucket.
"""

from __future__ import annotations

import doors
import material
import turns
from stored import BATCH
from turns import Case

WORKERS = {0: (0, 2), 50: (2, 8)}  # by ms of latency


def stream(url: str, latency_ms: int) -> turns.Reader:
    """A `DataLoader` over `as_torch`."""
    doors.delay(latency_ms)
    return doors.torch(url)


def lookup(url: str, latency_ms: int, workers: int) -> turns.Reader:
    """A `DataLoader` over `records`: PyTorch's own shuffle and collation."""
    import torch

    import reader

    doors.delay(latency_ms)
    torch.set_num_threads(1)  # as PyTorch does in workers: more wait actively while others collate a batch
    records = reader.records(url, "train", features=[])
    loader = torch.utils.data.DataLoader(
        records, batch_size=BATCH, shuffle=True, drop_last=True, num_workers=workers, persistent_workers=workers > 0
    )
    return lambda: doors.sizes((batch["image"], batch["class"]) for batch in loader)()


def main() -> None:
    """Measure and print."""
    flags = turns.parser(__doc__, 5120, 7).parse_args()
    url, _ = material.kept(flags.images, flags.count)
    print(f"{flags.count:,} images a turn, {flags.repeats} turns")
    for latency_ms, numbers in WORKERS.items():
        at = {"url": url, "latency_ms": latency_ms}
        base = f"as_torch, {latency_ms} ms"
        cases = {base: Case("records.stream", at)} | {
            f"records, {workers} workers, {latency_ms} ms": Case("records.lookup", {**at, "workers": workers})
            for workers in numbers
        }
        runs = turns.in_turns(cases, flags.count, flags.repeats)
        print(turns.table(runs, [base]))
        for name in [*cases][1:]:
            print(f"{name} compared with as_torch: {turns.ratio(runs[name], runs[base])}")


if __name__ == "__main__":
    main()
