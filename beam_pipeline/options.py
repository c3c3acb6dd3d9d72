"""The job's configuration: every flag of `python -m beam_pipeline`, validated once, frozen, the same from Python.

A field's metadata says how it appears on the command line and whether it decides bytes of the dataset (then it is part
of the manifest's `configuration`, and a published version can't be continued with another value).
"""

from __future__ import annotations

import dataclasses
import decimal
import os
import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import cached_property
from typing import Any

from PIL import ImageColor

from beam_pipeline import images, manifest_rows, secrets, storage
from beam_pipeline.errors import UsageError
from beam_pipeline.identity import Identity
from beam_pipeline.images import colour, geometry
from beam_pipeline.images.files import EXTENSIONS
from beam_pipeline.schema import NAME_PATTERN, VERSION_PATTERN
from beam_pipeline.sharding import Splits

LAYOUTS = ("class_folders", "split_class_folders", "manifest")
COMPRESSIONS = ("none", "gzip")
DUPLICATES = ("keep", "report", "drop", "fail")
_BYTE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_DECIMAL = re.compile(r"\d+(\.\d*)?|\.\d+")
REST = "rest"


def _flag(default: Any, text: str, choices: Iterable[object] | None = None, metavar: str | None = None) -> Any:
    """A field that decides bytes of the dataset."""
    metadata = {"help": text, "choices": choices, "metavar": metavar, "decides_bytes": True}
    return dataclasses.field(default=default, metadata=metadata)


def _run_flag(default: Any, text: str, choices: Iterable[str] | None = None, metavar: str | None = None) -> Any:
    """A field that only says how the job runs."""
    metadata = {"help": text, "choices": choices, "metavar": metavar, "decides_bytes": False}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What to convert, into what, and how. Fields are the flags; `--help` and the README describe them.

    Raises:
        UsageError: a value can't be used; names the flag, the value and the fix.
    """

    input: str | None = _run_flag(None, "folder or URL whose sub-folders are classes", metavar="DIR")
    output: str = _run_flag("", "root folder or URL; the dataset goes to ROOT/NAME/VERSION/", metavar="ROOT")
    name: str = _run_flag("", "dataset name: a-z, 0-9 and _, a letter first")
    version: str = _run_flag("1.0.0", "dataset version, N.N.N")
    layout: str = _flag("class_folders", "where class and split come from", choices=LAYOUTS)
    manifest: str | None = _run_flag(
        None, "CSV or JSONL with path, label and optional split, bytes, md5, features", metavar="FILE"
    )
    labels_file: str | None = _run_flag(
        None, "class list, one a line, order = id (sorted folder names)", metavar="FILE"
    )
    splits: str | None = _flag(
        None, "shares by a hash of the path: train=0.9,validation=0.1; one may be 'rest' (all in train)"
    )
    split_by: str | None = _flag(
        None, "regular expression; images whose path has the same first group share a split", metavar="REGEX"
    )
    image_size: str | int = _flag("224", "pixels: N, HxW, or none to keep each image's own")
    resize_mode: str = _flag("stretch", "how an image of other proportions is fitted", choices=geometry.RESIZE_MODES)
    resample: str = _flag("bilinear", "resize filter", choices=tuple(geometry.RESAMPLING))
    background: str | None = _flag(
        None,
        "'#rrggbb' or a CSS name: behind transparent pixels (white), beside padded images (black)",
        metavar="COLOUR",
    )
    channels: int = _flag(3, "3 stores RGB, 1 stores gray", choices=(1, 3))
    image_format: str = _flag("jpeg", "format of the stored images; png is lossless", choices=tuple(images.FORMATS))
    jpeg_quality: int = _flag(90, "1 to 100")
    jpeg_subsampling: str = _flag("4:2:0", "chroma subsampling", choices=tuple(images.SUBSAMPLING))
    optimize: bool = _flag(False, "search for smaller codes: 3 % smaller JPEGs, three times the encoding time")
    progressive: bool = _flag(False, "store progressive JPEGs, which readers take longer to decode")
    icc: str = _flag("srgb", "convert colours by an embedded profile, or keep pixels and profile", images.ICC_POLICIES)
    keep_metadata: bool = _flag(False, "store EXIF, XMP and comments too: places and names, perhaps")
    extensions: str = _flag(",".join(EXTENSIONS), "files that are listed, by their suffix", metavar="LIST")
    max_pixels: int = _flag(178_956_970, "reject larger images before decoding them")
    max_image_bytes: str | int = _flag("256MiB", "reject larger files before fetching them", metavar="BYTES")
    allow_truncated: bool = _flag(False, "take what there is of a file that ends early, instead of rejecting it")
    target_shard_bytes: str | int | None = _flag(
        None,
        "size of a shard, such as 200MB (128MiB, but at least 16 shards a split while each keeps 8MiB)",
        metavar="BYTES",
    )
    num_shards: str | int | None = _flag(
        None, "shards of each split, 8 or train=64,validation=4, instead of a size", metavar="N"
    )
    duplicates: str = _flag(
        "keep",
        "images with the same bytes: keep them, report them in duplicates.jsonl, drop all but one, or fail",
        choices=DUPLICATES,
    )
    compression: str = _flag("none", "gzip costs reading speed and saves nothing on JPEG", choices=COMPRESSIONS)
    one_hot: bool = _flag(False, "also write one_hot_class, 4 bytes x classes a record")
    seed: int = _flag(0, "of the global order")
    max_reject_fraction: float = _run_flag(0.01, "more rejected images than this fail the job, nothing is published")
    fetch_concurrency: int = _run_flag(32, "requests in flight in a worker process")
    decode_threads: int = _run_flag(0, "images decoded at a time in a worker process (cores)")
    io_deadline: float = _run_flag(
        storage.DEFAULT_DEADLINE_S, "seconds a storage request is retried", metavar="SECONDS"
    )
    strict: bool = _run_flag(False, "an image that vanishes or changes after it was listed fails the job")
    plan_only: bool = _run_flag(False, "print the plan and write no dataset")
    repair: bool = _run_flag(False, "read every byte of a published version and rewrite what is damaged")
    overwrite: bool = _run_flag(False, "delete a published version and write it anew")
    # Resolved by the launcher: lines of `labels_file`, column names of `manifest`; no flags of their own.
    labels: tuple[str, ...] | None = dataclasses.field(default=None, metadata={"decides_bytes": True})
    header: tuple[str, ...] = dataclasses.field(default=(), metadata={"decides_bytes": False})
    # Of one run, set by the launcher: which job it is, and how many images a local runner has memory for.
    most_references: int | None = dataclasses.field(default=None, compare=False, metadata={"decides_bytes": False})
    identity: Identity = dataclasses.field(
        default_factory=Identity.new, compare=False, repr=False, metadata={"decides_bytes": False}
    )

    def __post_init__(self) -> None:
        for flag in ("input", "output", "manifest", "labels_file"):
            value = getattr(self, flag)
            if value:
                if secrets.has_password(value):
                    fix = "leave it out and put it into fsspec's configuration (~/.config/fsspec)"
                    raise UsageError(f"--{flag}: the URL holds a password: {fix}")
                wrong = storage.why_unusable(storage.normalize(value))
                if wrong:
                    raise _wrong(f"--{flag}", value, wrong)
                object.__setattr__(self, flag, storage.normalize(value))
        self._check_names()
        self._check_choices()
        self._check_numbers()
        self._check_layout()
        # Each of these raises where its text can't be read.
        _ = self.split_fractions, self.shard_counts, self.shard_bytes, self.image_options, self.split_pattern
        _ = self.suffixes

    @property
    def dataset_url(self) -> str:
        """Where the version is published."""
        return storage.join(storage.join(self.output, self.name), self.version)

    @cached_property
    def split_fractions(self) -> dict[str, Fraction] | None:
        """Split → share, or None where the input itself says which image is in which split."""
        if self.layout == "split_class_folders":
            if self.splits is not None:
                raise _wrong("--splits", self.splits, "leave it out: the folders are the splits")
            return None
        return parse_splits(self.splits) if self.splits is not None else {"train": Fraction(1)}

    @property
    def dealt_splits(self) -> Splits:
        """Deals images to splits; all to train where the input says nothing."""
        return Splits(self.split_fractions or {"train": Fraction(1)})

    @cached_property
    def split_pattern(self) -> re.Pattern[str] | None:
        """`--split_by`, compiled."""
        if self.split_by is None:
            return None
        try:
            pattern = re.compile(self.split_by)
        except re.error as error:
            raise _wrong("--split_by", self.split_by, f"not a regular expression: {error}") from None
        if pattern.groups < 1:
            raise _wrong("--split_by", self.split_by, "put the part that stays together in a group: '([^/]+)_\\d+'")
        return pattern

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
            progressive=self.progressive,
            icc=self.icc,
            keep_metadata=self.keep_metadata,
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
            for column in manifest_rows.columns(self.header)
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
            "splits": None if fractions is None else _splits_text(fractions),
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

    def _check_names(self) -> None:
        if not self.output:
            raise UsageError("--output is missing: give the root folder or URL of your datasets")
        if not self.name:
            raise UsageError("--name is missing: give the dataset a name such as photos")
        if not NAME_PATTERN.fullmatch(self.name):
            raise _wrong("--name", self.name, "use a-z, 0-9 and _, a letter first (TFDS reads no other)")
        if not VERSION_PATTERN.fullmatch(self.version):
            raise _wrong("--version", self.version, "use N.N.N such as 1.0.0 (TFDS reads no other)")

    def _check_choices(self) -> None:
        for field in dataclasses.fields(self):
            choices = field.metadata.get("choices")
            value = getattr(self, field.name)
            if choices and value not in choices:
                raise _wrong(f"--{field.name}", value, f"choose one of {', '.join(map(str, choices))}")

    def _check_numbers(self) -> None:
        limits: Mapping[str, tuple[float, float]] = {
            "jpeg_quality": (1, 100),
            "max_pixels": (1, 1 << 40),
            "seed": (-(1 << 63), (1 << 63) - 1),
            "max_reject_fraction": (0, 1),
            "fetch_concurrency": (1, 1024),
            "decode_threads": (0, 1024),
            "io_deadline": (0, 86_400),
        }
        for name, (least, most) in limits.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise _wrong(f"--{name}", value, f"give a number from {least:g} to {most:g}")

    def _check_layout(self) -> None:
        if self.layout == "manifest" and not self.manifest:
            raise UsageError("--manifest is missing: --layout manifest needs a CSV or JSONL file")
        if self.layout != "manifest" and self.manifest:
            raise _wrong("--manifest", self.manifest, "it goes with --layout manifest")
        if self.layout != "manifest" and not self.input:
            raise UsageError("--input is missing: give the folder or URL whose sub-folders are classes")
        if self.layout == "manifest" and not self.input and self.manifest:
            object.__setattr__(self, "input", self.manifest.rpartition("/")[0])
        if self.target_shard_bytes is not None and self.num_shards is not None:
            raise _wrong("--num_shards", self.num_shards, "leave out --target_shard_bytes or this")
        counts, dealt = self.shard_counts, self.split_fractions
        if isinstance(counts, dict) and dealt and (self.layout == "class_folders" or self.splits):
            for split in sorted(counts.keys() - dealt.keys()):
                raise _wrong("--num_shards", self.num_shards, f"there is no split {split!r}, only {', '.join(dealt)}")
        if self.progressive and self.image_format != "jpeg":
            raise UsageError("--progressive: leave it out, only --image_format jpeg is progressive")
        if self.overwrite and self.repair:
            raise UsageError("--repair and --overwrite exclude each other: leave out one")
        if self.split_by is not None and self.layout == "split_class_folders":
            raise _wrong("--split_by", self.split_by, "leave it out: the folders are the splits")


def parse_splits(text: str) -> dict[str, Fraction]:
    """`train=0.9,validation=rest` as exact fractions that sum to 1."""
    fix = "write train=0.9,validation=0.1 with shares that sum to 1, one of them may be 'rest'"
    shares: dict[str, Fraction] = {}
    rest = None
    for part in text.split(","):
        name, _, share = (piece.strip() for piece in part.partition("="))
        if not NAME_PATTERN.fullmatch(name) or name in shares or (share == REST and rest):
            raise _wrong("--splits", text, fix)
        if share == REST:
            rest, shares[name] = name, Fraction(0)
        elif _DECIMAL.fullmatch(share):
            shares[name] = Fraction(share)
        else:
            raise _wrong("--splits", text, fix)
    if rest is not None:
        shares[rest] = 1 - sum(shares.values(), Fraction(0))
    if sum(shares.values()) != 1 or any(share <= 0 for share in shares.values()):
        raise _wrong("--splits", text, fix)
    if "train" not in shares:
        raise _wrong("--splits", text, "one split must be named train")
    return shares


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
            raise _wrong("--num_shards", text, fix)
        counts[name] = int(count)
    return counts


def parse_bytes(flag: str, value: str | int) -> int:
    """`128MiB`, `200MB` or a plain number, as bytes."""
    match = _BYTES.fullmatch(str(value).strip())
    unit = _BYTE_UNITS.get(match[2].upper()) if match else None
    byte_count = int(Fraction(match[1]) * unit) if match and unit else 0
    if byte_count < 1:
        raise _wrong(flag, value, "write a size such as 128MiB, 200MB or 1000000")
    return byte_count


def parse_colour(value: str) -> colour.Rgb:
    """`#rrggbb` or a CSS name, as (red, green, blue)."""
    try:
        red, green, blue, *alpha = ImageColor.getrgb(value.strip())
    except ValueError:
        alpha = [0]
    if alpha:
        raise _wrong("--background", value, "write a colour such as white or '#ff8000'")
    return red, green, blue


def parse_extensions(value: str) -> tuple[str, ...]:
    """`jpg,.PNG` as suffixes in lower case without dots."""
    suffixes = tuple(part.strip().lower().removeprefix(".") for part in value.split(","))
    if not all(suffix and not set(suffix) & set("./* ") for suffix in suffixes):
        raise _wrong("--extensions", value, "write suffixes such as jpg,jpeg,png")
    return suffixes


def parse_size(value: str | int) -> tuple[int, int] | None:
    """`224`, `HxW` or `none` as (height, width) in pixels, or None."""
    text = str(value).strip().lower()
    if text == "none":
        return None
    sides = [int(side) if side.isdecimal() else 0 for side in text.split("x")]
    if len(sides) > 2 or not all(1 <= side <= 16_384 for side in sides):
        raise _wrong("--image_size", value, "write 224, 224x320 (height x width) or none")
    return sides[0], sides[-1]


def _splits_text(fractions: Mapping[str, Fraction]) -> str:
    """The one way to write `--splits`: exact decimals, `rest` spelled out."""
    context = decimal.Context(prec=200)
    shares = {
        name: context.divide(decimal.Decimal(share.numerator), decimal.Decimal(share.denominator))
        for name, share in fractions.items()
    }
    return ",".join(f"{name}={share.normalize(context):f}" for name, share in shares.items())


def _wrong(flag: str, value: object, fix: str) -> UsageError:
    return UsageError(f"{flag} {str(value)!r}: {fix}")
