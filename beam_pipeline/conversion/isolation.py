"""Decodes images in a child process: an image that crashes or hangs its decoder costs itself, and not the worker.

Used for what an earlier attempt died of, or may have. The same function makes the same bytes as in a worker. Both ends
of the pipe are here. Nothing that the child sends is unpickled: its decoder has read a hostile image.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import IO, Any

from beam_pipeline import images
from beam_pipeline.conversion import watchdog
from beam_pipeline.errors import ImageShardsError, Reject, one_line
from beam_pipeline.images import EncodedImage, ImageOptions
from beam_pipeline.images.formats import hide_warnings
from beam_pipeline.images.statistics import ChannelSums, channel_sums
from beam_pipeline.schema import RejectReason

# To the child: bytes of an image, which follows.
_REQUEST = struct.Struct("<Q")
# From it: kind; bytes of two texts with a NUL between, and of an image, which follow; height, width, the source's;
# pixels, the sums of their values in up to three channels, the sums of the squares.
_ANSWER = struct.Struct("<BHQ4I7Q")
_IMAGE, _REJECT, _ERROR = 1, 2, 3  # texts: the source's format and how it passed; reason and detail; a message
_READY = b"ready"
# By the wall clock, which other work on the machine stretches.
_WALL_FACTOR = 2.0
# Address space, not memory: far above what any permitted image takes (Pillow holds 4 bytes a pixel, and up to five such
# copies), so that only what runs away meets it.
_SPARE_BYTES = 4 << 30
_BYTES_A_PIXEL = 32
# A terminal sends them to all processes of a job: no image is to blame.
_FROM_OUTSIDE = (signal.SIGHUP, signal.SIGINT)

_one_at_a_time = threading.Lock()  # in a process: all children together take no more memory than one image may


class Died(Reject):
    """A child process ended while it decoded an image."""


class Failed(Exception):
    """In a child process `images.convert` raised what it never should; its type and text."""


class IsolatedDecoder:
    """Decodes in a child process, which starts when it is needed, stays, and ends with this object.

    Args:
        options: what to make of images.
    """

    def __init__(self, options: ImageOptions) -> None:
        self._options = options
        self._child: subprocess.Popen[bytes] | None = None

    def convert(self, data: bytes) -> tuple[EncodedImage, ChannelSums]:
        """`images.convert`, and the sums of the image's pixels. Safe from any thread.

        Raises:
            Reject: as `images.convert`.
            Died: a second child, a new one, died of it as well: `decoder_crash`, `decoder_timeout`, `out_of_memory`.
            Failed: an error of this program.
        """
        with _one_at_a_time:
            with contextlib.suppress(Died):
                return self._convert(data)
            return self._convert(data)

    def _convert(self, data: bytes) -> tuple[EncodedImage, ChannelSums]:
        child = self._child = self._child or self._start()
        assert child.stdin is not None and child.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it is dead: its missing answer tells
                child.stdin.write(_REQUEST.pack(len(data)))
                child.stdin.write(data)
                child.stdin.flush()
            return _received(child.stdout, self._options)
        except (Reject, Failed):
            raise
        except BaseException as error:  # also an interrupt: what comes next would be the answer to this request
            code = child.wait() if isinstance(error, EOFError) else None
            self._child = None
            self._end()
            if code is not None:
                raise _why(code, self._options) from None
            if isinstance(error, ValueError):
                raise Died(RejectReason.DECODER_CRASH, "its decoder gave no valid answer, twice") from None
            raise

    def _start(self) -> subprocess.Popen[bytes]:
        # Found where this package was, installed or not.
        parts = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")]
        child = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import serve; serve()", json.dumps(self._options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a dying interpreter's dump
            env=os.environ | {"PYTHONPATH": os.pathsep.join(part for part in parts if part)},
        )
        self._end = weakref.finalize(self, _end, child)
        assert child.stdout is not None
        if child.stdout.read(len(_READY)) != _READY:  # no image's fault
            raise ImageShardsError(f"can't start a process to decode in: it ended {_how(child.wait())}")
        return child


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    with contextlib.suppress(BrokenPipeError), child:  # closes its pipes and waits
        pass


def _received(answers: IO[bytes], options: ImageOptions) -> tuple[EncodedImage, ChannelSums]:
    """An answer of a child.

    Raises:
        Reject, Failed: it says so.
        EOFError: it ended first.
        ValueError: it is none that a child gives.
    """
    kind, text_bytes, image_bytes, *numbers = _ANSWER.unpack(_exactly(answers, _ANSWER.size))
    if image_bytes > _most_bytes(options):
        raise ValueError(image_bytes)
    first, _, second = _exactly(answers, text_bytes).decode("utf-8", "surrogatepass").partition("\0")
    data = _exactly(answers, image_bytes)
    if kind == _REJECT:
        raise Reject(RejectReason(first), second)
    if kind == _ERROR:
        raise Failed(first)
    if kind != _IMAGE or second not in ("", images.WHOLE, images.WITHOUT_METADATA):
        raise ValueError(kind, second)
    height, width, source_height, source_width, pixels, *sums = numbers
    image = EncodedImage(data, height, width, images.Source(first, source_height, source_width), second or None)
    return image, ChannelSums(pixels, tuple(sums[: options.channels]), tuple(sums[3 : 3 + options.channels]))


def _exactly(answers: IO[bytes], count: int) -> bytes:
    data = answers.read(count)
    if len(data) < count:
        raise EOFError
    return data


def _why(code: int, options: ImageOptions) -> Died:
    if -code in _FROM_OUTSIDE:
        raise ImageShardsError(f"the process that decodes was ended {_how(code)}; the same command resumes")
    if code == -signal.SIGALRM:
        return Died(RejectReason.DECODER_TIMEOUT, f"no end in {watchdog.limit_s(options):.0f} s, twice")
    if code == -signal.SIGKILL:  # not by us: the system takes the largest process when memory runs out
        return Died(RejectReason.OUT_OF_MEMORY, "its decoder was killed by the system, twice")
    return Died(RejectReason.DECODER_CRASH, f"its decoder ended {_how(code)}, twice")


def _how(code: int) -> str:
    return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


def _most_bytes(options: ImageOptions) -> int:
    return _SPARE_BYTES + _BYTES_A_PIXEL * options.max_pixels


# --- the child's end


def serve() -> None:
    """Answer requests until there are no more."""
    hide_warnings()
    values: Any = [tuple(value) if isinstance(value, list) else value for value in json.loads(sys.argv[1])]
    options = ImageOptions(*values)
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when memory runs out, this process is to go, not the worker
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, _most_bytes(options))
    # The kernel acts on these by itself: a decoder may never come back to the interpreter.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    answers.write(_READY)
    answers.flush()
    while head := requests.read(_REQUEST.size):
        data = requests.read(*_REQUEST.unpack(head))
        # It stays set: one that is idle for so long ends too, and one whose parent waits for more than it has sent.
        signal.setitimer(signal.ITIMER_REAL, _WALL_FACTOR * watchdog.limit_s(options))
        answers.writelines(_answer(data, options))
        answers.flush()


def _answer(data: bytes, options: ImageOptions) -> tuple[bytes, ...]:
    seen: list[ChannelSums] = []
    try:
        image = images.convert(data, options, lambda pixels: seen.append(channel_sums(pixels)))
    except Reject as reject:
        return _packed(_REJECT, f"{reject.reason}\0{reject.detail}")
    except Exception as error:  # no image's fault: to be heard of, not to be mistaken for a crash
        return _packed(_ERROR, f"{type(error).__name__}: {one_line(error)[:1000]}")
    (sums,), none = seen, (0,) * (3 - options.channels)
    numbers = (image.height, image.width, image.source.height, image.source.width, sums.count)
    text = f"{image.source.format}\0{image.passed or ''}"
    return _packed(_IMAGE, text, image.data, *numbers, *sums.totals, *none, *sums.squares, *none)


def _packed(kind: int, text: str, data: bytes = b"", *numbers: int) -> tuple[bytes, ...]:
    encoded = text.encode("utf-8", "surrogatepass")
    return _ANSWER.pack(kind, len(encoded), len(data), *(numbers or (0,) * 11)), encoded, data


def _limit(kind: int, amount: int) -> None:
    _, hard = resource.getrlimit(kind)
    soft = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
    with contextlib.suppress(ValueError, OSError):  # a system that knows no such limit
        resource.setrlimit(kind, (soft, hard))
