"""Notes of what is being decoded, in the state folder: how the next attempt knows what a process died of.

A shard's note is written before its first image is decoded and obsolete once its sidecar is there: one request a shard.
An attempt that finds a note decodes the shard's images in subprocesses (`careful`). What kills those too is noted as
rejected, for all later attempts. Before the plan there are no shards: what is noted are parts of the sample, and whose.
"""

from __future__ import annotations

import functools
import hashlib
import json
import uuid
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from beam_pipeline import storage
from beam_pipeline.errors import Reject
from beam_pipeline.options import Config
from beam_pipeline.schema import RejectReason, ShardName, canonical_json


class Noted(NamedTuple):
    """An image that isn't decoded again: its path when that was noted, and why."""

    path: str
    reject: Reject


class Inflight:
    """The notes of one version.

    Args:
        config: of the job.
        state_url: its state folder.
    """

    def __init__(self, config: Config, state_url: str) -> None:
        self._store = storage.open_storage(config.output, config.io_deadline)
        self._job = config.identity.token
        self._deadline_s = config.io_deadline
        self._url = storage.join(state_url, "inflight")

    def begin_shard(self, name: ShardName) -> bool:
        """Note that a shard's images are decoded from now on; returns whether an earlier attempt noted that."""
        url = storage.join(self._url, f"shards/{name.split}-{name.index:05d}")
        return not self._store.create(url, uuid.uuid4().hex.encode())

    def begin_sampling(self, paths: Iterable[str] = ()) -> bool:
        """Note that a part of the sample is decoded from now on.

        Returns:
            Whether an earlier attempt noted that of this part, or another job of any: whatever that died of may be in
            this one. Other processes of this job are at work on their own parts.
        """
        part = hashlib.blake2b("\0".join(paths).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
        url = storage.join(self._url, f"sampling/{self._job}-{part}")
        is_first = self._store.create(url, uuid.uuid4().hex.encode())
        return not is_first or _another_sampled(self._url, self._job, self._deadline_s)

    def end_sampling(self) -> None:
        """The whole sample is measured."""
        self._store.delete_tree(storage.join(self._url, "sampling"))
        self._store.delete_empty_folders(self._url)

    def reject(self, content: str, path: str, reject: Reject) -> None:
        """Note that an image's decoder died in a subprocess: it isn't decoded again.

        Args:
            content: what tells its bytes, and what was to be made of them.
            path: for those who look.
            reject: why.
        """
        document = {"path": path, "reason": reject.reason, "detail": reject.detail}
        self._store.write(storage.join(self._url, f"rejected/{content}.json"), canonical_json(document))

    def rejected(self, plan: str) -> Mapping[str, Noted]:
        """Content → what was noted of it, as this process first sees it under a plan.

        Args:
            plan: its hash, or "" while there is none. A listing for each shard would be one request more, for nothing:
                what is noted later belongs to shards that have a note.
        """
        return _rejected(self._url, self._job, plan, self._deadline_s)

    def keep(self, rejected: Mapping[str, Noted]) -> None:
        """Note again what was noted before the state was made ready for another plan."""
        for content, noted in rejected.items():
            self.reject(content, noted.path, noted.reject)


@functools.lru_cache(maxsize=8)
def _another_sampled(url: str, job: str, deadline_s: float) -> bool:
    """Whether a job before this one noted that it samples, as this process first sees it."""
    store = storage.open_storage(url, deadline_s)
    return any(not name.startswith(job) for name in _names(store, storage.join(url, "sampling")))


@functools.lru_cache(maxsize=8)
def _rejected(url: str, job: str, plan: str, deadline_s: float) -> Mapping[str, Noted]:
    store, folder = storage.open_storage(url, deadline_s), storage.join(url, "rejected")
    found: dict[str, Noted] = {}
    for name in _names(store, folder):
        if noted := _parsed(store.read(storage.join(folder, name))):
            found[name.removesuffix(".json")] = noted
    return found


def _parsed(data: bytes) -> Noted | None:
    """A note; None for one that a power cut has left in part, whose image is then decoded apart once more."""
    try:
        document = json.loads(data)
        return Noted(document["path"], Reject(RejectReason(document["reason"]), document["detail"]))
    except (ValueError, KeyError, TypeError):
        return None


def _names(store: storage.Storage, folder: str) -> list[str]:
    try:
        return [file.path for file in store.files(folder)]
    except FileNotFoundError:
        return []
