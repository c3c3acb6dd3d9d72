"""Importing the framework that Keras runs on, quietly: for commands."""

from __future__ import annotations

import os
import sys
import warnings
from importlib.util import find_spec


def import_backend() -> None:
    """Import the framework that Keras runs on: JAX if TensorFlow, Keras' own default, isn't installed."""
    if "KERAS_BACKEND" not in os.environ and find_spec("tensorflow") is None and find_spec("jax") is not None:
        os.environ["KERAS_BACKEND"] = "jax"
    import_tensorflow_quietly()
    warnings.filterwarnings("ignore", module="keras")


def import_tensorflow_quietly() -> None:
    """Import TensorFlow, if it is installed, without the lines that its C++ side writes to stderr at any log level."""
    if find_spec("tensorflow") is None:
        return
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.stderr.flush()
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        import tensorflow

        tensorflow.config.list_physical_devices()
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
