"""What is said to people in a few words: numbers, a package that isn't installed."""

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
_UNITS = ("bytes", "kB", "MB", "GB", "TB")


def count(number: int, noun: str, plural: str = "") -> str:
    """`1 shard`, `1,200 shards`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def size(number: int) -> str:
    """`512 bytes`, `4.2 kB`, `131 MB`: three digits, decimal units."""
    if number < 1000:
        return count(number, "byte")
    value, unit = float(number), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:,.{max(0, 3 - len(str(int(value))))}f} {_UNITS[unit]}"


def explained(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The same error, its text saying how to install what is missing, if it is one of ours."""
    package = (error.name or "").partition(".")[0]
    if package not in _PACKAGES:
        return error
    name, extra = _PACKAGES[package]
    return ModuleNotFoundError(
        f"{name} is not installed: in the clone of imageshards, pip install '.[{extra}]'", name=error.name
    )
