"""manifest.json as typed structures, checked once, before the job or the reader uses it; unknown keys are ignored."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
import reprlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import IO, Annotated, Any, Literal, NoReturn, TypeAlias

import google_crc32c
import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from beam_pipeline.errors import NotPublishedError, OtherFormatError
from beam_pipeline.schema import NAME_PATTERN, VERSION_PATTERN, canonical_json, sha256, table_file

FORMAT_VERSION = 1
PUBLISHED, REPAIRED, ALREADY_PUBLISHED = "published", "repaired", "already published"  # outcomes of a job
_REPAIR = "run the job with --repair"
FOREIGN_KEY = "record_keys"  # `imageshards index` made the manifest: its shards may be anywhere

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
Dtype: TypeAlias = Literal["int64", "float32", "bytes"]
Size: TypeAlias = tuple[Pixels, Pixels]  # height, width


class FileSize(Struct, frozen=True):
    """What a listing shows of a file."""

    bytes: Count
    crc32c: Crc32c


class FileSums(FileSize, frozen=True):
    """The same, and what only reading it shows."""

    sha256: Sha256


def file_sums(data: bytes) -> FileSums:
    """Size and sums of a small file."""
    return FileSums(len(data), google_crc32c.value(data), sha256(data))


class ChecksumWriter:
    """Counts bytes and their sums on the way into a file of any size.

    Args:
        file: is written to.
        with_sha256: whether their SHA-256 is wanted, too.
    """

    def __init__(self, file: IO[bytes], with_sha256: bool = True) -> None:
        self._file = file
        self._hash = hashlib.sha256() if with_sha256 else None
        self.bytes = 0
        self.crc32c = 0

    def write(self, data: bytes) -> int:
        """Add some bytes."""
        self.crc32c = google_crc32c.extend(self.crc32c, bytes(data))
        self.bytes += len(data)
        if self._hash:
            self._hash.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        """`gzip` calls it."""
        self._file.flush()

    @property
    def sums(self) -> FileSums:
        """Size and sums of all bytes."""
        assert self._hash
        return FileSums(self.bytes, self.crc32c, self._hash.hexdigest())


class Shard(Struct, frozen=True):
    """One shard: its file, what it holds, CRC-32C of the complete file, and of how many listed images it was made.

    `table`: of its record table.
    """

    file: str
    records: Count
    bytes: Count
    crc32c: Crc32c
    images: Count
    listing_fingerprint: Fingerprint
    content_fingerprint: Fingerprint
    table: FileSums


class Split(Struct, frozen=True):
    """One split: its shards in order, and how many records each class has."""

    records: Count
    bytes: Count
    class_counts: tuple[Count, ...]
    shards: tuple[Shard, ...]


class Column(Struct, frozen=True):
    """A further feature of the records: its key, its type, and whether each record has a list of it."""

    name: str
    dtype: Dtype
    list: bool


class Statistics(Struct, frozen=True):
    """Channel mean and standard deviation of a sample of so many images, one number per channel."""

    mean: tuple[Decimal, ...]
    std: tuple[Decimal, ...]
    sampled_images: Count


class Image(Statistics, frozen=True):
    """How images are stored: smallest and largest size, None if there are none; statistics of their pixels."""

    format: Word
    channels: Literal[1, 3]
    min_size: Size | None
    max_size: Size | None
    passed_through: dict[str, Count] = {}


class Source(Struct, frozen=True):
    """What the images were before they were stored; sizes are None if there are no records."""

    formats: dict[str, Count]
    min_size: Size | None = None
    max_size: Size | None = None


class Configuration(Struct, frozen=True):
    """The flags that readers need."""

    compression: Literal["none", "gzip"]
    image_format: Word
    one_hot: bool


class _Flags(Struct):
    configuration: Configuration


class PlannedSplit(Struct, frozen=True, dict=True):
    """How one split is cut into shards.

    Attributes:
        images: how many are listed.
        estimated_bytes: of all its shards.
        cuts: first order key of each shard but the first, strictly increasing.
    """

    images: Count
    estimated_bytes: Count
    cuts: tuple[OrderKey, ...]

    @property
    def shards(self) -> int:
        """How many shards it has."""
        return len(self.cuts) + 1

    @functools.cached_property
    def keys(self) -> tuple[int, ...]:
        """The cuts as numbers."""
        return tuple(map(int, self.cuts))

    def shard_of(self, key: int) -> int:
        """Number of the shard that holds an order key."""
        return bisect_right(self.keys, key)


class Cuts(Struct, frozen=True):
    """How images were assigned to shards; an index of third-party files doesn't know."""

    splits: dict[str, PlannedSplit] = {}


class Rejects(Struct, frozen=True):
    """How many images got no record."""

    by_reason: dict[str, Count]
    environment: Count


class RecordKeys(Struct, frozen=True):
    """The features that hold image and class id in third-party records."""

    image: str
    class_: str = msgspec.field(name="class")


class Content(Struct, frozen=True, dict=True):
    """What manifest.json holds. `docs/format.md` says what each key means."""

    format_version: int
    self_sha256: Sha256
    name: Name
    version: Version
    configuration: dict[str, object]
    classes: tuple[str, ...]
    features: tuple[Column, ...]
    image: Image
    images: Count
    records: Count
    listing_fingerprint: Fingerprint
    content_fingerprint: Fingerprint
    plan: Cuts
    codec: dict[str, str]
    rejects: Rejects
    splits: dict[Name, Split]
    files: dict[str, Sha256]
    source: Source | None = None
    file_sizes: dict[str, FileSize] = {}
    record_keys: RecordKeys | UnsetType = UNSET

    @property
    def flags(self) -> Configuration:
        """The flags that readers need."""
        return msgspec.convert(self.configuration, Configuration)

    @functools.cached_property
    def shards(self) -> dict[tuple[str, int], Shard]:
        """(split, number) → that shard."""
        return {(name, index): shard for name, split in self.splits.items() for index, shard in enumerate(split.shards)}

    @property
    def tables(self) -> dict[str, FileSums]:
        """Path of each shard's record table → its size and sums."""
        return {table_file(shard.file): shard.table for shard in self.shards.values()}

    def contradictions(self) -> Iterator[str]:
        """What can't be true of numbers and names together; a ValidationError of the flags that readers need."""
        msgspec.convert({"configuration": self.configuration}, _Flags)
        if self.records != sum(split.records for split in self.splits.values()):
            yield f"$.records is {self.records}, its splits have others"
        for name, split in self.splits.items():
            for key in ("records", "bytes"):
                total = sum(getattr(shard, key) for shard in split.shards)
                if getattr(split, key) != total:
                    yield f"$.splits.{name}.{key} is {getattr(split, key)}, its shards have {total}"
            if len(split.class_counts) != len(self.classes):
                yield f"$.splits.{name}.class_counts needs one number per class"
        files = [shard.file for split in self.splits.values() for shard in split.shards]
        if len(set(files)) < len(files):
            yield "two shards have one file"


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Manifest(dict[str, Any]):
    """A published version: what `run` returns, and `load_info(…).manifest`. As a dict it is its `data`.

    Attributes:
        url: folder or URL of the version.
        data: content of manifest.json, as `docs/format.md` describes it.
        outcome: `published`, `repaired`, or `already published` if nothing was written.
        run: content of run.json: how the job went that published it; empty if that can't be read, or wasn't.
        checked: what was compared of a version that was published already, in one line.
        moved_ids: the first class that has another id than in the version before, in one line.
        etags_differ: an image has another etag or mtime than when it was published, and contents were not compared.
    """

    url: str
    data: dict[str, Any]
    outcome: str = PUBLISHED
    run: dict[str, Any] = dataclasses.field(default_factory=dict)
    checked: str = ""
    etags_differ: bool = False
    moved_ids: str = ""

    def __post_init__(self) -> None:
        self.update(self.data)

    def __repr__(self) -> str:
        """Counts in place of the documents, for a notebook."""
        return (
            f"Manifest(url={self.url!r}, outcome={self.outcome!r}, records={self.records}, "
            f"rejects={self.images - self.records}, classes={len(self.classes)})"
        )

    @functools.cached_property
    def content(self) -> Content:
        """The same as `data`, typed."""
        return msgspec.convert(self.data, Content)

    @property
    def images(self) -> int:
        """How many images were listed."""
        return int(self.data["images"])

    @property
    def records(self) -> int:
        """How many of them have a record."""
        return int(self.data["records"])

    @property
    def rejects(self) -> dict[str, int]:
        """Reason → rejected images."""
        return dict(self.data["rejects"]["by_reason"])

    @property
    def classes(self) -> list[str]:
        """Class names by class id."""
        return list(self.data["classes"])

    @property
    def splits(self) -> dict[str, int]:
        """Split → records."""
        return {split: content["records"] for split, content in self.data["splits"].items()}


def build_types(*kinds: type[Struct]) -> None:
    """Have msgspec build what it needs to convert these, which it does at the first use, and not safely in threads.

    Two threads that first convert to the same Struct at once crash the process (msgspec 0.22), so this is called where
    the Structs are defined: an import runs in one thread.
    """
    for kind in kinds:
        msgspec.json.Decoder(kind)


def builtins_of(document: Struct) -> dict[str, Any]:
    """A document as JSON has it; numbers as keys are text there."""
    values: dict[str, Any] = msgspec.to_builtins(document, str_keys=True)
    return values


def seal_manifest(manifest: Mapping[str, Any] | Struct) -> bytes:
    """The bytes of `manifest.json`: canonical JSON with `self_sha256` over the same text without that key."""
    document = builtins_of(manifest) if isinstance(manifest, Struct) else manifest
    body = {key: value for key, value in document.items() if key != "self_sha256"}
    return canonical_json({**body, "self_sha256": sha256(canonical_json(body))})


def parse_manifest(data: bytes, where: str) -> tuple[dict[str, Any], Content]:
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
        raise NotPublishedError(f"{where} is corrupt: no manifest can be read from it; {_REPAIR}") from None
    # The seal first, which is the same in every format: a flipped bit in the version's number is corruption.
    if not is_sealed:
        raise NotPublishedError(f"{where} is corrupt: its self_sha256 doesn't match; {_REPAIR}")
    if type(version) is int and version != FORMAT_VERSION:
        what = f"{where} has format_version {reprlib.repr(version)}, this release reads {FORMAT_VERSION}"
        raise OtherFormatError(f"{what}: use the one that wrote it")
    try:
        typed = msgspec.convert(manifest, Content)
        wrong = next(typed.contradictions(), "")
    except (msgspec.ValidationError, UnicodeError) as error:
        wrong = str(error)[:300]
    if wrong:
        fix = "index the files again" if FOREIGN_KEY in manifest else _REPAIR
        raise NotPublishedError(f"{where}: {wrong}; {fix}")
    _check_file_names(typed, where)
    return manifest, typed


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not valid JSON")


_IN_NO_NAME = "\0\ud800-\udc7f\udd00-\udfff"  # NUL, and surrogates that stand for no byte of a name on disk
_OUTSIDE = re.compile(rf"(^|/)\.{{0,2}}(/|\Z)|[\\{_IN_NO_NAME}]")  # an empty part, `.`, `..`, or a backslash
_FULL = re.compile(rf"(/|\w+://)[^{_IN_NO_NAME}]*")


def _check_file_names(manifest: Content, where: str) -> None:
    """Refuse names outside the dataset's folder: a manifest may come from anybody, and a copy writes under its names.

    `imageshards index` also names shards elsewhere, by their full path or URL: these are only read.
    """
    shards = [shard.file for split in manifest.splits.values() for shard in split.shards]
    if manifest.record_keys is not UNSET:
        shards = [file for file in shards if not _FULL.fullmatch(file)]
    outside = next((name for name in (*manifest.files, *shards) if _OUTSIDE.search(name)), None)
    if outside is not None:
        name = reprlib.repr(outside)
        raise NotPublishedError(f"{where} names {name}, which is outside its folder: don't use this dataset")


build_types(Content, _Flags, Configuration)
