"""The job's configuration: the flags, validated once, frozen, the same from Python; and what follows from them."""

from __future__ import annotations

import dataclasses
import os
import re
from fractions import Fraction
from functools import cached_property
from typing import Any

from beam_pipeline import images, manifest_rows, secrets, storage
from beam_pipeline.errors import UsageError
from beam_pipeline.flag_values import (
    parse_bytes,
    parse_choice,
    parse_colour,
    parse_extensions,
    parse_number,
    parse_pattern,
    parse_shards,
    parse_size,
    parse_splits,
    splits_text,
    wrong,
)
from beam_pipeline.flags import Flags
from beam_pipeline.identity import Identity
from beam_pipeline.schema import NAME_PATTERN, VERSION_PATTERN, is_utf8
from beam_pipeline.sharding import Splits

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
    identity: Identity = dataclasses.field(
        default_factory=Identity.new, compare=False, repr=False, metadata={"decides_bytes": False}
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
    def first_contact_s(self) -> float:
        """Seconds in which a store must answer at all: a wrong URL or no network should not take ten minutes."""
        return min(self.io_deadline, _FIRST_CONTACT_S)

    @cached_property
    def split_fractions(self) -> dict[str, Fraction] | None:
        """Split → share, or None where the input itself says which image is in which split."""
        if self.layout == "split_class_folders":
            return None
        return parse_splits(self.splits) if self.splits is not None else {"train": Fraction(1)}

    @property
    def dealt_splits(self) -> Splits:
        """Deals images to splits; all to train where the input says nothing."""
        return Splits(self.split_fractions or {"train": Fraction(1)})

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
            if secrets.has_password(place):
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
        if self.overwrite and self.repair:
            raise UsageError("--repair and --overwrite exclude each other: leave out one")
