"""What `--model` names: a model of `keras.applications`, in any spelling, or a function in a module of one's own."""

from __future__ import annotations

import os
import sys
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType

from beam_pipeline.errors import UsageError
from beam_pipeline.text import one_line

SMALL_CNN = "small_cnn"


def import_user_module(written: str, is_first: bool = True) -> ModuleType:
    """The module of a user's `package.module:function`; the current folder is searched first, or last."""
    module, _, name = written.partition(":")
    if os.getcwd() not in sys.path:  # `python -m` looks there, the command doesn't
        sys.path.insert(0 if is_first else len(sys.path), os.getcwd())
    try:
        getattr(found := import_module(module), name)
        return found
    except Exception as error:  # whatever the module does
        why = f"{type(error).__name__}: {one_line(error)}"
        raise UsageError(f"--model {written!r}: {why}; give package.module:function") from error


def application_name(given: str) -> str:
    """A model's name as Keras writes it: `MobileNetV2` for `mobilenet_v2`.

    Raises:
        UsageError: there is none; names the nearest.
    """
    if ":" in given or given == SMALL_CNN:
        return given
    import keras

    names = [SMALL_CNN, *(name for name, one in vars(keras.applications).items() if callable(one))]
    plain: dict[str, str] = {_plain(name): name for name in names}
    if (found := plain.get(_plain(given))) is not None:
        return found
    nearest = get_close_matches(_plain(given), plain, n=1)
    hint = f"did you mean {plain[nearest[0]]}?" if nearest else f"choose one of {', '.join(names)}"
    raise UsageError(f"--model {given!r}: {hint}")


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
