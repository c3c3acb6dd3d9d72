"""One writer at a time: who may write a version, and how long.

`_state/VERSION/owner.json` names the job that writes. On this machine it carries an OS lock for as long as the launcher
runs. In an object store it is created and rewritten under a generation precondition; any worker that finds it older
than 30 s refreshes it, from a thread beside a long step, and one that hasn't been refreshed for 10 minutes may be taken
over.
docs/decisions/006-one-writer.md says why this holds, and what holds where a store knows no preconditions.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, Protocol

from beam_pipeline import storage
from beam_pipeline.errors import ImageShardsError
from beam_pipeline.schema import canonical_json
from beam_pipeline.storage.identity import Identity, Process

OWNER_FILE = "owner.json"
REFRESH_S = 30.0
STALE_S = 600.0
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK})


class _Named(NamedTuple):
    """Who an owner.json names."""

    token: str
    plan: str
    process: Process | None

    @classmethod
    def read(cls, data: bytes) -> _Named:
        """From the file's content; anybody where it can't be read."""
        try:
            document: dict[str, Any] = json.loads(data)
            process = Process(**document["process"]) if document["process"] else None
            return cls(document["token"], document["plan"], process)
        except (ValueError, TypeError, KeyError):
            return cls("", "", None)

    @classmethod
    def of(cls, identity: Identity, plan: str) -> _Named:
        """A job and the hash of its plan."""
        return cls(identity.token, plan, identity.process)

    def document(self) -> bytes:
        """The file's content."""
        process = None if self.process is None else self.process._asdict()
        return canonical_json({"token": self.token, "plan": self.plan, "process": process})

    def __str__(self) -> str:
        return "another job" if self.process is None else f"another job (process {self.process.pid})"


class Owner(Protocol):
    """The right to write one version."""

    def refuse_if_taken(self) -> None:
        """For a launcher, before the job takes it. Raises ImageShardsError where another job that lives has it."""

    def acquire(self, plan: str) -> None:
        """Take it, for a plan's hash; a second call of the same job changes nothing.

        Raises:
            ImageShardsError: another job has it; says since when, and when it may be taken over.
        """

    def keep(self) -> None:
        """As `check`, now and then: for each record, at no cost."""

    def refreshed(self) -> AbstractContextManager[None]:
        """Refreshes it meanwhile, however long a step takes: an image whose decoder hangs, a request that is retried.

        That it is lost shows at the next `keep` or `check`.
        """

    def check(self) -> None:
        """Still ours? Refreshes it where that is due.

        Raises:
            ImageShardsError: another job has taken it over.
        """

    def release(self) -> None:
        """Give it up, if it is ours."""


def owner_of(state_url: str, version_url: str, identity: Identity, deadline_s: float) -> Owner:
    """The right to write a version.

    Args:
        state_url: its state folder.
        version_url: its own folder, for messages.
        identity: of this job.
        deadline_s: how long a remote request is retried.
    """
    if storage.is_local(state_url):
        return _Lock(storage.join(state_url, OWNER_FILE), version_url, identity)
    store = storage.open_versioned(state_url, deadline_s)
    return _Lease(store, storage.join(state_url, OWNER_FILE), version_url, identity)


def _lost(version_url: str) -> ImageShardsError:
    return ImageShardsError(
        f"{version_url}: another job has taken over the right to write it; this one stops, nothing of it is published"
    )


def _duration(seconds: float) -> str:
    whole = max(0, int(seconds))
    return f"{whole} s" if whole < 120 else f"{whole // 60} min"


# Locks that this process holds: path → descriptor. Closing it, as the process's end does, gives the lock back.
_held: dict[str, int] = {}


def _close_in_child() -> None:
    """A child must not hold its parent's locks when that is gone; closing a copy gives nothing back."""
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


class _Lock:
    """On this machine: an OS lock on owner.json, which the launcher holds and its workers recognise by the token."""

    def __init__(self, path: str, version_url: str, identity: Identity) -> None:
        self._path = path
        self._version_url = version_url
        self._identity = identity

    def refuse_if_taken(self) -> None:
        pass  # `acquire` is called by the launcher

    def acquire(self, plan: str) -> None:
        if self._named().token == self._identity.token:
            return
        descriptor = self._locked()
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, _Named.of(self._identity, plan).document(), 0)
        except OSError as error:
            os.close(descriptor)
            raise storage.explained(self._path, error) from error
        _held[self._path] = descriptor

    def _locked(self) -> int:
        """A descriptor of the owner.json that is there now, locked."""
        while True:
            try:
                os.makedirs(os.path.dirname(self._path), exist_ok=True)
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            except FileNotFoundError:  # its folder went in between
                continue
            except OSError as error:
                raise storage.explained(self._path, error) from error
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    os.close(descriptor)
                    raise self._taken() from error
            if self._is_there(descriptor):
                return descriptor
            os.close(descriptor)  # its owner has published and deleted it since it was opened

    def _is_there(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False

    def _taken(self) -> ImageShardsError:
        try:
            age_s = time.time() - os.stat(self._path).st_mtime
        except FileNotFoundError:
            age_s = 0.0
        return ImageShardsError(
            f"{self._version_url} is being written by {self._named()}, begun {_duration(age_s)} ago: wait for its end; "
            "it may be taken over as soon as that process is gone"
        )

    def _named(self) -> _Named:
        try:
            with open(self._path, "rb") as file:
                return _Named.read(file.read())
        except OSError:
            return _Named.read(b"")

    def keep(self) -> None:
        pass  # a lock doesn't grow old

    def refreshed(self) -> AbstractContextManager[None]:
        return nullcontext()

    def check(self) -> None:
        if self._named().token != self._identity.token:
            raise _lost(self._version_url)

    def release(self) -> None:
        descriptor = _held.get(self._path)
        if descriptor is None or self._named().token != self._identity.token:
            return
        del _held[self._path]
        os.unlink(self._path)  # before the lock is given back: nobody else gets this file
        os.close(descriptor)
        version = os.path.dirname(self._path)
        states = os.path.dirname(version)
        storage.open_storage(version).delete_empty_folders(version, states, os.path.dirname(states))


# When this process looks at a lease again: (file, token) → time.monotonic().
_next_look: dict[tuple[str, str], float] = {}


class _Lease:
    """In an object store: owner.json, changed only as the generation that was found."""

    def __init__(self, store: storage.VersionedStorage, url: str, version_url: str, identity: Identity) -> None:
        self._store = store
        self._url = url
        self._version_url = version_url
        self._identity = identity

    def refuse_if_taken(self) -> None:
        found = self._store.version(self._url)
        if found is not None:
            self._refuse_if_live(found)
            self._store.delete_version(self._url, found.generation)

    def acquire(self, plan: str) -> None:
        document = _Named.of(self._identity, plan).document()
        while True:
            found = self._store.version(self._url)
            if found is None:
                if self._store.create(self._url, document):
                    return
                continue  # another was first: look who
            if found.data == document:
                return
            self._refuse_if_live(found)
            if self._store.replace(self._url, document, found.generation):
                return

    def _refuse_if_live(self, found: storage.Version) -> None:
        named = _Named.read(found.data)
        if found.age_s > STALE_S or Identity(named.token, named.process).is_over():
            return
        at_once = ", at once if its process is gone from this machine" if named.process is not None else ""
        raise ImageShardsError(
            f"{self._version_url} is being written by {named}, last heard of {_duration(found.age_s)} ago: wait for "
            f"its end; it may be taken over in {_duration(STALE_S - found.age_s + 1)}{at_once}"
        )

    def keep(self) -> None:
        if time.monotonic() > _next_look.get((self._url, self._identity.token), 0.0):
            self.check()

    @contextmanager
    def refreshed(self) -> Iterator[None]:
        done = threading.Event()
        thread = threading.Thread(target=self._refresh_until, args=(done,), name="owner", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()  # no request of it must follow a release

    def _refresh_until(self, done: threading.Event) -> None:
        while not done.wait(REFRESH_S / 2):
            with suppress(ImageShardsError):  # whoever works meets the same at his next look
                self.keep()

    def check(self) -> None:
        found = self._store.version(self._url)
        if found is None or _Named.read(found.data).token != self._identity.token:
            raise _lost(self._version_url)
        if found.age_s > REFRESH_S:
            self._store.replace(self._url, found.data, found.generation)  # refused: another worker was faster
        # Not all workers at the same moment.
        pause_s = REFRESH_S * random.uniform(0.5, 1.0)
        _next_look[self._url, self._identity.token] = time.monotonic() + pause_s

    def release(self) -> None:
        found = self._store.version(self._url)
        if found is not None and _Named.read(found.data).token == self._identity.token:
            self._store.delete_version(self._url, found.generation)
