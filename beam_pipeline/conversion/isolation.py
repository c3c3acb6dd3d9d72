"""Decodes images in child processes: an image that crashes or hangs its decoder is rejected, and the worker lives on.

Both ends of the pipe are here. Nothing that a child sends is unpickled, since its decoder has read untrusted images.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import weakref
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing.connection import Connection, Pipe

import msgspec

from beam_pipeline import images
from beam_pipeline.errors import ImageShardsError, Reject
from beam_pipeline.images import PASSTHROUGH, EncodedImage, ImageOptions
from beam_pipeline.images.formats import hide_warnings
from beam_pipeline.images.memory import MIN_BOUND, SHARED, Reserve
from beam_pipeline.schema import RejectReason

# Reasons of images that killed a child process; `out_of_memory` may also be an exception in it.
DEATHS = (RejectReason.DECODER_CRASH, RejectReason.DECODER_TIMEOUT, RejectReason.OUT_OF_MEMORY)
# Limits of children are by the wall clock, which other work on the machine stretches.
_WALL_FACTOR = 2.0
_MAX_ANSWER_BYTES = 4 << 30  # more than any image has


class _Answer(msgspec.Struct, omit_defaults=True):
    """What a child says: it waits for so many bytes of memory, or why there is no image, or that but for its `data`."""

    reserve: int = 0
    reject: tuple[RejectReason, str] | None = None
    image: EncodedImage | None = None


_ANSWERS = msgspec.json.Decoder(_Answer)


class IsolatedDecoder:
    """Decodes in child processes, one per calling thread; they start when needed and end with this object.

    Args:
        options: how to convert images.
        limit_s: seconds that an image may take; twice that by the wall clock.
        with_sums: whether to compute the channel sums of each image.
    """

    def __init__(self, options: ImageOptions, limit_s: float, with_sums: bool) -> None:
        self._limit_s = limit_s
        self._start = partial(_Child, options, _WALL_FACTOR * limit_s, with_sums)
        self._idle: list[_Child] = []

    def convert(self, data: bytes) -> EncodedImage:
        """`images.convert`. Thread-safe.

        Raises:
            Reject: as `images.convert`; also one of `DEATHS` if the image killed two children, the second a new one.
        """
        for is_last in (False, True):
            with ExitStack() as held:

                def reserve(size: int) -> None:
                    held.enter_context(SHARED.held(size))

                if is_last:  # alone with all the memory, so that other images can't be to blame
                    reserve(MIN_BOUND)
                child = self._start() if is_last else self._idle_child()
                try:
                    answer = child.answer(data, None if is_last else reserve)
                except (EOFError, OSError):
                    death = self._why_died(child.process.wait())
                except (ValueError, RecursionError):
                    death = Reject(RejectReason.DECODER_CRASH, "its decoder gave no valid answer, twice")
                else:
                    # A child that hasn't answered isn't used again: its next answer may be the one to this request.
                    self._idle.append(child)
                    if isinstance(answer, Reject):
                        raise answer
                    return answer
        raise death

    def _idle_child(self) -> _Child:
        with suppress(IndexError):
            return self._idle.pop()
        return self._start()

    def _why_died(self, code: int) -> Reject:
        if code == -signal.SIGALRM:
            return Reject(RejectReason.DECODER_TIMEOUT, f"did not finish within {self._limit_s:.0f} s (2 attempts)")
        if code == -signal.SIGKILL:  # by the system, when memory runs out
            return Reject(RejectReason.OUT_OF_MEMORY, "its decoder was killed by the system, twice")
        return Reject(RejectReason.DECODER_CRASH, f"its decoder ended {_ending(code)}, twice")


def _ending(code: int) -> str:
    return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


class _Child:
    """A child process and the pipe to it; ends with this object.

    Raises:
        ImageShardsError: it can't start.
    """

    def __init__(self, options: ImageOptions, wall_s: float, with_sums: bool) -> None:
        self._pipe, theirs = Pipe()
        code = f"from {__name__} import serve; serve()"
        settings = msgspec.json.encode((options, with_sums)).decode()
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(theirs.fileno()), str(wall_s), settings],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # a terminal's signals to all processes of a job must not kill it
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # a dying interpreter's dump
        )
        weakref.finalize(self, _end, self.process)
        theirs.close()
        try:
            self._pipe.recv_bytes()
        except (EOFError, OSError):
            text = f"can't start a process to decode in: it ended {_ending(self.process.wait())}"
            raise ImageShardsError(text) from None

    def answer(self, data: bytes, reserve: Reserve | None) -> EncodedImage | Reject:
        """What `images.convert` returned or raised; `reserve` blocks until there is memory for it, None if there is.

        Raises:
            EOFError, OSError: the child died.
            ValueError, RecursionError: it sent something else.
        """
        self._pipe.send_bytes(data)
        answer = _ANSWERS.decode(self._pipe.recv_bytes(_MAX_ANSWER_BYTES))
        if answer.reserve > 0:
            if reserve:
                reserve(answer.reserve)
            self._pipe.send_bytes(b"")
            answer = _ANSWERS.decode(self._pipe.recv_bytes(_MAX_ANSWER_BYTES))
        encoded = self._pipe.recv_bytes(_MAX_ANSWER_BYTES)
        if answer.reject:
            return Reject(*answer.reject)
        if answer.image is None or answer.image.passthrough not in (None, *PASSTHROUGH):
            raise ValueError("no answer of `serve`")
        return answer.image._replace(data=encoded)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


# --- the child's end


def serve() -> None:
    """Answer requests until there are no more."""
    hide_warnings()
    options, with_sums = msgspec.json.decode(sys.argv[3], type=tuple[ImageOptions, bool])
    pipe, limit_s = Connection(int(sys.argv[1])), float(sys.argv[2])
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when memory runs out, the system should kill this process, not the worker
    # The default action needs no interpreter, to which a decoder that hangs doesn't return.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})

    def reserve(size: int) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)  # waiting for memory isn't hanging
        pipe.send_bytes(msgspec.json.encode(_Answer(reserve=size)))
        pipe.recv_bytes()
        signal.setitimer(signal.ITIMER_REAL, limit_s)

    pipe.send_bytes(b"ready")
    with suppress(EOFError, OSError):
        while True:
            data = pipe.recv_bytes()
            # Never cleared: it also ends a child that is idle for so long, or stalls while it answers.
            signal.setitimer(signal.ITIMER_REAL, limit_s)
            answer, encoded = _answer(data, options, reserve, with_sums)
            pipe.send_bytes(msgspec.json.encode(answer))
            pipe.send_bytes(encoded)


def _answer(data: bytes, options: ImageOptions, reserve: Reserve, with_sums: bool) -> tuple[_Answer, bytes]:
    try:
        image = images.convert(data, options, reserve, with_sums)
    except Reject as reject:
        return _Answer(reject=(RejectReason(reject.reason), reject.detail)), b""
    return _Answer(image=image._replace(data=b"")), image.data
