"""manifest.json as typed structures, checked once, before the job or the reader uses it; unknown keys are ignored."""

from __future__ import annotations

import json
import re
import reprlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NoReturn, TypeAlias

import msgspec
from msgspec import Meta, Struct

from beam_pipeline.errors import NotPublishedError, OtherFormatError
from beam_pipeline.schema import NAME_PATTERN, VERSION_PATTERN, canonical_json, relative_path_bytes, sha256

FORMAT_VERSION = 1
FOREIGN_KEY = "record_keys"  # `reader index` made the manifest: its shards may be anywhere

_SHORT = reprlib.Repr()  # values in errors: nothing deep, nothing long
_SHORT.maxstring = _SHORT.maxlong = 100

Count: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 53) - 1)]
Crc32c: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
Sha256: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Fingerprint: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
Decimal: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9]{1,9}(\.[0-9]{1,20})?(E-[0-9]{1,2})?\Z")]
OrderKey: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9]{1,20}\Z")]
Name: TypeAlias = Annotated[str, Meta(pattern=rf"^{NAME_PATTERN.pattern}\Z", max_length=255)]
Version: TypeAlias = Annotated[str, Meta(pattern=rf"^{VERSION_PATTERN.pattern}\Z", max_length=255)]
Word: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9:_-]{1,40}\Z")]
Pixels: TypeAlias = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
Size: TypeAlias = tuple[Pixels, Pixels]  # height, width


class Shard(Struct, frozen=True):
    """One shard: its file, what it holds, CRC-32C of the complete file, and of how many listed images it was made."""

    file: str
    records: Count
    bytes: Count
    crc32c: Crc32c
    images: Count
    listing_fingerprint: Fingerprint
    content_fingerprint: Fingerprint


class Split(Struct, frozen=True):
    """One split: its shards in order, and how many records each class has."""

    records: Count
    bytes: Count
    class_counts: tuple[Count, ...]
    shards: tuple[Shard, ...]

    def __post_init__(self) -> None:
        for name in ("records", "bytes"):
            total = sum(getattr(shard, name) for shard in self.shards)
            if getattr(self, name) != total:
                raise ValueError(f"{name} is {getattr(self, name)}, its shards have {total}")
        if sum(self.class_counts) > self.records:
            raise ValueError(f"class_counts sum to {sum(self.class_counts)} of {self.records} records")


class Column(Struct, frozen=True):
    """A further feature of the records: its key, its type, and whether each record has a list of it."""

    name: str
    dtype: Literal["int64", "float32", "bytes"]
    list: bool


class SizeRange(Struct, frozen=True):
    """Smallest and largest size of some images; None if there are none."""

    min_size: Size | None
    max_size: Size | None

    def __post_init__(self) -> None:
        least, most = self.min_size, self.max_size
        if (least is None) != (most is None) or (least and most and (least[0] > most[0] or least[1] > most[1])):
            raise ValueError(f"min_size is {least}, max_size {most}")


class Image(SizeRange, frozen=True):
    """How images are stored; `mean` and `std` have a number a channel, or none if nothing was sampled."""

    format: Word
    channels: Literal[1, 3]
    mean: tuple[Decimal, ...]
    std: tuple[Decimal, ...]
    sampled_images: Count
    passed_through: dict[str, Count] = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        numbers = len(self.mean), len(self.std)
        if numbers not in ((0, 0), (self.channels, self.channels)):
            raise ValueError(f"mean and std have {numbers[0]} and {numbers[1]} numbers for {self.channels} channels")


class Source(SizeRange, frozen=True):
    """What the images were before they were stored."""

    formats: dict[str, Count]


class Configuration(Struct, frozen=True):
    """The flags that decide bytes. An index of third-party files has the first three."""

    compression: Literal["none", "gzip"]
    image_format: Word
    one_hot: bool
    allow_truncated: bool = False
    background: tuple[Annotated[int, Meta(ge=0, le=255)], ...] | None = None
    channels: Literal[1, 3] = 3
    columns: tuple[Column, ...] = ()
    duplicates: Word = "keep"
    extensions: tuple[str, ...] = ()
    image_size: Size | None = None
    jpeg_quality: Annotated[int, Meta(ge=1, le=100)] = 90
    jpeg_subsampling: Word = "4:2:0"
    labels: tuple[str, ...] | None = None
    layout: Word = "class_folders"
    max_image_bytes: Count | None = None
    max_pixels: Count | None = None
    num_shards: Count | dict[str, Count] | None = None
    optimize: bool = False
    resample: Word = "bilinear"
    resize_mode: Word = "stretch"
    seed: int = 0
    split_by: str | None = None
    splits: str | None = None
    target_shard_bytes: Count | None = None


class PlannedSplit(Struct, frozen=True):
    """How one split was cut: the first order key of each shard but the first."""

    images: Count
    estimated_bytes: Count
    cuts: tuple[OrderKey, ...]


class Plan(Struct, frozen=True):
    """How images were assigned to shards."""

    splits: dict[str, PlannedSplit] = {}


class Rejects(Struct, frozen=True):
    """How many images got no record."""

    by_reason: dict[str, Count]
    environment: Count

    def __post_init__(self) -> None:
        if self.environment > sum(self.by_reason.values()):
            raise ValueError(f"environment is {self.environment} of {sum(self.by_reason.values())} rejects")


class Duplicates(Struct, frozen=True):
    """Groups of images with the same bytes."""

    groups: Count
    images: Count
    across_classes: Count
    across_splits: Count


class FileSize(Struct, frozen=True):
    """What a listing shows of a file."""

    bytes: Count
    crc32c: Crc32c


class RecordKeys(Struct, frozen=True):
    """The features that hold image and class id in third-party records."""

    image: str
    class_: str = msgspec.field(name="class")


class Manifest(Struct, frozen=True):
    """A published dataset. `docs/format.md` says what each key means."""

    format_version: int
    self_sha256: Sha256
    name: Name
    version: Version
    configuration: Configuration
    classes: tuple[str, ...]
    features: tuple[Column, ...]
    image: Image
    images: Count
    records: Count
    listing_fingerprint: Fingerprint
    content_fingerprint: Fingerprint
    plan: Plan
    codec: dict[str, str]
    rejects: Rejects
    splits: dict[str, Split]
    files: dict[str, Sha256]
    source: Source | None = None
    file_sizes: dict[str, FileSize] = {}
    duplicates: Duplicates | None = None
    record_keys: RecordKeys | None = None

    def __post_init__(self) -> None:
        wrong = next(self._contradictions(), None)
        if wrong:
            raise ValueError(wrong)

    def _contradictions(self) -> Iterator[str]:
        records = sum(split.records for split in self.splits.values())
        if self.records != records:
            yield f"$.records is {self.records}, the splits have {records}"
        for name, split in self.splits.items():
            if not NAME_PATTERN.fullmatch(name):
                yield f"$.splits has {_SHORT.repr(name)}, not the name of a split"
            if len(split.class_counts) != len(self.classes):
                counts = len(split.class_counts)
                yield f"$.splits.{name}.class_counts has {counts} numbers for {len(self.classes)} classes"
        files = Counter(shard.file for split in self.splits.values() for shard in split.shards)
        for file, times in files.items():
            if times > 1:
                yield f"{_SHORT.repr(file)} is the file of {times} shards"
        odd = next((file for file in (*self.files, *files) if not _is_file_name(file)), None)
        if odd is not None:
            yield f"{_SHORT.repr(odd)} is no file name"
        if self.file_sizes and self.file_sizes.keys() != self.files.keys():
            single = min(self.file_sizes.keys() ^ self.files.keys())
            yield f"{_SHORT.repr(single)} is in only one of $.files and $.file_sizes"
        shards = {name: len(split.shards) for name, split in self.splits.items()}
        planned = {name: len(split.cuts) + 1 for name, split in self.plan.splits.items()}
        if planned and planned != shards:
            yield f"$.plan has {planned} shards, $.splits {shards}"


def seal_manifest(manifest: Mapping[str, Any]) -> bytes:
    """The bytes of `manifest.json`: canonical JSON with `self_sha256` over the same text without that key."""
    body = {key: value for key, value in manifest.items() if key != "self_sha256"}
    return canonical_json({**body, "self_sha256": sha256(canonical_json(body))})


def open_manifest(data: bytes, where: str) -> dict[str, Any]:
    """The checked content of a `manifest.json` as parsed JSON; arguments and errors as in `parse_manifest`."""
    return parse_manifest(data, where)[0]


def parse_manifest(data: bytes, where: str) -> tuple[dict[str, Any], Manifest]:
    """Check the bytes of a `manifest.json`: its own hash first, then every type, number and file name.

    Args:
        data: the file's bytes.
        where: its URL, for errors.

    Returns:
        The parsed JSON, and the same typed.

    Raises:
        OtherFormatError: another release wrote it.
        NotPublishedError: not JSON, `self_sha256` doesn't match, a value of the wrong type or out of range, numbers
            that contradict each other, or the name of a file outside its folder.
    """
    try:
        manifest = json.loads(data, parse_constant=_refuse)
        version, _ = manifest["format_version"], manifest["self_sha256"]
        is_sealed = seal_manifest(manifest) == data  # the seal's own hash included
    except (ValueError, KeyError, TypeError, RecursionError):
        raise NotPublishedError(
            f"{where} is damaged: no manifest can be read from it; run the job with --repair"
        ) from None
    # The seal first, which is the same in every format: a flipped bit in the version's number is damage.
    if not is_sealed:
        raise NotPublishedError(f"{where} is damaged: its self_sha256 doesn't match; run the job with --repair")
    if type(version) is int and version != FORMAT_VERSION:
        raise OtherFormatError(
            f"{where} has format_version {_SHORT.repr(version)}, this release reads {FORMAT_VERSION}: "
            "use the one that wrote it"
        )
    fix = "index the files again" if FOREIGN_KEY in manifest else "run the job with --repair"
    try:
        typed = msgspec.convert(manifest, Manifest)
    except msgspec.ValidationError as error:
        raise NotPublishedError(f"{where}: {_explained(manifest, str(error))}; {fix}") from None
    except UnicodeError:
        raise NotPublishedError(f"{where}: it holds text that isn't UTF-8; {fix}") from None
    _check_file_names(typed, where)
    return manifest, typed


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _check_file_names(manifest: Manifest, where: str) -> None:
    """Refuse names outside the dataset's folder: a manifest may come from anybody, and a copy writes under its names.

    `reader index` also names shards elsewhere, by their full path or URL: these are only read.
    """
    shards = [shard.file for split in manifest.splits.values() for shard in split.shards]
    if manifest.record_keys is not None:
        shards = [file for file in shards if "\0" in file or not (file.startswith("/") or "://" in file)]
    names = (*manifest.files, *shards)
    outside = [name for name in names if {"", ".", ".."} & set(name.split("/")) or "\\" in name or "\0" in name]
    if outside:
        raise NotPublishedError(f"{where} names {outside[0]!r}, which is outside its folder: don't use this dataset")


def _is_file_name(file: str) -> bool:
    """Whether a file can have this name on disk, maybe not in UTF-8: half of a surrogate pair is no byte there."""
    try:
        relative_path_bytes(file)
    except UnicodeEncodeError:
        return False
    return True


# msgspec's errors: "Expected `int`, got `str` - at `$.splits[...].shards[3].records`", with `[...]` for any key.
_LOCATED = re.compile(r"(?P<what>.*) - at `(?P<path>\$[^`]*)`", re.DOTALL)
_LACKING = re.compile(r"Object missing required field `(\w+)`")
_VALUES: dict[str, Any] = {  # where `[...]` can be in a path → the type of the values
    "$.splits": Split,
    "$.files": Sha256,
    "$.file_sizes": FileSize,
    "$.codec": str,
    "$.plan.splits": PlannedSplit,
    "$.rejects.by_reason": Count,
    "$.source.formats": Count,
    "$.image.passed_through": Count,
    "$.configuration.num_shards": Count,
}


def _explained(manifest: dict[str, Any], message: str) -> str:
    """A validation error as `$.splits.train.shards[3].records is 'x': expected `int`, got `str``."""
    located = _LOCATED.fullmatch(message)
    if not located:
        return message
    path = general = "$"
    value: Any = manifest
    for name, number, any_key in re.findall(r"\.(\w+)|\[(\d+)\]|(\[\.\.\.\])", located["path"]):
        if any_key:
            name = next((key for key, one in value.items() if not _fits(one, _VALUES.get(general, Any))), "")
        step = f"[{number}]" if number else f".{name}"
        value = value[int(number)] if number else value.get(name)
        path, general = path + step, general + ("[...]" if any_key else step)
    if lacking := _LACKING.fullmatch(located["what"]):
        return f"{path} lacks {lacking[1]!r}"
    if located["what"].startswith("Invalid enum value"):
        return f"{path} is {_SHORT.repr(value)}, which this release doesn't know"
    shown = "" if isinstance(value, dict) else f" is {_SHORT.repr(value)}"
    return f"{path}{shown}: {located['what'][:1].lower()}{located['what'][1:]}"


def _fits(value: Any, type_: Any) -> bool:
    try:
        msgspec.convert(value, type_)
    except (msgspec.ValidationError, UnicodeError):
        return False
    return True
