"""Compares a published version with the command, its input and its own files."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from beam_pipeline import schema, storage
from beam_pipeline.config import Config
from beam_pipeline.conversion.fetch import convert_all
from beam_pipeline.dataset.preconditions import check_same, choices
from beam_pipeline.dataset.state import read_run
from beam_pipeline.errors import ImageShardsError, UsageError
from beam_pipeline.inputs import folders
from beam_pipeline.inputs.references import ImageRef, content_fields, listing_fields, reference_fields
from beam_pipeline.schema import ShardName, is_ours
from beam_pipeline.schema.job import ComparedInputs, ReferenceSum, as_run
from beam_pipeline.schema.manifest import Content, FileSize, Shard
from beam_pipeline.storage import ListedFile
from beam_pipeline.text import first_few, plural

_FILES_IN_FLIGHT = 32
_MAX_IN_LAUNCHER = 2_000_000  # images whose listing a launcher compares


@dataclasses.dataclass(frozen=True)
class CorruptFiles:
    """The files of a published version that are not as they were published.

    Attributes:
        shards: (split, index) of shards whose images are converted again, since one of their files is corrupt.
        files: names of other files that are restored.
        unexpected: names of shards and indexes that don't belong to the version: they are deleted.
    """

    shards: frozenset[tuple[str, int]]
    files: frozenset[str]
    unexpected: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.shards or self.files or self.unexpected)

    def __str__(self) -> str:
        shards = [plural(len(self.shards), "corrupt shard")] * bool(self.shards)
        named = ((self.files, "missing or corrupt file"), (self.unexpected, "unexpected file"))
        files = [f"{plural(len(names), noun)} ({first_few(sorted(names))})" for names, noun in named if names]
        return " and ".join(shards + files)


class Comparison(NamedTuple):
    """What a comparison found.

    Attributes:
        corrupt: to be repaired.
        checked: what was compared, and what wasn't, in one line.
        etags_differ: the etag or mtime of an image isn't the one that was published, and contents were not compared.
        run: content of run.json.
    """

    corrupt: CorruptFiles
    checked: str
    etags_differ: bool
    run: dict[str, Any]


def needs_job(config: Config, manifest: Content, is_local: bool) -> bool:
    """Whether images are compared by a job: it reads them, or lists very many where the workers are elsewhere."""
    return config.repair or (not is_local and manifest.images > _MAX_IN_LAUNCHER)


def compare_listing(config: Config, manifest: Content) -> Comparison:
    """`compare` without a job, by a listing of the input; errors are those of `check_same` and `compare`."""
    check_same(config, manifest)
    return compare(config, manifest, _compare_inputs(config, manifest))


def compare(config: Config, manifest: Content, inputs: ComparedInputs) -> Comparison:
    """Compare a published version, which `check_same` accepts, with its input and with its own manifest.

    Args:
        config: of the command; with `repair` every byte is read, else sizes (and MD5s and CRCs that a listing gives).
        manifest: of the version.
        inputs: what was found of its images, and with `repair` of the files of its shards.

    Raises:
        ImageShardsError: its inputs were others.
    """
    if inputs.different:
        counts = f"{manifest.images} images were listed then, {inputs.images} now"
        what = f"{counts}, {inputs.different} of {len(manifest.shards)} shards differ"
        fix = choices(config, manifest, inputs.labels)
        raise ImageShardsError(f"the input has changed since {config.dataset_url} was published: {what}; {fix}")
    corrupt, by = _find_corrupt(config, manifest, inputs)
    unread = 0 if config.repair else manifest.images - inputs.by_content
    run = read_run(config)
    etags_differ = unread > 0 and as_run(run).inputs not in ("", inputs.references)
    return Comparison(corrupt, _summary(manifest, inputs.by_content, unread, by), etags_differ, run)


def _summary(manifest: Content, compared: int, unread: int, by: str) -> str:
    """What was compared, and what wasn't, in one line.

    Args:
        manifest: of the version.
        compared: images that have the MD5s that were published.
        unread: images whose contents are unknown.
        by: what of the files was compared.
    """
    shards, files = plural(len(manifest.shards), "shard"), plural(len(manifest.files), "other file")
    parts = [f"{shards} and {files} match the {by} in the manifest"]
    parts += [f"{plural(compared, 'image')} match the MD5s that were published"] * bool(compared)
    others = ["files"] * (by == _SIZES) + [plural(unread, "image")] * bool(unread)
    unchecked = f"; contents of {' and '.join(others)} were not checked: --repair checks them" if others else ""
    return ", ".join(parts) + unchecked


class ShardSums:
    """Sums over the images of a shard, as the manifest has them: of their listing, and of contents that are known."""

    def __init__(self) -> None:
        self.listing, self.content = ReferenceSum(), ReferenceSum()

    def add(self, ref: ImageRef, md5: bytes | None) -> None:
        """Add an image; without its MD5 its content isn't known."""
        self.listing.add(listing_fields(ref))
        if md5 is not None:
            self.content.add(content_fields(ref, md5))


def compare_shard(shard: Shard | None, sums: ShardSums, environment: int) -> ComparedInputs:
    """Compare the images that are listed now with those that a shard was made of.

    Args:
        shard: its entry in the manifest; None for images of a split that it doesn't have.
        sums: of the images that are listed for it now.
        environment: how many images of the version couldn't be read for a reason of the moment: they have no MD5 in the
            manifest, and may have one now.
    """
    listing, content = sums.listing, sums.content
    is_same = shard is not None and (listing.hex, listing.count) == (shard.listing_fingerprint, shard.images)
    by_content = 0
    if shard is not None and (not environment or shard.records == shard.images) and content.count == listing.count:
        is_same = is_same and content.hex == shard.content_fingerprint
        by_content = content.count
    return ComparedInputs(images=listing.count, different=not is_same, by_content=by_content)


def shard_of(manifest: Content, ref: ImageRef) -> tuple[str, int]:
    """(split, number) of the shard that an image belongs to; 0 in a split that the version doesn't have."""
    split = manifest.plan.splits.get(ref.split)
    return ref.split, split.shard_of(ref.order_key) if split else 0


def _compare_inputs(config: Config, manifest: Content) -> ComparedInputs:
    """Compare today's input with the published one, shard by shard, in this process, streamed."""
    sums, references, total = dict[tuple[str, int], ShardSums](), ReferenceSum(), ComparedInputs()
    for ref, md5 in attach_md5(config, folders.all_images(config)):
        # A job with --stratify adds up its listing before the splits are known.
        references.add(reference_fields(ref._replace(split="") if config.stratify else ref))
        total.labels.add(ref.label)
        sums.setdefault(shard_of(manifest, ref), ShardSums()).add(ref, md5)
    total.references = str(references)
    for key in sums.keys() | manifest.shards.keys():
        part = compare_shard(manifest.shards.get(key), sums.get(key, ShardSums()), manifest.rejects.environment)
        total.merge(part)
    return total


def attach_md5(config: Config, refs: Iterable[ImageRef]) -> Iterator[tuple[ImageRef, bytes | None]]:
    """Images with their MD5s, as listed or, with `--repair`, in a worker, read; None if one isn't known.

    b"" is the MD5 of an image that a job wouldn't or couldn't read.
    """
    most_bytes = config.image_options.max_image_bytes
    if config.repair:
        yield from ((image.ref, image.md5) for image in convert_all(config, refs, lambda *_: None))
    else:
        yield from ((ref, ref.md5 if ref.source_bytes <= most_bytes else b"") for ref in refs)


def read_and_compare(
    config: Config, manifest: Content, key: tuple[str, int], refs: Iterable[ImageRef]
) -> ComparedInputs:
    """For a worker: compare one shard, its images and, with `--repair`, every byte of its files.

    Args:
        config, manifest: of the comparison.
        key: split and number of the shard.
        refs: its images as they are listed now.
    """
    sums, labels = ShardSums(), set[str]()
    for ref, md5 in attach_md5(config, refs):
        sums.add(ref, md5)
        labels.add(ref.label)
    shard = manifest.shards.get(key)
    compared = compare_shard(shard, sums, manifest.rejects.environment)
    compared.labels = labels
    if config.repair and shard is not None:
        store = storage.open_storage(config.output, config.io_deadline)
        expected = _files_of(manifest, shard)
        urls = {name: storage.join(config.dataset_url, name) for name in expected}
        listed = {name: file for name, url in urls.items() if (file := store.stat(url))}
        compared.corrupt = corrupt_files(config, expected, listed, "always")
    return compared


def _files_of(manifest: Content, shard: Shard) -> dict[str, FileSize]:
    """The files of one shard: itself, its record table, and its text index if it has one."""
    index = f"{schema.INDEX_FOLDER}/{shard.file}.idx"
    files = {shard.file: FileSize(shard.bytes, shard.crc32c), schema.table_file(shard.file): shard.table}
    if index in manifest.file_sizes:
        files[index] = manifest.file_sizes[index]
    return files


def _check_path(config: Config, url: str) -> None:
    """Check that a file can be written where one is missing; a folder there may hold somebody's work."""
    for path, is_other, kind in ((url, os.path.isdir, "folder"), (os.path.dirname(url), os.path.isfile, "file")):
        if storage.is_local(url) and is_other(path):
            raise UsageError(f"--output {config.output!r}: {path} is a {kind}; move it away")


_SIZES, _SIZES_AND_CRCS = "sizes", "sizes and CRCs"


def _find_corrupt(config: Config, manifest: Content, inputs: ComparedInputs) -> tuple[CorruptFiles, str]:
    """Compare files with the manifest, by a listing or with `--repair` every byte; also says what was compared.

    A corrupt text index or record table counts as a corrupt shard.
    """
    store = storage.open_storage(config.output, config.io_deadline)
    listed = {file.path: file for file in store.files(config.dataset_url)}
    shard_of_file: dict[str, tuple[str, int]] = {}
    expected: dict[str, FileSize] = dict(manifest.file_sizes)
    for key, shard in manifest.shards.items():
        files = _files_of(manifest, shard)
        shard_of_file |= dict.fromkeys(files, key)
        expected |= files
    others = {name: size for name, size in expected.items() if name not in shard_of_file}
    if config.repair:  # the job has read the files of shards, where the data is
        corrupt = inputs.corrupt | corrupt_files(config, others, listed, "always")
    else:
        corrupt = corrupt_files(config, expected, listed, "never")
    for name in sorted(corrupt):
        _check_path(config, storage.join(config.dataset_url, name))
    rewritten = {shard_of_file[name] for name in corrupt if name in shard_of_file}
    if schema.REJECTS_FILE in corrupt:  # its lines come from the shards that had rejects
        rewritten |= {key for key, shard in manifest.shards.items() if shard.records < shard.images}
    too_many = [name for name in listed.keys() - expected.keys() if is_ours(name, config.name)]
    unexpected = (name for name in too_many if ShardName.parse(name) or name.startswith(f"{schema.INDEX_FOLDER}/"))
    found = CorruptFiles(frozenset(rewritten), frozenset(corrupt & others.keys()), frozenset(unexpected))
    has_crcs = config.repair or all(listed[name].crc32c is not None for name in expected.keys() & listed.keys())
    return found, _SIZES_AND_CRCS if has_crcs else _SIZES


def corrupt_files(
    config: Config, expected: Mapping[str, FileSize], listed: Mapping[str, ListedFile], reads: storage.Reads
) -> set[str]:
    """The files of the version that are missing or have another size or CRC; those that are read, many at a time."""
    store = storage.open_storage(config.output, config.io_deadline)

    def is_intact(name: str) -> bool:
        url, size = storage.join(config.dataset_url, name), expected[name]
        return storage.is_intact(store, url, listed.get(name), size.bytes, size.crc32c, reads)

    threads = config.threads if storage.is_local(config.output) else _FILES_IN_FLIGHT
    with ThreadPoolExecutor(threads) as pool:
        are_intact = pool.map(is_intact, expected) if reads == "always" else map(is_intact, expected)
        return {name for name, ok in zip(expected, are_intact, strict=True) if not ok}
