"""One writer at a time: `claim.json` says which job may write a version. docs/decisions/006-one-writer.md"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from typing import NamedTuple

from beam_pipeline import storage
from beam_pipeline.config import Config
from beam_pipeline.errors import ImageShardsError
from beam_pipeline.schema import canonical_json
from beam_pipeline.storage.causes import explained

CLAIM_FILE = "claim.json"
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK})


class Writer(NamedTuple):
    """The job that a claim names; `plan` is its plan's hash, "" before there is one, `started` a time in UTC."""

    run: str = ""
    plan: str = ""
    host: str = ""
    pid: int = 0
    started: str = ""

    @classmethod
    def read(cls, data: bytes) -> Writer:
        """From the file's content; an unknown job if that can't be read."""
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError):
            return cls()

    def __str__(self) -> str:
        who = f" (process {self.pid} on {self.host}, since {self.started})" if self.pid else ""
        return f"being written by another job{who}"


def _document(run: str, plan: str = "") -> bytes:
    """The file's content for a job in this process."""
    started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return canonical_json(Writer(run, plan, socket.gethostname(), os.getpid(), started)._asdict())


class Claim:
    """The right to write one version: a lock on a local claim.json, elsewhere a claim.json that names the plan."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._url = storage.join(config.state_url, CLAIM_FILE)
        self._lock: int | None = None  # descriptor of claim.json, in the launcher; closing it unlocks

    def writer(self) -> Writer | None:
        """The job that has it."""
        try:
            return Writer.read(storage.open_storage(self._url, self._config.io_deadline).read(self._url))
        except FileNotFoundError:
            return None

    # --- here: an OS lock, which the launcher holds; its workers recognise their job by the run's id

    def hold(self) -> None:
        """Lock a local version until `release`. Raises ImageShardsError if another job has it."""
        if not storage.is_local(self._url):
            return
        descriptor = self._locked()
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, _document(self._config.run_id), 0)
        except OSError as error:
            os.close(descriptor)
            raise explained(self._url, error) from error
        self._lock = descriptor

    def _locked(self) -> int:
        """A descriptor of the claim.json that is there now, locked."""
        while True:
            try:
                os.makedirs(os.path.dirname(self._url), exist_ok=True)
                descriptor = os.open(self._url, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            except FileNotFoundError:  # its folder went in between
                continue
            except OSError as error:
                raise explained(self._url, error) from error
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                writer = Writer.read(os.pread(descriptor, 1 << 16, 0))
                os.close(descriptor)
                raise ImageShardsError(f"{self._config.dataset_url} is {writer}: wait for it to finish") from error
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    os.close(descriptor)
                    raise explained(self._url, error) from error
            if self._is_there(descriptor):
                return descriptor
            os.close(descriptor)  # the job that had it has deleted it since it was opened

    def _is_there(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._url))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Unlock it, and delete the folders that are empty then."""
        if self._lock is None:
            return
        if self._is_there(self._lock):
            os.unlink(self._url)  # before it is unlocked: nobody else gets this file
        os.close(self._lock)
        self._lock = None
        states = self._config.states_url
        storage.open_storage(states).delete_empty_folders(self._config.state_url, states, os.path.dirname(states))

    # --- in an object store: claim.json, changed only as it was found. Jobs of one plan share it: they write the same

    def take(self, plan: str, replaces: bool = False) -> tuple[str, bool]:
        """For the step that writes first, when the plan's hash is known; a repeated step changes nothing.

        Args:
            plan: hash of this job's.
            replaces: whether to replace that of another job of this plan, too, as `--restart` does.

        Returns:
            The run that made the claim: this one, or one of the same plan; whether it replaced another one just now, so
            that nothing that was written may stay.

        Raises:
            ImageShardsError: a job of another plan has it.
        """
        config = self._config
        if storage.is_local(self._url):
            return config.run_id, config.restart
        store, document = storage.open_storage(self._url, config.io_deadline), _document(config.run_id, plan)
        writer, generation = None, ""  # as mostly: nobody has it
        while not store.write(self._url, document, generation):
            writer, generation = self._read()
            if writer is not None:
                if writer.plan == plan and (writer.run == config.run_id or not (config.restart or replaces)):
                    return writer.run, False
                if not (config.restart or config.overwrite):
                    raise ImageShardsError(
                        f"{config.dataset_url} is {writer} with other images or flags: wait until it is published, or "
                        "--restart discards what it has written"
                    )
        return config.run_id, writer is not None

    def give_up(self) -> None:
        """Undo `take`: there is nothing to write."""
        if storage.is_local(self._url):
            return
        writer, generation = self._read()
        if writer is not None and writer.run == self._config.run_id:
            storage.open_storage(self._url, self._config.io_deadline).delete(self._url, generation)

    def _read(self) -> tuple[Writer | None, str]:
        """The job that has it, and the file's generation, or an older one."""
        found = storage.open_storage(self._url, self._config.io_deadline).stat(self._url)
        writer = self.writer()
        return writer, found.generation if found and writer else ""
