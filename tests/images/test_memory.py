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
from tests.images.tiffs import BLACK_IS_ZERO, DEFLATE, YCBCR, page, tiff
from tests.make import ROOT, encoded, picture

JPEG = DEFAULTS._replace(format="jpeg")
JPEG_OF_OWN_SIZE, GRAY_PNG = JPEG._replace(size=None), OWN_SIZE._replace(channels=1)
SIDES = 1000, 800


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
    "tiff in planes of 16 bits": lambda image: tiff(page(np.asarray(image) * np.uint16(257), bits=16, planar=True)),
    "tiff of ycbcr": lambda image: tiff(page(np.asarray(image.convert("YCbCr")), YCBCR, tags={530: [1, 1]})),
    "avif": lambda image: encoded(with_alpha(image), "AVIF", speed=10, subsampling="4:4:4"),
} | ({"heic": lambda image: encoded(with_alpha(image), "HEIF", quality=50)} if heic_kinds() else {})

# Forks for each file, so that nothing of one is measured with another.
MEASURE = """
import contextlib, json, os, re, sys
from beam_pipeline.images import ImageOptions, convert, memory, resize

def status(key):
    return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

memory.LARGE = 0  # for every image memory is reserved
resize.kernel()  # checked once, for all
with contextlib.suppress(ImportError):
    import pillow_heif
for path, values in json.load(sys.stdin):
    options = ImageOptions(*(tuple(value) if isinstance(value, list) else value for value in values))
    data, small = open(path, "rb").read(), open(path + ".small", "rb").read()
    if os.fork() == 0:
        convert(small, options)  # libraries' pages count, too, and as many as the kernel likes to map at once
        said, before = [], status("VmRSS")
        convert(data, options, said.append)
        print(path, status("VmHWM") - before, max(said), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures by Linux' /proc")
def test_no_kind_takes_more_than_was_foretold(tmp_path: Path) -> None:
    image, job = picture(*SIDES, seed=2), []
    for number, (kind, make) in enumerate(KINDS.items()):
        path = tmp_path / f"{number:02d} {kind}"
        path.write_bytes(make(image))
        Path(f"{path}.small").write_bytes(make(picture(40, 30)))
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


SMALL = picture(64, 64)
_SIDES = {322: 40_000, 323: 40_000}
IN_A_LARGE_TILE = tiff(
    page(np.zeros((16, 16, 1), np.uint8), BLACK_IS_ZERO, compression=DEFLATE, tile=(16, 16), tags=_SIDES)
)
PROGRESSIVE = {"progressive": True, "subsampling": 0}
# libjpeg keeps all coefficients of any JPEG that has more than one scan.
A_SCAN_A_CHANNEL = encoded(SMALL, subsampling=0)
(_SCAN,) = (part for part in jpeg_segments(A_SCAN_A_CHANNEL) if part.kind == 0xDA)
A_SCAN_A_CHANNEL = (
    A_SCAN_A_CHANNEL[: _SCAN.start] + b"\xff\xda\0\x08\1\1\0\0\x3f\0" + A_SCAN_A_CHANNEL[_SCAN.start + 14 :]
)


def stop(count: int) -> None:
    raise Reject("reserved", str(count >> 20))


# fmt: off
# A file, its options, and either what of it is refused or "", with the MiB that it takes.
CLAIMS = [
    (webp_claiming(10_000, 10_000), JPEG, "10000x10000 pixels of WEBP RGB", 1621),
    (png(13_000, 10_000, 8, 6, [b""]), JPEG, "13000x10000 pixels of PNG RGBA", 1115),
    (png(15_000, 10_000, 8, 4, [b""]), JPEG, "15000x10000 pixels of PNG LA", 1287),
    (png(10_000, 10_000, 8, 2, [b""]), GRAY_PNG, "10000x10000 pixels of PNG RGB", 1335),
    (claiming(encoded(SMALL, **PROGRESSIVE)), JPEG_OF_OWN_SIZE, "14000x12780 pixels of JPEG RGB", 2047),
    (claiming(A_SCAN_A_CHANNEL), JPEG_OF_OWN_SIZE, "14000x12780 pixels of JPEG RGB", 2047),
    (claiming(encoded(cmyk(SMALL), **PROGRESSIVE), 12_000, 12_000), JPEG, "12000x12000 pixels of JPEG CMYK", 1115),
    (IN_A_LARGE_TILE, JPEG, "16x16 pixels of TIFF L", 1525),
    (claiming(encoded(SMALL)), JPEG_OF_OWN_SIZE, "", 1023),
    (claiming(encoded(SMALL, progressive=True, subsampling=2)), JPEG, "", 522),
    (png(14_000, 12_780, 8, 2, [b""]), JPEG, "", 682),
    (webp_claiming(7_700, 8_000), JPEG, "", 998),
]
# fmt: on


@pytest.mark.parametrize(("data", "options", "kind", "mebibytes"), CLAIMS)
def test_memory_is_reserved_or_refused_by_the_header(data: bytes, options: ImageOptions, kind: str, mebibytes: int):
    with pytest.raises(Reject) as caught:
        convert(data, options, stop)
    refusal = f"{kind} take {mebibytes} MiB, --max_pixels 178956970 permits 1024 MiB"
    assert caught.value.args == (("too_many_pixels", refusal) if kind else ("reserved", str(mebibytes)))


def test_a_photo_of_108_megapixels_reserves_no_memory_if_it_is_resized() -> None:
    photo = claiming(encoded(SMALL, exif=turned(6)), 12_000, 9_000)
    assert convert(photo, JPEG, stop).source == ("JPEG", 12_000, 9_000)


def test_a_higher_limit_permits_more_memory_and_a_lower_one_no_less() -> None:
    data = webp_claiming(10_000, 10_000)
    assert rejected(data, JPEG._replace(max_pixels=300_000_000))[0] == "decode_error"
    assert memory.bound(DEFAULTS._replace(max_pixels=1000)) == 1 << 30
