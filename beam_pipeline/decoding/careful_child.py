"""The subprocess that `careful` decodes in: `python -m beam_pipeline.decoding.careful_child`, image after image.

On stdin a line of JSON (`bytes`, `options`, `cpu_s`) and so many bytes; on stdout a line with `reject`, with `error`,
or with `image`, `sums` and `bytes`, and so many bytes. For a large image a line with `claim` comes before that, the
memory it takes: a line on stdin says that it may. Before all that it says `ready`. It ends with its stdin.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
from dataclasses import astuple
from typing import IO, Any

from PIL import Image

from beam_pipeline import images
from beam_pipeline.decoding.pixel_sums import ChannelSums, channel_sums
from beam_pipeline.errors import Reject, one_line

# Address space, not memory: far above what any permitted image takes (Pillow holds 4 bytes a pixel, and up to five such
# copies), so that only what runs away meets it.
_SPARE_BYTES = 4 << 30
_BYTES_A_PIXEL = 32


def main() -> None:
    """Answer requests until there are no more."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when memory runs out, this process is to go, not the worker
    _limit(resource.RLIMIT_CORE, 0)
    answers.write(b"ready\n")
    answers.flush()
    requests = sys.stdin.buffer
    while line := requests.readline():
        request = json.loads(line)
        _answer(request, requests, answers)
        answers.flush()


def _answer(request: dict[str, Any], requests: IO[bytes], answers: IO[bytes]) -> None:
    data = requests.read(request["bytes"])
    options = images.ImageOptions(*map(_tuples, request["options"]))
    _limit(resource.RLIMIT_AS, _SPARE_BYTES + _BYTES_A_PIXEL * options.max_pixels)
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + request["cpu_s"]) + 1)
    sums: list[ChannelSums] = []

    def look(pixels: Image.Image) -> None:
        sums.append(channel_sums(pixels))

    def claim(count: int) -> None:
        answers.write(json.dumps({"claim": count}).encode() + b"\n")
        answers.flush()
        requests.readline()

    try:
        image = images.convert(data, options, look, claim)
    except Reject as reject:
        answers.write(json.dumps({"reject": [str(reject.reason), reject.detail]}).encode() + b"\n")
        return
    except Exception as error:  # no image's fault: to be heard of, not to be mistaken for a crash
        answers.write(json.dumps({"error": f"{type(error).__name__}: {one_line(error)}"}).encode() + b"\n")
        return
    answer = {"image": image[1:], "sums": astuple(sums[0]), "bytes": len(image.data)}
    answers.write(json.dumps(answer).encode() + b"\n" + image.data)


def _tuples(value: Any) -> Any:
    """JSON has lists only."""
    return tuple(value) if isinstance(value, list) else value


def _limit(kind: int, amount: int) -> None:
    _, hard = resource.getrlimit(kind)
    soft = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
    with contextlib.suppress(ValueError, OSError):  # a system that knows no such limit
        resource.setrlimit(kind, (soft, hard))


if __name__ == "__main__":
    main()
