"""The models that `--model` knows by name, so that `--help` and a typo need not import Keras; modules of one's own."""

from __future__ import annotations

import os
import sys
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType

from beam_pipeline.errors import UsageError
from beam_pipeline.text import one_line

SMALL_CNN = "small_cnn"
# Module of `keras.applications` → its models. A test compares them.
_APPLICATIONS = {
    "convnext": "ConvNeXtTiny ConvNeXtSmall ConvNeXtBase ConvNeXtLarge ConvNeXtXLarge",
    "densenet": "DenseNet121 DenseNet169 DenseNet201",
    "efficientnet": " ".join(f"EfficientNetB{number}" for number in range(8)),
    "efficientnet_v2": " ".join(f"EfficientNetV2{size}" for size in ("B0", "B1", "B2", "B3", "S", "M", "L")),
    "inception_resnet_v2": "InceptionResNetV2",
    "inception_v3": "InceptionV3",
    "mobilenet": "MobileNet",
    "mobilenet_v2": "MobileNetV2",
    "mobilenet_v3": "MobileNetV3Small MobileNetV3Large",
    "nasnet": "NASNetMobile NASNetLarge",
    "resnet": "ResNet50 ResNet101 ResNet152",
    "resnet_v2": "ResNet50V2 ResNet101V2 ResNet152V2",
    "vgg16": "VGG16",
    "vgg19": "VGG19",
    "xception": "Xception",
}
MODULES = {name: module for module, names in _APPLICATIONS.items() for name in names.split()}


def users_module(written: str, is_first: bool = True) -> ModuleType:
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
    plain = {name.lower(): name for name in (SMALL_CNN, *MODULES)}
    key = given.lower().replace("_", "").replace("-", "")
    if key in plain:
        return plain[key]
    nearest = get_close_matches(key, plain, n=1)
    hint = f"did you mean {plain[nearest[0]]}?" if nearest else "see --help"
    raise UsageError(f"--model {given!r}: {hint}")
