"""Objects by obstore: all of s3, az and http, and reading on gs. docs/decisions/009-storage-clients.md

Its own retries are off: `causes.retry` is the only loop. It can't be used after a fork: a forked child gets an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from typing import IO, Any, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, GenericError, NotSupportedError, PreconditionError
from obstore.store import AzureStore, HTTPStore, S3Store

from beam_pipeline.errors import StorageError, UsageError
from beam_pipeline.storage import (
    DEFAULT_DEADLINE_S,
    FIRST_CONTACT_S,
    Data,
    ListedFile,
    Storage,
    bucket_and_name,
    join,
    why_unusable,
)
from beam_pipeline.storage.causes import NO_CREDENTIALS, Incomplete, cause_of, retry, status_of

T = TypeVar("T")

CHUNK_BYTES = 16 << 20
PAGE_NAMES = 1000
_REFUSED = re.compile(r"^/|/$|//|(?:^|/)\.{1,2}(?:/|$)|[\x00-\x1f\x7f\ud800-\udfff]")


def refuses(name: str) -> bool:
    """Whether obstore can't ask for an object of this name, or would ask for another one."""
    return _REFUSED.search(name) is not None


@cache
def _first_user() -> int:
    """Id of the process that used obstore first; a forked child inherits it."""
    return os.getpid()


class ObjectStorage(Storage):
    """Objects of s3, az or http; several machines may write them, so updates are conditional on the version seen."""

    def __init__(self, scheme: str, deadline_s: float | None) -> None:
        self._scheme = scheme
        self._first_s = FIRST_CONTACT_S if deadline_s is None else None
        self._deadline_s = deadline_s = DEFAULT_DEADLINE_S if deadline_s is None else deadline_s
        self._is_anonymous = False  # turned on when there are no credentials
        # For connecting, and for a silent server, no longer than the deadline.
        connect_s, silence_s = self._timeouts = max(0.1, min(10.0, deadline_s)), max(0.1, min(60.0, deadline_s))
        limits = {"connect_timeout": f"{connect_s}s", "read_timeout": f"{silence_s}s"}
        limits["timeout"] = f"{max(deadline_s, silence_s)}s"  # else each request would end after 30 s
        self._options: Any = {"client_options": {"allow_http": True, **limits}, "retry_config": {"max_retries": 0}}
        self._stores = lru_cache(256)(self._new_store)

    def _new_store(self, bucket: str, is_anonymous: bool) -> Any:
        if self._scheme == "http":
            return HTTPStore(bucket, **self._options)
        more: dict[str, Any] = {"skip_signature": True} if is_anonymous else {}
        if self._scheme == "az":
            container, _, host = bucket.partition("@")  # abfss://container@account.dfs.core.windows.net
            more |= {"account_name": host.partition(".")[0]} if host else {}
            return AzureStore(container, **self._options, **more)
        return S3Store(bucket, **self._options, **(more or _aws_profile()))

    def _object(self, url: str, is_anonymous: bool) -> tuple[Any, str]:
        if _first_user() != os.getpid():
            what = "this process was forked from one that had used remote storage, whose client can't be forked"
            fix = 'start workers with multiprocessing_context="forkserver" (or "spawn")'
            raise StorageError(f"{url}: {what}", fix)
        if self._scheme == "http":
            return self._stores(url, False), ""
        bucket, name = bucket_and_name(url)
        if refuses(name):
            raise StorageError(f"{url}: a name that {self._scheme}:// can't be asked for here", "rename it")
        return self._stores(bucket, is_anonymous), name

    def _ask(self, url: str, request: Callable[[Any, str], T]) -> T:
        """Send a request until it succeeds; without credentials if there are none, for public buckets."""
        is_anonymous = self._is_anonymous
        try:
            return self._retry(lambda: request(*self._object(url, is_anonymous)), url, is_anonymous)
        except StorageError as error:
            if is_anonymous or cause_of(error.__cause__ or error) is not NO_CREDENTIALS:
                raise
        self._is_anonymous = True
        return self._ask(url, request)

    def _retry(self, request: Callable[[], T], url: str, is_anonymous: bool) -> T:
        result = retry(request, url, self._deadline_s, is_anonymous, self._first_s)
        self._first_s = self._first_s and self._deadline_s  # from now on there is a server
        return result

    # --- reading

    def read_range(self, url: str, start: int, stop: int | None, out: memoryview | None = None) -> Data:
        # obstore's memory, not `out`: a copy would cost 0.03 ms per MB.
        return b"" if stop is not None and stop <= start else memoryview(self._body(url, start, stop))

    def _body(self, url: str, start: int, stop: int | None) -> Any:
        return self._ask(url, lambda store, name: _received(store, name, start, stop)[0])

    def read_if(self, url: str, start: int, stop: int, generation: str) -> Data | None:
        data, meta = self._ask(url, lambda store, name: _received(store, name, start, stop))
        return memoryview(data) if self._generation(meta) == generation else None

    def _generation(self, meta: Any) -> str:
        return _listed("", meta).generation

    def stat(self, url: str) -> ListedFile | None:
        with suppress(FileNotFoundError):
            return _listed(url, self._ask(url, obstore.head))
        return None

    # --- listing

    def names(self, url: str) -> list[str]:
        pages = self._pages(url, "/")
        return sorted(name for files, folders in pages for name in [*(file.path for file in files), *folders])

    def files(self, url: str, every_name: bool = False) -> Iterator[ListedFile]:
        for files, _ in self._pages(url):
            yield from files

    def sizes(self, urls: Sequence[str]) -> list[int | None]:
        sizes: dict[str, int] = {}
        for folder in sorted({url.rpartition("/")[0] for url in urls}):
            for files, _ in self._pages(folder, "/"):
                sizes.update((join(folder, file.path), file.bytes) for file in files)
        return [sizes.get(url) for url in urls]

    def _pages(self, url: str, delimiter: str | None = None) -> Iterator[tuple[list[ListedFile], list[str]]]:
        """All files below a folder; with `/` as the delimiter those directly in it, and its folders."""
        if self._scheme == "http":
            raise UsageError(f"{url}: {why_unusable(url)}")
        url = url.rstrip("/")
        bucket, prefix = bucket_and_name(f"{url}/")

        def files_of(objects: Sequence[Any]) -> list[ListedFile]:
            """Without the empty objects named `folder/` that consoles create; obstore lists these without the slash."""
            files = (meta for meta in objects if meta["size"] or self.stat(f"{self._scheme}://{bucket}/{meta['path']}"))
            return [_listed(meta["path"][len(prefix) :], meta) for meta in files]

        if delimiter:
            page = self._ask(url, lambda store, _: self._complete(store, url, prefix))
            yield files_of(page["objects"]), [f"{folder[len(prefix) :]}/" for folder in page["common_prefixes"]]
            return
        for objects in self._listing(url, prefix):
            yield files_of(objects), []

    def _listing(self, url: str, prefix: str, after: str | None = None) -> Iterator[Sequence[Any]]:
        """Every object of a prefix, in pages; `after`: behind this name."""
        listing: Iterator[Sequence[Any]] | None = None
        last, before_last = after, after

        def next_page(store: Any, _: str) -> Sequence[Any]:
            nonlocal listing
            pages, listing = listing, None  # dropped if it fails: the retry lists from the last name on
            pages = pages or iter(obstore.list(store, prefix or None, offset=last, chunk_size=PAGE_NAMES))
            page = next(pages, ())
            if not page and self._scheme == "s3":  # obstore takes any XML for a listing, an error's for an empty one
                if last == after:
                    self._check_empty(url, after)
                else:  # an answer that has the last name is a listing
                    pages = iter(obstore.list(store, prefix or None, offset=before_last, chunk_size=PAGE_NAMES))
                    page = next(pages, ())
                    if not page and self.stat(f"s3://{bucket_and_name(url)[0]}/{last}"):
                        raise Incomplete(f"the listing lacks {last!r}, which is there")
                    page = [meta for meta in page if meta["path"] > last]
            listing = pages
            return page

        while page := self._ask(url, next_page):
            yield page
            before_last, last = page[-2]["path"] if len(page) > 1 else last, page[-1]["path"]

    def _complete(self, store: Any, url: str, prefix: str) -> Any:
        """The objects and folders directly in a folder."""
        page = obstore.list_with_delimiter(store, prefix or None)
        names = [*(meta["path"] for meta in page["objects"]), *(f"{folder}/" for folder in page["common_prefixes"])]
        if self._scheme != "s3":
            return page
        if not names:
            self._check_empty(url)
        elif len(names) % PAGE_NAMES == 0:  # an error may have been taken for the last page: look behind these
            last = max(names)
            end = f"{last}\U0010ffff" if last.endswith("/") else last
            for objects in self._listing(url, prefix, last[:-1]):
                if any(meta["path"] > end for meta in objects):
                    raise Incomplete(f"the listing ends at {last!r}, which isn't the last name")
        return page

    def _check_empty(self, url: str, after: str | None = None) -> None:
        """Raise `Incomplete` if a folder is listed as empty, but the folder above it has it, or it has more names."""
        parent, _, name = url.rpartition("/")
        try:
            if after or (bucket_and_name(url)[1] and f"{name}/" in self.names(parent)):
                raise Incomplete("the listing is empty, but the folder isn't")
        except StorageError as error:  # this account may be allowed to list the folder alone
            if error.__cause__ is None or cause_of(error.__cause__).is_transient:
                raise

    # --- writing

    def write(self, url: str, data: bytes, generation: str | None = None) -> bool:
        mode: Any = "overwrite" if generation is None else {"e_tag": generation} if generation else "create"

        def send(store: Any, name: str) -> bool:
            try:
                obstore.put(store, name, data, mode=mode, use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return False
            return True

        try:
            # It may be refused because the first attempt succeeded and its reply was lost: then the content is ours.
            return self._ask(url, send) or self.read(url) == data
        except FileNotFoundError:
            if generation is None:
                raise
            return False

    def publish(self, file: IO[bytes], url: str, generation: str | None = None) -> bool:
        def send(store: Any, name: str) -> None:
            file.seek(0)  # every part is signed with its SHA-256, which the server checks
            obstore.put(store, name, file, chunk_size=CHUNK_BYTES, max_concurrency=2)

        self._ask(url, send)  # multipart uploads can't be conditional
        return True

    def delete(self, url: str, generation: str = "") -> None:
        with suppress(FileNotFoundError):
            if not generation or self._ask(url, obstore.head)["e_tag"] == generation:  # deletes can't be conditional
                self._ask(url, obstore.delete)


def _aws_profile() -> dict[str, Any]:
    """Credentials of AWS profiles by boto3, since obstore doesn't read these."""
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


def _received(store: Any, name: str, start: int, stop: int | None) -> tuple[Any, Any]:
    """A complete body and the object's metadata, which `get_range` lacks; it would also cost twice the CPU."""
    span: Any = {"offset": start} if stop is None else (start, stop)
    try:
        reply = obstore.get(store, name, options={"range": span})
    except NotSupportedError:  # the server supports no ranges, or sends compressed files decompressed
        reply = obstore.get(store, name)
        return memoryview(reply.bytes())[start:stop], reply.meta
    except GenericError as error:
        if status_of(error) == 416:  # the file ends before
            return b"", {"e_tag": None, "version": None, "size": 0}
        raise
    data, size = reply.bytes(), reply.meta["size"]
    if start + len(data) != (size if stop is None else min(stop, size)):
        raise Incomplete(f"{len(data)} bytes from {start} of {size}")
    return data, reply.meta


def _listed(path: str, meta: Any) -> ListedFile:
    e_tag = meta["e_tag"] or ""
    if e_tag[:1].isalnum() and not e_tag.startswith("W/"):  # Azure's listings leave out the quotes
        e_tag = f'"{e_tag}"'
    return ListedFile(path, meta["size"], f"etag:{e_tag}" if e_tag else "", generation=e_tag)
