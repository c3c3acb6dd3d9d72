"""A resize in float64 with nothing rounded on the way: what the codec's output is measured against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def _cubic(x: Array) -> Array:
    x = np.abs(x)  # Keys, a = -0.5
    return np.where(x < 1, 1.5 * x**3 - 2.5 * x**2 + 1, np.where(x < 2, -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2, 0.0))


# Filter → (its function of a distance in output pixels, where it ends).
FILTERS: dict[str, tuple[Callable[[Array], Array], float]] = {
    "box": (lambda x: ((x > -0.5) & (x <= 0.5)).astype(np.float64), 0.5),
    "bilinear": (lambda x: np.maximum(0.0, 1 - np.abs(x)), 1.0),
    "hamming": (lambda x: np.where(np.abs(x) < 1, np.sinc(x) * (0.54 + 0.46 * np.cos(np.pi * x)), 0.0), 1.0),
    "bicubic": (_cubic, 2.0),
    "lanczos": (lambda x: np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0.0), 3.0),
}


def resize(pixels: Array, size: tuple[int, int], box: tuple[float, float, float, float], resample: str) -> Array:
    """Scale a part of an image, pixel centres at halves, the filter as wide as the reduction (no aliasing).

    Args:
        pixels: [height, width, channels].
        size: (width, height) of the result.
        box: (left, top, right, bottom) of the part, in pixels.
        resample: a key of `FILTERS`.

    Returns:
        float64 [height, width, channels], not clipped.
    """
    left, top, right, bottom = box
    rows = _weights(pixels.shape[0], size[1], top, bottom, resample)
    columns = _weights(pixels.shape[1], size[0], left, right, resample)
    return np.einsum("oh,hwc->owc", rows, np.einsum("pw,hwc->hpc", columns, pixels.astype(np.float64), optimize=True))


def _weights(source: int, target: int, start: float, end: float, resample: str) -> Array:
    """float64 [target, source]: how much of each source pixel is in each of the result's."""
    function, reach = FILTERS[resample]
    step = (end - start) / target
    scale = max(step, 1.0)
    centres = start + (np.arange(target) + 0.5) * step
    places = np.arange(source) + 0.5
    distance = (places[None, :] - centres[:, None]) / scale
    weights = np.where(np.abs(distance) <= reach, function(distance), 0.0)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def psnr(found: Array, exact: Array) -> float:
    """Peak signal-to-noise ratio of 8-bit pixels in dB."""
    error = np.mean((found.astype(np.float64) - np.clip(exact, 0, 255)) ** 2)
    return float(10 * np.log10(255**2 / max(error, 1e-12)))


def ssim(found: Array, exact: Array) -> float:
    """Mean structural similarity of the luma in windows of 8×8 (https://doi.org/10.1109/TIP.2003.819861), 0 to 1."""
    luma = np.array([0.299, 0.587, 0.114])
    one, other = found.astype(np.float64) @ luma, np.clip(exact, 0, 255) @ luma

    def mean(image: Array) -> Array:
        sums = np.pad(image, ((1, 0), (1, 0))).cumsum(0).cumsum(1)
        return np.asarray((sums[8:, 8:] - sums[:-8, 8:] - sums[8:, :-8] + sums[:-8, :-8]) / 64)

    mean_one, mean_other = mean(one), mean(other)
    variance_one, variance_other = mean(one * one) - mean_one**2, mean(other * other) - mean_other**2
    covariance = mean(one * other) - mean_one * mean_other
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    upper = (2 * mean_one * mean_other + c1) * (2 * covariance + c2)
    return float(np.mean(upper / ((mean_one**2 + mean_other**2 + c1) * (variance_one + variance_other + c2))))
