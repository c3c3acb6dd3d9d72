"""Ranges received by plain HTTP: what is right goes into the buffer, all else is left to another client."""

from __future__ import annotations

import gc
import http.server
import multiprocessing
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from beam_pipeline.errors import StorageError
from reader import object_ranges, ranges, remote
from reader.object_ranges import ObjectRanges
from reader.ranges import read_ranges
from reader.storage import LocalStorage, Range, open_storage
from tests.servers import Gcs

OBJECT = bytes(np.random.default_rng(5).integers(0, 256, 3 << 20, np.uint8))


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    connections: set[tuple[str, int]]
    seen: list[dict[str, str]]
    together: threading.Barrier  # of the three requests that are answered once all have come

    def do_GET(self) -> None:
        type(self).connections.add(self.client_address)
        type(self).seen.append(dict(self.headers))
        start, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        body = OBJECT[start : last + 1]
        fault = self.path.partition("?")[0].removeprefix("/")
        if fault == "together":
            self.together.wait(30)
        self.send_response({"whole": 200, "busy": 503, "beyond": 416}.get(fault, 206))
        if fault == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
            return
        body = OBJECT if fault in ("whole", "longer") else body
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if fault == "cut" else body)
        self.close_connection = fault in ("cut", "closing")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    _Handler.connections, _Handler.seen, _Handler.together = set(), [], threading.Barrier(3)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as listening:
        listening.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients that hang up
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()
    gc.collect()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # connections end with the process
class TestReceive:
    def test_a_range_comes_whole_over_a_connection_that_is_kept(self, server: str) -> None:
        client, buffer = ObjectRanges(), memoryview(bytearray(2 << 20))
        for start in (0, 5, 1 << 20):
            asks = [(f"{server}/object?alt=media", start, buffer)]
            assert client.receive(asks, {"Authorization": "Bearer x"}) == [2 << 20]
            assert buffer == OBJECT[start : start + (2 << 20)]
        assert len(_Handler.connections) == 1
        assert {seen["Authorization"] for seen in _Handler.seen} == {"Bearer x"}

    def test_where_the_object_ends_before_only_that_is_written(self, server: str) -> None:
        buffer = memoryview(bytearray(b"\xff" * 1000))
        assert ObjectRanges().receive([(f"{server}/object", len(OBJECT) - 10, buffer)], {}) == [10]
        assert buffer == OBJECT[-10:] + b"\xff" * 990

    @pytest.mark.parametrize("fault", ["whole", "busy", "beyond", "chunked", "longer", "cut"])
    def test_what_is_no_whole_range_is_none(self, server: str, fault: str) -> None:
        client, buffer = ObjectRanges(), memoryview(bytearray(1000))
        assert client.receive([(f"{server}/{fault}", 0, buffer)], {}) == [None]
        assert client.receive([(f"{server}/object", 0, buffer)], {}) == [1000], "the connection was left in the middle"
        assert buffer == OBJECT[:1000]

    def test_a_server_that_closes_its_connections_costs_a_try(self, server: str) -> None:
        client, buffer = ObjectRanges(), memoryview(bytearray(1000))
        received = [client.receive([(f"{server}/closing", 0, buffer)], {})[0] for _ in range(6)]
        assert received[0] == 1000
        assert received.count(1000) >= 3

    def test_nobody_answers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(object_ranges, "_TRIALS", 3)
        client, buffer = ObjectRanges(), memoryview(bytearray(10))
        assert [client.receive([("http://127.0.0.1:9/x", 0, buffer)], {}) for _ in range(4)] == [[None]] * 4

    def test_a_server_that_never_gives_ranges_is_asked_no_more(self, server: str) -> None:
        client, buffer = ObjectRanges(), memoryview(bytearray(10))
        for _ in range(100):
            assert client.receive([(f"{server}/whole", 0, buffer)], {}) == [None]
        assert len(_Handler.seen) == object_ranges._TRIALS

    def test_a_server_that_gave_ranges_is_asked_again_however_many_fail(self, server: str) -> None:
        client, buffer = ObjectRanges(), memoryview(bytearray(1000))
        for fault in ("object", *["cut"] * (2 * object_ranges._TRIALS), "object"):
            assert client.receive([(f"{server}/{fault}", 0, buffer)], {}) == [None if fault == "cut" else 1000]

    def test_a_thread_asks_for_all_before_it_awaits_a_reply(self, server: str) -> None:
        client, buffers = ObjectRanges(), [memoryview(bytearray(1 << 20)) for _ in range(4)]
        faults = ["together", "whole", "together", "together"]
        asks = [(f"{server}/{fault}", 100 * i, buffers[i]) for i, fault in enumerate(faults)]
        for _ in range(2):
            assert client.receive(asks, {}) == [1 << 20, None, 1 << 20, 1 << 20]
        assert [buffers[i] == OBJECT[100 * i :][: 1 << 20] for i in (0, 2, 3)] == [True] * 3

    def test_threads_have_connections_of_their_own(self, server: str) -> None:
        client, together = ObjectRanges(), threading.Barrier(4)

        def receive(start: int) -> bool:
            together.wait(30)
            buffer = memoryview(bytearray(1 << 20))
            received = client.receive([(f"{server}/object", start, buffer)], {})
            return received == [1 << 20] and buffer == OBJECT[start:][: 1 << 20]

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(receive, range(0, 400, 100)))
        assert len(_Handler.connections) == 4


class Remote(LocalStorage):
    is_remote = True


@pytest.fixture
def files(tmp_path: Path) -> list[Range]:
    (tmp_path / "a").write_bytes(OBJECT)
    path = str(tmp_path / "a")
    return [
        (path, 0, 10),
        (path, 1 << 20, 3 << 20),
        (str(tmp_path / "none"), 0, 9),
        (path, len(OBJECT) - 4, len(OBJECT) + 4),
    ]


@pytest.mark.parametrize("storage", [LocalStorage(), Remote()])
def test_ranges_come_in_order_and_a_missing_file_as_none(storage: LocalStorage, files: list[Range]) -> None:
    for _ in range(2):
        read = [None if part is None else bytes(part) for part in read_ranges(storage, files)]
        assert read == [OBJECT[:10], OBJECT[1 << 20 :], None, OBJECT[-4:]]
    assert list(read_ranges(storage, [])) == []


def test_ranges_are_asked_for_in_threads_unless_the_storage_asks_for_several_at_once(files: list[Range]) -> None:
    asked: list[int] = []

    class One(Remote):
        together = threading.Barrier(8)

        def read_into(self, ranges: Sequence[Range], parts: Sequence[memoryview]) -> list[int | None]:
            self.together.wait(30)
            asked.append(len(ranges))
            return super().read_into(ranges, parts)

    class Several(One):
        ranges_at_once = 2

    wanted = [(files[0][0], start, start + 100) for start in range(16)]
    for storage, sizes in ((One(), [1] * 16), (Several(), [2] * 8)):
        asked.clear()
        assert [bytes(part or b"") for part in read_ranges(storage, wanted)] == [OBJECT[a:b] for _, a, b in wanted]
        assert asked == sizes


def test_readers_in_several_threads_dont_share_a_buffer(files: list[Range]) -> None:
    path = files[0][0]

    def read(start: int) -> bool:
        wanted = [(path, start + 1000 * i, start + 1000 * i + 700) for i in range(20)]
        return all(
            part == OBJECT[first:last]
            for _ in range(20)
            for (_, first, last), part in zip(wanted, read_ranges(Remote(), wanted), strict=True)
        )

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(read, range(0, 6 << 17, 1 << 17)))


def test_a_buffer_that_requests_may_still_write_to_is_not_used_again(files: list[Range]) -> None:
    started, late, written = threading.Event(), threading.Event(), threading.Event()

    class Failing(Remote):
        def read_into(self, ranges: Sequence[Range], parts: Sequence[memoryview]) -> list[int | None]:
            if ranges[0][1] == 0:
                started.wait(30)
                raise StorageError("broken")
            started.set()
            late.wait(30)
            parts[0][:] = b"\xee" * len(parts[0])
            written.set()
            return [len(parts[0])]

    ranges._SPARE.clear()
    path = files[0][0]
    with pytest.raises(StorageError, match="broken"):
        list(read_ranges(Failing(), [(path, start, start + 100) for start in (0, 5)]))
    right = read_ranges(Remote(), [(path, 0, 100), (path, 100, 200)])
    first = next(right)
    late.set()
    assert written.wait(30)
    assert (first, next(right)) == (OBJECT[:100], OBJECT[100:200])


def _read_in_child(path: str, results: multiprocessing.Queue[bool]) -> None:
    results.put([bytes(part or b"") for part in read_ranges(Remote(), [(path, 7, 1007)])] == [OBJECT[7:1007]])


def test_a_forked_child_reads_into_memory_of_its_own(files: list[Range]) -> None:
    path = files[0][0]
    list(read_ranges(Remote(), [(path, 0, 1000)]))
    assert ranges._SPARE
    before = bytes(ranges._SPARE[-1])
    context = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[bool] = context.Queue()
    child = context.Process(target=_read_in_child, args=(path, results))
    child.start()
    assert results.get(timeout=60)
    child.join()
    assert bytes(ranges._SPARE[-1]) == before


def test_gs_is_read_by_plain_requests(gcs: Gcs, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = gcs.new_bucket()
    name = "a b/ü#?%[1]"
    gcs.put(bucket, name, OBJECT)
    remote.open_remote.cache_clear()
    storage = open_storage(f"gs://{bucket}")
    received: list[int | None] = []
    receive = ObjectRanges.receive

    def noted(*arguments: object) -> list[int | None]:
        some = receive(*arguments)  # type: ignore[arg-type]
        received.extend(some)
        return some

    monkeypatch.setattr(ObjectRanges, "receive", noted)
    url = f"gs://{bucket}/{name}"
    end = len(OBJECT)
    wanted = [
        (url, 0, 100),
        (url, 7, 1 << 20),
        (url, end - 5, end + 5),
        (f"gs://{bucket}/none", 0, 9),
        (url, end, end + 5),
    ]
    read = [None if part is None else bytes(part) for part in read_ranges(storage, wanted)]
    assert read == [OBJECT[:100], OBJECT[7 : 1 << 20], OBJECT[-5:], None, b""]
    assert sorted(received, key=str) == sorted([100, (1 << 20) - 7, 5, None, None], key=str)
    remote.open_remote.cache_clear()
