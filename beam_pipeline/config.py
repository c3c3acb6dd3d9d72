"""The job's configuration: the flags, validated once, frozen, the same from Python; and what follows from them."""

from __future__ import annotations

import dataclasses
import decimal
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from typing import Any

from PIL import ImageColor

from beam_pipeline import images, storage
from beam_pipeline.errors import UsageError
from beam_pipeline.images import geometry
from beam_pipeline.images.colour import Rgb
from beam_pipeline.images.formats import EXTENSIONS
from beam_pipeline.schema import NAME_PATTERN, STATE_FOLDER, VERSION_PATTERN, example, is_utf8
from beam_pipeline.storage import base

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
    restart: bool = _run_flag(_JOB, False, "discard what an unfinished job has written of an unpublished version")


REST = "rest"
_LONGEST_SIDE = 16_384
_BYTE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_DECIMAL = re.compile(r"\d+(\.\d*)?|\.\d+")


def wrong(flag: str, value: object, fix: str) -> UsageError:
    """The one form of every message about a value: flag, value as given, fix."""
    return UsageError(f"{flag} {str(value)!r}: {fix}")


def parse_choice(flag: str, value: object, choices: Sequence[object]) -> object:
    """One of a few values, which may be numbers."""
    for choice in choices:
        if str(value) == str(choice):
            return choice
    raise wrong(flag, value, f"choose one of {', '.join(map(str, choices))}")


def parse_number(flag: str, value: object, whole: bool, least: float, most: float) -> float:
    """A number, an int where it is to be `whole`."""
    try:
        number = int(str(value)) if whole else float(str(value))
    except ValueError:
        number = None
    if number is None or not least <= number <= most:  # a NaN is in no range
        raise wrong(flag, value, f"give a {'whole ' * whole}number from {least} to {most}")
    return number


def parse_splits(text: str) -> dict[str, Fraction]:
    """`train=0.9,validation=rest` as exact fractions that sum to 1."""
    fix = "write train=0.9,validation=0.1 with shares that sum to 1, one of them may be 'rest'"
    shares: dict[str, Fraction] = {}
    rest = None
    for part in text.split(","):
        name, _, share = (piece.strip() for piece in part.partition("="))
        if not NAME_PATTERN.fullmatch(name) or name in shares or (share == REST and rest):
            raise wrong("--splits", text, fix)
        if share == REST:
            rest, shares[name] = name, Fraction(0)
        elif _DECIMAL.fullmatch(share):
            shares[name] = Fraction(share)
        else:
            raise wrong("--splits", text, fix)
    if rest is not None:
        shares[rest] = 1 - sum(shares.values(), Fraction(0))
    if sum(shares.values()) != 1 or any(share <= 0 for share in shares.values()):
        raise wrong("--splits", text, fix)
    if "train" not in shares:
        raise wrong("--splits", text, "one split must be named train")
    return shares


def splits_text(fractions: Mapping[str, Fraction]) -> str:
    """The one way to write `--splits`: exact decimals, `rest` spelled out."""
    context = decimal.Context(prec=200)
    shares = {
        name: context.divide(decimal.Decimal(share.numerator), decimal.Decimal(share.denominator))
        for name, share in fractions.items()
    }
    return ",".join(f"{name}={share.normalize(context):f}" for name, share in shares.items())


def parse_pattern(text: str) -> re.Pattern[str]:
    """`--split_by`: a regular expression with a group."""
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise wrong("--split_by", text, f"not a regular expression: {error}") from None
    if pattern.groups < 1:
        raise wrong("--split_by", text, "put the part that stays together in a group: '([^/]+)_\\d+'")
    return pattern


def parse_shards(value: str | int) -> int | dict[str, int]:
    """`8` or `train=64,validation=4`."""
    fix = "write 8 or train=64,validation=4"
    text = str(value)
    if text.isdecimal() and int(text) > 0:
        return int(text)
    counts: dict[str, int] = {}
    for part in text.split(","):
        name, _, count = (piece.strip() for piece in part.partition("="))
        if not NAME_PATTERN.fullmatch(name) or name in counts or not (count.isdecimal() and int(count) > 0):
            raise wrong("--num_shards", text, fix)
        counts[name] = int(count)
    return counts


def parse_bytes(flag: str, value: str | int) -> int:
    """`128MiB`, `200MB` or a plain number, as bytes."""
    match = _BYTES.fullmatch(str(value).strip())
    unit = _BYTE_UNITS.get(match[2].upper()) if match else None
    byte_count = int(Fraction(match[1]) * unit) if match and unit else 0
    if byte_count < 1:
        raise wrong(flag, value, "write a size such as 128MiB, 200MB or 1000000")
    return byte_count


def parse_size(value: str | int) -> tuple[int, int] | None:
    """`224`, `HxW` or `none` as (height, width) in pixels, or None."""
    text = str(value).strip().lower()
    if text == "none":
        return None
    sides = [int(side) if side.isdecimal() else 0 for side in text.split("x")]
    if len(sides) <= 2 and all(sides) and max(sides) > _LONGEST_SIDE:
        raise wrong("--image_size", value, f"a side has at most {_LONGEST_SIDE} pixels")
    if len(sides) > 2 or not all(sides):
        raise wrong("--image_size", value, "write 224, 224x320 (height x width) or none")
    return sides[0], sides[-1]


def parse_colour(value: str) -> Rgb:
    """`#rrggbb` or a CSS name, as (red, green, blue)."""
    try:
        red, green, blue, *alpha = ImageColor.getrgb(value.strip())
    except ValueError:
        alpha = [0]
    if alpha:
        raise wrong("--background", value, "write a colour such as white or '#ff8000'")
    return red, green, blue


def parse_extensions(value: str) -> tuple[str, ...]:
    """`jpg,.PNG` as suffixes in lower case without dots."""
    suffixes = tuple(part.strip().lower().removeprefix(".") for part in value.split(","))
    if not all(suffix and not set(suffix) & set("./* ") for suffix in suffixes):
        raise wrong("--extensions", value, "write suffixes such as jpg,jpeg,png")
    return suffixes


_FIRST_CONTACT_S = 15.0
# Of a dataset's name: with split, number and an index's suffix, file names stay below 255 bytes.
_LONGEST_NAME = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Flags):
    """What to convert, into what, and how. Its arguments are the flags; `--help` and the README describe them.

    Raises:
        UsageError: a value can't be used; names the flag, the value and the fix.
    """

    # Resolved by the launcher: lines of `labels_file`, column names of `manifest`; no flags of their own.
    labels: tuple[str, ...] | None = dataclasses.field(default=None, metadata={"decides_bytes": True})
    header: tuple[str, ...] = dataclasses.field(default=(), metadata={"decides_bytes": False})
    # Of one run, set by the launcher: which job it is, and how many images a local runner has memory for.
    most_references: int | None = dataclasses.field(default=None, compare=False, metadata={"decides_bytes": False})
    run_id: str = dataclasses.field(
        default_factory=lambda: uuid.uuid4().hex, compare=False, repr=False, metadata={"decides_bytes": False}
    )

    def __post_init__(self) -> None:
        self._normalize_places()
        self._check_names()
        self._normalize_values()
        self._check_layout()
        self._check_combinations()
        # Each of these raises where its text can't be read.
        _ = self.split_fractions, self.shard_counts, self.shard_bytes, self.image_options, self.split_pattern
        _ = self.suffixes

    @property
    def dataset_url(self) -> str:
        """Where the version is published."""
        return storage.join(storage.join(self.output, self.name), self.version)

    @property
    def state_url(self) -> str:
        """What an unpublished job keeps; gone once the version is published."""
        return "/".join((storage.join(self.output, self.name), STATE_FOLDER, self.version))

    @property
    def first_contact_s(self) -> float:
        """Seconds in which a store must answer at all: a wrong URL or no network should not take ten minutes."""
        return min(self.io_deadline, _FIRST_CONTACT_S)

    @cached_property
    def split_fractions(self) -> dict[str, Fraction] | None:
        """Split → share, or None where the input itself says which image is in which split."""
        if self.layout == "split_class_folders":
            return None
        return parse_splits(self.splits) if self.splits is not None else {"train": Fraction(1)}

    @cached_property
    def split_pattern(self) -> re.Pattern[str] | None:
        """`--split_by`, compiled."""
        return None if self.split_by is None else parse_pattern(self.split_by)

    @cached_property
    def shard_bytes(self) -> int | None:
        """`--target_shard_bytes` as a number, or None for the default."""
        if self.target_shard_bytes is None:
            return None
        return parse_bytes("--target_shard_bytes", self.target_shard_bytes)

    @cached_property
    def shard_counts(self) -> int | dict[str, int] | None:
        """`--num_shards`: a number for each split, split → number, or None."""
        return None if self.num_shards is None else parse_shards(self.num_shards)

    @cached_property
    def image_options(self) -> images.ImageOptions:
        """What the codec needs to know."""
        return images.ImageOptions(
            size=parse_size(self.image_size),
            resize_mode=self.resize_mode,
            resample=self.resample,
            background=None if self.background is None else parse_colour(self.background),
            channels=self.channels,
            format=self.image_format,
            jpeg_quality=self.jpeg_quality,
            jpeg_subsampling=self.jpeg_subsampling,
            optimize=self.optimize,
            max_pixels=self.max_pixels,
            max_image_bytes=parse_bytes("--max_image_bytes", self.max_image_bytes),
            allow_truncated=self.allow_truncated,
        )

    @cached_property
    def suffixes(self) -> frozenset[str]:
        """`--extensions`: lower case, without dots."""
        return frozenset(parse_extensions(self.extensions))

    @property
    def columns(self) -> tuple[dict[str, Any], ...]:
        """Feature columns of a manifest as manifest.json names them, in order of their names."""
        return tuple(
            {"name": column.name, "dtype": column.dtype, "list": column.is_list}
            for column in example.columns(self.header)
        )

    @property
    def threads(self) -> int:
        """Decode threads of a worker process on this machine."""
        if self.decode_threads:
            return self.decode_threads
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def fingerprint(self) -> dict[str, Any]:
        """The `configuration` of the manifest: what decides bytes, in one form however it was written."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata["decides_bytes"]}
        fractions = self.split_fractions
        size = self.image_options.size
        values |= {
            "splits": None if fractions is None else splits_text(fractions),
            "image_size": None if size is None else list(size),
            "background": None if self.image_options.background is None else list(self.image_options.background),
            "extensions": sorted(self.suffixes),
            "max_image_bytes": self.image_options.max_image_bytes,
            "target_shard_bytes": self.shard_bytes,
            "num_shards": self.shard_counts,
            "labels": None if self.labels is None else list(self.labels),
            "columns": list(self.columns),
        }
        return values

    def _normalize_places(self) -> None:
        """Paths absolute, no slash at the end of a URL; nothing that no storage could hold."""
        for flag in ("input", "output", "manifest", "labels_file"):
            place = getattr(self, flag)
            if not place:
                continue
            if base.has_password(place):
                fix = "leave it out; credentials come from the store's usual variables"
                raise UsageError(f"--{flag}: the URL holds a password: {fix}")
            why = storage.why_unusable(storage.normalize(place), is_file=flag in ("manifest", "labels_file"))
            if flag == "output" and not is_utf8(place):
                why = "it isn't UTF-8, which a dataset's metadata is: rename the folder"
            if why:
                raise wrong(f"--{flag}", place, why)
            object.__setattr__(self, flag, storage.normalize(place))

    def _check_names(self) -> None:
        if not self.output:
            raise UsageError("--output is missing: give the root folder or URL of your datasets")
        if not self.name:
            raise UsageError("--name is missing: give the dataset a name such as photos")
        if not NAME_PATTERN.fullmatch(self.name):
            raise wrong("--name", self.name, "use a-z, 0-9 and _, a letter first (TFDS reads no other)")
        if len(self.name) > _LONGEST_NAME:
            raise wrong("--name", self.name, f"use at most {_LONGEST_NAME} characters, files are named after it")
        if not VERSION_PATTERN.fullmatch(self.version):
            raise wrong("--version", self.version, "use N.N.N such as 1.0.0 (TFDS reads no other)")

    def _normalize_values(self) -> None:
        """Numbers, which the command line gives as text, and values of which there are a few."""
        for field in dataclasses.fields(Flags):
            flag, value = f"--{field.name}", getattr(self, field.name)
            if field.metadata["choices"]:
                value = parse_choice(flag, value, field.metadata["choices"])
            elif field.metadata["between"]:
                value = parse_number(flag, value, field.type == "int", *field.metadata["between"])
            object.__setattr__(self, field.name, value)

    def _check_layout(self) -> None:
        """The flags that say where classes and splits come from go together."""
        if self.layout == "manifest":
            if not self.manifest:
                raise UsageError("--manifest is missing: --layout manifest needs a CSV or JSONL file")
            object.__setattr__(self, "input", self.input or self.manifest.rpartition("/")[0])
            return
        if self.manifest:
            raise wrong("--manifest", self.manifest, "it goes with --layout manifest")
        if not self.input:
            raise UsageError("--input is missing: give the folder or URL whose sub-folders are classes")
        if self.layout == "split_class_folders":
            for flag, value in (("--splits", self.splits), ("--split_by", self.split_by)):
                if value is not None:
                    raise wrong(flag, value, "leave it out: the folders are the splits")

    def _check_combinations(self) -> None:
        if self.target_shard_bytes is not None and self.num_shards is not None:
            raise wrong("--num_shards", self.num_shards, "leave out --target_shard_bytes or this")
        counts, dealt = self.shard_counts, self.split_fractions
        if isinstance(counts, dict) and dealt and (self.layout == "class_folders" or self.splits):
            for split in sorted(counts.keys() - dealt.keys()):
                raise wrong("--num_shards", self.num_shards, f"there is no split {split!r}, only {', '.join(dealt)}")
        for flag in ("overwrite", "restart"):
            if self.repair and getattr(self, flag):
                raise UsageError(f"--repair and --{flag} exclude each other: leave out one")
