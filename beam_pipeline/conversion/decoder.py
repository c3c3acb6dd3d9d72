"""How a worker decodes: in this process, under a watchdog, or in a child process if an earlier attempt crashed or hung.

Attempt markers in the state folder say what was being decoded when an attempt died. A shard's marker is created before
its first image is decoded, and its sidecar makes it obsolete: one request per shard. An attempt that finds a marker
decodes the shard's images in child processes. An image that kills those, too, is rejected in all later attempts.

A worker must also have the launcher's versions of this package and of the image libraries, which decide a dataset's
bytes. (Beam itself compares its own version and Python's.)
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

import beam_pipeline
from beam_pipeline import images, storage
from beam_pipeline.config import Config
from beam_pipeline.conversion.isolation import DEATHS, IsolatedDecoder
from beam_pipeline.errors import OTHER_IMAGE, ImageShardsError, Reject
from beam_pipeline.images import EncodedImage, ImageOptions, codec_versions
from beam_pipeline.images.memory import LEAST_BOUND, MemoryBudget
from beam_pipeline.schema import RejectReason, ShardName, canonical_json, sha256
from beam_pipeline.text import plural

# With the default --max_pixels a decoder is taken to hang after 239 s. Pillow decodes and resizes a pixel in about
# 0.02 µs; the limit is 50 times that, for a busy machine.
LEAST_S = 60.0
SECONDS_PER_PIXEL = 1e-6
_LOOK_EVERY_S = 1.0
# Large images share what one may take at the default --max_pixels; one that takes more is decoded alone.
_MEMORY = MemoryBudget(LEAST_BOUND)
_local_markers: set[str] = set()  # made by this process


@functools.cache
def versions() -> dict[str, str]:
    """This package's version, with a hash of its modules, and those of the image libraries."""
    folder = Path(beam_pipeline.__file__).parent
    modules = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
    hashes = canonical_json({name: sha256(path.read_bytes()) for name, path in modules.items()})
    return {**codec_versions(), "imageshards": f"{beam_pipeline.__version__} ({sha256(hashes)[:8]})"}


def check_versions(config: Config) -> None:
    """Check that this worker writes the bytes that the launcher's versions would.

    Raises:
        ImageShardsError: it has another version of something; names it.
    """
    if config.launcher is None:  # this process is the launcher's, or a child of it
        return
    here, there = versions(), config.launcher
    different = [name for name in {**there, **here} if here.get(name) != there.get(name)]
    if different:
        name, more = different[0], len(different) - 1
        ours = f"{name} {here[name]}" if name in here else f"no {name}"
        others = f" ({plural(more, 'other version')} differ{'s' * (more == 1)})" if more else ""
        raise ImageShardsError(f"the worker has {ours}, the launcher {there.get(name, 'none')}{others}: {OTHER_IMAGE}")


def remove_local_markers() -> None:
    """Called when a signal ends this process, so that the next attempt doesn't blame a decoder and isolate it."""
    for path in list(_local_markers):
        with contextlib.suppress(OSError):
            os.unlink(path)


@functools.cache  # parts of the sample follow each other, and starting a process takes as long as 100 images
def _isolated(options: ImageOptions, limit_s: float, with_sums: bool) -> IsolatedDecoder:
    return IsolatedDecoder(options, limit_s, _MEMORY, with_sums)


class Attempts:
    """The attempt markers of one version: for shards, parts of the sample, and images that kill decoders."""

    def __init__(self, config: Config) -> None:
        self._store = storage.open_storage(config.output, config.io_deadline)
        self._url = storage.join(config.state_url, "inflight")

    def begin_shard(self, name: ShardName) -> bool:
        """Mark that this attempt decodes a shard; returns whether an earlier attempt left its marker."""
        return self._mark(f"shards/{name.short}")

    def end_shard(self, name: ShardName) -> None:
        """Remove the marker: the attempt ended, and no decoder crashed or hung."""
        self._store.delete(storage.join(self._url, f"shards/{name.short}"))

    def begin_sampling(self, paths: Iterable[str]) -> bool:
        """The same for a part of the sample: the images at `paths`."""
        return self._mark(_sample_marker(paths))

    def end_sampling(self, paths: Iterable[str]) -> None:
        """Remove the marker and the folders above it that are empty: a pipeline that only samples leaves nothing."""
        self._store.delete(storage.join(self._url, _sample_marker(paths)))
        folders = [self._url]
        while len(folders) < 4:  # of all markers, of the version's state, of all states, of the dataset
            folders.append(os.path.dirname(folders[-1]))
        self._store.delete_empty_folders(storage.join(self._url, "sampling"), *folders)

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

    def _mark(self, name: str) -> bool:
        url = storage.join(self._url, name)
        is_first = self._store.create(url, uuid.uuid4().hex.encode())
        if is_first and not self._store.is_remote:
            _local_markers.add(url)
        return not is_first


def _sample_marker(paths: Iterable[str]) -> str:
    content = "\0".join(sorted(paths)).encode("utf-8", "surrogateescape")
    return f"sampling/{hashlib.blake2b(content, digest_size=8).hexdigest()}"


class Decoder:
    """Decodes the images of one shard, or of a part of the sample.

    Args:
        options: how to convert them.
        attempts: the job's markers; None for a decoder that neither reads nor writes any.
        isolated: whether to use child processes.
        with_sums: whether to compute the channel sums of each image.
    """

    def __init__(
        self, options: ImageOptions, attempts: Attempts | None, isolated: bool, with_sums: bool = False
    ) -> None:
        self._options = options
        self._attempts = attempts
        self._with_sums = with_sums
        self._limit_s = LEAST_S + options.max_pixels * SECONDS_PER_PIXEL
        self._isolated = _isolated(options, self._limit_s, with_sums) if isolated else None
        self._rejects = attempts.rejects() if attempts else {}

    def convert(self, path: str, data: bytes, md5: bytes) -> EncodedImage:
        """`images.convert` of the image at `path` with this MD5. Thread-safe.

        Raises:
            Reject: as `images.convert`; also if its decoder crashes or hangs, or did in an earlier attempt.
        """
        if self._rejects and (known := self._rejects.get(self._image(md5))):
            raise Reject(known.reason, known.detail)
        if self._isolated is None:
            return self._convert_here(path, data)
        try:
            return self._isolated.convert(data)
        except Reject as reject:
            if reject.reason in DEATHS and self._attempts:
                self._rejects[self._image(md5)] = reject  # for exact duplicates
                self._attempts.add_reject(self._image(md5), reject)
            raise

    def _convert_here(self, path: str, data: bytes) -> EncodedImage:
        with contextlib.ExitStack() as held:

            def reserve(size: int) -> None:
                _unwatch()  # waiting for memory isn't hanging
                held.enter_context(_MEMORY.held(size))
                _watch(path, self._limit_s)

            _watch(path, self._limit_s)
            try:
                return images.convert(data, self._options, reserve, self._with_sums)
            finally:
                _unwatch()

    def _image(self, md5: bytes) -> str:
        """A hash of an image and its options."""
        return hashlib.blake2b(md5 + json.dumps(self._options).encode(), digest_size=16).hexdigest()


# --- the watchdog: nothing but the end of the process stops a thread that hangs inside a C library

_watched: dict[int, tuple[float, float, str]] = {}  # thread → start, limit in seconds, path


def _watch(path: str, limit_s: float) -> None:
    """End the process if this thread takes longer for an image; the next attempt decodes it in a child process."""
    _start_watchdog()
    _watched[threading.get_ident()] = (time.monotonic(), limit_s, path)


def _unwatch() -> None:
    _watched.pop(threading.get_ident(), None)


@functools.cache
def _start_watchdog() -> None:
    threading.Thread(target=_look, name="watchdog", daemon=True).start()


def _look() -> None:
    while True:
        time.sleep(_LOOK_EVERY_S)
        now = time.monotonic()
        for start, limit_s, path in list(_watched.values()):
            if now - start > limit_s:
                line = f"error: {path!r} is still being decoded after {now - start:.0f} s: exiting"
                sys.stderr.write(f"\n{line}; the same command resumes, and decodes it in a child process\n")
                sys.stderr.flush()
                os._exit(1)
