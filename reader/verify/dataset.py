"""`verify`: reads every byte of a dataset and compares it with what the manifest says. Needs no TensorFlow.

A shard is the unit of work: worker processes take shards, read them from end to end and check framing, CRCs and
Examples; threads in them decode the images. Memory is some chunks of 8 MiB a worker, and 16 bytes a record to find file
names that repeat.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from itertools import islice
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np

from beam_pipeline import schema
from beam_pipeline.errors import UsageError
from reader.info import DatasetInfo, SplitInfo
from reader.limits import cpu_count
from reader.verify.faults import Fault, of_file
from reader.verify.files import RunIndex, check_files, check_sums
from reader.verify.names import repeated_names
from reader.verify.shard import DECODE, Findings, ShardChecker, ShardTask
from reader.words import count

__all__ = ["DECODE", "Fault", "verify"]

_MAX_FAULTS_A_SHARD = 100
# Below this many bytes more processes (0.5 s until they run) cost more than they gain over threads.
_PROCESS_BYTES = 256 << 20


def verify(info: DatasetInfo, *, decode: str = "all", processes: int = 1) -> list[Fault]:
    """Check a dataset to the last byte.

    Every file is there with the hash or the size and CRC-32C that the manifest has; both indexes fit the shards; TFDS
    metadata, labels and reject lines say what the manifest says; every record has its right CRCs, is an Example with
    the keys of the format, a label that its class id names, a file name that no other record has, and an image that
    decodes to its size; numbers of records add up.

    Args:
        info: from `load_info`.
        decode: which images are decoded: `all`, `sample` (the first record of each run of 64) or `none`.
        processes: that read shards at a time, one thread a core in all of them together. More than 1 starts new
            Pythons, which import the caller's main module: it must be guarded by `if __name__ == "__main__"`.

    Returns:
        Faults in a fixed order, at most 100 a shard; [] if all is well.

    Raises:
        UsageError: no such `decode`.
        StorageError: the storage can't be reached (a missing file is a fault).
    """
    if decode not in DECODE:
        raise UsageError(f"--decode {decode!r}: choose one of {', '.join(DECODE)}")
    sizes = dict(info.storage.files(info.url)) | _sizes_elsewhere(info)
    faults = [*check_files(info, sizes), *check_sums(info)]
    tasks = {split.name: _tasks(info, split, sizes, faults) for split in info.splits.values()}
    names = []
    with _workers(info, decode, processes, [task for some in tasks.values() for task in some]) as run:
        for split in info.splits.values():
            classes = np.zeros(info.num_classes, np.int64)
            is_right = len(tasks[split.name]) == len(split.shards)
            for task, findings in zip(tasks[split.name], run(tasks[split.name]), strict=True):
                faults += _some(findings.faults, info.path(task.shard.file))
                is_right = is_right and not findings.faults
                classes += np.array(findings.class_counts, np.int64)
                names.append((task.shard.file, findings.names))
            if is_right:  # a fault of a shard would explain it
                faults += _check_classes(info, split, classes.tolist())
    return faults + repeated_names(info, names)


def _tasks(info: DatasetInfo, split: SplitInfo, sizes: dict[str, int], faults: list[Fault]) -> list[ShardTask]:
    """The shards of a split that there are; adds the faults of its run index."""
    runs = RunIndex(info, split, sizes)
    faults += runs.faults
    tasks = []
    for index, shard in enumerate(split.shards):
        if shard.file in sizes:
            name = schema.ShardName.parse(shard.file)
            index_file = name.index_file if name and info.compression == "none" and name.index_file in sizes else None
            tasks.append(ShardTask(index, shard, sizes[shard.file], index_file, runs.rows_of(index)))
    return tasks


def _check_classes(info: DatasetInfo, split: SplitInfo, counts: list[int]) -> list[Fault]:
    """A fault if the records found don't have the classes that the manifest counts."""
    wrong = [number for number in range(info.num_classes) if counts[number] != split.class_counts[number]]
    if not wrong:
        return []
    first = wrong[0]
    what = (
        f"{split.name} holds {count(counts[first], 'record')} of class {first} {info.classes[first]!r}, "
        f"the manifest says {split.class_counts[first]:,}"
    )
    more = f"; and {count(len(wrong) - 1, 'more class differs', 'more classes differ')}" if len(wrong) > 1 else ""
    return [of_file(info.path(schema.MANIFEST_FILE), what + more)]


def _sizes_elsewhere(info: DatasetInfo) -> dict[str, int]:
    """Shard → bytes, of those that lie outside the dataset's folder (an index of foreign files)."""
    shards = [shard.file for split in info.splits.values() for shard in split.shards]
    files = [file for file in shards if info.path(file) == file]
    sizes = info.shard_storage.sizes(files) if files else []
    return {file: size for file, size in zip(files, sizes, strict=True) if size is not None}


def _some(faults: list[Fault], path: str) -> list[Fault]:
    if len(faults) <= _MAX_FAULTS_A_SHARD:
        return faults
    more = len(faults) - _MAX_FAULTS_A_SHARD
    return [
        *faults[:_MAX_FAULTS_A_SHARD],
        of_file(path, f"{count(more, 'more fault')} of this shard {'is' if more == 1 else 'are'} left out"),
    ]


class _Run(NamedTuple):
    """Checks shards in order; a few of them wait in the pool, however many there are."""

    pool: Executor | None
    checker: ShardChecker | None
    waiting: int

    def __call__(self, tasks: Sequence[ShardTask]) -> Iterator[Findings]:
        if self.checker is not None:
            yield from map(self.checker.check, tasks)
            return
        assert self.pool is not None
        rest = iter(tasks)
        pending: list[Future[Findings]] = [self.pool.submit(_check, task) for task in islice(rest, self.waiting)]
        while pending:
            yield pending.pop(0).result()
            pending += [self.pool.submit(_check, task) for task in islice(rest, 1)]


@contextmanager
def _workers(info: DatasetInfo, decode: str, processes: int, tasks: Sequence[ShardTask]) -> Iterator[_Run]:
    """Worker processes, or this one where that is faster."""
    processes = min(processes, len(tasks)) if sum(task.bytes for task in tasks) > _PROCESS_BYTES else 1
    threads = max(1, -(-cpu_count() // max(1, processes)))
    if processes <= 1:
        with ShardChecker(info, decode, threads) as checker:
            yield _Run(None, checker, 0)
        return
    arguments: tuple[Any, ...] = (info, decode, threads)
    # Spawned: a forked child would inherit clients of object stores whose threads it hasn't got.
    with ProcessPoolExecutor(processes, get_context("spawn"), _start, arguments) as pool:
        yield _Run(pool, None, 2 * processes)


_checker: ShardChecker | None = None  # of a worker process


def _start(info: DatasetInfo, decode: str, threads: int) -> None:
    global _checker
    _checker = ShardChecker(info, decode, threads)


def _check(task: ShardTask) -> Findings:
    assert _checker is not None
    return _checker.check(task)
