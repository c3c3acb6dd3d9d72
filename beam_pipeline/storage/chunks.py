"""Uploads of large files to gs://, in chunks that are repeated one by one."""

from __future__ import annotations

import json
import os
from typing import IO
from urllib.parse import quote

import google_crc32c

from beam_pipeline.storage.json_api import Client, Reply, check_written
from beam_pipeline.storage.retries import Incomplete, retry
from beam_pipeline.storage.urls import bucket_and_name

CHUNK_BYTES = 16 << 20  # a multiple of 256 KiB; a minute of silence ends a request: 2.3 Mbit/s are enough


class ChunkedUpload:
    """One resumable upload. https://cloud.google.com/storage/docs/performing-resumable-uploads

    A chunk without an answer is followed by the question what has arrived; it goes on from there. What counts for the
    deadline is the time since something more had arrived.
    """

    def __init__(self, client: Client, local_file: str, url: str, deadline_s: float) -> None:
        self._client = client
        self._file = local_file
        self._url = url
        self._deadline_s = deadline_s
        self._size = os.path.getsize(local_file)
        self._session = ""
        self._arrived = 0  # bytes that the server has
        self._is_known = True  # no longer after a chunk without an answer

    def run(self) -> None:
        """Upload the file.

        Raises:
            Incomplete: the server no longer knows the upload or made something else of it; begin anew.
            StorageError: a chunk had no success until the deadline.
        """
        with open(self._file, "rb") as file:
            crc32c = 0
            while piece := file.read(CHUNK_BYTES):
                crc32c = google_crc32c.extend(crc32c, piece)
            self._session = self._begin()
            while True:
                reply = retry(lambda: self._advance(file), self._url, self._deadline_s)
                if reply.status in (404, 410):
                    raise Incomplete("the upload is no longer known")
                if reply.status != 308:
                    check_written(reply.document(), self._size, crc32c)
                    return

    def _begin(self) -> str:
        bucket, name = bucket_and_name(self._url)
        reply = self._client.send(
            "POST",
            f"upload/storage/v1/b/{quote(bucket, safe='')}/o",
            {"Content-Type": "application/json", "X-Upload-Content-Type": "application/octet-stream"},
            json.dumps({"name": name}).encode(),
            uploadType="resumable",
            name=name,
        )
        return reply.headers["Location"]

    def _advance(self, file: IO[bytes]) -> Reply:
        """Send the next chunk, once it is known where it begins.

        Raises:
            Incomplete: nothing more has arrived.
        """
        before = self._arrived
        if not self._is_known:
            reply = self._put(b"", f"bytes */{self._size}")
            if reply.status != 308 or self._arrived > before:
                return reply
        file.seek(self._arrived)
        data = file.read(CHUNK_BYTES)
        span = f"{self._arrived}-{self._arrived + len(data) - 1}" if data else "*"
        reply = self._put(data, f"bytes {span}/{self._size}")
        if reply.status == 308 and self._arrived <= before:
            raise Incomplete(f"of a chunk of {len(data)} bytes none has arrived")
        return reply

    def _put(self, data: bytes, content_range: str) -> Reply:
        self._is_known = False
        expected = (308, 404, 410)
        reply = self._client.send("PUT", self._session, {"Content-Range": content_range}, data, expected=expected)
        if reply.status == 308:  # `bytes=0-LAST`, or nothing where none has arrived
            self._arrived = int(reply.headers.get("Range", "bytes=0--1").removeprefix("bytes=0-")) + 1
            self._is_known = True
        return reply
