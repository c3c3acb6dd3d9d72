"""Decodes images in subprocesses with limits: what crashes or hangs a decoder costs one image, and not the worker.

Used for what an earlier attempt died of, or may have. The bytes are those of the normal path: the same function makes
them. A subprocess takes one image at a time; a few of them serve all decode threads and stay.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from beam_pipeline import images
from beam_pipeline.decoding import watchdog
from beam_pipeline.decoding.pixel_sums import ChannelSums
from beam_pipeline.decoding.room import ROOM
from beam_pipeline.errors import ImageShardsError, Reject
from beam_pipeline.images import EncodedImage, ImageOptions
from beam_pipeline.schema import RejectReason

_PIPE_BYTES = 1 << 20
# By the wall clock, which other work on the machine stretches; by the CPU's the limit is the watchdog's.
_WALL_FACTOR = 2.0
_START_S = 120.0


class Died(Reject):
    """A subprocess ended, or had to be ended, while it decoded an image."""


class Failed(Exception):
    """In a subprocess `images.convert` raised what it never should; its type and text."""


class Decoders:
    """Subprocesses that decode, started as they are needed. Safe from any thread."""

    def __init__(self) -> None:
        self._free: list[_Child] = []
        self._alone = threading.Lock()

    def convert(self, data: bytes, options: ImageOptions) -> tuple[EncodedImage, ChannelSums]:
        """`images.convert`, and the sums of its pixels.

        Raises:
            Reject: as `images.convert`.
            Died: a second subprocess, fresh and alone, died of it as well: `decoder_crash`, `decoder_timeout`,
                `out_of_memory`.
            Failed: an error of this program.
        """
        try:
            return self._convert_in(self._take(), data, options)
        except Died:
            with self._alone:  # no two such images at a time: one may have taken the other's memory
                return self._convert_in(_Child(), data, options)

    def _convert_in(self, child: _Child, data: bytes, options: ImageOptions) -> tuple[EncodedImage, ChannelSums]:
        try:
            result = child.convert(data, options)
        except Died:
            child.kill()
            raise
        except (Reject, Failed):
            self._free.append(child)
            raise
        self._free.append(child)
        return result

    def _take(self) -> _Child:
        try:
            return self._free.pop()
        except IndexError:
            return _Child()


class _Child:
    """One subprocess; `beam_pipeline.decoding.careful_child` is its other end."""

    def __init__(self) -> None:
        # Found where this package was, installed or not.
        parts = [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(part for part in parts if part)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "beam_pipeline.decoding.careful_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a dying interpreter's dump
            env=environment,
        )
        self._received = b""
        try:
            self._line(time.monotonic() + _START_S, _START_S)
        except Died as died:  # no image's fault
            self.kill()
            raise ImageShardsError(f"can't start a subprocess to decode in: {died.detail}") from None

    def convert(self, data: bytes, options: ImageOptions) -> tuple[EncodedImage, ChannelSums]:
        """Convert one image.

        Raises:
            Reject: as `images.convert`.
            Died: it didn't survive.
            Failed: it raised something else.
        """
        limit_s = watchdog.limit_s(options)
        request = json.dumps({"bytes": len(data), "options": options, "cpu_s": limit_s})
        self._send(request.encode() + b"\n", data)
        reply, end = self._reply(limit_s)
        if claimed := reply.get("claim"):
            ROOM.take(claimed)
            try:
                self._send(b"\n")
                reply, end = self._reply(limit_s)
            finally:
                ROOM.give(claimed)
        if "reject" in reply:
            raise Reject(*reply["reject"])
        if "error" in reply:
            raise Failed(reply["error"])
        height, width, source, *more = reply["image"]
        sums = reply["sums"]
        image = EncodedImage(self._exactly(reply["bytes"], end, limit_s), height, width, images.Source(*source), *more)
        return image, ChannelSums(sums[0], tuple(sums[1]), tuple(sums[2]))

    def _send(self, *parts: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead: the answer will tell
            for part in parts:
                self._process.stdin.write(part)
            self._process.stdin.flush()

    def _reply(self, limit_s: float) -> tuple[dict[str, Any], float]:
        """A line of the subprocess, and when what follows it has to be there."""
        end = time.monotonic() + _WALL_FACTOR * limit_s
        reply: dict[str, Any] = json.loads(self._line(end, limit_s))
        return reply, end

    def kill(self) -> None:
        """End it, dead or alive."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()

    def _line(self, end: float, limit_s: float) -> bytes:
        while b"\n" not in self._received:
            self._receive(end, limit_s)
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _exactly(self, count: int, end: float, limit_s: float) -> bytes:
        while len(self._received) < count:
            self._receive(end, limit_s)
        data, self._received = self._received[:count], self._received[count:]
        return data

    def _receive(self, end: float, limit_s: float) -> None:
        assert self._process.stdout is not None
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN | select.POLLHUP)
        if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
            raise _timeout(limit_s)
        part = os.read(self._process.stdout.fileno(), _PIPE_BYTES)
        if not part:
            raise _why(self._process.wait(), limit_s)
        self._received += part


def _timeout(limit_s: float) -> Died:
    return Died(RejectReason.DECODER_TIMEOUT, f"no end in {limit_s:.0f} s, twice")


def _why(code: int, limit_s: float) -> Died:
    if code == -signal.SIGXCPU:
        return _timeout(limit_s)
    if code == -signal.SIGKILL:  # not by us: the system takes the largest process when memory runs out
        return Died(RejectReason.OUT_OF_MEMORY, "its decoder was killed by the system, twice")
    how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    return Died(RejectReason.DECODER_CRASH, f"its decoder ended {how}, twice")


@functools.cache
def shared_decoders() -> Decoders:
    """The subprocesses of this process."""
    return Decoders()
