"""The fetch and decode threads: in order, a bounded window, the first error in order, nothing left running."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest

from beam_pipeline import pools
from beam_pipeline.pools import Pools, shared_pools


def test_results_come_in_order_whatever_is_ready_first() -> None:
    pauses = random.Random(3)

    def fetch(item: int) -> int:
        time.sleep(pauses.random() / 300)
        return item * 10

    def convert(item: int, payload: int) -> int:
        time.sleep(pauses.random() / 300)
        return item + payload

    found = list(Pools(8, 3).map(range(100), fetch, convert, lambda item: 1))
    assert found == [item * 11 for item in range(100)]


def test_nothing_gives_nothing() -> None:
    assert list(Pools(2, 1).map([], lambda item: item, lambda item, payload: payload, lambda item: 1)) == []


def test_no_more_fetches_and_decodes_at_a_time_than_asked_for() -> None:
    lock = threading.Lock()
    now = {"fetch": 0, "convert": 0}
    most = {"fetch": 0, "convert": 0}

    def work(kind: str) -> None:
        with lock:
            now[kind] += 1
            most[kind] = max(most[kind], now[kind])
        time.sleep(0.002)
        with lock:
            now[kind] -= 1

    list(Pools(4, 2).map(range(60), lambda item: work("fetch"), lambda item, payload: work("convert"), lambda item: 1))
    assert most["fetch"] <= 4
    assert most["convert"] <= 2
    assert most["fetch"] > 1, "they overlap"


def test_items_are_taken_as_the_window_moves() -> None:
    taken = 0

    def items() -> Iterator[int]:
        nonlocal taken
        for item in range(1000):
            taken += 1
            yield item

    results = Pools(3, 2).map(items(), lambda item: item, lambda item, payload: payload, lambda item: 1)
    for done in range(1, 51):
        next(results)
        assert taken <= done + 8 * (1 + 2 * 2) + 8


def test_payload_bytes_in_flight_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "_PAYLOAD_BYTES", 100)
    monkeypatch.setattr(pools, "_BATCH_BYTES", 50)
    lock = threading.Lock()
    held = most = 0

    def fetch(item: int) -> int:
        nonlocal held, most
        with lock:
            held += 40
            most = max(most, held)
        return item

    def convert(item: int, payload: int) -> int:
        nonlocal held
        time.sleep(0.001)
        with lock:
            held -= 40
        return payload

    assert list(Pools(16, 4).map(range(50), fetch, convert, lambda item: 40)) == list(range(50))
    assert most <= 100


def test_an_item_over_the_whole_budget_still_goes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "_PAYLOAD_BYTES", 100)
    monkeypatch.setattr(pools, "_BATCH_BYTES", 50)
    sizes = [10, 5_000, 10, 9_000, 8_000, 1]
    found = list(Pools(8, 2).map(sizes, lambda item: item, lambda item, payload: payload, lambda item: item))
    assert found == sizes


def test_two_writers_that_share_a_budget_both_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "_PAYLOAD_BYTES", 100)
    monkeypatch.setattr(pools, "_BATCH_BYTES", 50)
    shared = Pools(8, 2)
    found: dict[int, list[int]] = {}

    def write(number: int) -> None:
        found[number] = list(shared.map(range(200), lambda item: item, lambda item, payload: payload, lambda item: 70))

    threads = [threading.Thread(target=write, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {number: list(range(200)) for number in range(3)}


@pytest.mark.parametrize("where", ["fetch", "convert"])
def test_the_first_error_in_order_is_raised_and_the_pool_works_on(where: str) -> None:
    shared = Pools(4, 2)

    def maybe_fail(kind: str, item: int) -> int:
        if kind == where and item in (19, 25):
            if item == 19:
                time.sleep(0.02)  # 25 fails first
            raise ValueError(f"item {item}")
        return item

    results = shared.map(
        range(100),
        lambda item: maybe_fail("fetch", item),
        lambda item, payload: maybe_fail("convert", item),
        lambda item: 1,
    )
    seen = []
    with pytest.raises(ValueError, match="item 19"):
        for result in results:
            seen.append(result)
    assert seen == list(range(16)), "the batches before it"
    assert shared._budget._taken == 0, "an abandoned window gives its bytes back"
    assert list(shared.map(range(20), lambda i: i, lambda i, payload: payload, lambda i: 1)) == list(range(20))


def test_a_consumer_that_stops_early_gives_everything_back() -> None:
    shared = Pools(4, 2)
    results = shared.map(range(100), lambda item: item, lambda item, payload: payload, lambda item: 5)
    next(results)
    results.close()
    assert shared._budget._taken == 0


def test_after_an_error_requests_that_wait_for_a_thread_are_not_begun() -> None:
    shared = Pools(2, 1)
    begun = []

    def fetch(item: int) -> int:
        begun.append(item)
        time.sleep(0.01)
        if item == 0:
            raise ValueError("storage is gone")
        return item

    with pytest.raises(ValueError, match="storage is gone"):
        list(shared.map(range(24), fetch, lambda item, payload: payload, lambda item: 1))
    at_the_error = len(begun)
    shared._fetchers.shutdown(wait=True)
    assert 8 <= at_the_error <= len(begun) <= at_the_error + 2 < 24


def test_a_process_has_one_pool_a_setting() -> None:
    assert shared_pools(3, 2) is shared_pools(3, 2)
    assert shared_pools(3, 2) is not shared_pools(3, 1)
