"""Repairs a published version: all but the shards from the manifest and the shards, checked against the manifest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from beam_pipeline import schema, storage
from beam_pipeline.config import Config
from beam_pipeline.dataset.compare import Damage
from beam_pipeline.dataset.publish import metadata_files, reject_lines
from beam_pipeline.dataset.sidecars import Sidecars
from beam_pipeline.dataset.state import JobState, shard_names
from beam_pipeline.dataset.totals import SavedGroups, SummedFile, run_index, run_rows_array, saved_lines
from beam_pipeline.dataset.writer import ClaimedPlan, index_text
from beam_pipeline.errors import ImageShardsError
from beam_pipeline.schema import ShardName
from beam_pipeline.schema.job import Plan
from beam_pipeline.schema.manifest import Content


def restore(
    claimed: ClaimedPlan,
    config: Config,
    manifest: Content,
    damage: Damage,
    _: Iterable[Any],
    saved: Iterable[SavedGroups],
) -> str:
    """Rewrite the corrupt files other than the shards, all of them checked against the manifest."""
    state = JobState(config)
    store = storage.open_storage(config.output, config.io_deadline)
    for file, parts in _restored_files(config, claimed.plan, manifest, damage, saved):
        with state.temporary_file() as out:
            lines = SummedFile(out)
            for part in parts:
                lines.write(part)
            if lines.sums.sha256 != manifest.files[file]:
                how = "use --overwrite" if config.repair else "a shard is corrupt: use --repair"
                raise ImageShardsError(f"{file} comes out with other bytes than were published: {how}")
            state.check(manifest.self_sha256)
            store.publish(out, storage.join(config.dataset_url, file))
    state.check(manifest.self_sha256)
    for file in sorted(damage.unexpected):
        store.delete(storage.join(config.dataset_url, file))
    state.clear()
    return config.dataset_url


def _restored_files(
    config: Config,
    plan: Plan,
    manifest: Content,
    damage: Damage,
    saved: Iterable[SavedGroups],
) -> Iterator[tuple[str, Iterable[bytes]]]:
    """(file, its content in parts) of what is corrupt other than the shards, which are valid by now."""
    names = shard_names(config, plan.splits)
    for name in names:
        if name.index_file in damage.files:
            yield name.index_file, [index_text(_record_bytes(config, name))]
    for split in plan.splits:
        if schema.runs_file(split) in damage.files:
            shards = (name for name in names if name.split == split)
            rows = (schema.run_rows(name.index, _record_bytes(config, name)) for name in shards)
            yield schema.runs_file(split), [run_index([run_rows_array(shard) for shard in rows])]
    yield from ((file, [data]) for file, data in metadata_files(manifest).items() if file in damage.files)
    if schema.REJECTS_FILE in damage.files:
        # Shards that had rejects are all among the corrupt ones; the others' lines are empty.
        sidecars = (Sidecars(config).read(name) for name in names if (name.split, name.index) in damage.shards)
        yield schema.REJECTS_FILE, (reject_lines(sidecar) for sidecar in sidecars if sidecar)
    if schema.DUPLICATES_FILE in damage.files:
        yield schema.DUPLICATES_FILE, saved_lines(config, saved)


def _record_bytes(config: Config, name: ShardName) -> Iterator[int]:
    """Framed length of each record of a plain shard, which is read in pieces.

    Raises:
        ImageShardsError: its framing is corrupt, which its size didn't show.
    """
    position, store = 0, storage.open_storage(config.output, config.io_deadline)
    with store.open(storage.join(config.dataset_url, name.file)) as file:
        while header := file.read(schema.FRAME_HEADER_BYTES):
            length = schema.framed_bytes(header)
            if length is None:
                raise ImageShardsError(f"shard {name.file} is corrupt at byte {position}: use --repair")
            yield length
            position += length
            file.read(length - schema.FRAME_HEADER_BYTES)
