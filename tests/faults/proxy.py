"""A proxy in front of a GCS server that fails as networks and servers do: seeded, so that a failure comes again.

What befalls a request depends on the seed, its method, its address and how often it has come, not on threads or time.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import random
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from tests.servers import serving

BUSY = "429, 500 or 503"
DROP = "the connection closes before the server hears of it"
RESET = "the connection is reset before the server hears of it"
TRUNCATE = "the reply's body ends early"
SHORT = "the reply's body ends early and its length agrees"
LOSE = "the server does it, the reply is lost"
DELAY = "it takes a moment longer"
EXPIRED = "401: the credentials have expired"
FORBIDDEN = "403: this account may not"
FLIP = "a bit of an image flips on its way"
SILENCE = "no answer ever comes"
FAULTS = (BUSY, DROP, RESET, TRUNCATE, SHORT, LOSE, DELAY)
FAILURES = (BUSY, DROP, RESET, TRUNCATE, LOSE)

_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host"}


class Handler(BaseHTTPRequestHandler):
    """Answers in silence."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits 40 ms for the client to acknowledge its headers

    def _reply(self, status: int, headers: dict[str, str], body: bytes, length: int | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, *arguments: object) -> None:
        pass


class Proxy(ThreadingHTTPServer):
    """The proxy before `upstream`: one of `faults` befalls a `share` of the requests, by `seed`.

    `share`, 0 to 1, may be changed while it runs; `happened` counts each fault.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, upstream: str, share: float, seed: int = 0, faults: Sequence[str] = FAULTS) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = upstream
        self.share = share
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.happened: Counter[str] = Counter()
        self.requests = 0
        self._seed = seed
        self._faults = faults
        self._seen: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._all_fail_from: int | None = None

    def fail_from(self, requests: int) -> None:
        """Let every request fail after that many."""
        self._all_fail_from = requests

    def fault_for(self, method: str, target: str) -> tuple[str | None, random.Random]:
        """What befalls this request, and the chance for the details."""
        # The server draws the ids of uploads; which number a bucket has depends on the tests before.
        address = re.sub(r"bucket-\d+", "bucket", f"{method} {target.partition('upload_id=')[0]}")
        with self._lock:
            if self.requests == self._all_fail_from:
                self.share = 1.0
            self.requests += 1
            self._seen[address] += 1
            name = f"{self._seed} {address} {self._seen[address]}"
            chance = random.Random(hashlib.sha256(name.encode()).digest())
            fault = chance.choice(self._faults) if chance.random() < self.share else None
            if fault:
                self.happened[fault] += 1
        return fault, chance

    def before(self, request: str, body: bytes) -> None:
        """Called before a request is passed on; for subclasses."""

    def after(self, body: bytes) -> None:
        """Called with the server's reply before it is passed back; for subclasses."""

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that go away are no news here."""


class _Handler(Handler):
    server: Proxy

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.before(f"{self.command} {self.path}", body)
        fault, chance = self.server.fault_for(self.command, self.path)
        if fault == BUSY:
            self._reply(chance.choice((429, 500, 503)), {}, b'{"error": {"code": 503, "message": "try again"}}')
        elif fault in (EXPIRED, FORBIDDEN):
            status = int(fault[:3])
            self._reply(status, {}, json.dumps({"error": {"code": status, "message": "the server's words"}}).encode())
        elif fault in (DROP, RESET):
            self._hang_up(reset=fault == RESET)
        elif fault == SILENCE:
            time.sleep(120)
        else:
            if fault == DELAY:
                time.sleep(0.03)
            self._forward(body, fault, chance)

    do_GET = do_POST = do_PUT = do_DELETE = _answer

    def _forward(self, body: bytes, fault: str | None, chance: random.Random) -> None:
        host = urlsplit(self.server.upstream).netloc
        connection = http.client.HTTPConnection(host, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP}
        connection.request(self.command, self.path, body, {**headers, "Host": host, "Content-Length": str(len(body))})
        reply = connection.getresponse()
        data = reply.read()
        connection.close()
        self.server.after(data)
        # A resumable upload goes on where the server says: also through here.
        sent = {
            name: value.replace(self.server.upstream, self.server.url)
            for name, value in reply.getheaders()
            if name.lower() not in _HOP_BY_HOP
        }
        cut = chance.randrange(len(data)) if data else 0
        if fault == FLIP and data.startswith(b"\xff\xd8"):
            data = data[:cut] + bytes([data[cut] ^ 1 << chance.randrange(8)]) + data[cut + 1 :]
        if fault == LOSE or (fault == TRUNCATE and not data):
            self._hang_up()
        elif fault == TRUNCATE:
            self._reply(reply.status, sent, data[:cut], length=len(data))
            self._hang_up()
        else:
            self._reply(reply.status, sent, data[:cut] if fault == SHORT else data)

    def _hang_up(self, reset: bool = False) -> None:
        if reset:  # no farewell: https://man7.org/linux/man-pages/man7/socket.7.html, SO_LINGER
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.rfile.close()  # it holds the socket open
        self.connection.close()


def proxied(
    upstream: str, share: float, seed: int = 0, faults: Sequence[str] = FAULTS
) -> AbstractContextManager[Proxy]:
    """Runs a proxy in a thread."""
    return serving(Proxy(upstream, share, seed, faults))
