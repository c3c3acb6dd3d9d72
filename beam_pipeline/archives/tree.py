"""Listings that go on inside archives: `photos.zip/cat` is a folder, and so is `train.tar/n01440764.tar`."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
import threading
import zlib
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from contextlib import suppress
from itertools import accumulate, islice

import msgspec

from beam_pipeline import storage
from beam_pipeline.archives import tar, zip
from beam_pipeline.archives.members import LINK, Members
from beam_pipeline.archives.tar import Read
from beam_pipeline.config import Config
from beam_pipeline.errors import MissingFileError
from beam_pipeline.storage import ListedFile, Part, Storage, etag_text
from beam_pipeline.text import print_line, size_text

SUFFIX = re.compile(r"\.(zip|tar)\Z", re.IGNORECASE)
_WITHIN = re.compile(r"\.(?:zip|tar)(?=/|\Z)", re.IGNORECASE)
_BLOCK_BYTES, _LOCAL_BLOCK_BYTES, _HEADER_BYTES = 8 << 20, 4 << 10, 16 << 10
_MIN_HOP_BYTES = 2 << 20  # a request takes as long as reading so much
_SAVED_BYTES, _ANNOUNCED_BYTES = 64 << 20, 1 << 30
LINK_ETAG = "link"


def tree(config: Config) -> Tree:
    """The tree of a run in this process: each archive's members are listed once."""
    return _of_run(config.context.id, storage.join(config.states_url, "archives"), config.io_deadline)


@functools.lru_cache(1)
def _of_run(run: str, saved_url: str, deadline_s: float) -> Tree:
    return Tree(saved_url, deadline_s)


class Tree:
    """Folders of any storage, and inside archives there. Thread-safe.

    Args:
        saved_url: a folder for what it took long to list: the members of remote tar files.
        deadline_s: how long a remote request is retried.
    """

    def __init__(self, saved_url: str, deadline_s: float) -> None:
        self._saved_url, self._deadline_s = saved_url, deadline_s
        self._lock = threading.Lock()
        self._names: dict[str, list[str]] = {}
        self._archives: dict[str, Future[tuple[ListedFile, Members] | None]] = {}

    def names(self, url: str) -> list[str]:
        """As `Storage.names`."""
        if (found := self._within(url)) is None:
            return self._store(url).names(url)
        _, members, folder = found
        return sorted(name.decode("utf-8", "surrogateescape") for name in members.children(folder))

    def files(self, url: str, every_name: bool = False) -> Iterator[ListedFile]:
        """As `Storage.files`; a link in an archive has the etag LINK_ETAG."""
        if (found := self._within(url)) is None:
            yield from self._store(url).files(url, every_name)
            return
        archive, members, folder = found
        place = f"in {etag_text(archive.etag)} at "
        for member in members.files(folder):
            path = member.name[len(folder) :].decode("utf-8", "surrogateescape")
            if member.method == LINK:
                yield ListedFile(path, 0, LINK_ETAG)
            else:
                facts = member.start, member.stop, member.packed, member.method, member.crc32
                part = Part(archive.path, archive.generation, *facts)
                yield ListedFile(path, member.size, f"{place}{member.start}", part=part)

    def unpacked(self, url: str, folder: str, wanted: Collection[str]) -> Iterator[tuple[str, ListedFile]]:
        """(URL when unpacked, file) of the files below a folder, as if each archive were a folder of its name.

        Args:
            url, folder: where it is, now and when archives are unpacked.
            wanted: URLs of such folders; archives that are none of these aren't opened.
        """
        for file in self.files(url):
            path, where = f"{folder}/{file.path}", f"{url}/{file.path}"
            yield path, file
            if SUFFIX.search(path) and path[:-4] in wanted and where in self.places(where[:-4]):
                yield from self.unpacked(where, path[:-4], wanted)

    def places(self, folder: str) -> list[str]:
        """The URL of a folder, or if there is none, those of the archives that become it."""
        parent, _, name = folder.rpartition("/")
        if parent not in self._names:
            self._names[parent] = self.names(parent)
        archives = [each for each in self._names[parent] if name and each[:-4] == name and SUFFIX.search(each)]
        return [f"{parent}/{each}" for each in archives if f"{name}/" not in self._names[parent]] or [folder]

    def is_packed(self, top: str, folder: str) -> bool:
        """Whether a folder, `top` or below it, is in an archive, or is one when that is unpacked."""
        above = accumulate(folder[len(top) + 1 :].split("/"), storage.join, initial=top)
        return self.is_folder(folder) or any(self.places(each) != [each] for each in islice(above, 1, None))

    def is_archive(self, folder_url: str, name: str) -> bool:
        """Whether a file is an archive by its content, even a truncated or corrupt one."""
        if found := self._within(folder_url):
            return found[1].has(found[2] + _encoded(name) + b"/")
        store, url = self._store(folder_url), storage.join(folder_url, name)
        if url[-3:].lower() == "zip":
            return zip.is_zip(functools.partial(store.read, url), store.size(url))
        begin = store.read(url, 0, tar.MAX_SEARCH)
        return tar.is_tar(lambda start, stop: begin[start:stop], 0, len(begin))

    def is_folder(self, url: str) -> bool:
        """Whether a URL is that of an archive, or of a folder in one."""
        found = self._within(url)
        return found is not None and (not found[2] or found[1].has(found[2]))

    def _store(self, url: str) -> Storage:
        return storage.open_storage(url, self._deadline_s)

    def _within(self, url: str) -> tuple[ListedFile, Members, bytes] | None:
        """The archive that a URL is in, its members, and the folder there."""
        for match in _WITHIN.finditer(url, url.find("://") + 3 if "://" in url else 0):
            if found := self._archive(url[: match.end()]):
                folder = _encoded(url[match.end() + 1 :])
                return *found, folder and folder.rstrip(b"/") + b"/"
        return None

    def _archive(self, url: str) -> tuple[ListedFile, Members] | None:
        """An archive and its members; None if it is a folder, or isn't there."""
        with self._lock:
            future = self._archives.get(url)
            if is_first := future is None:
                self._archives[url] = future = Future()
        assert future is not None
        if is_first:
            try:
                file = self._store(url).stat(url)
                future.set_result(file and (file, self._members(file)))
            except BaseException as error:
                del self._archives[url]  # a retry of the runner's lists it again
                future.set_exception(error)
        return future.result()

    def _members(self, file: ListedFile) -> Members:
        store, url = self._store(file.path), file.path
        if url[-3:].lower() == "zip":
            return Members.of(zip.members(functools.partial(store.read, url), file.bytes, url), url)
        if not store.is_remote:
            with store.open(url) as opened:
                number = opened.fileno()
                return self._of_tar(file, lambda start, stop: os.pread(number, stop - start, start), _LOCAL_BLOCK_BYTES)
        if file.bytes < _SAVED_BYTES or not file.generation:
            return self._of_tar(file, functools.partial(store.read, url), _BLOCK_BYTES)
        name = hashlib.blake2b(f"{url} {file.generation}".encode(), digest_size=16).hexdigest()
        saved = storage.join(self._saved_url, f"{name}.members")
        states = self._store(saved)
        with suppress(MissingFileError, ValueError, zlib.error, msgspec.MsgspecError):
            return Members.decode(states.read(saved))
        if file.bytes > _ANNOUNCED_BYTES:
            what = f"{url}: reading its headers, once: up to {size_text(file.bytes)}"
            print_line(f"{what} (50 MB/s: {file.bytes / 50e6 / 60:,.0f} minutes)", sys.stderr)
        members = self._of_tar(file, functools.partial(store.read, url), _BLOCK_BYTES)
        states.write(saved, members.encode())
        return members

    def _of_tar(self, file: ListedFile, read: Read, block_bytes: int) -> Members:
        return Members.of(tar.members(_Blocks(read, file.bytes, block_bytes), file.bytes, file.path), file.path)


class _Blocks:
    """Reads a file from start to end in large requests; small ones where much is hopped over."""

    def __init__(self, read: Read, size: int, block_bytes: int) -> None:
        self._read, self._size, self._block_bytes = read, size, block_bytes
        self._start, self._data = 0, b""

    def __call__(self, start: int, stop: int) -> bytes:
        begin = start - self._start
        if begin < 0 or stop - self._start > len(self._data):
            is_hop = start - self._start - len(self._data) >= _MIN_HOP_BYTES
            length = min(self._block_bytes, _HEADER_BYTES) if is_hop else self._block_bytes
            self._start, begin = start, 0
            self._data = self._read(start, min(self._size, max(stop, start + length)))
        return self._data[begin : begin + stop - start]


def _encoded(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")
