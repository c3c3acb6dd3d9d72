"""What Python's share of reading costs, and how many cores it can feed: the engine with decoding taken out.

    python benchmarks/many_cores.py [IMAGES] [--count 20480] [--repeats 5] [--threads 2,8,16,32]

First decoding is replaced by nothing: CPU µs per record from the page cache, all else included. Then by a sleep of
270 µs, in which other threads run as they do while libjpeg-turbo decodes: sleeping threads stand for cores that this
machine lacks. Beside it a bare loop of as many threads with the same sleep, alone and with 14 µs of Python for each
image: no reader in Python can be faster. A sleep takes some 60 µs longer than it is told, here as there.
"""

from __future__ import annotations

import material
import turns
from turns import Case


def main() -> None:
    """Print two tables."""
    parser = turns.parser(__doc__, 20_480, 5)
    parser.add_argument("--threads", default="2,8,16,32")
    flags = parser.parse_args()
    counts = [int(text) for text in flags.threads.split(",")]
    url, _ = material.kept(flags.images, flags.count)
    nothing = {
        f"nothing decoded, batch {batch}": Case(
            "doors.engine", {"url": url, "kind": "nothing", "threads": 2, "batch": batch}
        )
        for batch in (64, 1024)
    }
    print(turns.table(turns.in_turns(nothing, flags.count, flags.repeats), ()))
    print()
    for threads in counts:
        cases = {
            f"{threads} threads, a sleep": Case("doors.engine", {"url": url, "kind": "sleep", "threads": threads}),
            f"{threads} threads, bare": Case("doors.bare_sleep", {"threads": threads, "python_s": 0.0}),
            f"{threads} threads, bare + 14 µs": Case("doors.bare_sleep", {"threads": threads, "python_s": 14e-6}),
        }
        print(turns.table(turns.in_turns(cases, flags.count, flags.repeats), ()), flush=True)


if __name__ == "__main__":
    main()
