"""Attempt markers in the state folder say what was being decoded when an attempt died.

A shard's marker is created before its first image is decoded, and its sidecar makes it obsolete: one request per shard.
An attempt that finds a marker decodes the images in child processes. An image that kills those, too, is rejected in all
later attempts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Iterable

from beam_pipeline import storage
from beam_pipeline.config import Config
from beam_pipeline.errors import Reject
from beam_pipeline.schema import RejectReason, ShardName, canonical_json

_local_markers: set[str] = set()  # made by this process


def remove_local_markers() -> None:
    """Called when a signal ends this process, so that the next attempt doesn't blame a decoder and isolate it."""
    for path in list(_local_markers):
        with contextlib.suppress(OSError):
            os.unlink(path)


def shard_marker(name: ShardName) -> str:
    """The marker of a shard."""
    return f"shards/{name.short}"


def sample_marker(paths: Iterable[str]) -> str:
    """The marker of a part of the sample: the images at `paths`."""
    content = "\0".join(sorted(paths)).encode("utf-8", "surrogateescape")
    return f"sampling/{hashlib.blake2b(content, digest_size=8).hexdigest()}"


class Attempts:
    """The attempt markers of one version: for shards, parts of the sample, and images that kill decoders."""

    def __init__(self, config: Config) -> None:
        self._store = storage.open_storage(config.output, config.io_deadline)
        self._output, self._url = config.output, storage.join(config.state_url, "inflight")

    def begin(self, marker: str) -> bool:
        """Create a marker; returns whether this attempt is the first, else an earlier one left it."""
        url = storage.join(self._url, marker)
        is_first = self._store.create(url, uuid.uuid4().hex.encode())
        if is_first and not self._store.is_remote:
            _local_markers.add(url)
        return is_first

    def end(self, marker: str) -> None:
        """Remove a marker, and the folders above it that are empty: a pipeline that only samples leaves nothing."""
        url = storage.join(self._url, marker)
        self._store.delete(url)
        self._store.delete_empty_folders(os.path.dirname(url), self._output)

    def add_reject(self, image: str, reject: Reject) -> None:
        """Save that an image killed its decoder in a child process, too; `image` identifies it and its options."""
        document = canonical_json({"reason": reject.reason, "detail": reject.detail})
        self._store.write(storage.join(self._url, f"rejected/{image}.json"), document)

    def rejects(self) -> dict[str, Reject]:
        """The images that `add_reject` saved."""
        rejects, folder = {}, storage.join(self._url, "rejected")
        with contextlib.suppress(FileNotFoundError):
            for file in self._store.files(folder):
                # A power cut may leave half a file: then its image is decoded in a child process again.
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    document = json.loads(self._store.read(storage.join(folder, file.path)))
                    reject = Reject(RejectReason(document["reason"]), document["detail"])
                    rejects[file.path.removesuffix(".json")] = reject
        return rejects
