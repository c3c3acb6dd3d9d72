"""Restores files of a published version other than those of its shards, all checked against the manifest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from beam_pipeline import schema, storage
from beam_pipeline.config import Config
from beam_pipeline.dataset.compare import CorruptFiles
from beam_pipeline.dataset.publish import metadata_files, reject_lines
from beam_pipeline.dataset.shard_files import ShardFiles
from beam_pipeline.dataset.state import JobState, shard_names
from beam_pipeline.dataset.totals import run_index, run_rows_array
from beam_pipeline.dataset.writer import ClaimedPlan
from beam_pipeline.errors import ImageShardsError
from beam_pipeline.schema import ShardName
from beam_pipeline.schema.job import Plan
from beam_pipeline.schema.manifest import ChecksumWriter, Content
from beam_pipeline.schema.table import read_table


def restore(
    claimed: ClaimedPlan,
    config: Config,
    manifest: Content,
    corrupt: CorruptFiles,
    _: Iterable[Any],
) -> str:
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
    config: Config,
    plan: Plan,
    manifest: Content,
    corrupt: CorruptFiles,
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
