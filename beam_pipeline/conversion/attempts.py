"""Attempt markers in the state folder: what was being decoded when an attempt died, and which images kill decoders.

A shard's marker is created before its first image is decoded, and its sidecar makes it obsolete: one request a shard.
An attempt that finds a marker decodes the shard's images isolated, in a child process. An image that kills that too is
rejected in all later attempts. Before there is a plan, markers are of parts of the sample, and name the job.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import uuid
from collections.abc import Iterable

from beam_pipeline import storage
from beam_pipeline.config import Config
from beam_pipeline.errors import Reject
from beam_pipeline.schema import RejectReason, ShardName, canonical_json


class Attempts:
    """The attempt markers of one version.

    Args:
        config: of the job.
    """

    def __init__(self, config: Config) -> None:
        self._store = storage.open_storage(config.output, config.io_deadline)
        self._job = config.run_id
        self._url = storage.join(config.state_url, "inflight")

    def begin_shard(self, name: ShardName) -> bool:
        """Mark that a shard's images are decoded from now on; returns whether an earlier attempt did."""
        return not self._mark(f"shards/{name.short}")

    def end_shard(self, name: ShardName) -> None:
        """Take the marker back: the attempt ended, and not by its decoder."""
        self._store.delete(storage.join(self._url, f"shards/{name.short}"))

    def begin_sampling(self, paths: Iterable[str]) -> bool:
        """Mark that a part of the sample, the images at `paths`, is decoded from now on.

        Returns:
            Whether an earlier attempt at this part did, or another job at any part: what killed that may be in this
            one. Other processes of this job decode other parts, which says nothing.
        """
        part = hashlib.blake2b("\0".join(paths).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
        is_first = self._mark(f"sampling/{self._job}-{part}")
        return not is_first or _another_sampled(self._store, self._url, self._job)

    def end_sampling(self) -> None:
        """Delete the markers of the sample: all of it is measured."""
        self._store.delete_tree(storage.join(self._url, "sampling"))
        self._store.delete_empty_folders(self._url)

    def add_reject(self, image: str, reject: Reject) -> None:
        """Save that an image killed its decoder in a child process too: it isn't decoded again.

        Args:
            image: identifies its bytes and what was to be made of them.
            reject: its reason and detail.
        """
        document = canonical_json({"reason": reject.reason, "detail": reject.detail})
        self._store.write(storage.join(self._url, f"rejected/{image}.json"), document)

    def rejects(self, phase: str = "") -> dict[str, Reject]:
        """The images that were saved by `add_reject`.

        Args:
            phase: what was saved when this process first asked in this phase of the job, for one listing instead of one
                a shard: what is saved later belongs to shards that have a marker. "" looks now.
        """
        if phase:
            return _first_rejects(self._store, self._url, self._job, phase)
        return _rejects(self._store, self._url)

    def _mark(self, name: str) -> bool:
        return self._store.create(storage.join(self._url, name), uuid.uuid4().hex.encode())


@functools.lru_cache(maxsize=8)
def _another_sampled(store: storage.Storage, url: str, job: str) -> bool:
    """Whether another job marked a part of the sample before this process first asked."""
    return any(not name.startswith(job) for name in _names(store, storage.join(url, "sampling")))


@functools.lru_cache(maxsize=8)
def _first_rejects(store: storage.Storage, url: str, job: str, phase: str) -> dict[str, Reject]:
    """What was saved when this process first asked in a phase of a job."""
    return _rejects(store, url)


def _rejects(store: storage.Storage, url: str) -> dict[str, Reject]:
    found, folder = {}, storage.join(url, "rejected")
    for name in _names(store, folder):
        # A power cut may leave half a file: its image is decoded in a child process once more.
        with contextlib.suppress(ValueError, KeyError, TypeError):
            document = json.loads(store.read(storage.join(folder, name)))
            found[name.removesuffix(".json")] = Reject(RejectReason(document["reason"]), document["detail"])
    return found


def _names(store: storage.Storage, folder: str) -> list[str]:
    try:
        return [file.path for file in store.files(folder)]
    except FileNotFoundError:
        return []
