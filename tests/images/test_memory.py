"""Memory: what an image takes is foretold from its header and bounded."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from beam_pipeline.errors import Reject
from beam_pipeline.images import ImageOptions, convert, memory
from beam_pipeline.images.containers import APP14, jpeg_segments
from tests.images.kinds import cmyk, heic_kinds, png, png_chunk, turned, with_alpha, without_segment
from tests.images.profiles import wide_profile
from tests.images.test_codec import DEFAULTS, OWN_SIZE, rejected
from tests.make import ROOT, encoded, picture

JPEG = DEFAULTS._replace(format="jpeg")
JPEG_OF_OWN_SIZE, GRAY_PNG = JPEG._replace(size=None), OWN_SIZE._replace(channels=1)
SIDES = 1500, 1200


def sixteen_bits(image: Image.Image, *chunks: bytes) -> bytes:
    image.putpixel((0, 0), (0, 0, 0))
    rows = np.asarray(image).astype(">u2") * np.uint16(257)
    return png(*image.size, 16, 2, [row.astype(">u2").tobytes() for row in rows], *chunks)


KINDS: dict[str, Callable[[Image.Image], bytes]] = {
    "jpeg": encoded,
    "jpeg of a profile, turned": lambda image: encoded(image, icc_profile=wide_profile(), exif=turned(6)),
    "progressive": lambda image: encoded(image, progressive=True, subsampling=0),
    "progressive ink": lambda image: encoded(cmyk(image), progressive=True, subsampling=0),
    "ink unmarked": lambda image: without_segment(encoded(cmyk(image), subsampling=0), APP14),
    "png": lambda image: encoded(image, "PNG", compress_level=1),
    "png of alpha": lambda image: encoded(with_alpha(image), "PNG", compress_level=1),
    "png of a transparent colour": lambda image: encoded(image, "PNG", compress_level=1, transparency=(0, 0, 0)),
    "png of a transparent colour of 16 bits": lambda image: sixteen_bits(image, png_chunk(b"tRNS", bytes(6))),
    "png of a palette with alpha": lambda image: encoded(with_alpha(image).quantize(16), "PNG", compress_level=1),
    "webp": lambda image: encoded(image, "WEBP", method=0),
    "webp of alpha": lambda image: encoded(with_alpha(image), "WEBP", lossless=True, quality=0, method=0),
    "gif": lambda image: encoded(image.quantize(16), "GIF"),
    "tiff of one strip": lambda image: encoded(image, "TIFF", compression="tiff_adobe_deflate", strip_size=1 << 30),
    "avif": lambda image: encoded(with_alpha(image), "AVIF", speed=10, subsampling="4:4:4"),
} | ({"heic": lambda image: encoded(with_alpha(image), "HEIF", quality=50)} if heic_kinds() else {})

# Forks for each file, so that nothing of one is measured with another.
MEASURE = """
import contextlib, json, os, re, sys
from beam_pipeline.images import ImageOptions, convert, memory

def status(key):
    return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

memory.LARGE = 0  # for every image memory is reserved
with contextlib.suppress(ImportError):
    import pillow_heif
for path, values in json.load(sys.stdin):
    options = ImageOptions(*(tuple(value) if isinstance(value, list) else value for value in values))
    data = open(path, "rb").read()
    if os.fork() == 0:
        said, before = [], status("VmRSS")
        convert(data, options, said.append)
        print(path, status("VmHWM") - before, max(said), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures by Linux' /proc")
def test_no_kind_takes_more_than_was_foretold(tmp_path: Path) -> None:
    image, job = picture(*SIDES, seed=2), []
    for number, (kind, make) in enumerate(KINDS.items()):
        path = tmp_path / f"{number:02d} {kind}"
        path.write_bytes(make(image))
        job += [(str(path), options) for options in (JPEG, OWN_SIZE, JPEG_OF_OWN_SIZE._replace(optimize=True))]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}  # freed memory goes back, and isn't used unseen
    how = {"input": json.dumps(job), "env": environment, "cwd": ROOT, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", MEASURE], check=True, **how)
    lines = [line.rsplit(" ", 2) for line in done.stdout.splitlines()]
    assert len(lines) == len(job)
    pixels = SIDES[0] * SIDES[1]
    for path, taken, foretold in lines:
        assert int(taken) <= int(foretold) + (4 << 20), (path, int(taken) / pixels, int(foretold) / pixels)
    assert max(int(taken) for _, taken, _ in lines) > 15 * pixels, "it measures something"


def claiming(data: bytes, width: int = 14_000, height: int = 12_780) -> bytes:
    """A small JPEG whose header says that it is large."""
    (frame,) = (part for part in jpeg_segments(data) if part.kind in (0xC0, 0xC2))
    return data[: frame.start + 5] + struct.pack(">HH", height, width) + data[frame.start + 9 :]


def webp_claiming(width: int, height: int) -> bytes:
    """A lossless WebP with hardly any data: https://developers.google.com/speed/webp/docs/webp_lossless_bitstream_specification."""
    data = b"\x2f" + struct.pack("<I", (width - 1) | (height - 1) << 14) + bytes(11)
    return b"RIFF" + struct.pack("<I", len(data) + 12) + b"WEBPVP8L" + struct.pack("<I", len(data)) + data


def tiff_claiming(tile: int) -> bytes:
    """A small TIFF in a large tile, compressed."""
    tags = {256: 16, 257: 16, 258: 8, 259: 8, 262: 1, 277: 1, 322: tile, 323: tile, 324: 8, 325: 4}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<I", 12) + b"\x78\x9c\0\0" + struct.pack("<H", len(tags)) + entries + bytes(4)


SMALL = picture(64, 64)
PROGRESSIVE = {"progressive": True, "subsampling": 0}
# libjpeg keeps all coefficients of any JPEG that has more than one scan.
A_SCAN_A_CHANNEL = encoded(SMALL, subsampling=0)
(_SCAN,) = (part for part in jpeg_segments(A_SCAN_A_CHANNEL) if part.kind == 0xDA)
A_SCAN_A_CHANNEL = (
    A_SCAN_A_CHANNEL[: _SCAN.start] + b"\xff\xda\0\x08\1\1\0\0\x3f\0" + A_SCAN_A_CHANNEL[_SCAN.start + 14 :]
)


@pytest.mark.parametrize(
    ("data", "options", "said"),
    [
        (webp_claiming(10_000, 10_000), JPEG, "10000x10000 pixels of WEBP RGB take 1621 MiB"),
        (png(13_000, 10_000, 8, 6, [b""]), JPEG, "13000x10000 pixels of PNG RGBA take 1115 MiB"),
        (png(15_000, 10_000, 8, 4, [b""]), JPEG, "15000x10000 pixels of PNG LA take 1287 MiB"),
        (png(10_000, 10_000, 8, 2, [b""]), GRAY_PNG, "10000x10000 pixels of PNG RGB take 1335 MiB"),
        (claiming(encoded(SMALL, **PROGRESSIVE)), JPEG_OF_OWN_SIZE, "14000x12780 pixels of JPEG RGB take 2047 MiB"),
        (claiming(A_SCAN_A_CHANNEL), JPEG_OF_OWN_SIZE, "14000x12780 pixels of JPEG RGB take 2047 MiB"),
        (
            claiming(encoded(cmyk(SMALL), **PROGRESSIVE), 12_000, 12_000),
            JPEG,
            "12000x12000 pixels of JPEG CMYK take 1115 MiB",
        ),
        (tiff_claiming(40_000), JPEG, "16x16 pixels of TIFF L take 1525 MiB"),
    ],
)
def test_what_takes_more_than_the_bound_is_rejected_by_its_header(data: bytes, options: ImageOptions, said) -> None:
    assert rejected(data, options) == ("too_many_pixels", f"{said}, --max_pixels 178956970 permits 1024 MiB")


@pytest.mark.parametrize(
    ("data", "options", "mebibytes"),
    [
        (claiming(encoded(SMALL)), JPEG_OF_OWN_SIZE, 1023),
        (claiming(encoded(SMALL, progressive=True, subsampling=2)), JPEG, 522),
        (png(14_000, 12_780, 8, 2, [b""]), JPEG, 682),
        (webp_claiming(7_700, 8_000), JPEG, 998),
    ],
)
def test_what_takes_less_is_told_before_it_is_decoded(data: bytes, options: ImageOptions, mebibytes: int) -> None:
    def stop(count: int) -> None:
        raise Reject("reserved", str(count >> 20))

    with pytest.raises(Reject) as caught:
        convert(data, options, stop)
    assert caught.value.args == ("reserved", str(mebibytes))


def test_a_photo_of_108_megapixels_reserves_no_memory_where_it_is_resized() -> None:
    photo = claiming(encoded(SMALL, exif=turned(6)), 12_000, 9_000)
    assert convert(photo, JPEG, lambda count: pytest.fail(str(count))).source == ("JPEG", 12_000, 9_000)


def test_a_higher_limit_permits_more_memory_and_a_lower_one_no_less() -> None:
    assert memory.bound(DEFAULTS) == pytest.approx(1 << 30, rel=1e-6)
    assert memory.bound(DEFAULTS._replace(max_pixels=10**9)) == 6 * 10**9
    assert memory.bound(DEFAULTS._replace(max_pixels=1000)) == 1 << 30
    data = webp_claiming(10_000, 10_000)
    assert rejected(data, JPEG._replace(max_pixels=300_000_000))[0] == "decode_error"
