"""A version that is published already: is it what this command would make, is it whole, and making it whole again.

Repair never changes the manifest: every file that it rewrites must come out with the size and hash that stand in it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

import apache_beam as beam
from apache_beam.pvalue import AsIter

from beam_pipeline import images, listing, schema, storage
from beam_pipeline.errors import ImageShardsError, Reject, UsageError
from beam_pipeline.options import Config
from beam_pipeline.pools import shared_pools
from beam_pipeline.publish import metadata_files, run_index, run_rows_array
from beam_pipeline.schema import ShardName, canonical_json
from beam_pipeline.sharding import ImageRef, ReferenceSum, content_fields, listing_fields
from beam_pipeline.state import JobPlan, JobState, split_plans
from beam_pipeline.transforms import AssignShards, ListImages, WriteShards
from beam_pipeline.writer import fetch, index_text


@dataclasses.dataclass(frozen=True)
class Damage:
    """What of a published version must be written again.

    Attributes:
        shards: (split, index) of shards whose images are converted again.
        files: other files, by name.
    """

    shards: frozenset[tuple[str, int]]
    files: frozenset[str]

    def __bool__(self) -> bool:
        return bool(self.shards or self.files)

    def __str__(self) -> str:
        parts = []
        if self.shards:
            parts.append(f"{len(self.shards)} damaged shard{'s' * (len(self.shards) > 1)}")
        if self.files:
            some = ", ".join(sorted(self.files)[:3]) + ", …" * (len(self.files) > 3)
            parts.append(f"{len(self.files)} other file{'s' * (len(self.files) > 1)} ({some})")
        return " and ".join(parts)


def check(config: Config, manifest: dict[str, Any]) -> Damage:
    """Compare a published version with this command and with its own manifest.

    Args:
        config: of the command; with `repair` every byte is read, else sizes (and CRCs that a listing gives).
        manifest: of the version.

    Raises:
        UsageError: it was made with another configuration.
        ImageShardsError: its inputs were others.
    """
    _check_configuration(config, manifest)
    _check_inputs(config, manifest)
    return _find_damage(config, manifest)


def _check_configuration(config: Config, manifest: dict[str, Any]) -> None:
    ours = json.loads(canonical_json(config.fingerprint()))
    theirs = manifest["configuration"]
    different = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    if different:
        name = different[0]
        more = f" ({len(different) - 1} more flags differ)" if different[1:] else ""
        flag = {"labels": "labels_file", "columns": "manifest"}.get(name, name)
        raise UsageError(
            f"--{flag} {_as_written(name, ours.get(name))}: {config.dataset_url} is published with "
            f"{_as_written(name, theirs.get(name))}{more}; choose another --version or --overwrite"
        )


def _as_written(name: str, value: Any) -> str:
    """A value of the configuration as its flag is written."""
    if name == "image_size":
        return "none" if value is None else "x".join(map(str, value if value[0] != value[1] else value[:1]))
    if name == "columns":
        return f"of columns {', '.join(column['name'] for column in value or ()) or 'none'}"
    return f"of {', '.join(value)}" if name == "labels" and value else repr(value)


def _check_inputs(config: Config, manifest: dict[str, Any]) -> None:
    """Compare today's input with the published one, shard by shard: listings, and contents where they are known.

    A listing that gives MD5s tells contents; with `--repair` every image is read.
    """
    shards, plans = _shards(manifest), split_plans(manifest["plan"]["splits"])
    sums: dict[tuple[str, int], tuple[ReferenceSum, ReferenceSum]] = {}
    contents_known = not manifest["rejects"]["environment"]
    for ref, md5 in _contents(config):
        # An image of a split that didn't exist then counts as a shard that differs.
        shard = plans[ref.split].shard_of(ref.order_key) if ref.split in plans else 0
        names, contents = sums.setdefault((ref.split, shard), (ReferenceSum(), ReferenceSum()))
        names.add(listing_fields(ref))
        contents_known = contents_known and md5 is not None
        contents.add(content_fields(ref, md5 or b""))
    different = sum(key not in shards for key in sums)
    for key, published in shards.items():
        names, contents = sums.get(key, (ReferenceSum(), ReferenceSum()))
        same = names.hex == published["listing_fingerprint"] and names.count == published["images"]
        different += not (same and (not contents_known or contents.hex == published["content_fingerprint"]))
    if different:
        listed = sum(names.count for names, _ in sums.values())
        raise ImageShardsError(
            f"the input is not the one that {config.dataset_url} was made from: {manifest['images']} images were "
            f"listed then, {listed} now, {different} of {len(shards)} shards differ; "
            "choose another --version or --overwrite"
        )


def _contents(config: Config) -> Iterator[tuple[ImageRef, bytes | None]]:
    """Every image of the input with its MD5 as far as it is known: from the listing, or read with `--repair`."""
    refs = listing.all_images(config)
    if not config.repair:
        yield from ((ref, _listed_md5(config, ref)) for ref in refs)
        return
    store = storage.open_storage(config.input or "", config.io_deadline)

    def read(ref: ImageRef) -> bytes | Reject:
        return fetch(store, listing.image_url(config, ref.path), ref, config.image_options)

    def digest(ref: ImageRef, data: bytes | Reject) -> tuple[ImageRef, bytes]:
        return ref, b"" if isinstance(data, Reject) else hashlib.md5(data, usedforsecurity=False).digest()

    pools = shared_pools(config.fetch_concurrency, config.threads)
    yield from pools.map(refs, read, digest, lambda ref: ref.source_bytes)


def _listed_md5(config: Config, ref: ImageRef) -> bytes | None:
    """What the content fingerprint saw of an image, by its listing; b"" for one that was too large to be read."""
    if ref.source_bytes > config.image_options.max_image_bytes:
        return b""
    return bytes.fromhex(ref.etag[4:]) if ref.etag.startswith("md5:") else None


def _shards(manifest: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    return {
        (split, index): shard
        for split, content in manifest["splits"].items()
        for index, shard in enumerate(content["shards"])
    }


def _find_damage(config: Config, manifest: dict[str, Any]) -> Damage:
    store = storage.open_storage(config.output, config.io_deadline)
    found = {file.path: file for file in store.files(config.dataset_url)}
    shards = set()
    for key, shard in _shards(manifest).items():
        file = found.get(shard["file"])
        whole = file is not None and file.bytes == shard["bytes"] and file.crc32c in (None, shard["crc32c"])
        if whole and config.repair:
            whole = storage.crc32c_of(store, storage.join(config.dataset_url, shard["file"])) == shard["crc32c"]
        if not whole:
            shards.add(key)
    files = set()
    for name, digest in manifest["files"].items():
        url = storage.join(config.dataset_url, name)
        if name not in found or (config.repair and schema.sha256(store.read(url)) != digest):
            files.add(name)
    if schema.REJECTS_FILE in files:  # its lines come from the shards that had rejects
        shards |= {key for key, shard in _shards(manifest).items() if shard["records"] < shard["images"]}
    return Damage(frozenset(shards), frozenset(files))


def build_repair(pipeline: beam.Pipeline, config: Config, manifest: dict[str, Any], damage: Damage) -> None:
    """Add the job that rewrites what is damaged.

    Raises:
        ImageShardsError: the codecs installed here are not those that the version was made with.
    """
    plan = JobPlan(
        configuration=manifest["configuration"],
        classes=tuple(manifest["classes"]),
        columns=tuple(manifest["features"]),
        splits=split_plans(manifest["plan"]["splits"]),
        statistics={},
        references="repair",
        codec=manifest["codec"],
    )
    if damage.shards and images.codec_versions() != manifest["codec"]:
        raise ImageShardsError(
            f"can't repair with codecs {images.codec_versions()}: the version was made with {manifest['codec']}; "
            "install these, or use --overwrite"
        )
    plans = pipeline | "Plan" >> beam.Create([plan])
    summaries: Any = ()
    if damage.shards:
        pages, _ = pipeline | "ListImages" >> ListImages(config)
        shards = _shards(manifest)
        promised = {key: (shards[key]["bytes"], shards[key]["crc32c"]) for key in damage.shards}
        written = (
            pages
            | "AssignShards" >> AssignShards(plans)
            | "OnlyDamaged" >> beam.Filter(lambda pair, shards: pair[0] in shards, damage.shards)
            | "GroupByShard" >> beam.GroupByKey()
            | "WriteShards" >> WriteShards(config, plans, promised)
        )
        summaries = AsIter(written)  # waited for, no more
    plans | "RestoreFiles" >> beam.Map(_restore, config, manifest, damage, summaries)


def _restore(plan: JobPlan, config: Config, manifest: dict[str, Any], damage: Damage, _: Iterable[Any]) -> str:
    """Rewrite the damaged files beside the shards, all of them checked against the manifest."""
    state = JobState(config)
    store = storage.open_storage(config.output, config.io_deadline)
    for file, data in _restored_files(store, config, plan, manifest, damage):
        if schema.sha256(data) != manifest["files"][file]:
            raise ImageShardsError(f"{file} comes out with other bytes than were published: use --overwrite")
        store.write(storage.join(config.dataset_url, file), data)
    state.clear()
    return config.dataset_url


def _restored_files(
    store: storage.Storage, config: Config, plan: JobPlan, manifest: dict[str, Any], damage: Damage
) -> Iterator[tuple[str, bytes]]:
    for split, split_plan in sorted(plan.splits.items()):
        names = [_name(config, plan, split, index) for index in range(split_plan.shards)]
        for name in names:
            if name.index_file in damage.files:
                yield name.index_file, index_text(_record_bytes(store, config, name))
        if schema.runs_file(split) in damage.files:
            rows = (schema.run_rows(name.index, _record_bytes(store, config, name)) for name in names)
            yield schema.runs_file(split), run_index([run_rows_array(shard) for shard in rows])
    yield from ((file, data) for file, data in metadata_files(manifest).items() if file in damage.files)
    if schema.REJECTS_FILE in damage.files:
        state = JobState(config)
        had_rejects = [key for key, shard in sorted(_shards(manifest).items()) if shard["records"] < shard["images"]]
        yield schema.REJECTS_FILE, b"".join(state.rejects(_name(config, plan, *key)) for key in had_rejects)


def _name(config: Config, plan: JobPlan, split: str, index: int) -> ShardName:
    return ShardName(config.name, split, index, plan.splits[split].shards)


def _record_bytes(store: storage.Storage, config: Config, name: ShardName) -> Iterable[int]:
    """Framed length of each record of a shard that was found or made whole."""
    url = storage.join(config.dataset_url, name.file)
    return (len(record) + schema.FRAME_BYTES for record in schema.unframe(store.read(url), name.file))
