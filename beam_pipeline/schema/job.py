"""What a job writes apart from the dataset: its plan, claim and sidecars, and run.json, which says how it went."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Self, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from beam_pipeline.schema import canonical_json, sha256
from beam_pipeline.schema.manifest import (
    Column,
    Content,
    Count,
    FileSums,
    PlannedSplit,
    Sha256,
    Shard,
    Size,
    Statistics,
    build_types,
    builtins_of,
)

_SUM_MODULUS = 1 << 128
Document = TypeVar("Document", bound=Struct)


def document_bytes(document: Struct) -> bytes:
    """A document as its file holds it."""
    return canonical_json(builtins_of(document))


def read_document(data: bytes, kind: type[Document]) -> Document | None:
    """The content of a file that `document_bytes` made; None if it holds anything else. Unknown keys are ignored."""
    try:
        return msgspec.convert(json.loads(data), kind, str_keys=True)
    except (ValueError, RecursionError):
        return None


@dataclass(slots=True)
class ReferenceSum:
    """Count and order-free sum (mod 2^128) of hashes: equal for equal sets of images, in whatever order they come."""

    count: int = 0
    total: int = 0

    @classmethod
    def of_hex(cls, count: int, total: str) -> ReferenceSum:
        """The sum whose `hex` is `total`."""
        return cls(count, int(total, 16))

    def add(self, fields: Iterable[bytes]) -> None:
        """Add one image, identified by these fields."""
        digest = hashlib.blake2b(digest_size=16)
        for field in fields:
            digest.update(len(field).to_bytes(8, "little"))
            digest.update(field)
        self.count += 1
        self.total = (self.total + int.from_bytes(digest.digest(), "big")) % _SUM_MODULUS

    def merge(self, other: ReferenceSum) -> None:
        """Add all images of `other`."""
        self.count += other.count
        self.total = (self.total + other.total) % _SUM_MODULUS

    @property
    def hex(self) -> str:
        """The sum as 32 hexadecimal digits."""
        return f"{self.total:032x}"

    def __str__(self) -> str:
        return f"{self.count}-{self.hex}"


class Plan(Struct, frozen=True, dict=True):
    """plan.json: which shard each image goes to, and all else that decides the bytes of shards.

    Attributes:
        configuration: `Config.fingerprint()`.
        classes: class names by id.
        features: a manifest's columns.
        splits: split → its shards.
        statistics: of the sampled images' pixels.
        inputs: `ReferenceSum` of every listed image, etags included, as run.json keeps it.
        codec: versions of the image libraries.
    """

    configuration: dict[str, object]
    classes: tuple[str, ...]
    features: tuple[Column, ...]
    splits: dict[str, PlannedSplit]
    statistics: Statistics
    inputs: str
    codec: dict[str, str]

    @classmethod
    def published(cls, manifest: Content, inputs: str) -> Plan:
        """The plan of a published version, whose manifest says nothing of etags: `inputs` stands for their sum."""
        image = manifest.image
        return cls(
            configuration=manifest.configuration,
            classes=manifest.classes,
            features=manifest.features,
            splits=manifest.plan.splits,
            statistics=Statistics(image.mean, image.std, image.sampled_images),
            inputs=inputs,
            codec=manifest.codec,
        )

    @property
    def images(self) -> int:
        """Number of listed images."""
        return sum(split.images for split in self.splits.values())

    @property
    def shards(self) -> int:
        """Number of shards of all splits."""
        return sum(split.shards for split in self.splits.values())

    @cached_property
    def sha256(self) -> str:
        """Its hash, which sidecars carry."""
        return sha256(document_bytes(self))


class ClaimHolder(Struct, frozen=True):
    """claim.json: the job that may write a version; VERSION.lock: the command that is writing a local one.

    `plan` is its plan's hash, "" in VERSION.lock; `started` a time in UTC; `is_locked` whether its command holds
    VERSION.lock as long as it runs. `host`, `pid` and `started` are words for the user: nothing is decided by them.
    """

    run: str = ""
    plan: str = ""
    host: str = ""
    pid: int = 0
    started: str = ""
    is_locked: bool = False

    def __str__(self) -> str:
        who = f" (process {self.pid} on {self.host}, since {self.started})" if self.pid else ""
        return f"another job{who}"


Key = TypeVar("Key", str, int)


def add_counts(into: dict[Key, int], counts: dict[Key, int]) -> None:
    """Add counts by key to others."""
    for key, count in counts.items():
        into[key] = into.get(key, 0) + count


class Sums(Struct):
    """Numbers, counts by key and sets of a part, which add up."""

    def merge(self, other: Self) -> None:
        """Add those of another part."""
        for name in self.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, dict):
                add_counts(mine, theirs)
            elif isinstance(mine, set):
                mine |= theirs
            elif isinstance(mine, int | float):
                setattr(self, name, mine + theirs)


class Counts(Sums):
    """Counts over images, of a shard, a split or all.

    Attributes:
        records: images that got one.
        source_bytes: read.
        rejects: reason → images.
        class_counts: class id → records.
        source_formats, passed_through, bits_used: format, and these of `EncodedImage` → records.
        min_size, …: least or greatest height and width of records and of their sources; None without records.
        matched, reused: images whose path the base has, and those that were reused from it.
        cpu_s: CPU seconds that converting the images took.
    """

    records: int = 0
    source_bytes: int = 0
    rejects: dict[str, int] = {}
    class_counts: dict[int, int] = {}
    source_formats: dict[str, int] = {}
    passed_through: dict[str, int] = {}
    bits_used: dict[int, int] = {}
    min_size: Size | None = None
    max_size: Size | None = None
    source_min_size: Size | None = None
    source_max_size: Size | None = None
    matched: int = 0
    reused: int = 0
    cpu_s: float = 0.0

    @property
    def rejected(self) -> int:
        """Images that got no record."""
        return sum(self.rejects.values())

    def add_sizes(self, size: Size, source_size: Size) -> None:
        """Count the height and width of a record and of its source."""
        self.min_size, self.max_size = _each(min, self.min_size, size), _each(max, self.max_size, size)
        self.source_min_size = _each(min, self.source_min_size, source_size)
        self.source_max_size = _each(max, self.source_max_size, source_size)

    def merge(self, other: Counts) -> None:
        """Add all that another one counted."""
        Sums.merge(self, other)
        for size, source_size in ((other.min_size, other.source_min_size), (other.max_size, other.source_max_size)):
            if size and source_size:
                self.add_sizes(size, source_size)


def _each(pick: Callable[[int, int], int], a: Size | None, b: Size) -> Size:
    return (pick(a[0], b[0]), pick(a[1], b[1])) if a else b


class RejectLine(Struct, frozen=True):
    """A line of rejects.jsonl."""

    path: str
    reason: str
    detail: str


class Sidecar(Struct, frozen=True):
    """A finished shard: its files are there, with these sizes and CRCs.

    Attributes:
        plan: hash of the plan.
        shard: its entry in the manifest.
        etag: of its file.
        index: of its text index, None if it is compressed.
        runs: of its records, rows of `schema.RUN_DTYPE`.
        counts: over its images.
        rejected: its part of rejects.jsonl.
    """

    plan: Sha256
    shard: Shard
    etag: str
    index: FileSums | None
    runs: tuple[tuple[int, int, int, int], ...]
    counts: Counts
    rejected: tuple[RejectLine, ...]


class ReusedImages(Struct, frozen=True):
    """What was reused from a base: `converted` images are new or changed, `removed` ones are only in the base."""

    version: str
    self_sha256: str
    converted: int
    reused: int
    removed: int | UnsetType = UNSET


class Skipped(Struct, frozen=True):
    """What the listing left out: hidden files, links in archives, outside class folders, or with another suffix."""

    hidden: int = 0
    hidden_images: int = 0
    hidden_folders: int = 0
    outside_classes: int = 0
    suffixes: dict[str, int] = {}
    links: int = 0


class Excluded(Struct, frozen=True):
    """What `--exclude` left out: by which list, how many images, and three of its paths that match no image."""

    list: str
    sha256: Sha256
    images: int
    unmatched: int
    unmatched_paths: tuple[str, ...]


class Run(Struct, frozen=True):
    """run.json: how the job went that published a version. `docs/format.md` says what each key means."""

    command: tuple[str, ...] = ()
    runner: str = ""
    versions: dict[str, str] = {}
    started_unix_s: int = 0
    finished_unix_s: int = 0
    seconds: float = 0.0
    images: int = 0
    source_bytes: int = 0
    shard_bytes: int = 0
    inputs: str = ""
    skipped: Skipped = Skipped()
    excluded: Excluded | UnsetType = UNSET
    cpu_s: float = 0.0
    bits_used: dict[int, int] = {}
    base: ReusedImages | UnsetType = UNSET


def as_run(document: object) -> Run:
    """What `Manifest.run` holds; all defaults if no job wrote it: no hash covers run.json."""
    try:
        return msgspec.convert(document, Run, str_keys=True)
    except ValueError:
        return Run()


class ComparedInputs(Sums):
    """What a comparison of today's input with a published version found, of a shard or of all.

    Attributes:
        images: listed now.
        references: `ReferenceSum` of these, as run.json keeps it; "" in a part.
        labels: classes that images have now.
        different: shards whose images are others.
        by_content: images that have the contents that were published.
        corrupt: files of shards that were read and aren't as they were published.
    """

    images: int = 0
    references: str = ""
    labels: set[str] = set()
    different: int = 0
    by_content: int = 0
    corrupt: set[str] = set()


class PlannedJob(Struct, frozen=True):
    """What `--plan_only` leaves for the launcher: the plan, and what an estimate of the work needs to know.

    Attributes:
        source_bytes: of all images.
        sampled: images in the sample.
        unchanged: those of them that the base has unchanged.
        unread: those of these whose source needn't be read.
        cpu_s: CPU seconds that converting an image takes.
        excluded: as run.json has it.
    """

    plan: Plan
    source_bytes: Count
    sampled: Count
    unchanged: Count
    unread: Count
    cpu_s: float
    excluded: Excluded | UnsetType = UNSET


build_types(Plan, ClaimHolder, Sidecar, Run, ComparedInputs, PlannedJob)
