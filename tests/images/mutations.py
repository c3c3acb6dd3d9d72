"""Corrupt image files, each decided by its number: for the short fuzz in the tests and the long one in benchmarks."""

from __future__ import annotations

import hashlib
import random
import struct
import zlib
from typing import NamedTuple

from beam_pipeline.errors import Reject
from beam_pipeline.images import SUBSAMPLING, ImageOptions, convert
from beam_pipeline.images.geometry import RESIZE_MODES
from beam_pipeline.images.resize import RESAMPLING
from beam_pipeline.schema import RejectReason
from tests.images.kinds import broken, every_kind

TARGETS = ((1, 1), (7, 5), (24, 24), (40, 60))
_TELLING = (
    0,
    *(1 << bits for bits in (0, 1, 3, 7, 8, 15, 16, 24, 31)),
    *((1 << bits) - 1 for bits in (3, 7, 8, 15, 16, 31, 32)),
)


class Case(NamedTuple):
    """One corrupt file, and what is asked of it."""

    kind: str
    data: bytes
    options: ImageOptions


def case(seed: int, number: int, options: ImageOptions) -> Case:
    """The case of a number: the same for the same seed and files; `options` are what isn't varied."""
    random_ = random.Random(f"{seed}-{number}")
    sources = every_kind() | {name: data for name, (_, data) in broken().items()}
    kind = random_.choice(sorted(sources))
    data = bytearray(sources[kind])
    for _ in range(random_.choice((1, 1, 1, 2, 3, 8))):
        _damage(data, random_, sources)
    if data[:4] == b"\x89PNG" and random_.random() < 0.7:
        _correct_crcs(data)
    varied = options._replace(
        size=random_.choice((None, *TARGETS)),
        resize_mode=random_.choice(RESIZE_MODES),
        resample=random_.choice(sorted(RESAMPLING)),
        background=random_.choice((None, (10, 200, 30))),
        channels=random_.choice((1, 3)),
        format=random_.choice(("jpeg", "png")),
        jpeg_quality=random_.choice((1, 50, 90, 100)),
        jpeg_subsampling=random_.choice(sorted(SUBSAMPLING)),
        optimize=random_.random() < 0.2,
        allow_truncated=random_.random() < 0.3,
    )
    return Case(kind, bytes(data), varied)


def _damage(data: bytearray, random_: random.Random, sources: dict[str, bytes]) -> None:
    """Change some bytes, most often near the beginning, where the structure is."""
    if not data:
        data += random_.randbytes(20)
    end = len(data) if random_.random() < 0.5 else min(len(data), 600)
    place = random_.randrange(end)
    how = random_.randrange(8)
    if how == 0:
        data[place] ^= 1 << random_.randrange(8)
    elif how == 1:
        data[place] = random_.randrange(256)
    elif how == 2:  # a number of 2 or 4 bytes, of either order
        form = random_.choice(("<H", ">H", "<I", ">I"))
        number = random_.choice(_TELLING) & (0xFFFF if form[1] == "H" else 0xFFFFFFFF)
        data[place : place + struct.calcsize(form)] = struct.pack(form, number)
    elif how == 3:
        del data[place:]
    elif how == 4:
        del data[place : place + random_.randrange(1, 64)]
    elif how == 5:
        data[place:place] = random_.randbytes(random_.randrange(1, 64))
    elif how == 6:
        data[place:place] = data[place : place + random_.randrange(1, 200)]
    else:
        other = sources[random_.choice(sorted(sources))]
        start = random_.randrange(len(other) + 1)
        data[place : place + 40] = other[start : start + 40]


def _correct_crcs(data: bytearray) -> None:
    """Correct the CRCs of a PNG, so that damage gets further than to them."""
    position = 8
    while position + 12 <= len(data):
        length = int.from_bytes(data[position : position + 4], "big")
        end = position + 8 + length
        if end + 4 > len(data):
            return
        data[end : end + 4] = struct.pack(">I", zlib.crc32(data[position + 4 : end]))
        position = end + 4


def outcome(some: Case) -> tuple[str, str]:
    """What becomes of a case: `converted`, `passed` or why it is rejected; the hash of what came out, or the detail."""
    options = some.options
    try:
        image = convert(some.data, options)
    except Reject as reject:
        assert reject.reason in set(RejectReason), reject.reason
        assert " 0x" not in reject.detail and len(reject.detail) < 120 and reject.detail.isprintable(), reject.detail
        return str(reject.reason), reject.detail
    assert image.data[:2] == (b"\xff\xd8" if options.format == "jpeg" else b"\x89P")
    if options.size is not None and options.resize_mode in ("stretch", "crop", "pad"):
        assert (image.height, image.width) == options.size
    return "passed" if image.passthrough else "converted", hashlib.sha256(image.data).hexdigest()[:16]
