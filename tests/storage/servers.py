"""A small HTTP server that answers as it is told."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from tests.servers import serving

RESET, SILENCE, SHORT = -1, -2, -3  # answers that are none
_XML = "<?xml version='1.0'?><Error><Code>{}</Code><Message>{}</Message></Error>"


class Answer(NamedTuple):
    """An answer to a request: a status, or RESET, SILENCE, SHORT."""

    status: int
    code: str = "SomeCode"
    words: str = "the server's\nown words"


class Telling(ThreadingHTTPServer):
    """Gives the answers in turn, the last of them for ever."""

    daemon_threads = True

    def __init__(self, answers: Sequence[Answer]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = list(answers)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.requests: list[str] = []

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that go away are no news here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Telling

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        answers, count = self.server.answers, len(self.server.requests)
        self.server.requests.append(f"{self.command} {self.path}")
        status, code, words = answers[min(count, len(answers) - 1)]
        if status == SILENCE:
            time.sleep(60)
        elif status == RESET:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.rfile.close()
            self.connection.close()
        elif status in (200, SHORT):
            self._send(206, b"content" if status == 200 else b"con", 7, {"Content-Range": "bytes 0-6/7"})
            self.close_connection = status == SHORT
        else:
            body = _XML.format(code, words).encode()
            self._send(status, body, len(body), {})

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _answer

    def _send(self, status: int, body: bytes, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        more = {"Content-Length": str(length), "ETag": '"x"', "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}
        for name, value in {**more, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[str]:
    """Runs a server in a thread; yields its URL."""
    with serving(server):
        yield f"http://127.0.0.1:{server.server_port}"


@contextmanager
def telling(*answers: Answer) -> Iterator[Telling]:
    """Runs a server that gives these answers."""
    server = Telling(answers)
    with running(server):
        yield server
