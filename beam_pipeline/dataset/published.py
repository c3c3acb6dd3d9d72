"""Compares a published version with the command, its input and its own files."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from beam_pipeline import schema, storage
from beam_pipeline.config import ADDED, REMOVED, Config
from beam_pipeline.conversion.fetch import convert_all, listed_md5
from beam_pipeline.errors import ImageShardsError, StorageError, UsageError, plural, some
from beam_pipeline.inputs import folders
from beam_pipeline.inputs.references import ImageRef, ReferenceSum, content_fields, listing_fields, reference_fields
from beam_pipeline.planning.plan import JobPlan, split_plans
from beam_pipeline.schema import ShardName, canonical_json, is_ours


@dataclasses.dataclass(frozen=True)
class Damage:
    """The files of a published version that are not as they were published.

    Attributes:
        shards: (split, index) of shards whose images are converted again.
        files: names of other files that are restored.
        foreign: names of shards and indexes that don't belong to the version: they are deleted.
    """

    shards: frozenset[tuple[str, int]]
    files: frozenset[str]
    foreign: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.shards or self.files or self.foreign)

    def __str__(self) -> str:
        shards = [plural(len(self.shards), "corrupt shard")] * bool(self.shards)
        named = ((self.files, "missing or corrupt file", ""), (self.foreign, "file", " too many"))
        files = [f"{plural(len(names), noun)}{more} ({some(sorted(names))})" for names, noun, more in named if names]
        return " and ".join(shards + files)


class Check(NamedTuple):
    """What a comparison found.

    Attributes:
        damage: to be repaired.
        checked: what was compared, and what wasn't, in one line.
        touched: the etag or mtime of an image isn't the one that was published, and contents were not compared.
        run: content of run.json.
    """

    damage: Damage
    checked: str
    touched: bool
    run: dict[str, Any]


def check(config: Config, manifest: dict[str, Any]) -> Check:
    """Compare a published version with this command and with its own manifest.

    Args:
        config: of the command; with `repair` every byte is read, else sizes (and MD5s and CRCs that a listing gives).
        manifest: of the version.

    Raises:
        UsageError: it was made under another name, or with another configuration.
        ImageShardsError: its inputs were others.
    """
    _check_name(config, manifest)
    _check_configuration(config, manifest)
    compared, references = _check_inputs(config, manifest)
    damage, by = _find_damage(config, manifest)
    unread = 0 if config.repair else manifest["images"] - compared
    run = run_facts(config)
    touched = unread > 0 and run.get("inputs", references) != references
    return Check(damage, _summary(manifest, compared, unread, by), touched, run)


def _summary(manifest: dict[str, Any], compared: int, unread: int, by: str) -> str:
    """What was compared, and what wasn't, in one line.

    Args:
        manifest: of the version.
        compared: images that have the MD5s that were published.
        unread: images whose contents are unknown.
        by: what of the files was compared.
    """
    shards, files = plural(len(shards_of(manifest)), "shard"), plural(len(manifest["files"]), "other file")
    parts = [f"{shards} and {files} match the {by} in the manifest"]
    parts += [f"{plural(compared, 'image')} match the MD5s that were published"] * bool(compared)
    others = ["files"] * (by == _SIZES) + [plural(unread, "image")] * bool(unread)
    return ", ".join(parts) + f"; contents of {' and '.join(others)} were not checked: --repair checks them" * bool(
        others
    )


def run_facts(config: Config) -> dict[str, Any]:
    """Content of run.json; empty if it can't be read: the version is valid without it."""
    url = storage.join(config.dataset_url, schema.RUN_FILE)
    try:
        run = json.loads(storage.open_storage(url, config.first_contact_s).read(url))
    except (OSError, ValueError, RecursionError, StorageError):
        return {}
    return run if isinstance(run, dict) else {}


def _check_name(config: Config, manifest: dict[str, Any]) -> None:
    """A renamed folder's files keep the old name: repair would write others next to them."""
    for flag, ours in (("name", config.name), ("version", config.version)):
        if manifest[flag] != ours:
            raise UsageError(
                f"--{flag} {ours!r}: {config.dataset_url} was published as {manifest['name']}/{manifest['version']}, "
                "and its files say so: give its folder that name again, or use --overwrite"
            )


def _check_configuration(config: Config, manifest: dict[str, Any]) -> None:
    ours = REMOVED | ADDED | json.loads(canonical_json(config.fingerprint()))
    theirs = REMOVED | ADDED | manifest["configuration"]
    different = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    if different:
        name = different[0]
        others = len(different) - 1
        more = f" ({plural(others, 'more flag')} {'differs' if others == 1 else 'differ'})" if others else ""
        is_major = different != ["labels"] or not config.labels or _moved_id(manifest["classes"], config.labels)
        flag = {"labels": "labels_file", "columns": "manifest"}.get(name, name)
        raise UsageError(
            f"--{flag} {_as_written(name, ours.get(name))}: {config.dataset_url} is published with "
            f"{_as_written(name, theirs.get(name))}{more}; choose --version {_next_version(config, bool(is_major))} "
            "or --overwrite"
        )


def _next_version(config: Config, is_major: bool) -> str:
    major, minor, _ = map(int, config.version.split("."))
    return f"{major + 1}.0.0" if is_major else f"{major}.{minor + 1}.0"


def _moved_id(then: Sequence[str], now: Sequence[str]) -> tuple[str, str] | None:
    """The first class that was published whose id another class has now, and that one; None if new ones are last."""
    return next((pair for pair in zip(then, now, strict=False) if pair[0] != pair[1]), None)


def _choices(config: Config, manifest: dict[str, Any], labels: set[str]) -> str:
    """What to do with other inputs: MAJOR is raised if a class gets another id, else MINOR."""
    if config.layout != "manifest":  # a class folder without images is a class, too
        labels |= {folder.label for folder in folders.class_folders(config, folders.ListingSummary())}
    minor, moved = _next_version(config, False), _moved_id(manifest["classes"], config.labels or sorted(labels))
    if moved is None:
        return f"choose --version {minor} or --overwrite"
    return (
        f"class {moved[1]!r} takes the id of {moved[0]!r}: choose --version {_next_version(config, True)} or "
        f"--overwrite, or keep the ids with --version {minor} and a --labels_file: the lines of {schema.LABELS_FILE}, "
        "then the new classes"
    )


def _as_written(name: str, value: Any) -> str:
    """A value of the configuration as a user gives it."""
    if name == "image_size":
        return "none" if value is None else "x".join(map(str, value if value[0] != value[1] else value[:1]))
    if name == "columns":
        return f"of columns {', '.join(column['name'] for column in value or ()) or 'none'}"
    return f"of {', '.join(value)}" if name == "labels" and value else repr(value)


def _check_inputs(config: Config, manifest: dict[str, Any]) -> tuple[int, str]:
    """Compare today's input with the published one, shard by shard: listings, and contents if their MD5s are known.

    Returns:
        How many images have the contents that were published; `ListingSummary.references` as run.json keeps it.

    Raises:
        ImageShardsError: images were added, removed or changed.
    """
    shards, plans = shards_of(manifest), split_plans(manifest["plan"]["splits"])
    sums: dict[tuple[str, int], tuple[ReferenceSum, ReferenceSum]] = {}
    references, labels = ReferenceSum(), set[str]()
    for ref, md5 in _contents(config):
        # A job with --stratify adds up its listing before the splits are known.
        references.add(reference_fields(ref._replace(split="") if config.stratify else ref))
        labels.add(ref.label)
        # An image of a split that didn't exist then counts as a shard that differs.
        shard = plans[ref.split].shard_of(ref.order_key) if ref.split in plans else 0
        names, contents = sums.setdefault((ref.split, shard), (ReferenceSum(), ReferenceSum()))
        names.add(listing_fields(ref))
        if md5 is not None:
            contents.add(content_fields(ref, md5))
    compared, different = 0, len(sums.keys() - shards.keys())
    for key, one in shards.items():
        names, contents = sums.get(key, (ReferenceSum(), ReferenceSum()))
        same = names.hex == one["listing_fingerprint"] and names.count == one["images"]
        # An image that couldn't be read then has no MD5 in the fingerprint, and may have one now.
        was_read = one["records"] == one["images"] or not manifest["rejects"]["environment"]
        if was_read and contents.count == names.count:
            same = same and contents.hex == one["content_fingerprint"]
            compared += contents.count
        different += not same
    if different:
        raise ImageShardsError(
            f"the input has changed since {config.dataset_url} was published: {manifest['images']} images were "
            f"listed then, {references.count} now, {different} of {len(shards)} shards differ; "
            f"{_choices(config, manifest, labels)}"
        )
    return compared, str(references)


def _contents(config: Config) -> Iterator[tuple[ImageRef, bytes | None]]:
    """Every image of the input with its MD5, as listed or, with `--repair`, read; None if it isn't known.

    b"" is the MD5 of an image that a job wouldn't or couldn't read.
    """
    options, refs = config.image_options, folders.all_images(config)
    if not config.repair:
        yield from ((ref, listed_md5(ref) if ref.source_bytes <= options.max_image_bytes else b"") for ref in refs)
        return
    yield from ((one.ref, one.md5) for one in convert_all(config, refs, lambda *_: None))


def plan_of(manifest: dict[str, Any], inputs: str, dropped: str = "") -> JobPlan:
    """The plan that was published; the manifest says nothing of etags, so it knows neither `inputs` nor `dropped`."""
    return JobPlan(
        configuration=manifest["configuration"],
        classes=tuple(manifest["classes"]),
        columns=tuple(manifest["features"]),
        splits=split_plans(manifest["plan"].get("splits", {})),
        statistics={key: manifest["image"][key] for key in ("mean", "std", "sampled_images")},
        inputs=inputs,
        dropped=dropped,
        codec=manifest["codec"],
    )


def shards_of(manifest: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """(split, number) → the manifest's entry of that shard."""
    return {
        (split, index): shard
        for split, content in manifest["splits"].items()
        for index, shard in enumerate(content["shards"])
    }


def tables_of(manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Path → size and sums of each record table; older versions have none."""
    return {
        schema.table_file(shard["file"]): table
        for shard in shards_of(manifest).values()
        if (table := shard.get("table"))
    }


def _check_place(config: Config, url: str) -> None:
    """Check that a file can be written where one is missing; a folder there may hold somebody's work."""
    for path, is_other, kind in ((url, os.path.isdir, "folder"), (os.path.dirname(url), os.path.isfile, "file")):
        if storage.is_local(url) and is_other(path):
            raise UsageError(f"--output {config.output!r}: {path} is a {kind}; move it away")


_SIZES, _SIZES_AND_CRCS = "sizes", "sizes and CRCs"


def _find_damage(config: Config, manifest: dict[str, Any]) -> tuple[Damage, str]:
    """Compare files with the manifest, by a listing or with `--repair` every byte; also says what was compared."""
    store = storage.open_storage(config.output, config.io_deadline)
    found = {file.path: file for file in store.files(config.dataset_url)}
    shards = shards_of(manifest)
    expected = manifest["file_sizes"] | {one["file"]: one for one in shards.values()} | tables_of(manifest)
    reads: storage.Reads = "always" if config.repair else "never"
    corrupt = set()
    for name, one in expected.items():
        url = storage.join(config.dataset_url, name)
        if not storage.is_intact(store, url, found.get(name), one["bytes"], one["crc32c"], reads):
            corrupt.add(name)
            _check_place(config, url)
    damaged = {key for key, one in shards.items() if corrupt & {one["file"], schema.table_file(one["file"])}}
    if schema.REJECTS_FILE in corrupt:  # its lines come from the shards that had rejects
        damaged |= {key for key, one in shards.items() if one["records"] < one["images"]}
    not_expected = [name for name in found.keys() - expected.keys() if is_ours(name, config.name)]
    foreign = (name for name in not_expected if ShardName.parse(name) or name.startswith(f"{schema.INDEX_FOLDER}/"))
    damage = Damage(frozenset(damaged), frozenset(corrupt & manifest["files"].keys()), frozenset(foreign))
    has_crcs = config.repair or all(found[name].crc32c is not None for name in expected.keys() & found.keys())
    return damage, _SIZES_AND_CRCS if has_crcs else _SIZES
