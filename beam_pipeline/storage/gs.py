"""`gs://`: google-cloud-storage lists, writes and reads names that obstore can't; obstore reads the rest.

What is written is compared with the size and CRC-32C that the server answers. A reply may be lost: whether an upload
arrived is asked of the object, never concluded from an error, and nothing is deleted for it.
"""

from __future__ import annotations

import base64
import io
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import IO, Any, TypeVar
from urllib.parse import quote

import google.auth
import google_crc32c
from google.api_core.exceptions import NotFound, PreconditionFailed
from google.auth.credentials import AnonymousCredentials
from google.auth.exceptions import DefaultCredentialsError
from google.auth.transport.requests import AuthorizedSession, Request
from google.cloud.storage import Blob, Client
from google.cloud.storage.retry import DEFAULT_RETRY
from obstore.store import GCSStore

from beam_pipeline.errors import StorageError, one_line
from beam_pipeline.storage.base import ListedFile, Version
from beam_pipeline.storage.causes import Incomplete, MissingFileError, NoBucketError, retry, status_of
from beam_pipeline.storage.objects import (
    CHUNK_BYTES,
    NO_RETRIES,
    PAGE_NAMES,
    ObjectStorage,
    client_options,
    refuses,
    time_limits,
)
from beam_pipeline.storage.urls import bucket_and_name

T = TypeVar("T")
_FIELDS = "name,size,md5Hash,crc32c,generation"
_ONE_REQUEST_BYTES = 8 << 20  # google-cloud-storage sends more in chunks
_INNER_RETRY_S = 60.0  # of the chunks of one upload session


class GoogleStorage(ObjectStorage):
    """Objects of Google Cloud Storage."""

    def __init__(self, deadline_s: float) -> None:
        super().__init__("gs", deadline_s)
        # Else each client asks for the bucket's own data, for tracing, which the least rights don't allow.
        os.environ.setdefault("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")
        self._endpoint = _emulator()
        self._credentials = None if self._endpoint else _credentials()
        self._is_anonymous = self._credentials is None
        self._more: dict[str, Any] = {"retry": None, "timeout": time_limits(deadline_s)}
        self._idle: dict[int, deque[Client]] = {}

    def _new_store(self, bucket: str, is_anonymous: bool) -> Any:
        config: Any = {"skip_signature": self._is_anonymous}
        if self._endpoint:
            config["base_url"] = self._endpoint
        options = client_options(self._deadline_s)
        return GCSStore(
            bucket, config=config, client_options=options, retry_config=NO_RETRIES, credential_provider=self._token
        )

    def _token(self) -> Any:
        """A token for obstore, whose own search knows fewer kinds of credentials than google-auth."""
        if self._credentials is None:
            return {"token": "", "expires_at": None}
        if not self._credentials.valid:
            self._credentials.refresh(Request())
        expiry = self._credentials.expiry
        return {"token": self._credentials.token, "expires_at": expiry and expiry.replace(tzinfo=UTC)}

    def _ask(self, url: str, request: Callable[[Any, str], T]) -> T:
        return retry(lambda: request(*self._object(url)), url, self._deadline_s, self._is_anonymous)

    def _call(self, url: str, request: Callable[[Client], T]) -> T:
        """Send a request by google-cloud-storage until it succeeds; each thread meanwhile has a client of its own."""
        idle = self._idle.setdefault(os.getpid(), deque())  # a forked child must not share connections

        def send() -> T:
            try:
                client = idle.pop()
            except IndexError:  # no request here is of a project
                client = Client(project="unknown", credentials=self._credentials or AnonymousCredentials())
            try:
                return request(client)
            finally:
                idle.append(client)

        return retry(send, url, self._deadline_s, self._is_anonymous)

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

    def stat(self, url: str) -> ListedFile | None:
        found = self._call(url, lambda client: self._look(client, url))
        return None if found is None else _listed(url, found)

    def _look(self, client: Client, url: str) -> Blob | None:
        blob = _blob(client, url)
        try:
            blob.reload(**self._more)
        except NotFound:
            return None
        return blob

    def files(self, url: str, every_name: bool = False) -> Iterator[ListedFile]:
        for start, blobs, _ in self._pages(url, fields=f"nextPageToken,items({_FIELDS})"):
            for blob in blobs:
                if not blob.name.endswith("/"):  # consoles make such placeholders for folders
                    yield _listed(blob.name[start:], blob)

    def _inside(self, url: str) -> tuple[list[str], list[tuple[str, int]]]:
        folders: list[str] = []
        files: list[tuple[str, int]] = []
        for start, blobs, prefixes in self._pages(url, fields="nextPageToken,prefixes,items(name,size)", delimiter="/"):
            folders += [prefix[start:-1] for prefix in prefixes]
            files += [(blob.name[start:], blob.size) for blob in blobs if not blob.name.endswith("/")]
        return folders, files

    def _pages(self, url: str, **what: Any) -> Iterator[tuple[int, list[Blob], tuple[str, ...]]]:
        """Length of the folder's own name, objects and folders of each page."""
        bucket, name = bucket_and_name(url.rstrip("/"))
        prefix = f"{name}/" if name else ""
        token = None

        def look(client: Client) -> tuple[list[Blob], tuple[str, ...], str | None]:
            what.update(prefix=prefix, page_token=token, page_size=PAGE_NAMES)
            listing = client.list_blobs(bucket, **what, **self._more)
            page = next(listing.pages)
            return list(page), page.prefixes, listing.next_page_token

        while True:
            try:
                blobs, prefixes, token = self._call(url, look)
            except MissingFileError as error:
                raise NoBucketError(f"gs://{bucket}: there is no such bucket", "check its name") from error
            yield len(prefix), blobs, prefixes
            if not token:
                return

    # --- writing

    def write(self, url: str, data: bytes) -> None:
        self._upload(url, lambda: io.BytesIO(data), len(data), google_crc32c.value(data))

    def create(self, url: str, data: bytes) -> bool:
        return self.replace(url, data, "0")

    def replace(self, url: str, data: bytes, generation: str) -> bool:
        return self._upload(url, lambda: io.BytesIO(data), len(data), google_crc32c.value(data), int(generation))

    def publish(self, local_file: str, url: str) -> None:
        crc32c = 0
        with open(local_file, "rb") as file:
            while piece := file.read(CHUNK_BYTES):
                crc32c = google_crc32c.extend(crc32c, piece)
        self._upload(url, lambda: io.FileIO(local_file), os.path.getsize(local_file), crc32c)
        os.unlink(local_file)

    def _upload(
        self, url: str, opened: Callable[[], IO[bytes]], size: int, crc32c: int, only_on: int | None = None
    ) -> bool:
        """Write an object; False if it is no longer the generation `only_on` and holds something else."""
        generation = only_on  # None: whatever is there

        def is_ours(blob: Blob | None) -> bool:
            return blob is not None and blob.size == size and _crc32c(blob) in (None, crc32c)

        def send(client: Client) -> bool:
            nonlocal generation
            try:
                blob = _blob(client, url)
                with opened() as file:
                    blob.upload_from_file(file, size=size, checksum=None, if_generation_match=generation, **more)
                if not is_ours(blob):
                    raise Incomplete(f"{size} bytes were sent, the object has {blob.size} and CRC-32C {blob.crc32c}")
            except Exception as error:  # also a lost reply: what has arrived is asked of the object itself
                found = self._look(client, url)
                if is_ours(found):
                    return True
                if status_of(error) == 412 and only_on is not None:
                    return False
                if only_on is None:
                    generation = found.generation if found else 0
                if status_of(error) == 412 or (in_chunks and status_of(error) in (308, 404, 410)):
                    raise Incomplete("the object was changed or the upload forgotten meanwhile") from error
                raise
            return True

        more, in_chunks = dict(self._more), size > _ONE_REQUEST_BYTES
        if in_chunks:  # a chunk can only be sent again inside its session
            more["retry"] = DEFAULT_RETRY.with_timeout(min(_INNER_RETRY_S, self._deadline_s))
        return self._call(url, send)

    def version(self, url: str) -> Version | None:
        def look(client: Client) -> Version:
            # By plain requests: the store's clock is in a header.
            bucket, name = (quote(part, safe="") for part in bucket_and_name(url))
            place = f"{self._endpoint or 'https://storage.googleapis.com'}/storage/v1/b/{bucket}/o/{name}"
            session = AuthorizedSession(self._credentials or AnonymousCredentials())
            with session, session.get(place, timeout=self._more["timeout"]) as reply:
                reply.raise_for_status()
                item = reply.json()
                age = parsedate_to_datetime(reply.headers["Date"]) - datetime.fromisoformat(item["updated"])
            generation = item["generation"]
            data = _blob(client, url).download_as_bytes(if_generation_match=int(generation), **self._more)
            if google_crc32c.value(data) != int.from_bytes(base64.b64decode(item["crc32c"])):
                raise Incomplete("it was changed meanwhile")
            return Version(data, generation, age.total_seconds())

        with suppress(MissingFileError):
            return self._call(url, look)
        return None

    def delete(self, url: str) -> None:
        self.delete_version(url, "")

    def delete_version(self, url: str, generation: str) -> None:
        def send(client: Client) -> None:
            with suppress(NotFound, PreconditionFailed):
                _blob(client, url).delete(if_generation_match=int(generation) if generation else None, **self._more)

        self._call(url, send)


def _blob(client: Client, url: str) -> Blob:
    bucket, name = bucket_and_name(url)
    return client.bucket(bucket).blob(name, chunk_size=CHUNK_BYTES)


def _crc32c(blob: Blob) -> int | None:
    return int.from_bytes(base64.b64decode(blob.crc32c)) if blob.crc32c else None


def _listed(path: str, blob: Blob) -> ListedFile:
    """A composite object has no MD5, https://cloud.google.com/storage/docs/composite-objects."""
    crc32c = _crc32c(blob)
    etag = "" if crc32c is None else f"crc32c:{crc32c:08x}"
    if blob.md5_hash:
        etag = f"md5:{base64.b64decode(blob.md5_hash).hex()}"
    return ListedFile(path, blob.size, etag, crc32c)


def _emulator() -> str | None:
    """The address in STORAGE_EMULATOR_HOST, which google-cloud-storage follows by itself."""
    address = os.environ.get("STORAGE_EMULATOR_HOST", "")
    return (address if "://" in address else f"http://{address}") if address else None


def _credentials() -> Any:
    """What google-auth finds, the metadata server's included; None without any, as public buckets allow."""
    try:
        return google.auth.default(scopes=["https://www.googleapis.com/auth/devstorage.read_write"])[0]
    except DefaultCredentialsError as error:
        if file := os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
            raise StorageError(f"GOOGLE_APPLICATION_CREDENTIALS={file!r}: {one_line(error)}", "correct it") from None
        return None
