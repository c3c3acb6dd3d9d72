"""Publishes a finished job: joins the sidecars into indexes, metadata and the manifest, which is the commit point.

Sidecars are read shard by shard; what stays in memory is under 4 kB a shard. Order of writing: run index, labels,
features.json, rejects.jsonl, run.json, dataset_info.json, manifest.json. Until the last one there is no dataset.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from beam_pipeline import schema, storage
from beam_pipeline.config import Config
from beam_pipeline.dataset.duplicates import Counts, SavedGroups, saved_lines
from beam_pipeline.dataset.result import DatasetTotals, SummedFile
from beam_pipeline.dataset.state import JobState
from beam_pipeline.errors import ImageShardsError, NotPublishedError
from beam_pipeline.planning.plan import JobPlan, split_documents
from beam_pipeline.schema import ShardName, canonical_json
from beam_pipeline.schema.manifest import open_manifest, seal_manifest
from beam_pipeline.schema.tfds import dataset_info_document, features_document
from beam_pipeline.storage import ListedFile

_SIDECARS_IN_FLIGHT = 32


def publish(
    config: Config, plan: JobPlan, run: dict[str, Any], saved: Sequence[SavedGroups] | None = None
) -> dict[str, Any]:
    """Write everything that a dataset has beside its shards, the manifest last.

    Args:
        config, plan: of the job.
        run: content of run.json.
        saved: groups of duplicates in the state, or None where none were looked for.

    Returns:
        The manifest.

    Raises:
        ImageShardsError: a shard is missing, images are unaccounted for, or too many were rejected; nothing is
            published.
    """
    state = JobState(config)
    manifest = _of_an_earlier_attempt(config, plan)
    if manifest is None:
        with state.owner.refreshed():
            manifest = _publish(config, plan, run, saved)
    state.clear()
    return manifest


def _publish(config: Config, plan: JobPlan, run: dict[str, Any], saved: Sequence[SavedGroups] | None) -> dict[str, Any]:
    state, store = JobState(config), storage.open_storage(config.output, config.io_deadline)
    state.owner.check()
    found = {file.path: file for file in store.files(config.dataset_url)}

    def put(file: str, data: bytes) -> None:
        store.write(storage.join(config.dataset_url, file), data)

    with state.temporary_file() as reject_file, state.temporary_file() as duplicate_file:
        totals = DatasetTotals(config, plan, SummedFile(reject_file))
        for name, sidecar in _sidecars(config, plan, found):
            state.owner.keep()
            totals.add(name, sidecar, state.rejects(name) if sidecar["rejects"] else b"")
        totals.check(config.max_reject_fraction)
        reject_file.close()
        manifest = totals.manifest()
        run_indexes = totals.run_indexes()
        metadata = metadata_files(manifest)
        sums = totals.file_sums() | {file: schema.file_sums(data) for file, data in {**run_indexes, **metadata}.items()}
        if saved is not None:
            lines = SummedFile(duplicate_file)
            for part in saved_lines(config, saved):
                lines.write(part)
            duplicate_file.close()
            sums[schema.DUPLICATES_FILE] = lines.sums
            manifest["duplicates"] = Counts.total(one.counts for one in saved)._asdict()
        manifest["files"] = {file: one["sha256"] for file, one in sums.items()}
        manifest["file_sizes"] = {file: {"bytes": one["bytes"], "crc32c": one["crc32c"]} for file, one in sums.items()}
        for file, data in run_indexes.items():
            put(file, data)
        dataset_info = metadata.pop(schema.DATASET_INFO_FILE, None)
        for file, data in metadata.items():
            put(file, data)
        store.publish(reject_file.name, storage.join(config.dataset_url, schema.REJECTS_FILE))
        if saved is not None:
            store.publish(duplicate_file.name, storage.join(config.dataset_url, schema.DUPLICATES_FILE))
    put(schema.RUN_FILE, canonical_json({**run, **totals.run_totals()}))
    if dataset_info is not None:
        put(schema.DATASET_INFO_FILE, dataset_info)
    state.owner.check()
    if not store.create(storage.join(config.dataset_url, schema.MANIFEST_FILE), seal_manifest(manifest)):
        raise ImageShardsError(f"{config.dataset_url} was published by another job meanwhile; run the command again")
    return manifest


def _of_an_earlier_attempt(config: Config, plan: JobPlan) -> dict[str, Any] | None:
    """The manifest, if this plan is published: a runner repeats the step whose success it didn't hear of."""
    store = storage.open_storage(config.output, config.io_deadline)
    url = storage.join(config.dataset_url, schema.MANIFEST_FILE)
    try:
        manifest = open_manifest(store.read(url), url)
    except (FileNotFoundError, NotPublishedError):
        return None
    ours = json.loads(canonical_json([plan.configuration, {"splits": split_documents(plan.splits)}]))
    return manifest if [manifest["configuration"], manifest["plan"]] == ours else None


def _check_shard(config: Config, name: ShardName, sidecar: dict[str, Any], found: dict[str, ListedFile]) -> None:
    """Compare a shard's file and its text index with its sidecar.

    If no listing tells the CRC, the index is read, which is small, and the shard unless its etag or mtime is the one
    that the writer noted.

    Raises:
        ImageShardsError: something else has written one of them since.
    """
    store = storage.open_storage(config.output, config.io_deadline)
    for file, promised in ((name.file, sidecar), (name.index_file, sidecar["index"])):
        if promised is None:
            continue  # a compressed shard has no index
        listed, url = found.get(file), storage.join(config.dataset_url, file)
        as_written = listed is not None and listed.etag and listed.etag == promised.get("etag")
        read = False if as_written else None
        if not storage.is_whole(store, url, listed, promised["bytes"], promised["crc32c"], read):
            what = "shard" if promised is sidecar else "index"
            raise ImageShardsError(
                f"{what} {file} is not what this job wrote: nothing is published; run the same command again"
            )


def metadata_files(manifest: dict[str, Any]) -> dict[str, bytes]:
    """Labels and TFDS metadata by file name, all of it from the manifest, in order of writing."""
    files = {schema.LABELS_FILE: "".join(f"{label}\n" for label in manifest["classes"]).encode()}
    if manifest["configuration"]["compression"] != "none":
        return files  # TFDS can't read compressed shards
    image = manifest["image"]
    uniform = image["min_size"] is not None and list(image["min_size"]) == list(image["max_size"])
    features = features_document(
        image["format"],
        (*(image["min_size"] if uniform else (None, None)), image["channels"]),
        len(manifest["classes"]),
        manifest["configuration"]["one_hot"],
        manifest["features"],
    )
    splits = {
        split: (content["bytes"], [shard["records"] for shard in content["shards"]])
        for split, content in manifest["splits"].items()
    }
    files[schema.FEATURES_FILE] = canonical_json(features)
    files[schema.DATASET_INFO_FILE] = canonical_json(
        dataset_info_document(manifest["name"], manifest["version"], splits)
    )
    return files


def shard_names(config: Config, plan: JobPlan) -> list[ShardName]:
    """Every planned shard, in order of split and number."""
    splits = sorted(plan.splits.items())
    return [ShardName(config.name, split, index, one.shards) for split, one in splits for index in range(one.shards)]


def _sidecars(
    config: Config, plan: JobPlan, found: dict[str, ListedFile]
) -> Iterator[tuple[ShardName, dict[str, Any]]]:
    """Every planned shard's sidecar, in order of split and number, its files checked, some requests ahead."""
    state, names, plan_hash = JobState(config), shard_names(config, plan), plan.sha256

    def checked(name: ShardName) -> tuple[ShardName, dict[str, Any]]:
        sidecar = state.sidecar(name)
        if sidecar is None or sidecar["plan"] != plan_hash or not state.is_kept(sidecar):
            raise ImageShardsError(f"shard {name.file} was not written: run the same command again")
        _check_shard(config, name, sidecar, found)
        return name, sidecar

    with ThreadPoolExecutor(_SIDECARS_IN_FLIGHT) as pool:
        for start in range(0, len(names), _SIDECARS_IN_FLIGHT):
            yield from pool.map(checked, names[start : start + _SIDECARS_IN_FLIGHT])
