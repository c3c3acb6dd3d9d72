"""The resumable uploads of the GCS JSON API as they are documented, which fake-gcs-server keeps to only half way.

Asked for what has arrived (`bytes */SIZE`) it would end the upload; it also appends what comes twice.
https://cloud.google.com/storage/docs/performing-resumable-uploads
"""

from __future__ import annotations

import base64
import json
import random
import re
from contextlib import AbstractContextManager
from http.server import ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import google_crc32c

from tests.faults.proxy import Handler
from tests.servers import serving

_QUANTUM = 256 << 10


class UploadServer(ThreadingHTTPServer):
    """A server that takes uploads of one chunk after the other.

    Args:
        share: of the chunks at which it fails; it has taken a part of such a one, or all and fails in answering.
        seed: decides which, and how much.
    """

    daemon_threads = True

    def __init__(self, share: float, seed: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.objects: dict[str, bytes] = {}  # of finished uploads
        self.received = self.sessions = self.chunks = 0  # bytes of chunks that came, begun uploads
        self.lost_replies: frozenset[int] = frozenset()  # chunks, from 1, that are taken and whose answers are lost
        self.forget_after: int | None = None
        # How it fails at every chunk: "answers" that nothing arrived, or "hangs up" and says so when it is asked.
        self.keeps_nothing = ""
        self.open_uploads: dict[str, tuple[str, bytearray]] = {}
        self.share = share
        self.chance = random.Random(seed)


class _Handler(Handler):
    server: UploadServer

    def do_POST(self) -> None:
        name = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["name"]
        self.server.sessions += 1
        session = str(self.server.sessions)
        self.server.open_uploads[session] = name, bytearray()
        self._reply(200, {"Location": f"{self.server.url}/session/{session}"}, b"{}")

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received += len(data)
        session = self.path.rpartition("/")[2]
        if self.server.forget_after is not None and self.server.received > self.server.forget_after:
            self.server.forget_after = None
            self.server.open_uploads.clear()
        if session not in self.server.open_uploads:
            self._reply(410, {}, b"")
            return
        name, content = self.server.open_uploads[session]
        span, size = self._range()
        if self.server.keeps_nothing and span is not None:
            if self.server.keeps_nothing == "answers":
                self._reply(308, {"Range": f"bytes=0-{len(content) - 1}"} if content else {}, b"")
            else:
                self.close_connection = True
            return
        self.server.chunks += span is not None
        loses = self.server.chunks in self.server.lost_replies and span is not None
        fails = loses or (span is not None and self.server.chance.random() < self.server.share)
        if span is not None:
            assert span[0] <= len(content), "a gap"
            assert span[1] + 1 == size or len(data) % _QUANTUM == 0, "a chunk that GCS refuses"
            kept = int(len(data) * self.server.chance.random()) // _QUANTUM * _QUANTUM if fails else len(data)
            kept = len(data) if loses else kept
            content.extend(data[len(content) - span[0] : kept])  # what is there already is ignored
        if len(content) == size:
            self.server.objects[name] = bytes(content)
        if fails:
            self.close_connection = True
        elif len(content) == size:
            self._reply(200, {}, _item(bytes(content)))
        else:
            self._reply(308, {"Range": f"bytes=0-{len(content) - 1}"} if content else {}, b"")

    def do_GET(self) -> None:
        found = self.server.objects.get(unquote(urlsplit(self.path).path.rpartition("/o/")[2]))
        if found is None:
            self._reply(404, {}, b"{}")
        else:
            self._reply(200, {}, _item(found))

    def _range(self) -> tuple[tuple[int, int] | None, int]:
        found = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+)", self.headers["Content-Range"])
        assert found, self.headers["Content-Range"]
        span = (int(found[1]), int(found[2])) if found[1] else None
        return span, int(found[3])


def _item(content: bytes) -> bytes:
    crc32c = base64.b64encode(google_crc32c.value(content).to_bytes(4)).decode()
    return json.dumps({"size": str(len(content)), "crc32c": crc32c, "generation": "1"}).encode()


def upload_server(share: float = 0.0, seed: int = 0) -> AbstractContextManager[UploadServer]:
    """Runs the server in a thread."""
    return serving(UploadServer(share, seed))
