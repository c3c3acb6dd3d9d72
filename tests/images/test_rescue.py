"""Pictures that aren't lost: broken metadata beside them, and a JPEG that lacks only its last marker."""

from __future__ import annotations

import random
import struct
import zlib
from collections import Counter
from functools import cache

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from beam_pipeline.errors import Reject
from beam_pipeline.images import EncodedImage, ImageOptions, convert, memory
from beam_pipeline.images.containers import APP0, APP14, COM, EOI, SOS, jpeg_segments
from reader.pixels import decode_pixels, stored_shape
from tests.images.kinds import SIDEWAYS, UPRIGHT, every_kind, png_chunk, turned
from tests.images.profiles import wide_profile
from tests.images.test_codec import OWN_SIZE, pixels
from tests.make import encoded, noise, picture

JPEG = OWN_SIZE._replace(format="jpeg", channels=3)
PNG = OWN_SIZE
GRAY = OWN_SIZE._replace(channels=1)

pytestmark = pytest.mark.filterwarnings("ignore:::PIL")


def outcome(data: bytes, options: ImageOptions = PNG) -> EncodedImage | str:
    """The image, or the reason why there is none."""
    try:
        return convert(data, options)
    except Reject as reject:
        return reject.reason


# Valid bodies of the ancillary chunks of PNG and APNG, and of a private one.
ANCILLARY = {
    b"pHYs": struct.pack(">IIB", 2835, 2835, 1),
    b"gAMA": struct.pack(">I", 45455),
    b"sRGB": b"\0",
    b"cHRM": struct.pack(">8I", 31270, 32900, 64000, 33000, 30000, 60000, 15000, 6000),
    b"bKGD": bytes(6),
    b"sBIT": b"\x08\x08\x08",
    b"tIME": struct.pack(">HBBBBB", 2024, 2, 29, 1, 2, 3),
    b"hIST": bytes(16),
    b"sPLT": b"name\0\x08" + bytes(6),
    b"cICP": b"\1\x0d\0\1",
    b"tEXt": b"key\0text",
    b"zTXt": b"key\0\0" + zlib.compress(b"text"),
    b"iTXt": b"key\0\0\0\0\0text",
    b"eXIf": turned(1).tobytes().removeprefix(b"Exif\0\0"),
    b"iCCP": b"name\0\0" + zlib.compress(wide_profile()),
    b"acTL": struct.pack(">II", 1, 0),
    b"fcTL": struct.pack(">IIIIIHHBB", 0, UPRIGHT.width, UPRIGHT.height, 0, 0, 1, 10, 0, 0),
    b"fdAT": struct.pack(">I", 1) + zlib.compress(bytes(9)),
    b"prVt": b"private",
    b"prVT": b"private, unsafe to copy",
}
DAMAGES = ("crc", "one byte", "half", "one byte less", "too long", "empty", "garbage", "ones", "small numbers")


def damaged_body(body: bytes, damage: str) -> bytes:
    """The content of a chunk or segment after a damage that leaves the file's structure as it was."""
    return {
        "crc": body,
        "one byte": body[:1],
        "half": body[: len(body) // 2],
        "one byte less": body[:-1],
        "too long": body + bytes(5),
        "empty": b"",
        "garbage": random.Random(len(body)).randbytes(len(body)),
        "ones": b"\xff" * len(body),
        "small numbers": b"".join(struct.pack(">I", number) for number in range(len(body) // 4)) + body[-2:],
    }[damage]


def damaged_chunk(kind: bytes, damage: str) -> bytes:
    chunk = png_chunk(kind, damaged_body(ANCILLARY[kind], damage))
    return chunk[:-1] + bytes([chunk[-1] ^ 1]) if damage == "crc" else chunk


@cache
def pngs() -> dict[str, bytes]:
    """Pictures whose metadata counts, and of kinds with other chunks that do."""
    kinds = every_kind()
    profile = png_chunk(b"iCCP", ANCILLARY[b"iCCP"])
    sideways = encoded(SIDEWAYS, "PNG", exif=turned(6))
    both = sideways[:33] + profile + sideways[33:]
    return {"plain": kinds["png"], "turned with a profile": both, "transparent": kinds["png_transparent_colour"]}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", ANCILLARY, ids=bytes.decode)
def test_no_ancillary_chunk_costs_a_png_a_pixel(kind: bytes, damage: str) -> None:
    """Before the pixels, between them and after them; what is valid of EXIF and profile still counts."""
    chunk = damaged_chunk(kind, damage)
    for name, data in pngs().items():
        if kind == b"iCCP" and (name != "plain" or damage in ("one byte less", "too long")):
            continue  # the second profile, or one of which only the checksum is cut off
        if kind == b"eXIf" and name != "plain":
            continue
        expected, idat = convert(data, PNG), data.index(b"IDAT") - 4
        for place in (33, idat, len(data) - 12):
            assert outcome(data[:place] + chunk + data[place:]) == expected, (name, place)


@pytest.mark.parametrize("damage", ["crc", "one byte", "half", "empty", "garbage", "ones"])
@pytest.mark.parametrize("kind", [b"iCCP", b"eXIf"], ids=bytes.decode)
def test_broken_exif_or_profile_of_a_png_is_ignored_by_itself(kind: bytes, damage: str) -> None:
    """As libpng does; the other one, which is valid, is applied."""
    profile = png_chunk(b"iCCP", ANCILLARY[b"iCCP"])
    exif = png_chunk(b"eXIf", turned(6).tobytes().removeprefix(b"Exif\0\0"))
    plain = encoded(SIDEWAYS, "PNG")
    other = exif if kind == b"iCCP" else profile
    expected = convert(plain[:33] + other + plain[33:], PNG)
    broken = damaged_chunk(kind, damage)
    assert outcome(plain[:33] + broken + other + plain[33:]) == expected
    assert outcome(plain[:33] + other + plain[33:-12] + (broken if kind == b"eXIf" else b"") + plain[-12:]) == expected


def test_png_chunks_between_the_compressed_pixels_cost_none() -> None:
    data = encoded(UPRIGHT, "PNG")
    start = data.index(b"IDAT") + 4
    body = data[start : data.index(b"IEND") - 8]
    halves = png_chunk(b"IDAT", body[:99]), png_chunk(b"IDAT", body[99:])
    for kind in (b"pHYs", b"fdAT", b"fcTL", b"prVt"):
        broken = data[: start - 8] + halves[0] + damaged_chunk(kind, "crc") + halves[1] + data[-12:]
        assert outcome(broken) == convert(data, PNG)


@pytest.mark.parametrize("name", ["png", "png_palette", "png_palette_alpha", "png_transparent_colour"])
@pytest.mark.parametrize("kind", [b"IHDR", b"PLTE", b"tRNS", b"IDAT"], ids=bytes.decode)
def test_a_chunk_that_pixels_need_is_still_checked(name: str, kind: bytes) -> None:
    data = every_kind()[name]
    if kind not in data:
        return
    start = data.index(kind)
    length = int.from_bytes(data[start - 4 : start], "big")
    for place in {4, 4 + length // 2, 3 + length}:
        wrong = bytearray(data)
        wrong[start + place] ^= 0x11
        assert outcome(bytes(wrong)) == "decode_error", place
    if kind != b"IDAT":  # wrong by its CRC alone
        wrong = bytearray(data)
        wrong[start + 4 + length] ^= 0x11
        assert outcome(bytes(wrong)) == "decode_error"


def test_no_file_that_has_its_end_is_called_truncated() -> None:
    """Whatever the lengths in it say."""
    png, jpeg = encoded(UPRIGHT, "PNG"), encoded(UPRIGHT, comment=b"comment")
    comment = jpeg.index(b"comment") - 2
    for data in (
        png[:33] + png_chunk(b"pHYs", bytes(9)).replace(b"\0\0\0\x09", b"\x7f\0\0\0", 1) + png[33:],
        png[:8] + png_chunk(b"IHDR", png[16:24]) + png[33:],
        jpeg[:comment] + b"\xff\xff" + jpeg[comment + 2 :],
    ):
        assert outcome(data) == "decode_error"


def segment(kind: int, body: bytes) -> bytes:
    return bytes([0xFF, kind]) + (len(body) + 2).to_bytes(2, "big") + body


def icc(part: bytes, number: int = 1, count: int = 1) -> bytes:
    return b"ICC_PROFILE\0" + bytes([number, count]) + part


APP_BODIES = {
    **{f"APP{number}": (0xE0 + number, b"application data") for number in range(16)},
    "COM": (COM, b"comment"),
    "JFIF": (APP0, b"JFIF\0\1\1\0\0\1\0\1\0\0"),
    "JFXX": (APP0, b"JFXX\0\x13" + bytes(8)),
    "Exif": (0xE1, turned(1).tobytes()),
    "XMP": (0xE1, b"http://ns.adobe.com/xap/1.0/\0<x/>"),
    "ICC": (0xE2, icc(wide_profile())),
    "MPF": (0xE2, b"MPF\0" + bytes(20)),
    "FlashPix": (0xE2, b"FPXR\0" + bytes(9)),
    "Photoshop": (0xED, b"Photoshop 3.0\x008BIM\x03\xed\0\0\0\0\0\x10" + bytes(16)),
    "Adobe": (APP14, b"Adobe\0\x64\0\0\0\0\1"),
}
SHORT = range(40)


@cache
def jpegs() -> dict[str, bytes]:
    kinds = every_kind()
    both = encoded(SIDEWAYS, exif=turned(6), icc_profile=wide_profile())
    names = ("jpeg", "jpeg_444", "jpeg_progressive", "jpeg_gray", "jpeg_rgb", "jpeg_cmyk", "jpeg_ycck")
    return {name: kinds[name] for name in names} | {"turned with a profile": both}


@pytest.mark.parametrize("kind", APP_BODIES)
def test_no_metadata_costs_a_jpeg_a_pixel(kind: str) -> None:
    """Any beginning of a segment beside the picture's own, and every other damage."""
    marker, body = APP_BODIES[kind]
    broken = [body[:length] for length in SHORT if length < len(body)]
    # A complete JFIF or Adobe marker or profile means something, whatever it says.
    broken += [] if kind in ("JFIF", "Adobe", "ICC") else [body + bytes(5), b"\xff" * len(body), body[:12] + bytes(4)]
    for name, data in jpegs().items():
        has_profile, is_inks = name.startswith("turned"), name in ("jpeg_cmyk", "jpeg_ycck")
        if (has_profile and kind in ("Exif", "ICC")) or (is_inks and marker == APP14):
            continue  # the second of its kind
        expected = convert(data, PNG)
        place = next(part.start for part in jpeg_segments(data) if part.kind not in (0xD8, *range(0xE0, 0xF0), COM))
        for content in broken:
            assert outcome(data[:place] + segment(marker, content) + data[place:]) == expected, (name, content)


@pytest.mark.parametrize("name", ["jpeg", "jpeg_444", "jpeg_gray", "jpeg_rgb", "jpeg_cmyk", "jpeg_ycck"])
def test_the_markers_that_say_a_jpegs_colours_are_missed_or_not_needed(name: str) -> None:
    """Its own JFIF and Adobe markers, cut to any length: the picture, or a reject if its colours were a guess."""
    data, counts = every_kind()[name], Counter[str]()
    expected = convert(data, PNG)
    for part in [part for part in jpeg_segments(data) if part.kind in (APP0, APP14)]:
        body = data[part.start + 4 : part.end]
        for length in range(len(body)):
            broken = data[: part.start] + segment(part.kind, body[:length]) + data[part.end :]
            image = outcome(broken)
            counts["right" if image == expected else image if isinstance(image, str) else "wrong"] += 1
    assert counts["wrong"] == 0 and counts["truncated"] == 0, counts
    if name in ("jpeg_cmyk", "jpeg_ycck"):
        assert set(counts) == {"unsupported"}, counts
    else:
        assert set(counts) == {"right"}, counts


@pytest.mark.parametrize("kind", ["ICC", "Adobe", "JFIF", "Photoshop"])
def test_what_is_published_of_a_jpeg_has_no_broken_segment(kind: str) -> None:
    marker, body = APP_BODIES[kind]
    data = encoded(picture())
    for length in range(len(body) - 1):
        if length > 40:
            break
        image = convert(data[:2] + segment(marker, body[:length]) + data[2:], JPEG)
        assert [part.kind for part in jpeg_segments(image.data) if part.kind in (*range(0xE0, 0xF0), COM)] == [APP0]
        assert np.array_equal(simplejpeg.decode_jpeg(image.data, strict=True), pixels(image.data))
        if image.passthrough:
            assert image.data == data and image.passthrough == "without_metadata"


def unterminated() -> dict[str, bytes]:
    """JPEGs of every coding, without their EOI."""
    smooth, rough, flat = picture(50, 37, seed=3), noise(40, 30), Image.new("RGB", (40, 30), (255, 255, 255))
    found = {}
    for name, image in {"smooth": smooth, "rough": rough, "flat": flat}.items():
        for coding, flags in {
            "baseline": {},
            "444": {"subsampling": 0},
            "optimised": {"optimize": True},
            "progressive": {"progressive": True},
            "progressive 444": {"progressive": True, "subsampling": 0},
            "restarts": {"restart_marker_blocks": 1},
            "restarts of rows": {"restart_marker_rows": 1, "subsampling": 0},
            "progressive restarts": {"progressive": True, "restart_marker_blocks": 2},
            "coarse": {"quality": 20},
            "fine": {"quality": 100, "subsampling": 0},
        }.items():
            found[f"{name} {coding}"] = encoded(image, **flags)[:-2]
        found[f"{name} gray"] = encoded(image.convert("L"))[:-2]
        found[f"{name} gray progressive"] = encoded(image.convert("L"), progressive=True)[:-2]
    return found


@pytest.mark.parametrize("name", unterminated())
def test_a_jpeg_that_lacks_only_its_end_is_stored_and_a_cut_one_never_with_other_pixels(name: str) -> None:
    data = unterminated()[name]
    whole = data + bytes([0xFF, EOI])
    expected = convert(whole, PNG).data
    for end in (data, data + b"\xff"):
        assert outcome(end) == convert(whole, PNG)
        image = convert(end, JPEG)
        assert image.data == convert(whole, JPEG).data
        assert image.passthrough == (None if "progressive" in name or "gray" in name else "without_metadata")
        assert np.array_equal(simplejpeg.decode_jpeg(image.data, strict=True), pixels(image.data))
    scans = [part.start for part in jpeg_segments(whole) if part.kind == SOS]
    ends = [part.end for part in jpeg_segments(whole) if part.kind == SOS][:-1]
    markers = [at for at in range(scans[0], len(data)) if data[at] == 0xFF and 0xD0 <= data[at + 1 : at + 2][0] <= 0xD7]
    random_ = random.Random(name)
    cuts = {
        *(len(data) - k for k in range(1, 33)),
        *ends,
        *scans[1:],
        *(at + by for at in markers[-9:] for by in (0, 1, 2)),
    }
    cuts |= {random_.randrange(scans[0], len(data)) for _ in range(20)}
    for cut in sorted(cuts):
        image_or_reason = outcome(data[:cut])
        if isinstance(image_or_reason, EncodedImage):
            assert image_or_reason.data == expected, len(data) - cut
        else:
            assert image_or_reason == "truncated" or (image_or_reason == "decode_error" and cut < scans[0] + 14)


@pytest.mark.parametrize("tail", [bytes(4096), b"<html>error 500</html>" * 99], ids=["zeros", "text"])
def test_what_follows_a_cut_scan_does_not_complete_it(tail: bytes) -> None:
    """As in a download whose file was made at its full length beforehand."""
    for name in ("smooth", "rough"):
        data = unterminated()[f"{name} progressive"]
        for cut in (len(data) - 40, len(data) // 2 + 350, len(data) - 4):
            assert outcome(data[:cut] + tail) in ("truncated", "decode_error")


@pytest.mark.parametrize("size", [(24, 24), (5, 5), (100, 80)])
def test_a_jpeg_without_end_is_resized_as_the_complete_one(size: tuple[int, int]) -> None:
    data, options = encoded(picture(200, 150)), PNG._replace(size=size)
    assert outcome(data[:-2], options) == convert(data, options)
    assert outcome(data[:-100], options) == "truncated"


def test_memory_is_reserved_once_for_a_jpeg_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LARGE", 0)
    asked: list[int] = []
    convert(encoded(picture(200, 150))[:-2], JPEG, asked.append)
    assert len(asked) == 1


@pytest.mark.parametrize("name", ["png", "jpeg", "png_16bit", "jpeg_progressive"])
def test_foreign_records_with_broken_metadata_are_read(name: str) -> None:
    """By the reader, from an index of third-party shards."""
    data = every_kind()[name]
    pieces = (damaged_chunk(b"pHYs", "crc"), damaged_chunk(b"sRGB", "empty"), damaged_chunk(b"prVt", "crc"))
    if name.startswith("jpeg"):
        pieces = (segment(0xE2, b"ICC_PROFILE\0"), segment(0xED, b"Photoshop 3.0\x008BIM"), segment(APP14, b"Adobe"))
    place = 2 if name.startswith("jpeg") else 33
    for piece in pieces:
        broken = data[:place] + piece + data[place:]
        assert np.array_equal(decode_pixels(broken, 3), decode_pixels(data, 3))
        assert stored_shape(broken, 3) == stored_shape(data, 3)
