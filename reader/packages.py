"""One line about a package that isn't installed: only some users of the reader need each of them."""

from __future__ import annotations

# What `import` calls it → what people call it, and the extra that brings it.
_PACKAGES = {
    "PIL": ("Pillow", "reader"),
    "fsspec": ("fsspec", "reader"),
    "gcsfs": ("gcsfs", "reader"),
    "jax": ("JAX", "jax"),
    "keras": ("Keras", "reader"),
    "matplotlib": ("Matplotlib", "reader"),
    "tensorflow": ("TensorFlow", "reader"),
    "torch": ("PyTorch", "torch"),
}


def explained(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The same error, its text saying how to install what is missing, where that is one of ours."""
    package = (error.name or "").partition(".")[0]
    if package not in _PACKAGES:
        return error
    name, extra = _PACKAGES[package]
    return ModuleNotFoundError(f"{name} is not installed: pip install '.[{extra}]'", name=error.name)
