"""Publishes a finished job: joins the sidecars into indexes, metadata and the manifest, which is the commit point.

Sidecars are read shard by shard; what stays in memory is under 4 kB per shard. Order of writing: run indexes, labels,
features.json, rejects.jsonl and run.json at once, while files of other jobs are deleted;
dataset_info.json; manifest.json. Until then there is no dataset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import IO, Any

import msgspec

from beam_pipeline import schema, storage
from beam_pipeline.config import Config
from beam_pipeline.dataset.claim import SupersededError
from beam_pipeline.dataset.compare import CorruptFiles
from beam_pipeline.dataset.shard_files import ShardFiles
from beam_pipeline.dataset.state import JobState, run_concurrently, shard_names
from beam_pipeline.dataset.totals import DatasetTotals, run_index, run_rows_array
from beam_pipeline.dataset.version import withdraw
from beam_pipeline.dataset.writer import ClaimedPlan
from beam_pipeline.errors import UNPUBLISHED, ImageShardsError, MissingFileError
from beam_pipeline.schema import ShardName, canonical_json, is_ours
from beam_pipeline.schema.job import Plan, Run, Sidecar, document_bytes
from beam_pipeline.schema.manifest import ChecksumWriter, Content, FileSize, file_sums, seal_manifest
from beam_pipeline.schema.table import read_table
from beam_pipeline.schema.tfds import dataset_info_document, features_document
from beam_pipeline.storage import ListedFile

_SIDECARS_IN_FLIGHT = 32


def publish(config: Config, claimed: ClaimedPlan, run: Run) -> Content:
    """Write all files of a dataset other than its shards, the manifest last.

    Args:
        config, claimed: of the job.
        run: what is known of it, for run.json.

    Returns:
        The manifest.

    Raises:
        ImageShardsError: a shard is missing, images are unaccounted for, or too many were rejected; nothing is
            published.
    """
    plan, state = claimed.plan, JobState(config, claimed.run)
    try:
        return _publish(config, state, plan, run)
    except SupersededError:
        # By an earlier attempt at this step, or by another job of this plan?
        manifest = state.manifest() if state.has_published(plan) else None
        if manifest is None:
            withdraw(config, state, plan)
            raise
    state.clear()
    return manifest


def _publish(config: Config, state: JobState, plan: Plan, run: Run) -> Content:
    store = storage.open_storage(config.output, config.io_deadline)
    url_of = partial(storage.join, config.dataset_url)

    def put(file: str, content: bytes | IO[bytes]) -> None:
        state.put(url_of(file), content, listed.get(url_of(file)), state.check)

    def list_version() -> dict[str, ListedFile]:
        files: dict[str, ListedFile] = {}
        with suppress(MissingFileError):  # a job that overwrites has deleted the folder
            files = {url_of(file.path): file for file in store.files(config.dataset_url)}
        state.check()  # what another job writes after this has a generation that is not replaced
        return files

    with state.temporary_file() as reject_file, ThreadPoolExecutor(1) as thread:
        totals, rejects = DatasetTotals(config, plan), ChecksumWriter(reject_file)
        listing = thread.submit(list_version)
        for name, sidecar in _sidecars(config, state, plan, listing.result):
            totals.add(name, sidecar)
            rejects.write(reject_lines(sidecar))
        try:
            totals.check()
        except ImageShardsError:
            store.publish(reject_file, storage.join(state.url, schema.REJECTS_FILE))
            raise
        manifest = totals.manifest()
        small = totals.run_indexes() | metadata_files(manifest)
        sums = {name: file_sums(data) for name, data in small.items()}
        sums |= {**totals.index_sums, schema.REJECTS_FILE: rejects.sums}
        files: dict[str, bytes | IO[bytes]] = {**small, schema.REJECTS_FILE: reject_file}
        manifest = msgspec.structs.replace(
            manifest,
            files={file: of_file.sha256 for file, of_file in sums.items()},
            file_sizes={file: FileSize(of_file.bytes, of_file.crc32c) for file, of_file in sums.items()},
        )
        files[schema.RUN_FILE] = document_bytes(totals.run(run))
        last = [(file, files.pop(file)) for file in (schema.DATASET_INFO_FILE,) if file in files]
        listed = listing.result()
        if url_of(schema.MANIFEST_FILE) in listed and state.has_published(plan):
            raise SupersededError.published(config.dataset_url)
        # A job that lost the claim may have written files since this one listed and deleted its files.
        shards = shard_names(config, plan.splits)
        expected = {*sums, schema.RUN_FILE, *(file for name in shards for file in (name.file, name.table_file))}
        others = [file for file in listed.values() if is_ours(file.path, config.name) and file.path not in expected]
        deleted = {url_of(file.path): file.generation for file in others}
        run_concurrently(partial(state.delete_all, deleted), *(partial(put, *item) for item in files.items()))
    run_concurrently(state.check, *(partial(put, *item) for item in last))
    _commit(config, state, seal_manifest(manifest))
    return manifest


def _commit(config: Config, state: JobState, manifest: bytes) -> None:
    """Write the manifest; take it back if another job has begun the version since this one last looked at the claim."""
    store = storage.open_storage(config.output, config.io_deadline)
    url = storage.join(config.dataset_url, schema.MANIFEST_FILE)
    is_new, left = run_concurrently(partial(store.create, url, manifest), state.files)
    if not is_new:
        raise SupersededError.published(config.dataset_url)
    try:
        state.check(is_published=True)
    except SupersededError:
        written = store.stat(url)
        if written is not None and store.read(url) == manifest:
            store.delete(url, written.generation)
        raise
    state.clear(left)


def metadata_files(manifest: Content) -> dict[str, bytes]:
    """Labels and TFDS metadata by file name, all of it from the manifest, in order of writing."""
    files = {schema.LABELS_FILE: "".join(f"{label}\n" for label in manifest.classes).encode()}
    if manifest.flags.compression != "none":
        return files  # TFDS can't read compressed shards
    image = manifest.image
    height, width = image.min_size if image.min_size and image.min_size == image.max_size else (None, None)
    shape = (height, width, image.channels)
    features = features_document(image.format, shape, len(manifest.classes), manifest.flags.one_hot, manifest.features)
    splits = {name: (split.bytes, [shard.records for shard in split.shards]) for name, split in manifest.splits.items()}
    files[schema.FEATURES_FILE] = canonical_json(features)
    files[schema.DATASET_INFO_FILE] = canonical_json(dataset_info_document(manifest.name, manifest.version, splits))
    return files


def reject_lines(sidecar: Sidecar) -> bytes:
    """A shard's part of rejects.jsonl."""
    return b"".join(map(document_bytes, sidecar.rejected))


def _sidecars(
    config: Config, state: JobState, plan: Plan, listing: Callable[[], dict[str, ListedFile]]
) -> Iterator[tuple[ShardName, Sidecar]]:
    """Every planned shard's sidecar, in order of split and number, its files checked, some requests ahead."""
    names = shard_names(config, plan.splits)

    def checked(name: ShardName) -> tuple[ShardName, Sidecar]:
        files = ShardFiles(config, name)
        sidecar, files.seen = files.read_sidecar(), listing()  # which first says it if the claim is lost
        if sidecar is None or sidecar.plan != plan.sha256:
            state.check()
            if state.has_published(plan):  # by an earlier attempt, which deleted it
                raise SupersededError.published(config.dataset_url)
            raise ImageShardsError(f"shard {name.file} was not written: run the same command again")
        if different := files.difference(sidecar, reads=False):
            raise ImageShardsError(f"{different} is not what this job wrote: {UNPUBLISHED}")
        return name, sidecar

    with ThreadPoolExecutor(_SIDECARS_IN_FLIGHT) as pool:
        for start in range(0, len(names), _SIDECARS_IN_FLIGHT):
            yield from pool.map(checked, names[start : start + _SIDECARS_IN_FLIGHT])


# --- repair: the files of a published version other than those of its shards, all checked against the manifest


def restore(claimed: ClaimedPlan, config: Config, manifest: Content, corrupt: CorruptFiles, _: Iterable[Any]) -> str:
    """Rewrite the corrupt files other than the shards, all of them checked against the manifest."""
    state = JobState(config)
    store = storage.open_storage(config.output, config.io_deadline)
    for file, parts in _restored_files(config, claimed.plan, manifest, corrupt):
        with state.temporary_file() as out:
            lines = ChecksumWriter(out)
            for part in parts:
                lines.write(part)
            if lines.sums.sha256 != manifest.files[file]:
                how = "use --overwrite" if config.repair else "a shard is corrupt: use --repair"
                raise ImageShardsError(f"{file} comes out with other bytes than were published: {how}")
            state.check(manifest.self_sha256)
            store.publish(out, storage.join(config.dataset_url, file))
    state.check(manifest.self_sha256)
    for file in sorted(corrupt.unexpected):
        store.delete(storage.join(config.dataset_url, file))
    state.clear()
    return config.dataset_url


def _restored_files(
    config: Config, plan: Plan, manifest: Content, corrupt: CorruptFiles
) -> Iterator[tuple[str, Iterable[bytes]]]:
    """(file, its content in parts) of what is corrupt other than the shards, which are valid by now."""
    names = shard_names(config, plan.splits)
    for split in plan.splits:
        if schema.runs_file(split) in corrupt.files:
            shards = (name for name in names if name.split == split)
            rows = (schema.run_rows(name.index, _record_bytes(config, name, manifest)) for name in shards)
            yield schema.runs_file(split), [run_index([run_rows_array(shard) for shard in rows])]
    yield from ((file, [data]) for file, data in metadata_files(manifest).items() if file in corrupt.files)
    if schema.REJECTS_FILE in corrupt.files:
        # Shards that had rejects are all among the corrupt ones; the others' lines are empty.
        rewritten = (ShardFiles(config, name) for name in names if (name.split, name.index) in corrupt.shards)
        yield schema.REJECTS_FILE, (reject_lines(sidecar) for files in rewritten if (sidecar := files.read_sidecar()))


def _record_bytes(config: Config, name: ShardName, manifest: Content) -> list[int]:
    """Framed length of each record of a plain shard.

    Raises:
        ImageShardsError: its record table is corrupt, which its size didn't show.
    """
    url = ShardFiles(config, name).table
    data = storage.open_storage(url, config.io_deadline).read(url)
    if schema.sha256(data) != manifest.tables[name.table_file].sha256:
        raise ImageShardsError(f"{name.table_file} is corrupt: use --repair")
    lengths: list[int] = read_table(data)["bytes"].tolist()
    return lengths
