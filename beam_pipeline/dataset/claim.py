"""One writer at a time: `claim.json` says which job may write a version and delete its files.

It is created if there is none, and replaced or deleted only as it was found, on this machine as in an object store.
Jobs of one plan share it: they write the same bytes. On this machine a command also holds a lock, by which the kernel
says whether it still runs. docs/decisions/006-one-writer.md
"""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO

from beam_pipeline import storage
from beam_pipeline.config import Config
from beam_pipeline.errors import ImageShardsError
from beam_pipeline.schema.job import ClaimHolder, document_bytes, read_document
from beam_pipeline.storage.causes import translating_os_errors
from beam_pipeline.storage.local import making_folder
from beam_pipeline.text import print_line

CLAIM_FILE = "claim.json"
_RETRY_S, _MAX_RETRIES = 0.02, 5  # a look at whether a lock is free holds it for microseconds


class SupersededError(ImageShardsError):
    """The version isn't this job's any more: its claim is gone, or there is a manifest.

    Another job of the same plan may have published it, which is fine: `JobState.has_published` says so.
    """

    @classmethod
    def published(cls, version_url: str) -> SupersededError:
        """There is a manifest."""
        return cls(f"{version_url} was published by another job while this one was running; run the command again")


class ClaimedError(ImageShardsError):
    """Another job is writing the version."""


class VersionLock:
    """The lock on `_state/VERSION.lock`: a command that writes a local version holds it for as long as it runs.

    The kernel unlocks it however the command ends. The file is next to the state folder, which jobs delete. There is
    none in an object store, and where the file system has no locks.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._path = f"{config.state_url}.lock"
        self._has_locks = storage.is_local(config.output)
        self._file: FileIO | None = None  # closing it unlocks

    def acquire(self) -> None:
        """Hold it until `release`; if it is held already, nothing changes.

        Raises:
            ClaimedError: another command holds it.
        """
        while self._has_locks and self._file is None:
            with translating_os_errors(self._path), ExitStack() as opened:
                file = opened.enter_context(making_folder(self._path, lambda: FileIO(self._path, "r+", opener=_create)))
                try:
                    is_free = _lock(file, fcntl.LOCK_EX)
                except OSError as error:
                    self._go_without(error)
                    return
                if not is_free:
                    raise self._claimed_by(_read(file))
                if self._is_there(file):  # else the command that had it has deleted it since it was opened
                    file.truncate(0)
                    file.write(document_bytes(_new_holder(self._config)))
                    self._file = file
                    opened.pop_all()

    def release(self) -> None:
        """Delete the file, and the folders that are empty then."""
        if self._file is None:
            return
        if self._is_there(self._file):
            os.unlink(self._path)  # before it is unlocked: nobody else gets this file
        self._file.close()
        self._file = None
        output = self._config.output
        storage.open_storage(output).delete_empty_folders(self._config.states_url, output)

    def check(self) -> None:
        """Check that no other command holds it.

        Raises:
            ClaimedError: one does.
        """
        if holder := self.holder():
            raise self._claimed_by(holder)

    def is_ours(self) -> bool:
        """Whether this job's command holds it, which may be another process."""
        with self._opened() as file:
            return file is not None and _read(file).run == self._config.context.id

    def holder(self) -> ClaimHolder | None:
        """The other command that holds it; None if none does."""
        with self._opened() as file:
            if file is None or (holder := _read(file)).run == self._config.context.id:
                return None
            try:
                return None if _lock(file, fcntl.LOCK_SH) else holder
            except OSError:  # then nobody has it
                return None

    @contextmanager
    def _opened(self) -> Iterator[FileIO | None]:
        """The file; None if there is none."""
        with ExitStack() as opened, translating_os_errors(self._path):
            file = None
            with suppress(FileNotFoundError):
                file = opened.enter_context(FileIO(self._path, opener=_open)) if self._has_locks else None
            yield file

    def _is_there(self, file: FileIO) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), os.stat(self._path))
        except FileNotFoundError:
            return False

    def _go_without(self, error: OSError) -> None:
        self._has_locks = False
        os.unlink(self._path)
        fix = "don't start another command for this version before this one has ended"
        print_line(f"warning: {self._path}: can't be locked here ({error.strerror}): {fix}", sys.stderr)

    def _claimed_by(self, holder: ClaimHolder) -> ClaimedError:
        return ClaimedError(f"{self._config.dataset_url} is being written by {holder}: wait for it to finish")


class Claim:
    """The right to write a version and its state folder.

    Attributes:
        url: of claim.json.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._store = storage.open_storage(config.output, config.io_deadline)
        self._lock = VersionLock(config)
        self.url = storage.join(config.state_url, CLAIM_FILE)

    def holder(self) -> ClaimHolder | None:
        """The job that has it; an unknown one if that can't be read."""
        try:
            data = self._store.read(self.url)
        except FileNotFoundError:
            return None
        # Writes are atomic: on this machine a power cut has emptied it, and the job has ended.
        return read_document(data, ClaimHolder) or ClaimHolder(is_locked=not self._store.is_remote)

    def acquire(self, plan: str, replaces: bool = False) -> tuple[str, bool]:
        """For the step that writes first, when the plan's hash is known; a repeated step changes nothing.

        Args:
            plan: hash of this job's.
            replaces: replace the claim even if another job of this plan holds it, as `--restart` does.

        Returns:
            The run that made the claim: this one, or one of the same plan; whether it replaced another one just now:
            then nothing that was written may stay.

        Raises:
            ClaimedError: a job of another plan has it, or another command is writing the version.
        """
        config, url = self._config, self._config.dataset_url

        def joins(holder: ClaimHolder) -> bool:
            return holder.plan == plan and (holder.run == config.context.id or not (config.restart or replaces))

        if command := self._lock.holder():
            holder = self.holder()
            if holder is None or not joins(holder):
                raise ClaimedError(f"{url} is being written by {command}: wait for it to finish")
            return holder.run, False
        document = document_bytes(_new_holder(config, plan, self._lock.is_ours()))
        holder, generation = None, ""  # the common case: unclaimed
        while not self._store.write(self.url, document, generation):
            holder, generation = self._read_claim()
            if holder is not None and joins(holder):
                return holder.run, False
            # The lock of a job that had one is free or ours: it has ended.
            if holder is not None and not (config.restart or config.overwrite or holder.is_locked):
                what = f"{url} is being written by {holder} with other images or flags: wait until it is published"
                fix = "if it has ended, --restart (in Python restart=True) discards what it has written"
                raise ClaimedError(f"{what} or, {fix}")
        return config.context.id, holder is not None

    def discard(self) -> None:
        """Undo `acquire`: there is nothing to write."""
        holder, generation = self._read_claim()
        if holder is not None and holder.run == self._config.context.id:
            self._store.delete(self.url, generation)

    def is_abandoned(self, holder: ClaimHolder) -> bool:
        """Whether its holder is a command that has ended, because this job's command holds the lock now."""
        return holder.is_locked and holder.run != self._config.context.id and self._lock.is_ours()

    def _read_claim(self) -> tuple[ClaimHolder | None, str]:
        """The job that has it, and the file's generation, or an older one."""
        listed = self._store.stat(self.url)
        holder = self.holder()
        return holder, listed.generation if listed and holder else ""


def _new_holder(config: Config, plan: str = "", is_locked: bool = False) -> ClaimHolder:
    """This job, in this process."""
    started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return ClaimHolder(config.context.id, plan, socket.gethostname(), os.getpid(), started, is_locked)


def _create(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o644)


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)


def _read(file: FileIO) -> ClaimHolder:
    """The command that an open lock file names; an unknown one if it is just beginning."""
    return read_document(os.pread(file.fileno(), 1 << 16, 0), ClaimHolder) or ClaimHolder()


def _lock(file: FileIO, operation: int) -> bool:
    """Lock a file without waiting; returns False if another process has locked it.

    Raises:
        OSError: the file system has no locks.
    """
    for _ in range(_MAX_RETRIES):
        try:
            fcntl.flock(file, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_RETRY_S)
        else:
            return True
    return False
