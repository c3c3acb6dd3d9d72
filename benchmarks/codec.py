"""The codec: quality against a float64 resize, and time, for each way to shrink cheaply before the filter.

    python benchmarks/codec.py [IMAGES] [--count 40] [--large 8] [--megapixels 12] [--size 224] [--resample bilinear]

IMAGES is a folder of photos (drawn pictures without). Two kinds of input are measured: the photos, and large ones made
by laying them out side by side, which keeps the detail of every pixel (an enlarged photo has none to lose). "plain" is
Pillow's straight path: decode at full size, then filter. Times are CPU ms per image of one thread. It prints Markdown
for RESULTS.md.
"""

from __future__ import annotations

import io
import statistics
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import turns
from material import images as material
from PIL import Image, ImageOps, JpegImagePlugin

import beam_pipeline
from beam_pipeline import images
from beam_pipeline.conversion.decoder import Decoder
from beam_pipeline.images import ImageOptions, geometry
from beam_pipeline.images.resize import RESAMPLING
from tests.images.reference import psnr, resize, ssim

GAPS = (1.0, 1.5, 2.0, 3.0, 4.0)


def main() -> None:
    """Measure and print."""
    parser = turns.parser(__doc__, 40, 5)
    parser.add_argument("--large", type=int, default=8)
    parser.add_argument("--megapixels", type=float, default=12)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--resample", default="bilinear", choices=sorted(RESAMPLING))
    arguments = parser.parse_args()
    config = beam_pipeline.Config(
        input="in", output="out", name="bench", image_size=arguments.size, resample=arguments.resample
    )
    with tempfile.TemporaryDirectory(prefix="imageshards-bench-") as scratch:
        folder = material(arguments.images, Path(scratch), arguments.count)
        photos = [path.read_bytes() for path in sorted(folder.rglob("*.*"))]
    codec, worker = overheads_us()
    print(f"Python beyond Pillow's calls: {codec:.0f} µs per image, with all that a worker does {worker:.0f} µs.")
    compare("photos", photos, config.image_options, arguments.repeats)
    large = [mosaic(photos, number, arguments.megapixels) for number in range(arguments.large)]
    compare(f"photos of {arguments.megapixels:g} MP", large, config.image_options, arguments.repeats)


def mosaic(photos: list[bytes], seed: int, megapixels: float) -> bytes:
    """A JPEG of 4:3, made of photos side by side."""
    height = round((megapixels * 1e6 * 3 / 4) ** 0.5)
    canvas = Image.new("RGB", (height * 4 // 3, height))
    order = np.random.default_rng(seed).permutation(len(photos))
    x = y = row = number = 0
    while y < canvas.height:
        with Image.open(io.BytesIO(photos[order[number % len(order)]])) as photo:
            canvas.paste(photo, (x, y))
            x, row, number = x + photo.width, max(row, photo.height), number + 1
        if x >= canvas.width:
            x, y, row = 0, y + row, 0
    out = io.BytesIO()
    canvas.save(out, "JPEG", quality=92)
    return out.getvalue()


def compare(title: str, sources: list[bytes], options: ImageOptions, rounds: int) -> None:
    """Print a table of the ways to shrink."""
    assert options.size is not None
    size = (options.size[1], options.size[0])
    exact = []
    for data in sources:
        decoded = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
        exact.append(resize(decoded, size, (0, 0, decoded.shape[1], decoded.shape[0]), options.resample))
    ways: dict[str, Callable[[bytes, ImageOptions], bytes]] = {"none: decode all, then filter": plain}
    ways |= {str(gap): with_gap(gap) for gap in GAPS}
    print(f"\n{len(sources)} {title} to {size[0]}×{size[1]}, {options.resample}, quality {options.jpeg_quality}:\n")
    print("| gap | PSNR, dB | SSIM | before encoding, dB | SSIM | worst image, dB | CPU ms | times as fast |")
    print("|---|---|---|---|---|---|---|---|")
    milliseconds = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.process_time()
            for data in sources:
                way(data, options)
            milliseconds[name].append((time.process_time() - start) / len(sources) * 1000)
    lossless = options._replace(format="png")
    baseline: list[float] = []
    for name, way in ways.items():
        stored = [quality(way(data, options), reference) for data, reference in zip(sources, exact, strict=True)]
        before = [quality(way(data, lossless), reference) for data, reference in zip(sources, exact, strict=True)]
        baseline = baseline or [one for one, _ in stored]
        worst = min(one - other for (one, _), other in zip(stored, baseline, strict=True))
        ms, plain_ms = statistics.median(milliseconds[name]), statistics.median(milliseconds[next(iter(ways))])
        figures = f"{mean(stored, 0):.2f} | {mean(stored, 1):.4f} | {mean(before, 0):.2f} | {mean(before, 1):.4f}"
        chosen = "**" if name == str(geometry.REDUCING_GAP) else ""
        print(f"| {chosen}{name}{chosen} | {figures} | {worst:.2f} | {ms:.2f} | {plain_ms / ms:.2f} |")


def mean(pairs: list[tuple[float, float]], place: int) -> float:
    """Mean of one of two figures."""
    return statistics.fmean(pair[place] for pair in pairs)


def quality(encoded: bytes, exact: np.ndarray) -> tuple[float, float]:
    """(PSNR, SSIM) of an encoded image."""
    found = np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))
    return psnr(found, exact), ssim(found, exact)


def plain(data: bytes, options: ImageOptions) -> bytes:
    """Decode all of it, then filter: no DCT scaling, no gap."""
    assert options.size is not None
    with Image.open(io.BytesIO(data)) as image:
        upright = ImageOps.exif_transpose(image)
        pixels = upright.convert("RGB").resize(options.size[::-1], RESAMPLING[options.resample])
    out = io.BytesIO()
    if options.format == "png":
        pixels.save(out, "PNG")
    else:
        pixels.save(out, "JPEG", quality=options.jpeg_quality, subsampling=images.SUBSAMPLING[options.jpeg_subsampling])
    return out.getvalue()


def with_gap(gap: float) -> Callable[[bytes, ImageOptions], bytes]:
    """The codec with another gap."""

    def convert(data: bytes, options: ImageOptions) -> bytes:
        with mock.patch.object(geometry, "REDUCING_GAP", gap):
            return images.convert(data, options).data

    return convert


def overheads_us() -> tuple[float, float]:
    """CPU µs that the codec, and that a worker, add to Pillow's calls, on an image that is hardly anything else.

    The least of alternating rounds: other work on the machine only adds to it.
    """
    out = io.BytesIO()
    Image.effect_noise((16, 12), 50).convert("RGB").save(out, "JPEG")
    data = out.getvalue()
    options = beam_pipeline.Config(input="in", output="out", name="bench", image_size=8).image_options

    def bare() -> None:
        image = Image.open(io.BytesIO(data), formats=("JPEG",))
        assert isinstance(image, JpegImagePlugin.JpegImageFile)
        image.draft("RGB", (12, 12))
        pixels = image.resize((8, 8), Image.Resampling.BILINEAR, reducing_gap=geometry.REDUCING_GAP)
        pixels.save(io.BytesIO(), "JPEG", quality=90, subsampling=2)

    decoder = Decoder(options, None, isolated=False)
    ways: tuple[Callable[[], object], ...] = (
        bare,
        lambda: images.convert(data, options),
        lambda: decoder.convert("a.jpg", data, b""),
    )
    rounds = [[timeit.timeit(way, number=300, timer=time.process_time) / 300 * 1e6 for way in ways] for _ in range(30)]
    pillow, codec, worker = (min(times) for times in zip(*rounds, strict=True))
    return codec - pillow, worker - pillow


if __name__ == "__main__":
    sys.exit(main())
