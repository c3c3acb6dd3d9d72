"""A proxy that adds a latency to each request: `python slow_proxy.py UPSTREAM_PORT LATENCY_MS`. Linux only.

Prints its port, then runs until it is killed. `GET /proxied` tells how many requests and bytes of objects went through.
It shares its CPUs with what is measured: a body passes from socket to socket inside the kernel.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import IO

_HOST = re.compile(rb"^host:[^\r]*", re.IGNORECASE | re.MULTILINE)
_LENGTH = re.compile(rb"^content-length: *(\d+)", re.IGNORECASE | re.MULTILINE)
_PIPE_BYTES = 256 << 10  # a user may have 64 MB of them


class SlowProxy(ThreadingTCPServer):
    """Forwards HTTP/1.1 with keep-alive to a port of this machine, each connection in a thread."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, upstream: int, latency_s: float) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.upstream = upstream
        self.latency_s = latency_s
        self._counts = {"requests": 0, "bytes": 0}
        self._lock = threading.Lock()

    def count(self, **more: int) -> dict[str, int]:
        """Add to what went through, and return it."""
        with self._lock:
            for name, number in more.items():
                self._counts[name] += number
            return dict(self._counts)


class _Connection(StreamRequestHandler):
    server: SlowProxy
    disable_nagle_algorithm = True

    def handle(self) -> None:
        upstream = _Upstream(self.server.upstream)
        try:
            while head := _head(self.rfile):
                body = self.rfile.read(_length(head) or 0)
                if head.startswith(b"GET /proxied "):
                    text = json.dumps(self.server.count()).encode()
                    self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))
                    continue
                time.sleep(self.server.latency_s)
                head = _HOST.sub(b"host: 127.0.0.1:%d" % self.server.upstream, head)  # the server serves its own only
                length = upstream.forward(head + body, self.connection)
                first = head.partition(b"\r\n")[0]
                is_object = b"alt=media" in first or not first.startswith(b"GET /storage/v1/")
                self.server.count(requests=1, bytes=length * is_object)
        except ConnectionError:
            pass  # the client has gone
        finally:
            upstream.close()


class _Upstream:
    """One connection to the server."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._replies = self._socket.makefile("rb")
        self._pipe = os.pipe()
        fcntl.fcntl(self._pipe[0], fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def close(self) -> None:
        for end in self._pipe:
            os.close(end)
        self._replies.close()
        self._socket.close()

    def forward(self, request: bytes, client: socket.socket) -> int:
        """Pass a request on and its reply back; returns the length of its body, 0 where it has none beforehand."""
        self._socket.sendall(request)
        head = _head(self._replies)
        if not head:
            raise ConnectionError("the server closed the connection")
        here, there = client.getsockname()[1], self._socket.getpeername()[1]
        head = head.replace(b"127.0.0.1:%d" % there, b"127.0.0.1:%d" % here)  # where an upload goes on
        length = _length(head)
        if length is None:  # a listing: objects have a length
            chunks = list(_chunks(self._replies)) if b"chunked" in head.lower() else []
            client.sendall(head + b"".join(chunks))
            return 0
        start = self._replies.read1(length) if length else b""
        client.sendall(head + start)
        self._splice(length - len(start), client)
        return length

    def _splice(self, length: int, client: socket.socket) -> None:
        read_end, write_end = self._pipe
        while length:
            moved = os.splice(self._socket.fileno(), write_end, min(length, _PIPE_BYTES))
            if not moved:
                raise ConnectionError("the server ended a body early")
            length -= moved
            while moved:
                moved -= os.splice(read_end, client.fileno(), moved)


def _head(stream: IO[bytes]) -> bytes:
    """Up to the empty line; nothing where the connection was closed."""
    lines = []
    while line := stream.readline():
        lines.append(line)
        if line == b"\r\n":
            break
    return b"".join(lines)


def _chunks(stream: IO[bytes]) -> Iterator[bytes]:
    """The parts of a chunked body as they came, the empty last one too."""
    while True:
        line = stream.readline()
        data = stream.read(int(line, 16) + 2)
        yield line + data
        if len(data) == 2:
            return


def _length(head: bytes) -> int | None:
    found = _LENGTH.search(head)
    return int(found[1]) if found else None


if __name__ == "__main__":
    with SlowProxy(int(sys.argv[1]), float(sys.argv[2]) / 1000) as proxy:
        print(proxy.server_address[1], flush=True)
        proxy.serve_forever()
