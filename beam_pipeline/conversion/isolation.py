"""Decodes images in a child process: an image that crashes or hangs its decoder costs itself, and not the worker.

Both ends of the pipe are here. Nothing that the child sends is unpickled, since its decoder has read a hostile image.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from multiprocessing.connection import Connection, Pipe
from typing import Any

from beam_pipeline import images
from beam_pipeline.errors import ImageShardsError, Reject
from beam_pipeline.images import PASSTHROUGH, ChannelSums, EncodedImage, ImageOptions, Source
from beam_pipeline.images.formats import hide_warnings
from beam_pipeline.schema import RejectReason

# Reasons of images whose child process died; `out_of_memory` may also be an exception in it.
DEATHS = (RejectReason.DECODER_CRASH, RejectReason.DECODER_TIMEOUT, RejectReason.OUT_OF_MEMORY)
# By the wall clock, which other work on the machine stretches.
_WALL_FACTOR = 2.0
_MOST_BYTES = 4 << 30  # of an answer: more than any image has

_one_at_a_time = threading.Lock()  # in a process: all children together take no more memory than one image may


class IsolatedDecoder:
    """Decodes in a child process, which starts when it is needed, stays, and ends with this object.

    Args:
        options: what to make of images.
        limit_s: seconds that an image may take; twice that by the clock.
    """

    def __init__(self, options: ImageOptions, limit_s: float) -> None:
        self._options = options
        self._limit_s = limit_s
        self._child: _Child | None = None

    def convert(self, data: bytes) -> EncodedImage:
        """`images.convert` with the sums of the pixels. Safe from any thread.

        Raises:
            Reject: as `images.convert`; also one of `DEATHS` if a second child, a new one, died of the image as well.
        """
        with _one_at_a_time:
            for _ in range(2):
                # Only a child that has answered is used again: else its next answer may be the one to this request.
                child, self._child = self._child or _Child(self._options, _WALL_FACTOR * self._limit_s), None
                try:
                    answer = child.answer(data)
                except (EOFError, OSError):
                    death = self._why(child.process.wait())
                except (ValueError, RecursionError):
                    death = Reject(RejectReason.DECODER_CRASH, "its decoder gave no valid answer, twice")
                else:
                    self._child = child
                    if isinstance(answer, Reject):
                        raise answer
                    return answer
            raise death

    def _why(self, code: int) -> Reject:
        if code == -signal.SIGALRM:
            return Reject(RejectReason.DECODER_TIMEOUT, f"no end in {self._limit_s:.0f} s, twice")
        if code == -signal.SIGKILL:  # not by us: the system takes the largest process when memory runs out
            return Reject(RejectReason.OUT_OF_MEMORY, "its decoder was killed by the system, twice")
        return Reject(RejectReason.DECODER_CRASH, f"its decoder ended {_how(code)}, twice")


def _how(code: int) -> str:
    return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


class _Child:
    """A child process and the pipe to it; ends with this object.

    Raises:
        ImageShardsError: it can't start.
    """

    def __init__(self, options: ImageOptions, wall_s: float) -> None:
        self._pipe, theirs = Pipe()
        code = f"from {__name__} import serve; serve()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(theirs.fileno()), str(wall_s), json.dumps(options)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # what a terminal sends to all processes of a job isn't an image's fault
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # a dying interpreter's dump
        )
        weakref.finalize(self, _end, self.process)
        theirs.close()
        try:
            self._pipe.recv_bytes()
        except (EOFError, OSError):
            text = f"can't start a process to decode in: it ended {_how(self.process.wait())}"
            raise ImageShardsError(text) from None

    def answer(self, data: bytes) -> EncodedImage | Reject:
        """What `images.convert` returned or raised.

        Raises:
            EOFError, OSError: the child died.
            ValueError, RecursionError: it sent something else.
        """
        self._pipe.send_bytes(data)
        answer, encoded = json.loads(self._pipe.recv_bytes(_MOST_BYTES)), self._pipe.recv_bytes(_MOST_BYTES)
        match answer:
            case {"reject": [str(reason), str(detail)]}:
                return Reject(RejectReason(reason), detail)
            case {"image": [[int(), int()] as size, [str(), int(), int()] as source, how, [int(), [*_], [*_]] as sums]}:
                if how in (None, *PASSTHROUGH):
                    sums = ChannelSums(sums[0], tuple(sums[1]), tuple(sums[2]))
                    return EncodedImage(encoded, size[0], size[1], Source(*source), how, sums)
        raise ValueError("no answer of `serve`")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


# --- the child's end


def serve() -> None:
    """Answer requests until there are no more."""
    hide_warnings()
    values: Any = [tuple(value) if isinstance(value, list) else value for value in json.loads(sys.argv[3])]
    options, pipe = ImageOptions(*values), Connection(int(sys.argv[1]))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when memory runs out, this process is to go, not the worker
    # The kernel acts on this by itself: a decoder may never come back to the interpreter.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    pipe.send_bytes(b"ready")
    with contextlib.suppress(EOFError, OSError):
        while True:
            data = pipe.recv_bytes()
            # It stays set: a child that is idle for so long ends too, as does one whose parent waits for more bytes.
            signal.setitimer(signal.ITIMER_REAL, float(sys.argv[2]))
            answer, encoded = _answer(data, options)
            pipe.send_bytes(json.dumps(answer).encode())
            pipe.send_bytes(encoded)


def _answer(data: bytes, options: ImageOptions) -> tuple[Any, bytes]:
    try:
        image = images.convert(data, options, with_sums=True)
    except Reject as reject:
        return {"reject": [reject.reason, reject.detail]}, b""
    assert image.sums is not None
    sums = [image.sums.count, image.sums.totals, image.sums.squares]
    return {"image": [[image.height, image.width], image.source, image.passthrough, sums]}, image.data
