"""Notes of what is being decoded, in the state folder: how the next attempt knows what a process died of.

A shard's note is written before its first image is decoded and obsolete once its sidecar is there: one request a shard.
An attempt that finds a note decodes the shard's images in a child process (`careful`). What kills that too is noted as
rejected, for all later attempts. Before the plan there are no shards: what is noted are parts of the sample, and whose.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import uuid
from collections.abc import Iterable, Mapping

from beam_pipeline import storage
from beam_pipeline.config import Config
from beam_pipeline.schema import RejectReason, ShardName, canonical_json

Rejected = Mapping[str, tuple[str, str]]  # what tells an image → reason and detail of its `Reject`


class Inflight:
    """The notes of one version.

    Args:
        config: of the job.
    """

    def __init__(self, config: Config) -> None:
        self._store = storage.open_storage(config.output, config.io_deadline)
        self._job = config.run_id
        self._deadline_s = config.io_deadline
        self._url = storage.join(config.state_url, "inflight")

    def begin_shard(self, name: ShardName) -> bool:
        """Note that a shard's images are decoded from now on; returns whether an earlier attempt noted that."""
        return not self._begin(f"shards/{name.split}-{name.index:05d}")

    def begin_sampling(self, paths: Iterable[str] = ()) -> bool:
        """Note that a part of the sample is decoded from now on.

        Returns:
            Whether an earlier attempt noted that of this part, or another job of any: whatever that died of may be in
            this one. Other processes of this job are at work on their own parts.
        """
        part = hashlib.blake2b("\0".join(paths).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
        is_first = self._begin(f"sampling/{self._job}-{part}")
        return not is_first or _another_sampled(self._url, self._job, self._deadline_s)

    def _begin(self, note: str) -> bool:
        return self._store.create(storage.join(self._url, note), uuid.uuid4().hex.encode())

    def end_sampling(self) -> None:
        """The whole sample is measured."""
        self._store.delete_tree(storage.join(self._url, "sampling"))
        self._store.delete_empty_folders(self._url)

    def reject(self, content: str, reason: str, detail: str) -> None:
        """Note that an image's decoder died in a child process: it isn't decoded again.

        Args:
            content: what tells its bytes, and what was to be made of them.
            reason, detail: of its `Reject`.
        """
        document = {"reason": reason, "detail": detail}
        self._store.write(storage.join(self._url, f"rejected/{content}.json"), canonical_json(document))

    def rejected(self, plan: str) -> Rejected:
        """What was noted as this process first saw it under a plan.

        Args:
            plan: its hash, or "" while there is none. A listing for each shard would be one request more, for nothing:
                what is noted later belongs to shards that have a note.
        """
        return _rejected(self._url, self._job, plan, self._deadline_s)

    def keep(self, rejected: Rejected) -> None:
        """Note again what was noted before the state was made ready for another plan."""
        for content, (reason, detail) in rejected.items():
            self.reject(content, reason, detail)


@functools.lru_cache(maxsize=8)
def _another_sampled(url: str, job: str, deadline_s: float) -> bool:
    """Whether a job before this one noted that it samples, as this process first sees it."""
    notes = _notes(storage.open_storage(url, deadline_s), storage.join(url, "sampling"))
    return any(not name.startswith(job) for name in notes)


@functools.lru_cache(maxsize=8)
def _rejected(url: str, job: str, plan: str, deadline_s: float) -> Rejected:
    store, folder = storage.open_storage(url, deadline_s), storage.join(url, "rejected")
    found = {}
    for name in _notes(store, folder):
        # A power cut may leave a note in part: its image is decoded in a child process once more.
        with contextlib.suppress(ValueError, KeyError, TypeError):
            document = json.loads(store.read(storage.join(folder, name)))
            found[name.removesuffix(".json")] = (RejectReason(document["reason"]), document["detail"])
    return found


def _notes(store: storage.Storage, folder: str) -> list[str]:
    try:
        return [file.path for file in store.files(folder)]
    except FileNotFoundError:
        return []
