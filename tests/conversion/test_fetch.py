"""The fetch and decode threads: in order, a bounded window, the first error in order, nothing left running."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest

from beam_pipeline.conversion import pool
from beam_pipeline.conversion.pool import Pool

REMOTE_OR_LOCAL = pytest.mark.parametrize("fetches", [4, 0], ids=["remote", "local"])


@pytest.fixture
def small_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 bytes in flight, 50 in a batch."""
    monkeypatch.setattr(pool, "_PAYLOAD_BYTES", 100)
    monkeypatch.setattr(pool, "_BATCH_BYTES", 50)


def unchanged(item: int) -> int:
    return item


def one_byte(item: int) -> int:
    return 1


def fetched_only(item: int, fetched: Callable[[], int]) -> int:
    return fetched()


@REMOTE_OR_LOCAL
def test_results_come_in_order_whatever_is_ready_first(fetches: int) -> None:
    pauses = random.Random(3)

    def fetch(item: int) -> int:
        time.sleep(pauses.random() / 300)
        return item * 10

    def convert(item: int, fetched: Callable[[], int]) -> int:
        time.sleep(pauses.random() / 300)
        return item + fetched()

    found = list(Pool(fetches, 3).map(range(100), fetch, convert, one_byte))
    assert found == [item * 11 for item in range(100)]


def test_no_more_fetches_and_decodes_at_a_time_than_asked_for() -> None:
    lock, now, most = threading.Lock(), Counter(), Counter()

    def work(kind: str) -> None:
        assert threading.current_thread().name.startswith(kind)
        with lock:
            now[kind] += 1
            most[kind] = max(most[kind], now[kind])
        time.sleep(0.002)
        with lock:
            now[kind] -= 1

    list(Pool(4, 2).map(range(60), lambda item: work("fetch"), lambda item, fetched: work("decode"), one_byte))
    assert 1 < most["fetch"] <= 4, "they overlap"
    assert most["decode"] <= 2


def test_a_slow_request_holds_no_decoder() -> None:
    shared = Pool(4, 1)
    goes_on = threading.Event()
    slow = shared.map([0], lambda item: goes_on.wait(30), lambda item, fetched: fetched(), one_byte)
    waiting = threading.Thread(target=next, args=(slow,))
    waiting.start()
    assert list(shared.map(range(20), unchanged, fetched_only, one_byte)) == list(range(20))
    assert waiting.is_alive()
    goes_on.set()
    waiting.join()


@REMOTE_OR_LOCAL
def test_items_are_taken_as_the_window_moves(fetches: int) -> None:
    taken: list[int] = []
    items = (taken.append(item) or item for item in range(1000))  # type: ignore[func-returns-value]
    results = Pool(fetches, 2).map(items, unchanged, fetched_only, one_byte)
    for done in range(1, 51):
        next(results)
        assert len(taken) <= done + 8 * (1 + 2 * 2) + 8


@pytest.mark.usefixtures("small_budget")
def test_payload_bytes_in_flight_are_bounded() -> None:
    lock, held = threading.Lock(), [0]

    def change(by: int) -> None:
        with lock:
            held.append(held[-1] + by)

    def fetch(item: int) -> int:
        change(40)
        return item

    def convert(item: int, fetched: Callable[[], int]) -> int:
        time.sleep(0.001)
        change(-40)
        return fetched()

    assert list(Pool(16, 4).map(range(50), fetch, convert, lambda item: 40)) == list(range(50))
    assert 40 <= max(held) <= 100


@pytest.mark.usefixtures("small_budget")
def test_writers_that_share_a_budget_all_finish() -> None:
    shared = Pool(8, 2)
    found: dict[int, list[int]] = {}

    def write(number: int) -> None:
        found[number] = list(shared.map(range(200), unchanged, fetched_only, lambda item: 5000 if item == 50 else 70))

    threads = [threading.Thread(target=write, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {number: list(range(200)) for number in range(3)}


@pytest.mark.parametrize("where", ["fetch", "convert"])
@REMOTE_OR_LOCAL
def test_the_first_error_in_order_is_raised_and_the_pool_works_on(fetches: int, where: str) -> None:
    shared = Pool(fetches, 2)

    def maybe_fail(kind: str, item: int) -> int:
        if kind == where and item in (19, 25):
            if item == 19:
                time.sleep(0.02)  # 25 fails first
            raise ValueError(f"item {item}")
        return item

    def convert(item: int, fetched: Callable[[], int]) -> int:
        return maybe_fail("convert", fetched())

    seen = []
    with pytest.raises(ValueError, match="item 19"):
        for result in shared.map(range(100), lambda item: maybe_fail("fetch", item), convert, one_byte):
            seen.append(result)
    assert seen == list(range(16)), "the batches before it"
    assert shared.budget._reserved == 0, "an abandoned window gives its bytes back"
    assert list(shared.map(range(20), unchanged, fetched_only, one_byte)) == list(range(20))
