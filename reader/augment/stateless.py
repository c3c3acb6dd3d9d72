"""Random numbers from (seed, step, name, place) in `keras.ops`: the same on every backend, nothing to save."""

from __future__ import annotations

import zlib
from functools import cache
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

Tensor = Any  # Keras ships no types

ops = keras.ops

_QUANTILES = 1024


def uniform(seed: int, step: Tensor, name: str, count: Tensor) -> Tensor:
    """float32 [count] in [0, 1).

    Args:
        seed: of the job.
        step: integer, also a tensor.
        name: of this stream of numbers.
        count: how many.
    """
    key = zlib.crc32(f"{name}\0{seed}".encode())
    places = ops.arange(count, dtype="int32")
    numbers = _mix(_mix(places + _signed(key)) + ops.cast(step, "int32"))
    return ops.cast(_shifted(numbers, 8), "float32") * 2.0**-24


def _mix(x: Tensor) -> Tensor:
    """lowbias32 (https://nullprogram.com/blog/2018/07/31/) in int32 that wraps: PyTorch has no arithmetic on uint32."""
    x = ops.bitwise_xor(x, _shifted(x, 16)) * _signed(0x7FEB352D)
    x = ops.bitwise_xor(x, _shifted(x, 15)) * _signed(0x846CA68B)
    return ops.bitwise_xor(x, _shifted(x, 16))


def _shifted(x: Tensor, bits: int) -> Tensor:
    """A logical shift to the right: no copies of the sign."""
    shifted = ops.bitwise_right_shift(x, ops.convert_to_tensor(bits, "int32"))
    return ops.bitwise_and(shifted, ops.convert_to_tensor((1 << (32 - bits)) - 1, "int32"))


def _signed(number: int) -> Tensor:
    return ops.convert_to_tensor(np.uint32(number).astype(np.int32), "int32")


def beta(alpha: float, draws: Tensor) -> Tensor:
    """Uniform draws [n] → draws of Beta(alpha, alpha), by its quantiles."""
    quantiles = ops.convert_to_tensor(_beta_quantiles(alpha), "float32")
    place = draws * (_QUANTILES - 1)
    low = ops.cast(place, "int32")
    below, above = ops.take(quantiles, low), ops.take(quantiles, ops.minimum(low + 1, _QUANTILES - 1))
    return below + (above - below) * (place - ops.floor(place))


@cache
def _beta_quantiles(alpha: float) -> npt.NDArray[np.float32]:
    # In t, with x = sin²(t), the density (x(1 - x))^(alpha - 1) dx has no pole that a sum couldn't take.
    t = (np.arange(1 << 16) + 0.5) / (1 << 16) * (np.pi / 2)
    density = (np.sin(t) * np.cos(t)) ** (2 * alpha - 1)
    cumulative = np.concatenate(([0.0], np.cumsum(density) / density.sum()))
    bounds = np.sin(np.arange((1 << 16) + 1) / (1 << 16) * (np.pi / 2)) ** 2
    return np.asarray(np.interp(np.linspace(0, 1, _QUANTILES), cumulative, bounds), np.float32)
