"""imageshards, the read side: batches of sharded image datasets for any trainer, and the tools around them.

    import imageshards

    info = imageshards.load_info("gs://bucket/datasets/flowers/1.0.0")
    train = imageshards.train_dataset(info, "train", global_batch_size=1024, augment=imageshards.augment.flip_crop)

`import imageshards` has these names too, tools in `imageshards.tools`. Importing either is cheap and loads no
framework: the first use of a name does.
"""

from __future__ import annotations

import importlib
from typing import Any

from beam_pipeline import __version__
from beam_pipeline.names import homes

_HOMES = homes("reader")  # loaded on first use (PEP 562)
__all__ = ["__version__", *_HOMES]

# What `import` calls it → what people call it, and the extra that brings it.
_PACKAGES = {
    "PIL": ("Pillow", "reader"),
    "jax": ("JAX", "jax"),
    "jinja2": ("Jinja2", "reader"),
    "keras": ("Keras", "train"),
    "matplotlib": ("Matplotlib", "train"),
    "obstore": ("obstore", "reader"),
    "simplejpeg": ("simplejpeg", "reader"),
    "tensorflow": ("TensorFlow", "tensorflow"),
    "torch": ("PyTorch", "torch"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(_HOMES[name])
        value = getattr(module, name) if module.__name__ != __name__ else importlib.import_module(f"reader.{name}")
    except ModuleNotFoundError as error:
        raise with_install_hint(error) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def with_install_hint(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The error with a text that says how to install the package, if an extra brings it; else unchanged."""
    package = (error.name or "").partition(".")[0]
    if package not in _PACKAGES:
        return error
    name, extra = _PACKAGES[package]
    return ModuleNotFoundError(f"{name} is not installed: pip install 'imageshards[{extra}]'", name=error.name)
