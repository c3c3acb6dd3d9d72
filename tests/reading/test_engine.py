"""The engine from outside: what users hold, drop, kill, fork and send; odd sizes; any number of threads."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest

import reader
from beam_pipeline.errors import UsageError
from beam_pipeline.storage.local import LocalStorage
from reader.buffers import BufferPool
from tests.reading.shards import make_dataset
from tests.servers import SILENCE, Answer, telling

RECORDS = 300


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> reader.DatasetInfo:
    folder = tmp_path_factory.mktemp("photos") / "1.0.0"
    return reader.load_info(make_dataset(folder, {"train": [100, 0, 70, 130], "one": [0, 1]}))


def train(info: Any, batch: int = 16, **more: Any) -> Any:
    return reader.train_batches(info, more.pop("split", "train"), global_batch_size=batch, **more)


def all_bytes(batches: Any) -> list[bytes]:
    return [array.tobytes() for batch in batches for array in batch]


@pytest.fixture(scope="module", autouse=True)
def others() -> Iterator[None]:
    """Threads that other tests of this process left: TensorFlow never drops a dataset's function."""
    OTHERS.update(threading.enumerate())
    yield
    OTHERS.clear()


OTHERS: set[threading.Thread] = set()


def ours() -> int:
    return sum(thread.name.startswith("reader") for thread in set(threading.enumerate()) - OTHERS)


def wait_until(condition: Callable[[], bool]) -> None:
    """Up to 10 s; for what ends soon."""
    for _ in range(1000):
        gc.collect(0)
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError(f"not after 10 s: {ours()} threads")


# --- what is held stays as it was

HOLDS: dict[str, Callable[[Any], Any]] = {
    "batch": lambda images: images,
    "record": lambda images: images[3],
    "view of a view": lambda images: images[4:9][1:3, ::2, :, 1],
    "flat": lambda images: images.reshape(-1)[100:5000].view(np.uint16),
    "memoryview": lambda images: memoryview(images[2]),
    "dlpack": lambda images: np.from_dlpack(images),
    "frombuffer": lambda images: np.frombuffer(images.data, np.uint8),
}


@pytest.mark.parametrize("kind", HOLDS)
def test_what_is_held_of_twenty_batches_stays_as_it_was_while_reading_goes_on(
    info: reader.DatasetInfo, kind: str
) -> None:
    held, expected = [], []
    for number, (images, _) in enumerate(train(info, 8).repeat()):
        assert images.ctypes.data % 64 == 0
        if number < 20:
            held.append(HOLDS[kind](images))
            expected.append(np.array(np.asarray(held[-1])))
        if number == 120:
            break
        del images
    for one, copy in zip(held, expected, strict=True):
        assert np.array_equal(np.asarray(one), copy)


# --- nothing is left over


@pytest.mark.parametrize("how", ["dropped", "exhausted", "failed", "closed"])
def test_threads_end_with_their_iterator(info: reader.DatasetInfo, how: str) -> None:
    def fail(image: Any, seed: int) -> Any:
        raise ValueError

    wait_until(lambda: ours() == 0)
    iterator = iter(train(info, augment=fail if how == "failed" else None))
    if how == "failed":
        with pytest.raises(UsageError):
            next(iterator)
        with pytest.raises(StopIteration):
            next(iterator)
    else:
        next(iterator)
        assert ours() > 0
    if how == "exhausted":
        assert len(list(iterator)) == RECORDS // 16 - 1
    elif how == "closed":
        iterator.close()
    elif how == "dropped":
        del iterator
    wait_until(lambda: ours() == 0)


@pytest.mark.parametrize("how", ["iterations", "datasets", "abandoned"])
@pytest.mark.soak
def test_hundreds_leave_no_threads_descriptors_or_memory(info: reader.DatasetInfo, how: str) -> None:
    process, batches = psutil.Process(), train(info, 50)

    def use(times: int) -> None:
        for _ in range(times):
            one = batches if how == "iterations" else train(info, 50)
            for _ in itertools.islice(one, 1 if how == "abandoned" else None):
                pass

    use(40)
    wait_until(lambda: ours() == 0)
    before = process.memory_info().rss, process.num_fds(), threading.active_count()
    use(100 if how == "abandoned" else 200)
    wait_until(lambda: ours() == 0)
    assert process.num_fds() <= before[1]
    assert threading.active_count() <= before[2]
    assert process.memory_info().rss < before[0] + (30 << 20)


# --- any sizes, any number of threads


@pytest.mark.parametrize(
    ("batch", "more"),
    [
        (1, {}),
        (1, {"window_runs": 1}),
        (150, {"window_runs": 1}),
        (301, {}),
        (1000, {"window_runs": 1}),
        (3, {"split": "one"}),
        (1, {"split": "one"}),
        (16, {"window_runs": 10**9}),
        (7, {"image_size": 300}),
        (9, {"host": (2, 3), "window_runs": 2}),
        (5, {"split": "train[:1]+one+train[99:101]"}),
    ],
)
def test_any_sizes_give_the_same_bytes_with_any_number_of_threads(
    info: reader.DatasetInfo, batch: int, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for threads in (1, 3, 32):
        monkeypatch.setattr("reader.stream.cpu_count", lambda threads=threads: threads)
        batches = train(info, batch, augment=reader.augment.flip_crop, **more)
        evals = reader.eval_batches(info, "train", global_batch_size=batch, features=["filename"])
        names = [name for inputs, _, weights in evals for name in inputs["filename"][weights > 0]]
        assert [int(name[-10:-4]) for name in names] == list(range(RECORDS))
        found.append(all_bytes(itertools.islice(batches.repeat(), 2 * len(batches) + 1)))
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 4 * len(batches) + 2


# --- what goes wrong in a thread reaches who waits


def test_no_memory_and_bugs_in_threads_are_raised_not_waited_for(
    info: reader.DatasetInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise MemoryError("none left")

    monkeypatch.setattr("reader.engine.SMALLEST_BUFFER", 0)  # these runs are small
    for target, name in ((BufferPool, "array"), (BufferPool, "run_buffer"), (LocalStorage, "read_range")):
        batches = train(info)
        with monkeypatch.context() as patch, pytest.raises(MemoryError, match="none left"):
            patch.setattr(target, name, fail)
            list(batches)
        assert len(list(batches)) == len(batches)


def test_a_process_that_an_augment_ends_is_ended(info: reader.DatasetInfo) -> None:
    def leave(image: Any, seed: int) -> Any:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        list(train(info, augment=leave))


# --- processes


def forked(work: Callable[[], None]) -> int:
    """The exit status of a fork that does some work; killed after 20 s."""
    child = os.fork()
    if not child:
        signal.alarm(20)
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:os.fork:RuntimeWarning")
def test_a_fork_reads_on_and_an_iterator_from_before_says_so(info: reader.DatasetInfo) -> None:
    batches = train(info, 1)
    expected = all_bytes(batches)[: RECORDS * 2]
    batches = train(info, 1)
    iterator = iter(batches)
    for _ in range(3):
        next(iterator)

        def check() -> None:
            assert all_bytes(train(info, 1)) == expected == all_bytes(batches)

        def go_on() -> None:
            with pytest.raises(UsageError, match="before a fork"):
                list(iterator)

        assert (forked(check), forked(go_on), forked(iterator.close)) == (0, 0, 0)
    assert len(list(iterator)) == RECORDS - 3


SCRIPT = """
import sys, reader
crop = reader.augment.random_resized_crop()
batches = reader.train_batches(sys.argv[1], "train", global_batch_size=64, image_size=400, augment=crop)
iterator = batches.repeat()
for _ in range(int(sys.argv[2])):
    next(iterator)
print("ready", flush=True)
"""


def child(script: str, *arguments: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize("ending", ["", "del iterator", "for _ in batches: break"])
def test_a_process_ends_while_batches_are_decoded_ahead(info: reader.DatasetInfo, ending: str) -> None:
    for steps in ("0", "1", "2"):
        process = child(SCRIPT + ending, info.url, steps)
        assert process.communicate(timeout=60) == ("ready\n", "")
        assert process.returncode == 0  # a thread that comes back from C++ to no interpreter would abort


HANGING = """
import sys, time, signal, threading, reader
from beam_pipeline import storage
from beam_pipeline.storage.local import LocalStorage
far = storage.open_storage(sys.argv[2])
def read_range(self, url, start, stop, out=None):
    print("asked", flush=True)
    return far.read_range(sys.argv[2] + "/bucket/shard", start, stop, out)
LocalStorage.is_remote = True
batches = reader.train_batches(sys.argv[1], "train", global_batch_size=64)
LocalStorage.read_range = read_range  # what is asked for from here on are records
def consume():
    next(iter(batches))
"""


@pytest.mark.parametrize(
    ("how", "lines", "said"),
    [
        ("interrupted", "consume()", "asked"),
        (
            "exits",
            "threading.Thread(target=consume, daemon=True).start()\ntime.sleep(1)\nprint('end', flush=True)",
            "end",
        ),
    ],
)
def test_a_process_ends_soon_beside_a_server_that_never_answers(
    info: reader.DatasetInfo, how: str, lines: str, said: str
) -> None:
    with telling(Answer(SILENCE)) as silent:
        process = child(HANGING + lines, info.url, silent.url)
        assert process.stdout is not None
        try:
            assert any(line.strip() == said for line in iter(process.stdout.readline, ""))
            start = time.monotonic()
            if how == "interrupted":
                process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=30)
            assert time.monotonic() - start < 3
        finally:
            process.kill()
    if how == "interrupted":
        assert process.returncode == -signal.SIGINT and error.strip().endswith("KeyboardInterrupt")
    else:
        assert (process.returncode, error) == (0, "")
