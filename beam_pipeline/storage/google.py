"""`gs://`: objects of Google Cloud Storage, whole or not at all, changed only as the generation that was found.

Listings are requests page by page: gcsfs' `find` would hold them all (3.5 kB an object).
https://cloud.google.com/storage/docs/json_api/v1/objects
"""

from __future__ import annotations

import base64
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote

import google_crc32c

from beam_pipeline.storage.base import ListedFile, Version
from beam_pipeline.storage.chunks import CHUNK_BYTES, ChunkedUpload
from beam_pipeline.storage.json_api import Client, Reply, check_written, crc32c_in, object_path, whole
from beam_pipeline.storage.remote import FsspecStorage, or_nothing
from beam_pipeline.storage.urls import bucket_and_name

_PAGE_NAMES = 1000  # the most that GCS puts in one page
_ITEM_FIELDS = "name,size,md5Hash,crc32c"


class GoogleStorage(FsspecStorage):
    """Objects of Google Cloud Storage."""

    def __init__(self, filesystem: Any, deadline_s: float) -> None:
        super().__init__(filesystem, deadline_s)
        self._client = Client(filesystem, deadline_s)

    def names(self, url: str) -> Iterator[str]:
        for prefix, page in self._pages(url, delimiter="/", fields="nextPageToken,prefixes,items(name)"):
            items = (item["name"] for item in page.get("items", ()))
            # Consoles make placeholders for folders, which end in a slash.
            files = (name for name in items if not name.endswith("/"))
            yield from (name[len(prefix) :] for name in (*page.get("prefixes", ()), *files))

    def files(self, url: str, every_name: bool = False) -> Iterator[ListedFile]:
        for prefix, page in self._pages(url, fields=f"nextPageToken,prefixes,items({_ITEM_FIELDS})"):
            for item in page.get("items", ()):
                if not item["name"].endswith("/"):  # consoles make such placeholders for folders
                    yield listed_file(item["name"][len(prefix) :], item)

    def _pages(self, url: str, **parameters: str) -> Iterator[tuple[str, dict[str, Any]]]:
        bucket, name = bucket_and_name(url)
        prefix = f"{name}/" if name else ""
        token: str | None = None
        while True:
            page = self._page(url, bucket, prefix=prefix, maxResults=_PAGE_NAMES, pageToken=token, **parameters)
            yield prefix, page
            token = page.get("nextPageToken")
            if not token:
                return

    def _page(self, url: str, bucket: str, **parameters: Any) -> dict[str, Any]:
        path = f"storage/v1/b/{quote(bucket, safe='')}/o"
        return self._retry(lambda: self._client.send("GET", path, **parameters).document(), url)

    def stat(self, url: str) -> ListedFile | None:
        item = self._retry(
            lambda: or_nothing(lambda: self._client.send("GET", object_path(url), fields=_ITEM_FIELDS).document()), url
        )
        return None if item is None else listed_file(url, item)

    def read(self, url: str, start: int | None = None, end: int | None = None) -> bytes:
        return self._media(url, start or 0, end).body

    def _media(self, url: str, start: int = 0, end: int | None = None) -> Reply:
        if end is not None and end <= start:
            return Reply(200, {}, b"")
        headers = {} if not start and end is None else {"Range": f"bytes={start}-{'' if end is None else end - 1}"}

        def request() -> Reply:
            reply = self._client.send("GET", f"download/{object_path(url)}", headers, expected=(416,), alt="media")
            return reply._replace(body=whole(reply, start, end))

        return self._retry(request, url)

    def write(self, url: str, data: bytes) -> None:
        self._retry(lambda: self._upload(url, data), url)

    def create(self, url: str, data: bytes) -> bool:
        return self._write_if(url, data, "0")

    def replace(self, url: str, data: bytes, generation: str) -> bool:
        return self._write_if(url, data, generation)

    def _write_if(self, url: str, data: bytes, generation: str) -> bool:
        """A refusal may be the second answer to a request whose first was lost: then the content is ours."""
        if self._retry(lambda: self._upload(url, data, generation), url):
            return True
        try:
            return self.read(url) == data
        except FileNotFoundError:
            return False

    def _upload(self, url: str, data: bytes, generation: str | None = None) -> bool:
        """Write an object in one request; False if it is no longer that generation."""
        bucket, name = bucket_and_name(url)
        boundary = uuid.uuid4().hex
        head = (
            f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps({'name': name})}\r\n"
            f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
        )
        reply = self._client.send(
            "POST",
            f"upload/storage/v1/b/{quote(bucket, safe='')}/o",
            {"Content-Type": f"multipart/related; boundary={boundary}"},
            head.encode() + data + f"\r\n--{boundary}--".encode(),
            expected=(412,) if generation is not None else (),
            uploadType="multipart",
            ifGenerationMatch=generation,
        )
        if reply.status == 412:
            return False
        check_written(reply.document(), len(data), google_crc32c.value(data))
        return True

    def version(self, url: str) -> Version | None:
        def look() -> tuple[Reply, dict[str, Any]] | None:
            reply = or_nothing(lambda: self._client.send("GET", object_path(url)))
            return None if reply is None else (reply, reply.document())

        while True:
            found = self._retry(look, url)
            media = None if found is None else or_nothing(lambda: self._media(url))
            if found is None or media is None:
                return None
            reply, item = found
            if media.headers.get("X-Goog-Generation") == item["generation"] or _holds(item, media.body):
                age = parsedate_to_datetime(reply.headers["Date"]) - datetime.fromisoformat(item["updated"])
                return Version(media.body, item["generation"], age.total_seconds())

    def delete_version(self, url: str, generation: str) -> None:
        self._delete(url, ifGenerationMatch=generation)

    def publish(self, local_file: str, url: str) -> None:
        if os.path.getsize(local_file) <= CHUNK_BYTES:
            with open(local_file, "rb") as file:
                self.write(url, file.read())
        else:
            self._retry(lambda: ChunkedUpload(self._client, local_file, url, self._deadline_s).run(), url)
        os.unlink(local_file)

    def delete(self, url: str) -> None:
        self._delete(url)

    def _delete(self, url: str, **condition: Any) -> None:
        self._retry(
            lambda: or_nothing(lambda: self._client.send("DELETE", object_path(url), expected=(412,), **condition)), url
        )


def _holds(item: Mapping[str, Any], data: bytes) -> bool:
    """Whether these bytes are this object's, where a proxy left their generation out; else one was written between."""
    return crc32c_in(item) == int(google_crc32c.value(data))


def listed_file(path: str, item: Mapping[str, Any]) -> ListedFile:
    """One item of a listing; a composite object has no MD5."""
    crc32c = crc32c_in(item)
    etag = "" if crc32c is None else f"crc32c:{crc32c:08x}"
    if "md5Hash" in item:
        etag = f"md5:{base64.b64decode(item['md5Hash']).hex()}"
    return ListedFile(path, int(item["size"]), etag, crc32c)
