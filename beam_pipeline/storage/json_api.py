"""Single requests to the JSON API, with the credentials, the connections and the event loop of gcsfs.

What is read is held against the length and the CRC that the server gives with it, what is written against the CRC that
it answers. https://cloud.google.com/storage/docs/json_api
"""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

import aiohttp
import google_crc32c
from fsspec import asyn
from yarl import URL

from beam_pipeline.storage.retries import Incomplete, Refused
from beam_pipeline.storage.urls import bucket_and_name

_SILENCE_S = 60.0


class Reply(NamedTuple):
    """A server's answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def document(self) -> dict[str, Any]:
        """The body as JSON."""
        try:
            return dict(json.loads(self.body))
        except ValueError:
            raise Incomplete(f"{len(self.body)} bytes that are no JSON") from None


class Client:
    """Sends single requests.

    Args:
        filesystem: of gcsfs.
        deadline_s: after so long without a byte a request has failed, or after a minute.
    """

    def __init__(self, filesystem: Any, deadline_s: float) -> None:
        self._fs = filesystem
        silence_s = max(min(deadline_s, _SILENCE_S), 0.1)
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=silence_s, sock_read=silence_s)

    def send(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        data: bytes | None = None,
        expected: Collection[int] = (),
        **parameters: Any,
    ) -> Reply:
        """One request, once.

        Args:
            method: of HTTP.
            path: behind the host's name, quoted; or a whole URL.
            headers: beside those that gcsfs adds.
            data: the body.
            expected: statuses that the caller can use beside 2xx.
            parameters: of the query; None is left out.

        Raises:
            FileNotFoundError: 404.
            Refused: any other status.
            Incomplete, OSError, aiohttp.ClientError: the connection failed.
        """
        url = path if path.startswith("http") else f"{self._fs._location}/{path}"
        given = {name: value for name, value in parameters.items() if value is not None}
        if given:
            url += f"{'&' if '?' in url else '?'}{urlencode(given, quote_via=quote)}"
        reply: Reply = asyn.sync(self._fs.loop, self._send, method, url, dict(headers or {}), data)
        if reply.status < 300 or reply.status in expected:
            return reply
        if reply.status == 404:
            raise FileNotFoundError(path)
        raise Refused(reply.status, _message(reply.body))

    async def _send(self, method: str, url: str, headers: dict[str, str], data: bytes | None) -> Reply:
        await self._fs._set_session()
        async with self._fs.session.request(
            method,
            URL(url, encoded=True),
            headers=self._fs._get_headers(headers),
            data=data,
            timeout=self._timeout,
            allow_redirects=False,
        ) as reply:
            return Reply(reply.status, reply.headers, await reply.read())


def _message(body: bytes) -> str:
    text = body.decode("utf-8", "replace")
    try:
        error = json.loads(text)["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        pass
    return " ".join(text.split())[:200]


def object_path(url: str) -> str:
    """Where a request for one object goes."""
    bucket, name = bucket_and_name(url)
    return f"storage/v1/b/{quote(bucket, safe='')}/o/{quote(name, safe='')}"


def whole(reply: Reply, start: int, end: int | None) -> bytes:
    """The asked bytes of a reply, all of them.

    Raises:
        Incomplete: bytes are missing, or their CRC isn't the object's.
    """
    body = reply.body
    if reply.status == 416:  # behind the end
        return b""
    if reply.status == 206:
        first, last, size = _content_range(reply.headers.get("Content-Range", ""))
        wanted = size if end is None else min(end, size)
        if first != start or last + 1 != wanted or len(body) != wanted - start:
            raise Incomplete(f"{len(body)} bytes of [{start}, {wanted})")
        return body
    hashes = dict(part.strip().split("=", 1) for part in reply.headers.get("X-Goog-Hash", "").split(",") if part)
    as_stored = reply.headers.get("X-Goog-Stored-Content-Encoding", "identity") == "identity"
    if as_stored and crc32c_in(hashes) not in (None, google_crc32c.value(body)):
        raise Incomplete(f"{len(body)} bytes with another CRC than the object's")
    return body[start:end]


def _content_range(text: str) -> tuple[int, int, int]:
    """First byte, last byte and size of `bytes 0-9/100`."""
    try:
        span, _, size = text.removeprefix("bytes ").partition("/")
        first, _, last = span.partition("-")
        return int(first), int(last), int(size)
    except ValueError:
        raise Incomplete(f"Content-Range {text!r}") from None


def check_written(item: Mapping[str, Any], size: int, crc32c: int) -> None:
    """Hold what a server made of an upload against what was sent.

    Raises:
        Incomplete: it is something else.
    """
    if int(item.get("size", -1)) != size or crc32c_in(item) not in (None, crc32c):
        raise Incomplete(f"{size} bytes were sent, the object has {item.get('size')} and CRC-32C {item.get('crc32c')}")


def crc32c_in(item: Mapping[str, Any]) -> int | None:
    """The CRC-32C that the API gives in Base64, or None."""
    return int.from_bytes(base64.b64decode(item["crc32c"])) if "crc32c" in item else None
