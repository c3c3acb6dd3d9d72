"""`gs://`: obstore reads; google-cloud-storage lists and writes, and reads names that obstore can't ask for.

Each upload's size and CRC-32C are compared with the server's answer. A reply may be lost, so after an error the object
itself is asked whether the upload has arrived, and nothing is deleted.
"""

from __future__ import annotations

import base64
import functools
import io
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import IO, Any, TypeVar

import google.auth
import google_crc32c
from google.api_core.exceptions import NotFound, PreconditionFailed
from google.auth.credentials import AnonymousCredentials
from google.auth.exceptions import DefaultCredentialsError
from google.cloud.storage import Blob, Client
from google.cloud.storage.retry import DEFAULT_RETRY
from obstore.auth.google import GoogleCredentialProvider
from obstore.store import GCSStore

from beam_pipeline.errors import MissingFileError, StorageError
from beam_pipeline.storage import Data, ListedFile, bucket_and_name
from beam_pipeline.storage.causes import Incomplete, status_of
from beam_pipeline.storage.objects import CHUNK_BYTES, PAGE_NAMES, ObjectStorage, refuses
from beam_pipeline.text import one_line

T = TypeVar("T")
_FIELDS = "kind,nextPageToken,prefixes,items(name,size,md5Hash,crc32c,generation)"
_ONE_REQUEST_BYTES = 8 << 20  # google-cloud-storage sends more in chunks


class GoogleStorage(ObjectStorage):
    """Objects of Google Cloud Storage."""

    def __init__(self, deadline_s: float | None) -> None:
        super().__init__("gs", deadline_s)
        # Else each client asks for the bucket's metadata, for tracing, which needs more permissions than a job has.
        os.environ.setdefault("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")
        self._endpoint = os.environ.get("STORAGE_EMULATOR_HOST", "")
        if self._endpoint and "://" not in self._endpoint:
            self._endpoint = f"http://{self._endpoint}"
        self._credentials = (None if self._endpoint else _credentials()) or AnonymousCredentials()
        self._is_anonymous = isinstance(self._credentials, AnonymousCredentials)
        self._more: dict[str, Any] = {"retry": None, "timeout": self._timeouts}
        self._idle: dict[int, deque[Client]] = {}

    def _new_store(self, bucket: str, is_anonymous: bool) -> Any:
        config: Any = {"skip_signature": is_anonymous}
        if self._endpoint:
            config["base_url"] = self._endpoint
        provider = GoogleCredentialProvider(self._credentials)  # obstore itself finds fewer kinds than google-auth
        return GCSStore(bucket, config=config, credential_provider=provider, **self._options)

    def _call(self, url: str, request: Callable[[Client], T]) -> T:
        """Send a request by google-cloud-storage until it succeeds; threads don't share a client while they use it."""
        idle = self._idle.setdefault(os.getpid(), deque())  # a forked child must not share connections

        def send() -> T:
            try:
                client = idle.pop()
            except IndexError:  # no request here needs a project
                options = {"api_endpoint": self._endpoint} if self._endpoint else None
                client = Client(project="unknown", credentials=self._credentials, client_options=options)
            try:
                return request(client)
            finally:
                idle.append(client)

        return self._retry(send, url, self._is_anonymous)

    # --- reading and listing

    def _body(self, url: str, start: int, stop: int | None) -> Any:
        if not refuses(bucket_and_name(url)[1]):
            return super()._body(url, start, stop)
        span: dict[str, Any] = {"start": start or None, "end": None if stop is None else stop - 1}
        try:
            return self._call(url, lambda client: _blob(client, url).download_as_bytes(**span, **self._more))
        except StorageError as error:
            if status_of(error.__cause__) == 416:  # the file ends before
                return b""
            raise

    def read_if(self, url: str, start: int, stop: int, generation: str) -> Data | None:
        if not refuses(bucket_and_name(url)[1]):
            return super().read_if(url, start, stop, generation)
        file = self.stat(url)
        return self.read_range(url, start, stop) if file and file.generation == generation else None

    def _generation(self, meta: Any) -> str:
        return str(meta["version"] or "")

    def stat(self, url: str) -> ListedFile | None:
        return self._call(url, lambda client: self._head(client, url))

    def _head(self, client: Client, url: str) -> ListedFile | None:
        blob = _blob(client, url)
        with suppress(NotFound):
            blob.reload(**self._more)
            return _listed(url, blob)
        return None

    def _pages(self, url: str, delimiter: str | None = None) -> Iterator[tuple[list[ListedFile], list[str]]]:
        bucket, name = bucket_and_name(url.rstrip("/"))
        prefix = f"{name}/" if name else ""
        start, token = len(prefix), None

        def fetch_page(client: Client) -> tuple[list[Blob], tuple[str, ...], str | None]:
            what = {"prefix": prefix, "delimiter": delimiter, "page_token": token, "page_size": PAGE_NAMES}
            listing = client.list_blobs(bucket, fields=_FIELDS, **what, **self._more)
            page = next(listing.pages)
            if page.raw_page.get("kind") != "storage#objects":  # an error by a gateway, with status 200
                raise Incomplete(f"not a listing: {str(page.raw_page)[:100]}")
            return list(page), page.prefixes, listing.next_page_token

        while True:
            try:
                blobs, folders, token = self._call(url, fetch_page)
            except MissingFileError as error:
                raise MissingFileError(f"gs://{bucket}: there is no such bucket", "check its name") from error
            # Consoles create empty objects named `folder/`.
            files = [_listed(blob.name[start:], blob) for blob in blobs if not blob.name.endswith("/")]
            yield files, [folder[start:] for folder in folders]
            if not token:
                return

    def regions(self, url: str) -> frozenset[str] | None:
        """A bucket's locations, such as europe-west4 or eu; None if this account may not read them."""
        try:
            bucket = self._call(url, lambda client: client.get_bucket(bucket_and_name(url)[0], **self._more))
        except StorageError as error:
            if status_of(error.__cause__) == 403:
                return None
            if status_of(error.__cause__) == 404:
                name = bucket_and_name(url)[0]
                raise MissingFileError(f"gs://{name}: there is no such bucket", "check its name") from error
            raise
        return frozenset(str(location).lower() for location in bucket.data_locations or [bucket.location])

    # --- writing

    def write(self, url: str, data: bytes, generation: str | None = None) -> bool:
        return self._upload(url, io.BytesIO(data), generation)

    def publish(self, file: IO[bytes], url: str, generation: str | None = None) -> bool:
        return self._upload(url, file, generation)

    def _upload(self, url: str, file: IO[bytes], generation: str | None) -> bool:
        """Write an object; False if it has another generation than this, "" for a new object, and other content."""
        only_on = None if generation is None else int(generation or 0)
        file.seek(0)
        crc32c = functools.reduce(google_crc32c.extend, iter(lambda: file.read(CHUNK_BYTES), b""), 0)
        size, more = file.tell(), dict(self._more)
        if in_chunks := size > _ONE_REQUEST_BYTES:  # a chunk can only be retried within its session
            more["retry"] = DEFAULT_RETRY.with_timeout(self._timeouts[1])

        def is_ours(file: ListedFile | None) -> bool:
            return file is not None and file.bytes == size and file.crc32c in (None, crc32c)

        def send(client: Client) -> bool:
            try:
                blob = _blob(client, url)
                blob.upload_from_file(file, True, size, checksum=None, if_generation_match=only_on, **more)
                if not is_ours(_listed(url, blob)):
                    raise Incomplete(f"{size} bytes were sent, the object has {blob.size} and CRC-32C {blob.crc32c}")
            except Exception as error:  # the reply may be lost, although the upload has arrived
                if is_ours(self._head(client, url)):
                    return True
                if status_of(error) == 412 and only_on is not None:
                    return False
                if in_chunks and status_of(error) in (308, 404, 410):
                    raise Incomplete("the upload session has expired") from error
                raise
            return True

        return self._call(url, send)

    def delete(self, url: str, generation: str = "") -> None:
        def send(client: Client) -> None:
            with suppress(NotFound, PreconditionFailed):
                _blob(client, url).delete(if_generation_match=int(generation) if generation else None, **self._more)

        self._call(url, send)


def _blob(client: Client, url: str) -> Blob:
    bucket, name = bucket_and_name(url)
    return client.bucket(bucket).blob(name, chunk_size=CHUNK_BYTES)


def _listed(path: str, blob: Blob) -> ListedFile:
    """A composite object has no MD5, https://cloud.google.com/storage/docs/composite-objects."""
    if blob.size is None:
        raise Incomplete("not an object's metadata")
    crc32c = int.from_bytes(base64.b64decode(blob.crc32c)) if blob.crc32c else None
    md5 = base64.b64decode(blob.md5_hash) if blob.md5_hash else None
    return ListedFile(path, blob.size, md5 or ("" if crc32c is None else crc32c), crc32c, str(blob.generation or ""))


def _credentials() -> Any:
    """What google-auth finds, the metadata server's included; None without any, for public buckets."""
    try:
        return google.auth.default(scopes=["https://www.googleapis.com/auth/devstorage.read_write"])[0]
    except DefaultCredentialsError as error:
        if file := os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
            raise StorageError(f"GOOGLE_APPLICATION_CREDENTIALS={file!r}: {one_line(error)}", "correct it") from None
        return None
