"""A version that is published already: is it what this command would make, and is it whole?"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

from beam_pipeline import listing, schema, storage
from beam_pipeline.errors import ImageShardsError, UsageError
from beam_pipeline.fetching import convert_all, listed_md5
from beam_pipeline.options import Config
from beam_pipeline.own_files import is_ours
from beam_pipeline.schema import ShardName, canonical_json
from beam_pipeline.sharding import ImageRef, ReferenceSum, content_fields, listing_fields
from beam_pipeline.state import split_plans
from beam_pipeline.storage import ListedFile
from beam_pipeline.wording import plural

_INDEXES = f"{schema.INDEX_FOLDER}/"


@dataclasses.dataclass(frozen=True)
class Damage:
    """What of a published version must be written again.

    Attributes:
        shards: (split, index) of shards whose images are converted again.
        files: other files, by name.
        foreign: shards and indexes that don't belong to the version, by name: they are deleted.
    """

    shards: frozenset[tuple[str, int]]
    files: frozenset[str]
    foreign: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.shards or self.files or self.foreign)

    def __str__(self) -> str:
        parts = []
        if self.shards:
            parts.append(plural(len(self.shards), "damaged shard"))
        if self.files:
            parts.append(f"{plural(len(self.files), 'other file')} ({_some(self.files)})")
        if self.foreign:
            parts.append(f"{plural(len(self.foreign), 'file')} too many ({_some(self.foreign)})")
        return " and ".join(parts)


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + ", …" * (len(ordered) > 3)


def check(config: Config, manifest: dict[str, Any]) -> Damage:
    """Compare a published version with this command and with its own manifest.

    Args:
        config: of the command; with `repair` every byte is read, else sizes (and CRCs that a listing gives).
        manifest: of the version.

    Raises:
        UsageError: it was made under another name, or with another configuration.
        ImageShardsError: its inputs were others.
    """
    _check_name(config, manifest)
    _check_configuration(config, manifest)
    _check_inputs(config, manifest)
    return _find_damage(config, manifest)


def _check_name(config: Config, manifest: dict[str, Any]) -> None:
    """A renamed folder's shards and metadata keep the old name, so what repair wrote would lie beside them."""
    for flag, ours in (("name", config.name), ("version", config.version)):
        if manifest[flag] != ours:
            raise UsageError(
                f"--{flag} {ours!r}: {config.dataset_url} was published as {manifest['name']}/{manifest['version']}, "
                "and its files say so: give its folder that name again, or use --overwrite"
            )


def _check_configuration(config: Config, manifest: dict[str, Any]) -> None:
    ours = json.loads(canonical_json(config.fingerprint()))
    theirs = manifest["configuration"]
    different = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    if different:
        name = different[0]
        others = len(different) - 1
        more = f" ({plural(others, 'more flag')} {'differs' if others == 1 else 'differ'})" if others else ""
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
    shards, plans = shards_of(manifest), split_plans(manifest["plan"]["splits"])
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
    yield from ((one.ref, one.md5) for one in convert_all(config, refs, lambda *_: None))


def _listed_md5(config: Config, ref: ImageRef) -> bytes | None:
    """What the content fingerprint saw of an image, by its listing; b"" for one that was too large to be read."""
    if ref.source_bytes > config.image_options.max_image_bytes:
        return b""
    return listed_md5(ref)


def shards_of(manifest: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """(split, number) → what the manifest says of that shard."""
    return {
        (split, index): shard
        for split, content in manifest["splits"].items()
        for index, shard in enumerate(content["shards"])
    }


def _find_damage(config: Config, manifest: dict[str, Any]) -> Damage:
    store = storage.open_storage(config.output, config.io_deadline)
    found = {file.path: file for file in store.files(config.dataset_url)}
    shards = {key for key, one in shards_of(manifest).items() if not _is_whole(config, store, found, one["file"], one)}
    files = {
        name
        for name, sha256 in manifest["files"].items()
        if not _is_whole(config, store, found, name, {**manifest["file_sizes"][name], "sha256": sha256})
    }
    if schema.REJECTS_FILE in files:  # its lines come from the shards that had rejects
        shards |= {key for key, shard in shards_of(manifest).items() if shard["records"] < shard["images"]}
    promised = manifest["files"].keys() | {shard["file"] for shard in shards_of(manifest).values()}
    left_over = (name for name in found.keys() - promised if is_ours(name, config.name))
    foreign = (name for name in left_over if ShardName.parse(name) or name.startswith(_INDEXES))
    return Damage(frozenset(shards), frozenset(files), frozenset(foreign))


def _is_whole(
    config: Config, store: storage.Storage, found: dict[str, ListedFile], name: str, published: dict[str, Any]
) -> bool:
    """Whether a file is as published, by its listing; with `--repair` by every byte of it."""
    file = found.get(name)
    if file is None or file.bytes != published["bytes"] or file.crc32c not in (None, published["crc32c"]):
        return False
    if not config.repair:
        return True
    url = storage.join(config.dataset_url, name)
    if "sha256" in published:
        digest = hashlib.sha256()
        for piece in storage.pieces(store, url, file.bytes):
            digest.update(piece)
        return digest.hexdigest() == str(published["sha256"])
    return storage.crc32c_of(store, url, file.bytes) == int(published["crc32c"])
