"""Every flag of `python -m beam_pipeline`: its default, its values, what `--help` says of it.

A field's metadata also says whether it decides bytes of the dataset: then it is part of the manifest's `configuration`,
and a published version can't be continued with another value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from beam_pipeline import images, storage
from beam_pipeline.images import geometry
from beam_pipeline.images.files import EXTENSIONS

LAYOUTS = ("class_folders", "split_class_folders", "manifest")
COMPRESSIONS = ("none", "gzip")
DUPLICATES = ("keep", "report", "drop", "fail")
# Flags that are gone → the value that they had by default, which is what a job does now; what it does, for the message.
REMOVED: dict[str, tuple[object, str]] = {
    "progressive": (False, "JPEGs are always stored baseline"),
    "icc": ("srgb", "colours are always converted to sRGB"),
    "keep_metadata": (False, "EXIF, XMP and comments are never stored"),
}
# Groups of flags in --help.
_PLACES, _SPLITS, _IMAGES, _SHARDS, _JOB = "input and output", "splits", "images", "shards", "job"


def _flag(
    group: str,
    default: Any,
    text: str,
    choices: Sequence[object] | None = None,
    metavar: str | None = None,
    between: tuple[float, float] | None = None,
    decides_bytes: bool = True,
) -> Any:
    """A field that is a flag.

    Args:
        group: of `--help`.
        default: None where leaving it out means more than any value.
        text: for `--help`, the default in brackets at its end where showing `default` itself wouldn't do.
        choices: its only values.
        metavar: stands for its value in `--help`.
        between: least and greatest value of a number.
        decides_bytes: of the dataset, whoever runs the job on whatever.
    """
    return dataclasses.field(
        default=default,
        metadata={
            "group": group,
            "help": text,
            "choices": choices,
            "metavar": metavar,
            "between": between,
            "decides_bytes": decides_bytes,
        },
    )


def _run_flag(group: str, default: Any, text: str, **more: Any) -> Any:
    """As `_flag`; it only says where from, where to and how the job runs."""
    return _flag(group, default, text, decides_bytes=False, **more)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags as a user gives them, in the groups of `--help`."""

    input: str | None = _run_flag(
        _PLACES, None, "folder or URL whose sub-folders are the classes (required)", metavar="DIR"
    )
    output: str = _run_flag(
        _PLACES,
        "",
        "folder or URL of your datasets; this one goes to ROOT/NAME/VERSION/ (required)",
        metavar="ROOT",
    )
    name: str = _run_flag(_PLACES, "", "of the dataset: a-z, 0-9 and _, a letter first (required)")
    version: str = _run_flag(_PLACES, "1.0.0", "of the dataset", metavar="N.N.N")
    layout: str = _flag(
        _PLACES,
        "class_folders",
        "where class and split come from: DIR/CLASS/image.jpg, DIR/SPLIT/CLASS/image.jpg, or the rows of --manifest",
        choices=LAYOUTS,
    )
    manifest: str | None = _run_flag(
        _PLACES,
        None,
        "CSV or JSONL file for --layout manifest, with columns path and label. Columns split, bytes and md5 are "
        "optional. Any other column becomes a feature of the records, of the type in its name: age:int64, "
        "score:float32, caption:bytes, box:float32[]. Paths are relative to --input (the file's folder) or whole URLs",
        metavar="FILE",
    )
    labels_file: str | None = _run_flag(
        _PLACES, None, "class names in the order of their ids, one a line (the folders' names, sorted)", metavar="FILE"
    )
    extensions: str = _flag(_PLACES, ",".join(EXTENSIONS), "suffixes of the files that are images", metavar="LIST")
    duplicates: str = _flag(
        _PLACES,
        "keep",
        "images with the same bytes: keep them all, report them in duplicates.jsonl, drop all but one, or fail",
        choices=DUPLICATES,
    )

    splits: str | None = _flag(
        _SPLITS,
        None,
        "the share of each split, such as train=0.9,validation=0.1; one share may be 'rest'. A hash of its path puts "
        "an image into its split (train=1)",
        metavar="SHARES",
    )
    split_by: str | None = _flag(
        _SPLITS,
        None,
        "regular expression: images share a split if its first group matches the same part of their paths, such as "
        "the name of a video or a patient",
        metavar="REGEX",
    )

    image_size: str | int = _flag(
        _IMAGES, "224", "of the stored images in pixels: 224, 224x320 (height x width), or none to keep each one's own"
    )
    resize_mode: str = _flag(
        _IMAGES,
        "stretch",
        "for images of other proportions: stretch distorts them, crop keeps the middle, pad adds borders. shorter and "
        "longer keep the proportions: the image's shorter, or its longer side gets the size",
        choices=geometry.RESIZE_MODES,
    )
    resample: str = _flag(_IMAGES, "bilinear", "filter for resizing", choices=tuple(geometry.RESAMPLING))
    background: str | None = _flag(
        _IMAGES,
        None,
        "colour behind transparent pixels (white) and of the borders that pad adds (black): '#rrggbb' or a CSS name",
        metavar="COLOUR",
    )
    channels: int = _flag(_IMAGES, 3, "3 stores RGB, 1 stores gray", choices=(1, 3))
    image_format: str = _flag(
        _IMAGES, "jpeg", "format of the stored images; png is lossless", choices=tuple(images.FORMATS)
    )
    jpeg_quality: int = _flag(_IMAGES, 90, "from 1 to 100", between=(1, 100))
    jpeg_subsampling: str = _flag(
        _IMAGES, "4:2:0", "resolution of colours; 4:4:4 is the full one", choices=tuple(images.SUBSAMPLING)
    )
    optimize: bool = _flag(_IMAGES, False, "make JPEGs 3 % smaller, in three times the encoding time")
    max_pixels: int = _flag(
        _IMAGES,
        178_956_970,
        "reject images of more pixels, or of more memory than 6 bytes for each of these, before they are decoded",
        between=(1, 1 << 40),
    )
    max_image_bytes: str | int = _flag(
        _IMAGES, "256MiB", "reject larger files, before they are fetched", metavar="BYTES"
    )
    allow_truncated: bool = _flag(
        _IMAGES, False, "store what there is of a file that ends early, instead of rejecting it"
    )

    target_shard_bytes: str | int | None = _flag(
        _SHARDS,
        None,
        "size of a shard, such as 200MB (128MiB, or down to 8MiB where a split then gets fewer than 16 shards)",
        metavar="BYTES",
    )
    num_shards: str | int | None = _flag(
        _SHARDS,
        None,
        "number of shards, instead of a size: 8 for each split, or train=64,validation=4",
        metavar="N",
    )
    compression: str = _flag(
        _SHARDS, "none", "gzip saves nothing on JPEGs and costs reading speed", choices=COMPRESSIONS
    )
    one_hot: bool = _flag(_SHARDS, False, "also store one_hot_class, 4 bytes for each class in every record")
    seed: int = _flag(_SHARDS, 0, "another seed, another order of the records", between=(-(1 << 63), (1 << 63) - 1))

    max_reject_fraction: float = _run_flag(
        _JOB, 0.01, "publish nothing if more of the images than this are rejected, from 0 to 1", between=(0, 1)
    )
    strict: bool = _run_flag(_JOB, False, "fail if an image vanishes or changes while the job runs")
    fetch_concurrency: int = _run_flag(_JOB, 32, "requests at a time in a worker process", between=(1, 1024))
    decode_threads: int = _run_flag(
        _JOB, 0, "images decoded at a time in a worker process (one for each core)", between=(0, 1024)
    )
    io_deadline: float = _run_flag(
        _JOB,
        storage.DEFAULT_DEADLINE_S,
        "how long a storage request that fails is retried",
        metavar="SECONDS",
        between=(0, 86_400),
    )
    plan_only: bool = _run_flag(_JOB, False, "print the plan and write no dataset")
    repair: bool = _run_flag(_JOB, False, "read every byte of a published version and rewrite what is damaged")
    overwrite: bool = _run_flag(_JOB, False, "delete a published version and write it anew")
