"""Ranges of objects by plain HTTP, received into memory that is there already.

A client that makes objects of its own of what it receives costs 1.9 ms of CPU a MB (gcsfs) or 1.2 (urllib3), this one
0.75, most of it in the kernel. It knows no retries and no errors: what doesn't go well is asked for another way.
"""

from __future__ import annotations

import http.client
import ssl
import threading
from collections.abc import Sequence
from functools import cache
from urllib.parse import urlsplit

Ask = tuple[str, int, memoryview]  # URL, first byte, where to

_TIMEOUT_S = 60.0  # without a byte
_PARTIAL_CONTENT = 206
# Where the first so many requests all fail, a server or proxy isn't one for plain requests. Later failures say less:
# after a pause the server may have closed every connection.
_TRIALS = 32


class ObjectRanges:
    """Range requests of many threads, each of which keeps its connections."""

    def __init__(self) -> None:
        self._mine = threading.local()
        self._failures = 0
        self._has_worked = False

    def receive(self, asks: Sequence[Ask], headers: dict[str, str]) -> list[int | None]:
        """Fill each buffer with its object's bytes. All are asked for before the first reply is awaited.

        Returns:
            How many bytes each got, fewer where its object ends before; None where that didn't work, and the buffer may
            hold anything.
        """
        asked = [self._ask(ask, headers, place) for place, ask in enumerate(asks)]
        return [
            None if connection is None else self._receive(connection, buffer)
            for connection, (_, _, buffer) in zip(asked, asks, strict=True)
        ]

    def _ask(self, ask: Ask, headers: dict[str, str], place: int) -> http.client.HTTPConnection | None:
        url, start, buffer = ask
        if not len(buffer) or (self._failures >= _TRIALS and not self._has_worked):
            return None
        scheme, host, path, query, _ = urlsplit(url)
        connection = self._connection(scheme, host, place)
        wanted = {"Range": f"bytes={start}-{start + len(buffer) - 1}", "User-Agent": "imageshards", **headers}
        try:
            connection.request("GET", f"{path}?{query}", headers=wanted)
        except (OSError, http.client.HTTPException):
            self._fail(connection)
            return None
        return connection

    def _receive(self, connection: http.client.HTTPConnection, buffer: memoryview) -> int | None:
        try:
            received = _fill(connection.getresponse(), buffer)
        except (OSError, http.client.HTTPException):
            received = None
        if received is None:
            self._fail(connection)
        else:
            self._has_worked = True
        return received

    def _fail(self, connection: http.client.HTTPConnection) -> None:
        self._failures += 1
        connection.close()  # the next request opens it again

    def _connection(self, scheme: str, host: str, place: int) -> http.client.HTTPConnection:
        """This thread's connection for the request at that place among those under way."""
        kept: dict[tuple[str, int], http.client.HTTPConnection] = self._mine.__dict__.setdefault("connections", {})
        if (host, place) not in kept:
            kept[host, place] = (
                http.client.HTTPSConnection(host, timeout=_TIMEOUT_S, context=_certificates())
                if scheme == "https"
                else http.client.HTTPConnection(host, timeout=_TIMEOUT_S)
            )
        return kept[host, place]


def _fill(reply: http.client.HTTPResponse, buffer: memoryview) -> int | None:
    """Receive a reply's whole body; None where it isn't the range."""
    if reply.status != _PARTIAL_CONTENT or reply.length is None or reply.length > len(buffer):
        return None
    wanted = buffer[: reply.length]
    received = 0
    while received < len(wanted):
        more = reply.readinto(wanted[received:])
        if not more:
            return None
        received += more
    return received


@cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()  # takes 20 ms: once for all connections
