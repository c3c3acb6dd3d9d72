"""Makes a damaged version whole again: its damaged shards from their images, all else from the manifest and the shards.

Repair never changes the manifest: every file that it rewrites must come out with the size and hash that stand in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import apache_beam as beam
from apache_beam.pvalue import AsIter

from beam_pipeline import images, schema, storage
from beam_pipeline.duplicates import SavedGroups, saved_lines
from beam_pipeline.errors import ImageShardsError
from beam_pipeline.joined import run_index, run_rows_array
from beam_pipeline.options import Config
from beam_pipeline.publish import metadata_files
from beam_pipeline.published import Damage, shards_of
from beam_pipeline.schema import ShardName
from beam_pipeline.state import JobPlan, JobState, split_plans
from beam_pipeline.transforms import AssignShards, ListImages, MarkDuplicates, SaveDuplicates, WriteShards
from beam_pipeline.writer import index_text

_PIECE_BYTES = 16 << 20


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
        references=f"repair {config.identity.token}",  # what an interrupted repair left may be damaged since
        codec=manifest["codec"],
    )
    if damage.shards and images.codec_versions() != manifest["codec"]:
        raise ImageShardsError(
            f"can't repair with codecs {images.codec_versions()}: the version was made with {manifest['codec']}; "
            "install these, or use --overwrite"
        )
    plans = pipeline | "Plan" >> beam.Create([plan]) | "TakeOwnership" >> beam.Map(_owned, config)
    restores_duplicates = schema.DUPLICATES_FILE in damage.files
    summaries: Any = ()
    saved: Any = ()
    if damage.shards or restores_duplicates:
        pages, survey = pipeline | "ListImages" >> ListImages(config)
        if config.duplicates == "drop" or restores_duplicates:
            marked, _, groups = pages | "MarkDuplicates" >> MarkDuplicates(config, survey)
            pages = marked if config.duplicates == "drop" else pages
        if restores_duplicates:
            saved = AsIter(groups | "SaveDuplicates" >> SaveDuplicates(config, plans))
    if damage.shards:
        summaries = AsIter(_rewritten(pages, config, plans, manifest, damage))  # waited for, no more
    plans | "RestoreFiles" >> beam.Map(_restore, config, manifest, damage, summaries, saved)


def _owned(plan: JobPlan, config: Config) -> JobPlan:
    JobState(config).owner.acquire(plan.sha256)
    return plan


def _rewritten(pages: Any, config: Config, plans: Any, manifest: dict[str, Any], damage: Damage) -> Any:
    """`ShardId`s of the damaged shards, which are published as they were or not at all."""
    shards = shards_of(manifest)
    promised = {key: (shards[key]["bytes"], shards[key]["crc32c"]) for key in damage.shards}
    return (
        pages
        | "AssignShards" >> AssignShards(config, plans)
        | "OnlyDamaged" >> beam.Filter(lambda pair, shards: pair[0] in shards, damage.shards)
        | "GroupByShard" >> beam.GroupByKey()
        | "WriteShards" >> WriteShards(config, plans, promised)
    )


def _restore(
    plan: JobPlan,
    config: Config,
    manifest: dict[str, Any],
    damage: Damage,
    _: Iterable[Any],
    saved: Iterable[SavedGroups],
) -> str:
    """Rewrite the damaged files beside the shards, all of them checked against the manifest."""
    state = JobState(config)
    store = storage.open_storage(config.output, config.io_deadline)
    state.owner.check()
    with state.owner.refreshed():
        for file, parts in _restored_files(store, config, plan, manifest, damage, saved):
            with state.temporary_file() as out:
                digest = hashlib.sha256()
                for part in parts:
                    out.write(part)
                    digest.update(part)
                out.close()
                if digest.hexdigest() != manifest["files"][file]:
                    how = "use --overwrite" if config.repair else "a shard is damaged: use --repair"
                    raise ImageShardsError(f"{file} comes out with other bytes than were published: {how}")
                store.publish(out.name, storage.join(config.dataset_url, file))
        for file in sorted(damage.foreign):
            store.delete(storage.join(config.dataset_url, file))
    state.clear()
    return config.dataset_url


def _restored_files(
    store: storage.Storage,
    config: Config,
    plan: JobPlan,
    manifest: dict[str, Any],
    damage: Damage,
    saved: Iterable[SavedGroups],
) -> Iterator[tuple[str, Iterable[bytes]]]:
    """(file, its content in parts) of what is damaged beside the shards, which are whole by now."""
    for split, split_plan in sorted(plan.splits.items()):
        names = [_name(config, plan, split, index) for index in range(split_plan.shards)]
        for name in names:
            if name.index_file in damage.files:
                yield name.index_file, [index_text(_record_bytes(store, config, name))]
        if schema.runs_file(split) in damage.files:
            rows = (schema.run_rows(name.index, _record_bytes(store, config, name)) for name in names)
            yield schema.runs_file(split), [run_index([run_rows_array(shard) for shard in rows])]
    yield from ((file, [data]) for file, data in metadata_files(manifest).items() if file in damage.files)
    if schema.REJECTS_FILE in damage.files:
        state = JobState(config)
        had_rejects = [key for key, shard in sorted(shards_of(manifest).items()) if shard["records"] < shard["images"]]
        yield schema.REJECTS_FILE, (state.rejects(_name(config, plan, *key)) for key in had_rejects)
    if schema.DUPLICATES_FILE in damage.files:
        yield schema.DUPLICATES_FILE, saved_lines(config, saved)


def _name(config: Config, plan: JobPlan, split: str, index: int) -> ShardName:
    return ShardName(config.name, split, index, plan.splits[split].shards)


def _record_bytes(store: storage.Storage, config: Config, name: ShardName) -> Iterator[int]:
    """Framed length of each record of a plain shard, which is read in pieces.

    Raises:
        ImageShardsError: its framing is damaged, which its size didn't show.
    """
    url = storage.join(config.dataset_url, name.file)
    file = store.stat(url)
    size = file.bytes if file else 0
    position, piece, piece_start = 0, b"", 0
    while position < size:
        if position + schema.FRAME_HEADER_BYTES > piece_start + len(piece):
            piece, piece_start = store.read(url, position, min(position + _PIECE_BYTES, size)), position
        header = position - piece_start
        length = schema.framed_bytes(piece[header : header + schema.FRAME_HEADER_BYTES])
        if length is None:
            raise ImageShardsError(f"shard {name.file} is damaged at byte {position}: use --repair")
        yield length
        position += length
