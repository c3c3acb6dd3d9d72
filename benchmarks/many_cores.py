"""What Python's share of reading costs, and how many cores it can feed: the engine with decoding taken out.

    python benchmarks/many_cores.py [IMAGES] [--count 20480] [--repeats 5] [--threads 2,8,16,32]

First decoding is replaced by nothing: CPU µs per record from the page cache, all else included. Then by a sleep of
270 µs, in which other threads run as they do while libjpeg-turbo decodes: sleeping threads stand for cores that this
machine lacks. A sleep takes some 60 µs longer than it is told.
"""

from __future__ import annotations

import material
import turns
from turns import Case


def main() -> None:
    """Print a table."""
    parser = turns.parser(__doc__, 20_480, 5)
    parser.add_argument("--threads", default="2,8,16,32")
    flags = parser.parse_args()
    url, _ = material.kept(flags.images, flags.count)
    nothing = {"url": url, "kind": "nothing", "threads": 2}
    cases = {f"nothing decoded, batch {n}": Case("doors.engine", {**nothing, "batch": n}) for n in (64, 1024)}
    for threads in map(int, flags.threads.split(",")):
        case = Case("doors.engine", {"url": url, "kind": "sleep", "threads": threads})
        cases[f"{threads} threads, a sleep"] = case
    print(turns.table(turns.in_turns(cases, flags.count, flags.repeats), ()))


if __name__ == "__main__":
    main()
