"""Says how to install a package that is missing."""

from __future__ import annotations

# What `import` calls it → what people call it, and the extra that brings it.
_PACKAGES = {
    "PIL": ("Pillow", "reader"),
    "cv2": ("OpenCV", "reader"),
    "jax": ("JAX", "jax"),
    "keras": ("Keras", "train"),
    "matplotlib": ("Matplotlib", "train"),
    "obstore": ("obstore", "reader"),
    "simplejpeg": ("simplejpeg", "reader"),
    "tensorflow": ("TensorFlow", "tensorflow"),
    "torch": ("PyTorch", "torch"),
}


def explained(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The same error, its text saying how to install what is missing, if it is one of ours."""
    package = (error.name or "").partition(".")[0]
    if package not in _PACKAGES:
        return error
    name, extra = _PACKAGES[package]
    return ModuleNotFoundError(
        f"{name} is not installed: in the clone of imageshards, pip install '.[{extra}]'", name=error.name
    )
