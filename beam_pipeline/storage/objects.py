"""Objects by obstore: all of s3, az and http, and reading on gs. docs/decisions/009-storage-clients.md

Its own retries are off: `causes.retry` is the only loop. It can't be used after a fork, so a forked child is told.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache, lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, GenericError, NotSupportedError, PreconditionError
from obstore.store import AzureStore, HTTPStore, S3Store

from beam_pipeline.errors import StorageError, UsageError
from beam_pipeline.storage.base import Data, ListedFile, Storage, Version
from beam_pipeline.storage.causes import NO_CREDENTIALS, Incomplete, cause_of, retry, status_of
from beam_pipeline.storage.urls import bucket_and_name, join, why_unusable

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

T = TypeVar("T")

CHUNK_BYTES = 16 << 20
PAGE_NAMES = 1000
_DELETES_IN_FLIGHT = 32
NO_RETRIES: RetryConfig = {"max_retries": 0}
_REFUSED = re.compile(r"^/|/$|//|(?:^|/)\.{1,2}(?:/|$)|[\x00-\x1f\x7f\ud800-\udfff]")


def refuses(name: str) -> bool:
    """Whether obstore can't ask for this object, or would ask for another one."""
    return _REFUSED.search(name) is not None


@cache
def _first_user() -> int:
    """The process that used obstore first; a forked child inherits the answer."""
    return os.getpid()


def time_limits(deadline_s: float) -> tuple[float, float]:
    """Seconds for connecting, and of silence, no longer than the deadline."""
    return max(0.1, min(10.0, deadline_s)), max(0.1, min(60.0, deadline_s))


def client_options(deadline_s: float) -> ClientConfig:
    """Of a client of obstore; without `timeout` each request would end after 30 s."""
    connect_s, silence_s = time_limits(deadline_s)
    whole_s = max(deadline_s, silence_s)
    return {
        "allow_http": True,
        "connect_timeout": f"{connect_s}s",
        "read_timeout": f"{silence_s}s",
        "timeout": f"{whole_s}s",
    }


class ObjectStorage(Storage):
    """Objects of s3, az or http; several machines write to them, so a file can be changed only as it was found."""

    is_remote = True

    def __init__(self, scheme: str, deadline_s: float) -> None:
        self._scheme = scheme
        self._deadline_s = deadline_s
        self._anonymous: set[str] = set()  # buckets without credentials
        self._stores = lru_cache(256)(self._new_store)

    def _new_store(self, bucket: str, is_anonymous: bool) -> ObjectStore:
        options = client_options(self._deadline_s)
        if self._scheme == "http":
            return HTTPStore(bucket, client_options=options, retry_config=NO_RETRIES)
        more: Any = {"skip_signature": True} if is_anonymous else {}
        if self._scheme == "az":
            container, _, host = bucket.partition("@")  # abfss://container@account.dfs.core.windows.net
            more |= {"account_name": host.partition(".")[0]} if host else {}
            return AzureStore(container, client_options=options, retry_config=NO_RETRIES, **more)
        more |= {} if is_anonymous else _aws_profile()
        return S3Store(bucket, client_options=options, retry_config=NO_RETRIES, **more)

    def _object(self, url: str) -> tuple[ObjectStore, str]:
        if _first_user() != os.getpid():
            raise StorageError(
                f"{url}: this process was forked from one that had used remote storage, whose client can't be forked",
                'start workers with multiprocessing_context="forkserver" (or "spawn")',
            )
        if self._scheme == "http":
            return self._stores(url, False), ""
        bucket, name = bucket_and_name(url)
        if refuses(name):
            raise StorageError(f"{url}: a name that {self._scheme}:// can't be asked for here", "rename it")
        return self._stores(bucket, bucket in self._anonymous), name

    def _ask(self, url: str, request: Callable[[ObjectStore, str], T]) -> T:
        """Send a request until it succeeds; without credentials if there are none, as public buckets allow."""
        bucket = bucket_and_name(url)[0]
        try:
            return retry(lambda: request(*self._object(url)), url, self._deadline_s, bucket in self._anonymous)
        except StorageError as error:
            if bucket in self._anonymous or cause_of(error.__cause__ or error) is not NO_CREDENTIALS:
                raise
        self._anonymous.add(bucket)
        return retry(lambda: request(*self._object(url)), url, self._deadline_s, True)

    # --- reading

    def read_range(self, url: str, start: int, stop: int, out: memoryview | None = None) -> Data:
        # Memory of obstore's own, not `out`: a copy would cost 0.03 ms a MB more.
        return b"" if stop <= start else memoryview(self._body(url, start, stop))

    def read(self, url: str, start: int = 0, stop: int | None = None) -> bytes:
        return b"" if stop is not None and stop <= start else bytes(self._body(url, start, stop))

    def _body(self, url: str, start: int, stop: int | None) -> Any:
        return self._ask(url, lambda store, name: _received(store, name, start, stop))

    def stat(self, url: str) -> ListedFile | None:
        with suppress(FileNotFoundError):
            return _listed(url, self._ask(url, obstore.head))
        return None

    # --- listing

    def names(self, url: str) -> list[str]:
        folders, files = self._inside(url)
        return sorted([*(f"{name}/" for name in folders), *(name for name, _ in files)])

    def _inside(self, url: str) -> tuple[list[str], list[tuple[str, int]]]:
        """Folders, and files with their bytes, directly inside a folder."""

        def look(store: ObjectStore, prefix: str) -> tuple[list[str], list[tuple[str, int]]]:
            found = obstore.list_with_delimiter(store, prefix or None)
            files = [(_last(one["path"]), one["size"]) for one in found["objects"] if _is_file(store, one)]
            return [_last(folder) for folder in found["common_prefixes"]], files

        return self._ask(self._folder(url), look)

    def files(self, url: str, every_name: bool = False) -> Iterator[ListedFile]:
        prefix = bucket_and_name(self._folder(url))[1]
        pages: Iterator[Sequence[ObjectMeta]] | None = None
        last: str | None = None

        def look(store: ObjectStore, _: str) -> list[ObjectMeta] | None:
            nonlocal pages
            begun, pages = pages or iter(obstore.list(store, prefix or None, offset=last, chunk_size=PAGE_NAMES)), None
            page = next(begun, None)
            pages = begun  # after a failure it begins again behind the last name
            return None if page is None else [one for one in page if _is_file(store, one)]

        while (page := self._ask(url, look)) is not None:
            for one in page:
                yield _listed(one["path"][len(prefix) + 1 if prefix else 0 :], one)
                last = one["path"]

    def _folder(self, url: str) -> str:
        if self._scheme == "http":
            raise UsageError(f"{url}: {why_unusable(url)}")
        return url.rstrip("/")

    def sizes(self, urls: Sequence[str]) -> list[int | None]:
        found: dict[str, int] = {}
        for folder in sorted({url.rpartition("/")[0] for url in urls}):
            found.update((join(folder, name), size) for name, size in self._inside(folder)[1])
        return [found.get(url) for url in urls]

    # --- writing

    def write(self, url: str, data: bytes) -> None:
        self._ask(url, lambda store, name: obstore.put(store, name, data, use_multipart=False))

    def create(self, url: str, data: bytes) -> bool:
        return self._write_if(url, data, "create")

    def replace(self, url: str, data: bytes, generation: str) -> bool:
        """Write a small file anew if it still is that version; False, and nothing written, if it isn't."""
        return self._write_if(url, data, {"e_tag": generation})

    def _write_if(self, url: str, data: bytes, mode: Any) -> bool:
        """A refusal may be the second answer to a request whose first was lost: then the content is ours."""

        def send(store: ObjectStore, name: str) -> bool:
            try:
                obstore.put(store, name, data, mode=mode, use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return False
            return True

        with suppress(FileNotFoundError):
            return self._ask(url, send) or self.read(url) == data
        return False

    def version(self, url: str) -> Version | None:
        """A file as it is now, or None."""

        def look(store: ObjectStore, name: str) -> Version:
            reply = obstore.get(store, name)
            meta = reply.meta
            age = datetime.now(UTC) - meta["last_modified"]  # by this machine's clock: obstore doesn't tell the store's
            return Version(bytes(reply.bytes()), meta["e_tag"] or "", age.total_seconds())

        with suppress(FileNotFoundError):
            return self._ask(url, look)
        return None

    def delete_version(self, url: str, generation: str) -> None:
        """Delete a file if it still is that version."""
        found = self.version(url)  # there are no conditional deletes
        if found is not None and found.generation == generation:
            self.delete(url)

    def publish(self, local_file: str, url: str) -> None:
        size = os.path.getsize(local_file)

        def send(store: ObjectStore, name: str) -> None:
            with open(local_file, "rb") as file:  # every part is signed with its SHA-256, which the server compares
                obstore.put(store, name, file, chunk_size=CHUNK_BYTES, max_concurrency=2)
            if (found := obstore.head(store, name)["size"]) != size:
                raise Incomplete(f"{size} bytes were sent, the object has {found}")

        self._ask(url, send)
        os.unlink(local_file)

    def delete(self, url: str) -> None:
        with suppress(FileNotFoundError):
            self._ask(url, obstore.delete)

    def delete_tree(self, url: str, keep: Collection[str] = ()) -> None:
        files = (file.path for file in self.files(url) if file.path not in keep)
        with ThreadPoolExecutor(_DELETES_IN_FLIGHT) as pool:
            while some := list(islice(files, PAGE_NAMES)):
                for _ in pool.map(lambda path: self.delete(join(url, path)), some):
                    pass


def _aws_profile() -> dict[str, Any]:
    """Credentials of AWS profiles, which obstore doesn't read, by boto3."""
    shared = os.environ.get("AWS_SHARED_CREDENTIALS_FILE", os.path.expanduser("~/.aws/credentials"))
    profile = os.environ.get("AWS_PROFILE")
    if "AWS_ACCESS_KEY_ID" in os.environ or not (profile or os.path.exists(shared)):
        return {}
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        if not profile:
            return {}
        fix = "install boto3, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        raise StorageError(f"AWS_PROFILE={profile!r} needs boto3", fix) from None
    return {"credential_provider": Boto3CredentialProvider()}


def _received(store: ObjectStore, name: str, start: int, stop: int | None) -> Any:
    """A body, all of it. `get_range` costs twice the CPU, and a reply without a range tells no size of the object."""
    span: Any = {"offset": start} if stop is None else (start, stop)
    try:
        reply = obstore.get(store, name, options={"range": span})
    except NotSupportedError:  # a server that knows no ranges, or unpacks what it sends
        return memoryview(obstore.get(store, name).bytes())[start:stop]
    except GenericError as error:
        if status_of(error) == 416:  # the file ends before
            return b""
        raise
    data, size = reply.bytes(), reply.meta["size"]
    if start + len(data) != (size if stop is None else min(stop, size)):
        raise Incomplete(f"{len(data)} bytes from {start} of {size}")
    return data


def _is_file(store: ObjectStore, one: ObjectMeta) -> bool:
    """Whether a listed object is one: consoles make empty ones named `folder/`, listed here without their slash."""
    if one["size"]:
        return True
    try:
        obstore.head(store, one["path"])
    except FileNotFoundError:
        return False
    return True


def _listed(path: str, one: ObjectMeta) -> ListedFile:
    return ListedFile(path, one["size"], f"etag:{one['e_tag']}" if one["e_tag"] else "")


def _last(path: str) -> str:
    return path.rpartition("/")[2]
