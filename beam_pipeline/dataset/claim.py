"""One writer at a time: `claim.json` says which job may write a version and delete its files.

docs/decisions/006-one-writer.md
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from beam_pipeline import storage
from beam_pipeline.config import Config
from beam_pipeline.errors import ImageShardsError
from beam_pipeline.schema.job import ClaimHolder, document_bytes, read_document
from beam_pipeline.storage.causes import translating_os_errors
from beam_pipeline.storage.local import making_folder

CLAIM_FILE = "claim.json"
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK})
_LOOK_AGAIN_S = 0.05


class SupersededError(ImageShardsError):
    """The version isn't this job's any more: its claim is gone, or there is a manifest.

    Another job of the same plan may have published it, which is fine: `JobState.outcome` says so.
    """

    @classmethod
    def taken_over(cls, version_url: str) -> SupersededError:
        """This job's claim is gone."""
        return cls(f"{version_url}: another job has taken over this version; this one stops and publishes nothing")

    @classmethod
    def published(cls, version_url: str) -> SupersededError:
        """There is a manifest."""
        return cls(f"{version_url} was published by another job while this one was running; run the command again")


class ClaimedError(ImageShardsError):
    """Another job is writing the version, or is just beginning to."""


def open_claim(config: Config) -> SharedClaim | LocalClaim:
    """The claim of a version, by where it is."""
    return LocalClaim(config) if storage.is_local(config.output) else SharedClaim(config)


class SharedClaim:
    """In an object store: claim.json, changed only as it was found. Jobs of one plan share it: they write the same.

    Attributes:
        url: of claim.json.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._store = storage.open_storage(config.output, config.io_deadline)
        self.url = storage.join(config.state_url, CLAIM_FILE)

    def holder(self) -> ClaimHolder | None:
        """The job that has it."""
        try:
            return _holder(self._store.read(self.url))
        except FileNotFoundError:
            return None

    def verify(self, run: str) -> bool:
        """Whether it still is that of this run."""
        holder = self.holder()
        return holder is not None and holder.run == run

    def acquire(self, plan: str = "", replaces: bool = False) -> tuple[str, bool]:
        """For the step that writes first, when the plan's hash is known; a repeated step changes nothing.

        Args:
            plan: hash of this job's; "" for the launcher, which acquires nothing.
            replaces: whether to replace that of another job of this plan, too, as `--restart` does.

        Returns:
            The run that made the claim: this one, or one of the same plan; whether it replaced another one just now, so
            that nothing that was written may stay.

        Raises:
            ImageShardsError: a job of another plan has it.
        """
        config = self._config
        if not plan:
            return config.run_id, False
        document = _document(config, plan)
        holder, generation = None, ""  # the common case: unclaimed
        while not self._store.write(self.url, document, generation):
            holder, generation = self._look()
            if holder is not None and _is_shared(config, holder, plan, replaces):
                return holder.run, False
        return config.run_id, holder is not None

    def release(self) -> None:
        """For the launcher, at the end: the job itself deletes the claim when it has published."""

    def discard(self) -> None:
        """Undo `acquire`: there is nothing to write."""
        holder, generation = self._look()
        if holder is not None and holder.run == self._config.run_id:
            self._store.delete(self.url, generation)

    def _look(self) -> tuple[ClaimHolder | None, str]:
        """The job that has it, and the file's generation, or an older one."""
        listed = self._store.stat(self.url)
        holder = self.holder()
        return holder, listed.generation if listed and holder else ""


class LocalClaim(SharedClaim):
    """On this machine: claim.json under an OS lock, which the launcher holds as long as its job runs.

    In somebody's own pipeline there is no launcher: then the step that plans holds the lock only while it prepares the
    output, and writes its plan's hash into the file, with the rules of object stores.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._lock: int | None = None  # descriptor of claim.json; closing it unlocks
        self._is_launcher = False

    def acquire(self, plan: str = "", replaces: bool = False) -> tuple[str, bool]:
        """As `SharedClaim.acquire`; also for the launcher. The lock is held until `release`."""
        config = self._config
        if plan and config.has_launcher:
            if not self.verify(config.run_id):
                raise SupersededError.taken_over(config.dataset_url)
            return config.run_id, False  # with --restart the launcher has made the plan invalid
        self.release()  # from the call before
        descriptor = self._locked()
        try:
            holder = _read_locked(descriptor)
            is_replaced = holder is not None and bool(holder.plan)  # of a pipeline that has no launcher
            if holder is not None and is_replaced and _is_shared(config, holder, plan, replaces):
                run, is_replaced = holder.run, False
            else:
                run = config.run_id
                with translating_os_errors(self.url):
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, _document(config, plan), 0)
        except BaseException:
            os.close(descriptor)
            raise
        self._lock, self._is_launcher = descriptor, not plan
        return run, is_replaced

    @contextmanager
    def locked(self) -> Iterator[ClaimHolder | None]:
        """Hold the lock while the state is deleted, and yield the claim's holder; None if there is none.

        Raises:
            ClaimedError: another job holds it.
        """
        descriptor = self._locked()
        try:
            yield _read_locked(descriptor)
        finally:
            os.close(descriptor)

    def _locked(self) -> int:
        """A descriptor of the claim.json that is there now, locked."""
        deadline = time.monotonic() + self._config.io_deadline
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        while True:
            with translating_os_errors(self.url):
                descriptor = making_folder(self.url, lambda: os.open(self.url, flags, 0o644))
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = _read_locked(descriptor)
                os.close(descriptor)
                # A pipeline that has no launcher holds it while it prepares the output.
                if (holder is None or holder.plan) and time.monotonic() < deadline:
                    time.sleep(_LOOK_AGAIN_S)
                    continue
                who = holder or ClaimHolder()
                raise ClaimedError(
                    f"{self._config.dataset_url} is being written by {who}: wait for it to finish"
                ) from error
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    os.close(descriptor)
                    with translating_os_errors(self.url):
                        raise
            if self._is_there(descriptor):
                return descriptor
            os.close(descriptor)  # the job that had it has deleted it since it was opened

    def _is_there(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self.url))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Unlock it; the launcher also deletes the file, and the folders that are empty then."""
        if self._lock is None:
            return
        if self._is_launcher and self._is_there(self._lock):
            os.unlink(self.url)  # before it is unlocked: nobody else gets this file
        os.close(self._lock)
        self._lock = None
        if self._is_launcher:
            states = self._config.states_url
            self._store.delete_empty_folders(self._config.state_url, states, os.path.dirname(states))

    def discard(self) -> None:
        """Undo `acquire`, but for a launcher's."""
        if not self._config.has_launcher:
            super().discard()


def _holder(data: bytes) -> ClaimHolder:
    """The job that a claim.json names; an unknown one if that can't be read."""
    return read_document(data, ClaimHolder) or ClaimHolder()


def _read_locked(descriptor: int) -> ClaimHolder | None:
    """The job that an open claim.json names; None if it is empty or can't be read."""
    return read_document(os.pread(descriptor, 1 << 16, 0), ClaimHolder)


def _document(config: Config, plan: str) -> bytes:
    """The file's content for a job in this process."""
    started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return document_bytes(ClaimHolder(config.run_id, plan, socket.gethostname(), os.getpid(), started))


def _is_shared(config: Config, holder: ClaimHolder, plan: str, replaces: bool) -> bool:
    """Whether the claim of a job is this one's, too; else it may be replaced.

    Raises:
        ImageShardsError: it is of another plan, and neither `--restart` nor `--overwrite` is given.
    """
    if holder.plan == plan and (holder.run == config.run_id or not (config.restart or replaces)):
        return True
    if config.restart or config.overwrite:
        return False
    # The launcher doesn't know yet whether its plan would be the same one.
    what = f"{holder} with other images or flags" if plan else f"{holder} in a pipeline of its own"
    again = "" if plan else "run that again, "
    discards = f"{'--restart' if config.has_launcher else 'restart=True'} discards what it has written"
    if _process_has_ended(holder):
        fix = f"{again}or, if its job has ended, too, {discards}" if again else f"if its job has, too, {discards}"
        raise ClaimedError(f"{config.dataset_url} was begun by {what}, whose process has ended: {fix}")
    raise ClaimedError(
        f"{config.dataset_url} is being written by {what}: {again}wait until it is published, or {discards}"
    )


def _process_has_ended(holder: ClaimHolder) -> bool:
    """Whether the process that made the claim was one of this machine, and has ended."""
    if not holder.pid or holder.host != socket.gethostname():
        return False
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # another user's; no process has this number
        pass
    return False
