"""The job's configuration: every flag is declared once, parsed when it is set, and the same from Python."""

from __future__ import annotations

import dataclasses
import decimal
import functools
import json
import os
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from typing import Any, Generic, TypeVar, cast, get_args, overload

import msgspec
from PIL import ImageColor

from beam_pipeline import images, storage
from beam_pipeline.errors import UsageError
from beam_pipeline.images import geometry
from beam_pipeline.images.colour import Rgb
from beam_pipeline.images.formats import EXTENSIONS
from beam_pipeline.images.resize import RESAMPLING
from beam_pipeline.machine import cpu_count
from beam_pipeline.schema import NAME_PATTERN, RECORD_KEYS, STATE_FOLDER, VERSION_PATTERN, canonical_json, is_utf8
from beam_pipeline.schema.manifest import Column, Dtype

BY_NAME = "name"  # a value of --split_by
ANY = "any"  # a value of --extensions
_MAX_NAME = 100  # of a dataset: file names, with split, number and an index's suffix, stay below 255 bytes
_MAX_SIDE = 16_384
_DECIMAL = re.compile(r"\d+(\.\d*)?|\.\d+")
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_BYTE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def wrong(flag: str, value: object, fix: object) -> UsageError:
    """The error for a flag's value, which is hidden if it holds a password."""
    shown = "***" if storage.has_password(str(value)) else str(value)
    return UsageError(f"{flag} {shown!r}: {fix}")


# --- parsers: raw value → parsed value. Idempotent, so `dataclasses.replace` works. The ValueError's text is the fix.


def _between(kind: type[int] | type[float], least: float, most: float) -> Callable[[object], Any]:
    def parse(value: object) -> float:
        with suppress(ValueError):
            number = kind(str(value))
            if least <= number <= most:  # False for NaN
                return number
        raise ValueError(f"give {'an integer' if kind is int else 'a number'} from {least} to {most}")

    return parse


def _folder(value: str | os.PathLike[str] | None, is_file: bool = False) -> str:
    """An absolute path or a URL, without a slash at its end; "" for none."""
    raw = os.fsdecode(value or "")
    if not raw:
        return ""
    if storage.has_password(raw):
        raise ValueError("leave the password out; credentials come from the store's usual variables")
    if scheme := re.match(r"(\w{2,}):/(?!/)", raw):
        raise ValueError(f"a URL has two slashes, which a Path drops: write it as text, {scheme[1]}://...")
    url = storage.normalize(raw)
    if why := storage.why_unusable(url, is_file):
        raise ValueError(why)
    return url


_file = functools.partial(_folder, is_file=True)


def _list(value: str | os.PathLike[str] | None) -> str:
    if str(value).lower().endswith(".csv"):
        raise ValueError("it can't be CSV: save its paths as a .txt file, one per line, or as JSONL")
    return _file(value)


def _name(value: str) -> str:
    if value and not (NAME_PATTERN.fullmatch(value) and len(value) <= _MAX_NAME):
        raise ValueError(f"use at most {_MAX_NAME} of a-z, 0-9 and _, a letter first (TFDS reads no other)")
    return value


def _version(value: str) -> str:
    if not VERSION_PATTERN.fullmatch(value):
        raise ValueError("use N.N.N such as 1.0.0 (TFDS reads no other)")
    return value


def _base(value: str) -> str:
    if value not in ("", "none") and not VERSION_PATTERN.fullmatch(value):
        raise ValueError("name a version such as 1.0.0, or none")
    return value


def _extensions(value: str | Iterable[str]) -> frozenset[str]:
    """`jpg,.PNG` or a list of suffixes: in lower case, without dots; or `any`."""
    parts = value.split(",") if isinstance(value, str) else value
    suffixes = frozenset(part.strip().lower().removeprefix(".") for part in parts)
    if not suffixes or not all(suffix and not set(suffix) & set("./* ") for suffix in suffixes):
        raise ValueError("write suffixes such as jpg,jpeg,png, or any")
    return suffixes


def _pairs(value: object) -> list[tuple[str, Any]]:
    """`train=0.9,validation=0.1` or a mapping, as pairs; in a text all values are text."""
    if isinstance(value, Mapping):
        return [(str(name), share) for name, share in value.items()]
    parts = (part.partition("=") for part in str(value).split(","))
    return [(name.strip(), share.strip()) for name, _, share in parts]


def _split_folders(value: str | Mapping[str, str]) -> dict[str, str]:
    """`Training=train,Testing=test` or a mapping: folder → split."""
    pairs = _pairs(value)
    if len(dict(pairs)) < len(pairs) or not all(name and NAME_PATTERN.fullmatch(str(split)) for name, split in pairs):
        raise ValueError("write Training=train,Testing=test: each folder once, each split of a-z, 0-9 and _")
    return dict(sorted(pairs))


def _splits(value: str | Mapping[str, Any]) -> dict[str, Fraction]:
    """`train=0.9,validation=rest`, `train=90,validation=10` or a mapping: exact fractions that sum to 1."""
    shares: dict[str, Fraction] = {}
    rest = []
    for name, share in _pairs(value):
        is_share = isinstance(share, Fraction) or share == "rest" or _DECIMAL.fullmatch(str(share))
        if not is_share or not NAME_PATTERN.fullmatch(name) or name in shares:
            raise ValueError("write decimal shares such as train=0.9,validation=0.1; one may be 'rest'")
        if share == "rest":
            rest.append(name)
        shares[name] = Fraction(0) if share == "rest" else Fraction(str(share))
    if len(rest) > 1:
        raise ValueError("one split may be 'rest', the others need a share")
    if rest:
        others = sum(shares.values(), Fraction(0))
        shares[rest[0]] = 1 - others
        if others >= 1:
            fix = "write shares below 1, such as 0.8"
            raise ValueError(f"nothing is left for 'rest': the others sum to {float(others):g}; {fix}")
    if min(shares.values()) <= 0:
        raise ValueError("every split needs a share above 0")
    if (total := sum(shares.values(), Fraction(0))) not in (1, 100):
        raise ValueError(f"the shares sum to {float(total):g}: write shares that sum to 1, or percent that sum to 100")
    if "train" not in shares:
        raise ValueError("one split must be named train")
    return {name: share / total for name, share in shares.items()}


def splits_text(shares: Mapping[str, Fraction]) -> str:
    """The canonical text of `--splits`: exact decimals, without `rest`."""
    ratios = {name: decimal.Decimal(share.numerator) / share.denominator for name, share in shares.items()}
    return ",".join(f"{name}={ratio:f}" for name, ratio in ratios.items())


def _split_by(value: str | re.Pattern[str]) -> re.Pattern[str] | str:
    """A regular expression with a group, or the word `name`."""
    if value == BY_NAME:
        return BY_NAME
    try:
        pattern = re.compile(value)
    except re.error as error:
        raise ValueError(f"it is not a regular expression: {error}") from None
    if pattern != re.compile(pattern.pattern):  # the manifest stores only its text
        raise ValueError("write its flags into it: '(?i)...'")
    if pattern.groups < 1:
        raise ValueError("put the part that stays together in a group: '([^/]+)_\\d+'")
    return pattern


def _shards(value: int | str | Mapping[str, int]) -> int | dict[str, int]:
    """`8`, `train=64,validation=4` or a mapping."""
    if str(value).isdecimal() and int(str(value)) > 0:
        return int(str(value))
    pairs = _pairs(value)
    counts = {name: int(str(count)) if str(count).isdecimal() else 0 for name, count in pairs}
    if len(counts) < len(pairs) or not all(NAME_PATTERN.fullmatch(name) and count for name, count in counts.items()):
        raise ValueError("write 8 or train=64,validation=4")
    return counts


def _bytes(value: int | str) -> int:
    """`128MiB`, `200MB` or a plain number, as bytes."""
    match = _BYTES.fullmatch(str(value).strip())
    unit = _BYTE_UNITS.get(match[2].upper()) if match else None
    byte_count = int(Fraction(match[1]) * unit) if match and unit else 0
    if byte_count < 1:
        raise ValueError("write a size such as 128MiB, 200MB or 1000000")
    return byte_count


def _size(value: int | str | Sequence[int] | None) -> tuple[int, int] | None:
    """`224`, `HxW`, (height, width) or `none`: (height, width) in pixels, or None."""
    text = "x".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    if text.strip().lower() == "none":
        return None
    sides = [int(side) if side.isdecimal() else 0 for side in text.strip().lower().split("x")]
    if len(sides) > 2 or not all(0 < side <= _MAX_SIDE for side in sides):
        raise ValueError(f"write 224, 224x320 (height x width, at most {_MAX_SIDE}) or none")
    return sides[0], sides[-1]


def _colour(value: str | Sequence[int]) -> Rgb:
    """`#rrggbb`, a CSS name or (red, green, blue)."""
    with suppress(TypeError, ValueError):
        parts = ImageColor.getrgb(value.strip()) if isinstance(value, str) else tuple(value)
        if len(parts) == 3 and all(part in range(256) for part in parts):
            return parts
    raise ValueError("write a colour such as white or '#ff8000'")


def _switch(value: bool | str) -> bool:
    """True, False or their names, which a Flex Template's launcher passes."""
    if str(value).lower() not in ("true", "false"):
        raise ValueError("leave the value out, or write true or false")
    return str(value).lower() == "true"


# --- flags

Raw = TypeVar("Raw")
Parsed = TypeVar("Parsed")


@dataclasses.dataclass(eq=False)
class Flag(Generic[Raw, Parsed]):
    """A field of `Config` that is a flag: a descriptor that parses the values it is set to.

    Attributes:
        group: of `--help`.
        default: a raw value; None is never parsed.
        values: one of the parsers above, or a tuple of all values.
        help: for `--help`, which adds the default unless the text ends with one.
        metavar: stands for the value in `--help`.
    """

    group: str
    default: Any
    values: Callable[[Any], Parsed] | tuple[object, ...]
    help: str
    metavar: str = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, config: None, owner: type) -> Raw: ...
    @overload
    def __get__(self, config: object, owner: type) -> Parsed: ...
    def __get__(self, config: object | None, owner: type) -> Any:
        return self.default if config is None else vars(config)[self.name]

    def __set__(self, config: object, value: Raw) -> None:
        parsed: Any = value
        try:
            if isinstance(self.values, tuple):
                parsed = next((choice for choice in self.values if str(choice) == str(value)), None)
                if parsed is None:
                    raise ValueError(f"choose one of {', '.join(map(str, self.values))}")
            elif value is not None or self.default is not None:
                parsed = self.values(value)
        except (TypeError, ValueError) as error:
            fix = f"give text, not {type(value).__name__}" if isinstance(error, TypeError) else error
            raise wrong(f"--{self.name}", value, fix) from None
        vars(config)[self.name] = parsed


Switch = Flag[bool | str, bool]
Text = Flag[str, str]
Integer = Flag[int | str, int]
Fractional = Flag[float | str, float]
Url = Flag[str | os.PathLike[str] | None, str]
# Groups of flags in --help. Those of _URLS and _JOB decide no byte of a dataset, all others do.
_URLS, _CLASSES, _IMAGES, _SHARDS, _JOB = "input and output", "classes and splits", "images", "shards", "job"


@dataclasses.dataclass(frozen=True)
class RunContext:
    """Facts of one run, which the launcher finds out for its workers: nothing that decides a byte.

    Attributes:
        id: of the run.
        launcher: the versions that workers of a cluster must have; None if they are the launcher's own.
        base_sha256: `self_sha256` of the base's manifest; "" without a base.
        max_references: how many images a local runner has memory for; None for no limit.
        compares: whether the job only compares.
    """

    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    launcher: Mapping[str, str] | None = None
    base_sha256: str = ""
    max_references: int | None = None
    compares: bool = False


# fmt: off
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What to convert, where to, and how. The arguments are the flags, which `--help` and the README describe.

    Values may be text as on the command line, or Python's paths, numbers, mappings and sequences.

    Raises:
        UsageError: a value can't be used; names the flag, the value and the fix.
    """

    input: Url = Flag(
        _URLS, "", _folder, "folder, zip or tar file whose sub-folders are the classes, or its URL (required)", "DIR")
    output: Url = Flag(
        _URLS, "", _folder, "folder or URL of your datasets; writes to ROOT/NAME/VERSION/ (required)", "ROOT")
    name: Text = Flag(
        _URLS, "", _name, "name of the dataset: a-z, 0-9 and _, a letter first (required)", "NAME")
    version: Text = Flag(
        _URLS, "1.0.0", _version, "version of the dataset: raise MAJOR (2.0.0) if a class id or the configuration "
        "changes, MINOR (1.1.0) for other images, PATCH (1.0.1) for corrections (default: 1.0.0)", "N.N.N")
    manifest: Url = Flag(
        _URLS, "", _file, "CSV or JSONL file for --layout manifest, with columns path and label. Columns split, "
        "bytes (only http:// and https:// URLs need it) and md5 are optional. Any other column becomes a feature of "
        "the records, of the type in its name: "
        "age:int64, score:float32, caption:bytes, tags:bytes[]. Paths are relative to --input (the file's folder) or "
        "full URLs", "FILE")
    labels_file: Url = Flag(
        _URLS, "", _file, "class names in the order of their ids, one per line (default: sorted folder names)", "FILE")
    exclude: Url = Flag(
        _URLS, "", _list, "images to leave out, whose classes stay: a text file of paths below --input, one per line, "
        "or .jsonl, with the lines that imageshards duplicates writes", "FILE")
    folders_are_classes: Switch = Flag(
        _URLS, False, _switch, "the folders are the classes, although they look like splits or like a folder above "
        "the classes: by their names, or since they hold the same sub-folders")

    layout: Text = Flag(
        _CLASSES, "class_folders", ("class_folders", "split_class_folders", "manifest"),
        "where class and split come from: DIR/CLASS/image.jpg, DIR/SPLIT/CLASS/image.jpg, or the rows of --manifest")
    split_folders: Flag[str | Mapping[str, str] | None, dict[str, str] | None] = Flag(
        _CLASSES, None, _split_folders, "the split of each folder of --layout split_class_folders, such as "
        "Training=train,Testing=test (default: the folders' names)", "FOLDERS")
    splits: Flag[str | Mapping[str, Any] | None, dict[str, Fraction] | None] = Flag(
        _CLASSES, None, _splits, "the share of each split, such as train=0.9,validation=0.1 or train=90,validation=10; "
        "one share may be 'rest'. "
        "Images are assigned by a hash of their path, so one that is moved to another class may change its split: see "
        "--split_by name (default: train=1)", "SHARES")
    split_by: Flag[str | re.Pattern[str] | None, re.Pattern[str] | str | None] = Flag(
        _CLASSES, None, _split_by, "regular expression: images share a split if its first group matches the same part "
        "of their paths, such as the name of a video or a patient. name is the path below the class folder: an image "
        "that is moved to another class keeps its split", "REGEX|name")
    stratify: Switch = Flag(
        _CLASSES, False, _switch, "give each class its exact share of each split; adding images may move "
        "a few others")

    extensions: Flag[str | Iterable[str], frozenset[str]] = Flag(
        _IMAGES, ",".join(EXTENSIONS), _extensions, "suffixes of the files that are images; any: every "
        "file, also one without a suffix", "LIST")
    image_size: Flag[int | str | Sequence[int] | None, tuple[int, int] | None] = Flag(
        _IMAGES, "224", _size,
        "size of the stored images in pixels: 224, 224x320 (height x width), or none to keep each one's own", "SIZE")
    resize_mode: Text = Flag(
        _IMAGES, "stretch", geometry.RESIZE_MODES,
        "for images of another aspect ratio: stretch distorts them, crop keeps the middle, pad adds borders. shorter "
        "and longer keep the aspect ratio: the image's shorter, or its longer side gets the size")
    resample: Text = Flag(_IMAGES, "bilinear", tuple(RESAMPLING), "filter for resizing")
    background: Flag[str | Sequence[int] | None, Rgb | None] = Flag(
        _IMAGES, None, _colour, "colour behind transparent pixels and of the borders that pad adds, '#rrggbb' or a CSS "
        "name (default: white, borders black)", "COLOUR")
    channels: Integer = Flag(_IMAGES, 3, (1, 3), "3 stores RGB, 1 stores gray")
    image_format: Text = Flag(_IMAGES, "jpeg", tuple(images.FORMATS), "format of the stored images; png is lossless")
    jpeg_quality: Integer = Flag(_IMAGES, 90, _between(int, 1, 100), "quality of the stored JPEGs, from 1 to 100", "N")
    jpeg_subsampling: Text = Flag(
        _IMAGES, "4:2:0", tuple(images.SUBSAMPLING), "chroma subsampling of the stored JPEGs; 4:4:4 is none")
    optimize: Switch = Flag(_IMAGES, False, _switch, "make JPEGs 3 % smaller, in three times the encoding time")
    max_pixels: Integer = Flag(
        _IMAGES, 178_956_970, _between(int, 1, 1 << 40),
        "reject images of more pixels than this, or that need more than 6 times as many bytes of memory, before they "
        "are decoded", "N")
    max_image_bytes: Integer = Flag(_IMAGES, "256MiB", _bytes, "reject larger files, before they are fetched", "BYTES")
    allow_truncated: Switch = Flag(
        _IMAGES, False, _switch, "store the readable part of a truncated file instead of rejecting it")

    target_shard_bytes: Flag[int | str | None, int | None] = Flag(
        _SHARDS, None, _bytes, "size of a shard, such as 200MB (default: 128MiB, or down to 8MiB if a split then gets "
        "fewer than 16 shards)", "BYTES")
    num_shards: Flag[int | str | Mapping[str, int] | None, int | dict[str, int] | None] = Flag(
        _SHARDS, None, _shards, "number of shards, instead of a size: 8 for each split, or train=64,validation=4", "N")
    compression: Text = Flag(
        _SHARDS, "none", ("none", "gzip"),
        "compression of the shards; gzip saves nothing on JPEGs and slows down reading")
    one_hot: Switch = Flag(_SHARDS, False, _switch, "also store one_hot_class: 4 bytes per class in every record")
    seed: Integer = Flag(_SHARDS, 0, _between(int, -(1 << 63), (1 << 63) - 1), "seed of the order of the records", "N")

    max_reject_fraction: Fractional = Flag(
        _JOB, 0.01, _between(float, 0, 1),
        "publish nothing if a larger fraction of the images is rejected, from 0 to 1", "X")
    strict: Switch = Flag(_JOB, False, _switch, "fail if an image vanishes or changes while the job runs")
    fetch_concurrency: Integer = Flag(
        _JOB, 32, _between(int, 1, 1024), "concurrent requests of a worker process", "N")
    decode_threads: Integer = Flag(
        _JOB, 0, _between(int, 0, 1024),
        "images that a worker process decodes at a time (default: one per core; 2 on Dataflow)", "N")
    io_deadline: Fractional = Flag(
        _JOB, storage.DEFAULT_DEADLINE_S, _between(float, 0, 86_400),
        "how long a storage request that fails is retried", "SECONDS")
    base: Text = Flag(
        _JOB, "", _base, "published version to reuse unchanged images from (identical output), or none (default: "
        "the newest one with the same image flags and --seed)", "N.N.N")
    plan_only: Switch = Flag(
        _JOB, False, _switch, "print the plan and an estimate of CPU time, files and bytes, and write no dataset")
    repair: Switch = Flag(_JOB, False, _switch, "read every byte of a published version and rewrite what is corrupt")
    overwrite: Switch = Flag(_JOB, False, _switch, "delete a published version and rewrite it")
    restart: Switch = Flag(_JOB, False, _switch, "discard what an unpublished job has written, and start over")
    preflight: Switch = Flag(
        _JOB, False, _switch, "check input, output, credentials, buckets and versions, one line each, and stop")
    detach: Switch = Flag(
        _JOB, False, _switch, "submit the job to Dataflow and return; the same command later watches it")
    # fmt: on

    # No flags; read by the launcher: the lines of `labels_file`, the column names of `manifest`, the hash of `exclude`.
    labels: tuple[str, ...] | None = None
    header: tuple[str, ...] = ()
    exclude_sha256: str = ""
    context: RunContext = dataclasses.field(default_factory=RunContext, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Fill in the input of a manifest, and check the flags that depend on each other."""
        if self.layout == "manifest" and self.manifest:
            object.__setattr__(self, "input", self.input or self.manifest.rpartition("/")[0] or "/")
        _check_combinations(self)

    def in_run(self, **facts: Any) -> Config:
        """This configuration with other facts of its run."""
        return dataclasses.replace(self, context=dataclasses.replace(self.context, **facts))

    @property
    def dataset_url(self) -> str:
        """The folder of the published version."""
        return storage.join(storage.join(self.output, self.name), self.version)

    @property
    def states_url(self) -> str:
        """The folder of the states of all versions."""
        return storage.join(storage.join(self.output, self.name), STATE_FOLDER)

    @property
    def state_url(self) -> str:
        """The folder of an unpublished job's state, which is deleted once the version is published."""
        return storage.join(self.states_url, self.version)

    @property
    def first_contact_s(self) -> float:
        """Deadline of the first requests: a wrong URL or a missing network should not take ten minutes."""
        return min(self.io_deadline, storage.FIRST_CONTACT_S)

    @property
    def split_fractions(self) -> dict[str, Fraction] | None:
        """Split → share; None if the input says which image is in which split."""
        return None if self.layout == "split_class_folders" else self.splits or {"train": Fraction(1)}

    @property
    def known_splits(self) -> tuple[str, ...]:
        """Names of the splits; empty if the input may have other splits than the flags."""
        if self.split_folders:
            return tuple(sorted({*self.split_folders.values()}))
        return tuple(self.split_fractions or ()) if self.layout == "class_folders" or self.splits else ()

    @property
    def image_options(self) -> images.ImageOptions:
        """The flags that the codec needs."""
        return images.ImageOptions.of(vars(self))

    @property
    def columns(self) -> tuple[Column, ...]:
        """Feature columns of a manifest, in order of their names."""
        return feature_columns(self.header)

    @property
    def threads(self) -> int:
        """Decode threads of a worker process on this machine."""
        return self.decode_threads or cpu_count()

    def fingerprint(self) -> dict[str, object]:
        """The `configuration` of the manifest: the flags that decide bytes, as JSON types."""
        fractions = self.split_fractions
        values = {name: getattr(self, name) for name, flag in FLAGS.items() if flag.group not in (_URLS, _JOB)}
        values |= {
            "splits": None if fractions is None else splits_text(fractions),
            "split_by": getattr(self.split_by, "pattern", self.split_by),
            "extensions": sorted(self.extensions),
            "labels": self.labels,
            "columns": msgspec.to_builtins(self.columns),
        }
        if self.exclude:
            values["exclude"] = self.exclude_sha256
        return dict(json.loads(canonical_json(values)))


def _check_combinations(config: Config) -> None:
    """Check the flags that depend on each other."""
    if config.layout == "manifest" and not config.manifest:
        raise UsageError("--manifest is missing: --layout manifest needs a CSV or JSONL file")
    if config.layout != "manifest" and config.manifest:
        raise wrong("--manifest", config.manifest, "it goes with --layout manifest")
    for flag in ("input", "output", "name"):
        if not getattr(config, flag):
            raise UsageError(f"--{flag} is missing: give the {FLAGS[flag].help.removesuffix(' (required)')}")
    if not is_utf8(config.output):
        raise wrong("--output", config.output, "it isn't UTF-8, which a dataset's metadata is: rename the folder")
    for flag in ("splits", "split_by", "stratify"):
        if getattr(config, flag) and (config.layout == "split_class_folders" or "split" in config.header):
            raise UsageError(f"--{flag}: leave it out, the input says which image is in which split")
    if config.stratify and config.splits is None:
        raise UsageError("--stratify: give --splits, too: without it every image is in train")
    if config.stratify and isinstance(config.split_by, re.Pattern):
        fix = "leave it or --stratify out: what it keeps together may be of several classes"
        raise wrong("--split_by", config.split_by.pattern, fix)
    if config.target_shard_bytes is not None and config.num_shards is not None:
        raise wrong("--num_shards", config.num_shards, "leave out --target_shard_bytes or this")
    counts = config.num_shards if isinstance(config.num_shards, dict) else {}
    if (known := config.known_splits) and (unknown := sorted(counts.keys() - known)):
        part = f"{unknown[0]}={counts[unknown[0]]}"
        raise wrong("--num_shards", part, f"there is no split {unknown[0]!r}, only {', '.join(known)}")
    if config.split_folders and config.layout != "split_class_folders":
        raise UsageError("--split_folders: it goes with --layout split_class_folders")
    for flag in ("overwrite", "restart"):
        if config.repair and getattr(config, flag):
            raise UsageError(f"--repair and --{flag} can't be used together: leave out one")


_OWN_COLUMNS = ("path", "label", "split", "bytes", "md5")


def feature_columns(header: Sequence[str], url: str = "") -> tuple[Column, ...]:
    """The feature columns of a manifest's header, in order of their names.

    Raises:
        UsageError: a name is reserved or repeated, or a type unknown.
    """
    columns: dict[str, Column] = {}
    for heading in header:
        name, dtype = name_and_type(heading)
        if heading in _OWN_COLUMNS:
            fault = "is repeated: keep one" if header.count(heading) > 1 else ""
        elif not name:
            fault = "has no name: give it one, or leave it out (pandas: index=False)"
        elif name in RECORD_KEYS or name in _OWN_COLUMNS:
            fault = "has a reserved name: rename it"
        elif not is_utf8(name):
            fault = "has a name that isn't UTF-8: rename it"
        elif name in columns:
            heading, fault = name, "is repeated: keep one"
        else:
            fault = "" if dtype in get_args(Dtype) else "has no type int64, float32 or bytes: declare one"
            columns[name] = Column(name, cast(Dtype, dtype), heading.endswith("[]"))
        if fault:
            raise UsageError(f"--manifest {url!r}: column {heading!r} {fault}")
    return tuple(columns[name] for name in sorted(columns))


def name_and_type(heading: str) -> tuple[str, str]:
    """`age:int64` → age, int64; `tags[]` → tags, bytes."""
    name, _, dtype = heading.removesuffix("[]").partition(":")
    return name, dtype or "bytes"


FLAGS = {name: flag for name, flag in vars(Config).items() if isinstance(flag, Flag)}
