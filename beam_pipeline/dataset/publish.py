"""Publishes a finished job: joins the sidecars into indexes, metadata and the manifest, which is the commit point.

Sidecars are read shard by shard; what stays in memory is under 4 kB a shard. Order of writing: run indexes, labels,
features.json, rejects.jsonl and run.json at once; dataset_info.json; manifest.json. Until then there is no dataset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import IO, Any

from beam_pipeline import schema, storage
from beam_pipeline.config import Config
from beam_pipeline.dataset import duplicates
from beam_pipeline.dataset.duplicates import SavedGroups
from beam_pipeline.dataset.result import DatasetTotals, SummedFile
from beam_pipeline.dataset.state import JobState, at_once
from beam_pipeline.errors import ImageShardsError
from beam_pipeline.planning.plan import JobPlan
from beam_pipeline.schema import ShardName, canonical_json, is_ours
from beam_pipeline.schema.manifest import seal_manifest
from beam_pipeline.schema.tfds import dataset_info_document, features_document
from beam_pipeline.storage import ListedFile, usage
from beam_pipeline.storage.usage import Usage

_SIDECARS_IN_FLIGHT = 32
# Requests after run.json is written, besides the other files: itself, the manifest, a listing; what the launcher reads.
_WRITES_TO_COME, _READS_TO_COME = 3, 4


def publish(
    config: Config, plan: JobPlan, run: dict[str, Any], saved: Sequence[SavedGroups] | None = None
) -> dict[str, Any]:
    """Write all files of a dataset other than its shards, the manifest last.

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
    try:
        return _publish(config, state, plan, run, saved)
    except ImageShardsError as error:
        # The state may be gone because an earlier attempt at this step, or another job of this plan, has published.
        manifest = state.published_manifest(plan, after=error)
        if manifest is None:
            raise
    state.clear()
    return manifest


def _publish(
    config: Config, state: JobState, plan: JobPlan, run: dict[str, Any], saved: Sequence[SavedGroups] | None
) -> dict[str, Any]:
    store = storage.open_storage(config.output, config.io_deadline)

    def put(file: str, content: bytes | IO[bytes]) -> None:
        state.put(storage.join(config.dataset_url, file), content, found.get(file), partial(state.check, plan))

    def look() -> dict[str, ListedFile]:
        files = {file.path: file for file in store.files(config.dataset_url)}
        state.check(plan)  # what another job writes after this has a generation that is not replaced
        return files

    with (
        state.temporary_file() as reject_file,
        state.temporary_file() as duplicate_file,
        ThreadPoolExecutor(1) as thread,
    ):
        totals, rejects = DatasetTotals(config, plan), SummedFile(reject_file)
        looked = thread.submit(look)
        for name, sidecar in _sidecars(config, state, plan, looked.result):
            totals.add(name, sidecar)
            rejects.write(reject_lines(sidecar))
        try:
            totals.check()
        except ImageShardsError:
            store.publish(reject_file, storage.join(state.url, schema.REJECTS_FILE))
            raise
        manifest = totals.manifest()
        small = totals.run_indexes() | metadata_files(manifest)
        sums = {name: schema.file_sums(data) for name, data in small.items()}
        sums |= {**totals.index_sums, schema.REJECTS_FILE: rejects.sums}
        files: dict[str, bytes | IO[bytes]] = {**small, schema.REJECTS_FILE: reject_file}
        if saved is not None:
            lines = SummedFile(duplicate_file)
            for part in duplicates.saved_lines(config, saved):
                lines.write(part)
            sums[schema.DUPLICATES_FILE] = lines.sums
            files[schema.DUPLICATES_FILE] = duplicate_file
            manifest["duplicates"] = duplicates.totals(saved)
        manifest["files"] = {file: one["sha256"] for file, one in sums.items()}
        manifest["file_sizes"] = {file: {"bytes": one["bytes"], "crc32c": one["crc32c"]} for file, one in sums.items()}
        used = Usage(**run.get("used", {}))
        used.merge(usage.take())
        if not storage.is_local(config.output):
            used.lists_and_writes += len(files) + _WRITES_TO_COME
            used.reads += _READS_TO_COME
        files[schema.RUN_FILE] = canonical_json(
            {**run, "inputs": plan.inputs, **totals.run_totals(used, run.get("prices", {}))}
        )
        last = [(file, files.pop(file)) for file in (schema.DATASET_INFO_FILE,) if file in files]
        found = looked.result()
        if schema.MANIFEST_FILE in found and state.published_manifest(plan) is not None:
            raise state.published_meanwhile()
        # A job that lost the claim may have written files since this one listed and deleted its files.
        shards = shard_names(config, plan)
        expected = {*sums, schema.RUN_FILE, *(file for name in shards for file in (name.file, name.table_file))}
        others = [one for one in found.values() if is_ours(one.path, config.name) and one.path not in expected]
        deleted = {storage.join(config.dataset_url, one.path): one.generation for one in others}
        at_once(partial(state.delete_all, deleted), *(partial(put, *one) for one in files.items()))
    at_once(partial(state.check, plan), *(partial(put, *one) for one in last))
    _commit(config, state, plan, seal_manifest(manifest))
    return manifest


def _commit(config: Config, state: JobState, plan: JobPlan, manifest: bytes) -> None:
    """Write the manifest; take it back if another job has begun the version since this one last looked at the claim."""
    store = storage.open_storage(config.output, config.io_deadline)
    url = storage.join(config.dataset_url, schema.MANIFEST_FILE)
    is_new, left = at_once(partial(store.create, url, manifest), state.files)
    if not is_new:
        raise state.published_meanwhile()
    try:
        state.check(plan, is_published=True)
    except ImageShardsError:
        found = store.stat(url)
        if found is not None and store.read(url) == manifest:
            store.delete(url, found.generation)
        raise
    state.clear(left)


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


def reject_lines(sidecar: dict[str, Any]) -> bytes:
    """A shard's part of rejects.jsonl."""
    return b"".join(map(canonical_json, sidecar["rejected"]))


def shard_names(config: Config, plan: JobPlan) -> list[ShardName]:
    """Every planned shard, in order of split and number."""
    splits = sorted(plan.splits.items())
    return [ShardName(config.name, split, index, one.shards) for split, one in splits for index in range(one.shards)]


def _sidecars(
    config: Config, state: JobState, plan: JobPlan, found: Callable[[], dict[str, ListedFile]]
) -> Iterator[tuple[ShardName, dict[str, Any]]]:
    """Every planned shard's sidecar, in order of split and number, its files checked, some requests ahead."""
    names = shard_names(config, plan)

    def checked(name: ShardName) -> tuple[ShardName, dict[str, Any]]:
        sidecar, listed = state.sidecar(name), found()  # which first says it if the claim is lost
        if sidecar is None or sidecar["plan"] != plan.sha256:
            raise ImageShardsError(f"shard {name.file} was not written: run the same command again")
        if different := state.difference(name, sidecar, listed.get, reads=False):
            raise ImageShardsError(
                f"{different} is not what this job wrote: nothing is published; run the same command again"
            )
        return name, sidecar

    with ThreadPoolExecutor(_SIDECARS_IN_FLIGHT) as pool:
        for start in range(0, len(names), _SIDECARS_IN_FLIGHT):
            yield from pool.map(checked, names[start : start + _SIDECARS_IN_FLIGHT])
