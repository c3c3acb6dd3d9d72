"""Prints the metadata of the Flex Template, made from the flags: `python -m tools.flex_template > FILE`.

The file is deploy/flex_template/metadata.json. Format: https://cloud.google.com/dataflow/docs/guides/templates/configuring-flex-templates
"""

from __future__ import annotations

import json
from typing import Any

from beam_pipeline.config import FLAGS, Flag

_REQUIRED = ("input", "output", "name")
_NEVER = ("plan_only", "preflight", "detach")  # interactive flags, useless in a template
_FOLDERS = {"input": "GCS_READ_FOLDER", "output": "GCS_WRITE_FOLDER"}


def metadata() -> dict[str, Any]:
    """The template's name and a parameter for each flag."""
    image = {
        "name": "sdk_container_image",
        "label": "Image",
        "helpText": "image that the workers run: the template's own",
        "isOptional": False,
        "paramType": "TEXT",
    }
    return {
        "name": "imageshards",
        "description": "Turns images in class folders into TFRecord shards of equal size.",
        "parameters": [image, *(_parameter(name, flag) for name, flag in FLAGS.items() if name not in _NEVER)],
    }


def _parameter(name: str, flag: Flag[Any, Any]) -> dict[str, Any]:
    parameter: dict[str, Any] = {
        "name": name,
        "label": name.replace("_", " ").capitalize(),
        "helpText": flag.help.removesuffix(" (required)"),
        "isOptional": name not in _REQUIRED,
        "paramType": _FOLDERS.get(name, "TEXT"),
    }
    if flag.default is False:
        return parameter | {"paramType": "BOOLEAN", "defaultValue": "false"}
    if isinstance(flag.values, tuple):
        options = [{"value": str(value), "label": str(value)} for value in flag.values]
        parameter |= {"paramType": "ENUM", "enumOptions": options}
    if flag.default not in (None, ""):
        parameter["defaultValue"] = str(flag.default)
    return parameter


if __name__ == "__main__":
    print(json.dumps(metadata(), indent=2))
