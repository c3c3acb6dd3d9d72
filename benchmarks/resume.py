"""Resumes training streams at random steps, each in a new process, and compares with the uninterrupted ones.

    python benchmarks/resume.py [--resumes 50] [--records 2000] [--seed 0] [--hosts 1,2,3,7,16]

Drawn pictures in 4 uneven shards; full shuffle and `random_resized_crop` then `flip_crop`. First every number of hosts
reads two epochs: each record has to come once an epoch over all hosts, in equally many steps. Then each resume, half of
them on the same number of hosts: there, names and pixels have to follow as if nothing had happened. On another number,
the records not yet trained in the epoch have to come exactly once before the next epoch, with the same pixels.
Exits 1 at the first difference.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import reader
from tests.reading.shards import make_dataset

SIDE = 24
BATCH = 8  # a host's

Seen = list[list[tuple[str, str]]]  # host → (file name, hash of its pixels) in order


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all comparisons."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--resumes", type=int, default=50)
    parser.add_argument("--records", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hosts", default="1,2,3,7,16")
    parser.add_argument("--read", metavar="JSON", help="(one process' part)")
    flags = parser.parse_args(arguments)
    if flags.read:
        print(json.dumps(read(**json.loads(flags.read))))
        return 0
    counts = [int(text) for text in flags.hosts.split(",")]
    quarter = flags.records // 8
    shards = [quarter, 2 * quarter + 13, quarter - 13, flags.records - 4 * quarter]
    with tempfile.TemporaryDirectory(prefix="imageshards-resume-") as scratch:
        folder = make_dataset(Path(scratch) / "1.0.0", {"train": shards}, size=(30, 40))
        whole = {hosts: read(folder, hosts, None, 2 * steps(flags.records, hosts)) for hosts in counts}
        for hosts, seen in whole.items():
            check_epochs(seen, flags.records)
            print(f"{hosts} hosts: every record once in each of 2 epochs, {steps(flags.records, hosts)} steps each")
        generator = random.Random(flags.seed)
        for number in range(flags.resumes):
            before = generator.choice(counts)
            after = before if number % 2 else generator.choice([hosts for hosts in counts if hosts != before])
            step = generator.randrange(steps(flags.records, before))
            check_resume(folder, whole, flags.records, before, after, step)
            print(f"resume {number + 1}: {before} hosts, step {step} → {after} hosts: right", flush=True)
    return 0


def steps(records: int, hosts: int) -> int:
    """Steps that contain an epoch."""
    return -(-records // (BATCH * hosts))


def in_new_process(folder: str, hosts: int, position: str | None, count: int) -> Seen:
    """`read` in a Python of its own."""
    part = json.dumps({"folder": folder, "hosts": hosts, "position": position, "count": count})
    done = subprocess.run([sys.executable, __file__, "--read", part], stdout=subprocess.PIPE, check=True)
    return [[(name, pixels) for name, pixels in host] for host in json.loads(done.stdout.splitlines()[-1])]


def read(folder: str, hosts: int, position: str | None, count: int) -> Seen:
    """What each host hands out in `count` steps."""
    crop = reader.augment.random_resized_crop(then=reader.augment.flip_crop)
    seen = []
    for host in range(hosts):
        batches = reader.train_batches(
            folder,
            "train",
            global_batch_size=BATCH * hosts,
            host=(host, hosts),
            image_size=SIDE,
            augment=crop,
            features=["filename"],
            seed=3,
            position=None if position is None else reader.Position.from_json(position),
        )
        seen.append(
            [
                (name.decode(), hashlib.sha256(image.tobytes()).hexdigest()[:12])
                for inputs, _ in itertools.islice(batches.repeat(), count)
                for name, image in zip(inputs["filename"], inputs["image"], strict=True)
            ]
        )
    return seen


def check_epochs(seen: Seen, records: int) -> None:
    """Every record once an epoch: a record's first places over all hosts are the first epoch's."""
    hosts = len(seen)
    for host in seen:  # a host's share of an epoch holds no record twice
        share = [name for name, _ in host[: records // hosts]]
        assert len(set(share)) == len(share)
    first = Counter(name for host in seen for name, _ in host[: records // hosts])
    assert first.most_common(1)[0][1] == 1
    assert len(first) == records // hosts * hosts
    both = Counter(name for host in seen for name, _ in host[: 2 * records // hosts])
    assert max(both.values()) <= 2
    assert sum(both.values()) == 2 * records // hosts * hosts


def check_resume(folder: str, whole: dict[int, Seen], records: int, before: int, after: int, step: int) -> None:
    """One resume after `step` trained steps of the first epoch."""
    options = {"global_batch_size": BATCH * before, "host": (0, before), "seed": 3}
    position = reader.train_batches(folder, "train", **options).position.after(step)
    trained = [host[: BATCH * step] for host in whole[before]]
    if before == after:
        resumed = in_new_process(folder, after, position.to_json(), steps(records, after))
        for host, uninterrupted in zip(resumed, whole[before], strict=True):
            expected = uninterrupted[BATCH * step :][: len(host)]
            assert host[: len(expected)] == expected
        return
    left = records - sum(map(len, trained))
    resumed = in_new_process(folder, after, position.to_json(), -(-left // (BATCH * after)) + 1)
    # Hosts whose share is one record less are one record further: `left // after` of each are the epoch's for sure.
    rest = Counter(pair for host in resumed for pair in host[: left // after])
    if 1 not in whole:
        whole[1] = read(folder, 1, None, steps(records, 1))
    (one,) = whole[1]
    epoch = Counter(one[:records])
    already = Counter(pair for host in trained for pair in host)
    assert already <= epoch
    assert rest <= epoch - already
    assert sum(rest.values()) == left // after * after
    last = Counter(pair for host in resumed for pair in host[: -(-left // after)])
    assert epoch - already <= last  # and the odd ones come next


if __name__ == "__main__":
    sys.exit(main())
