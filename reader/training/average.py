"""`--ema`: an exponential moving average of the weights, in a model of its own that is evaluated and saved."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np


class Average:
    """The average of a model's weights and of what BatchNormalization has seen.

    Keras' `use_ema` overwrites the weights that are trained at the end of each `fit`; this leaves them alone.

    Args:
        model: that holds the average, built as the other one was.
        of: the model that is trained.
        decay: share of itself that the average keeps in a step; less in the first steps, as of TensorFlow's
            ExponentialMovingAverage, or the first weights would stay in it.
    """

    def __init__(self, model: Any, of: Any, decay: float) -> None:
        pairs = [
            (average, variable)
            for average, variable in zip(model.variables, of.variables, strict=True)
            if keras.backend.is_float_dtype(variable.dtype)  # seeds are integers
        ]
        self.variables = [average for average, _ in pairs]
        self._decay, self._update = decay, _compiled(pairs)

    def update(self, step: int) -> None:
        """Take in the weights after a global step."""
        self._update(np.float32(min(self._decay, (1 + step) / (10 + step))))


def _compiled(pairs: list[tuple[Any, Any]]) -> Any:
    """A function of the decay, which calls the device once: Keras has no way that is the same on both backends."""
    if keras.backend.backend() != "jax":
        import tensorflow as tf

        @tf.function  # type: ignore[untyped-decorator]
        def update(decay: Any) -> None:
            for average, variable in pairs:
                average.assign(average + (variable - average) * (1 - decay))

        return update
    import jax

    @jax.jit  # type: ignore[untyped-decorator]
    def blended(values: list[tuple[Any, Any]], decay: Any) -> list[Any]:
        return [average + (value - average) * (1 - decay) for average, value in values]

    def update_arrays(decay: Any) -> None:
        values = blended([(average.value, variable.value) for average, variable in pairs], decay)
        for (average, _), value in zip(pairs, values, strict=True):
            average.assign(value)

    return update_arrays
