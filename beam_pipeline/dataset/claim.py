"""One writer at a time: `claim.json` says which job may write a version. docs/decisions/006-one-writer.md"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from typing import NamedTuple, Protocol

from beam_pipeline import storage
from beam_pipeline.config import Config
from beam_pipeline.errors import ImageShardsError
from beam_pipeline.schema import canonical_json

CLAIM_FILE = "claim.json"
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK})


class Writer(NamedTuple):
    """The job that a claim names; `plan` is "" until it is known, `started` a time in UTC."""

    run: str = ""
    plan: str = ""
    host: str = "an unknown host"
    pid: int = 0
    started: str = "an unknown time"

    @classmethod
    def here(cls, run: str, plan: str = "") -> Writer:
        """This process."""
        return cls(run, plan, socket.gethostname(), os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()))

    @classmethod
    def read(cls, data: bytes) -> Writer:
        """From the file's content; somebody, if that can't be read."""
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError):
            return cls()

    def document(self) -> bytes:
        """The file's content."""
        return canonical_json(self._asdict())


class Claim(Protocol):
    """The right to write one version."""

    def hold(self) -> None:
        """For the launcher: lock a local version until `release`. Raises ImageShardsError if another job has it."""

    def release(self) -> None:
        """Unlock it."""

    def take(self, plan: str) -> bool:
        """For the step that writes first, when the plan's hash is known; a repeated step changes nothing.

        Returns:
            Whether what this plan has written so far may stay.

        Raises:
            ImageShardsError: another job has it.
        """

    def read(self) -> tuple[Writer | None, str]:
        """Which job has it, and the file's generation, or an older one."""

    def give_up(self) -> None:
        """Undo `take`: there is nothing to write."""


def claim_of(config: Config) -> Claim:
    """The right to write the version."""
    return _LocalClaim(config) if storage.is_local(config.output) else RemoteClaim(config)


# Locks that this process holds: path → descriptor. Closing it, as the process's end does, unlocks.
_held: dict[str, int] = {}


def _close_in_child() -> None:
    """A child must not hold its parent's locks when that is gone; closing a copy unlocks nothing."""
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


class _LocalClaim:
    """An OS lock on claim.json, which the launcher holds; its workers recognise their job by the run's id."""

    def __init__(self, config: Config) -> None:
        self._path = storage.join(config.state_url, CLAIM_FILE)
        self._version_url = config.dataset_url
        self._run = config.run_id
        self._restarts = config.restart

    def hold(self) -> None:
        descriptor = self._locked()
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, Writer.here(self._run).document(), 0)
        except OSError as error:
            os.close(descriptor)
            raise storage.explained(self._path, error) from error
        _held[self._path] = descriptor

    def _locked(self) -> int:
        """A descriptor of the claim.json that is there now, locked."""
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
                    writer = Writer.read(os.pread(descriptor, 1 << 16, 0))
                    os.close(descriptor)
                    raise ImageShardsError(
                        f"{self._version_url} is being written by another job (process {writer.pid} on {writer.host}, "
                        f"since {writer.started}): wait for its end"
                    ) from error
            if self._is_there(descriptor):
                return descriptor
            os.close(descriptor)  # the job that had it has published and deleted it since it was opened

    def _is_there(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        if descriptor := _held.pop(self._path, 0):
            if self._is_there(descriptor):
                os.unlink(self._path)  # before it is unlocked: nobody else gets this file
            os.close(descriptor)
            version = os.path.dirname(self._path)
            states = os.path.dirname(version)
            storage.open_storage(version).delete_empty_folders(version, states, os.path.dirname(states))

    def take(self, plan: str) -> bool:
        return not self._restarts

    def give_up(self) -> None:
        pass  # the launcher's `release` does

    def read(self) -> tuple[Writer | None, str]:
        try:
            with open(self._path, "rb") as file:
                return Writer.read(file.read()), ""
        except FileNotFoundError:
            return None, ""


class RemoteClaim:
    """In an object store: claim.json, changed only as it was found. Jobs of one plan share it: they write the same."""

    def __init__(self, config: Config) -> None:
        self._store = storage.open_versioned(config.output, config.io_deadline)
        self._url = storage.join(config.state_url, CLAIM_FILE)
        self._config = config

    def hold(self) -> None:
        pass  # it is taken when the plan is known

    def release(self) -> None:
        pass  # the state goes with it, or another job of this plan goes on

    def read(self) -> tuple[Writer | None, str]:
        found = self._store.stat(self._url)
        try:
            return Writer.read(self._store.read(self._url)), found.generation if found else ""
        except FileNotFoundError:
            return None, ""

    def take(self, plan: str) -> bool:
        config = self._config
        document = Writer.here(config.run_id, plan).document()
        while True:
            writer, generation = self.read()
            if writer is not None:
                if writer.plan == plan and (writer.run == config.run_id or not config.restart):
                    return True
                if not (config.restart or config.overwrite):
                    raise ImageShardsError(
                        f"{config.dataset_url} is being written by another job (process {writer.pid} on {writer.host}, "
                        f"since {writer.started}) with other images or flags: wait until it is published, or --restart "
                        "discards what it has written"
                    )
            if self._store.replace(self._url, document, generation):
                return writer is None

    def give_up(self) -> None:
        writer, generation = self.read()
        if writer is not None and writer.run == self._config.run_id:
            self._store.delete(self._url, generation)
