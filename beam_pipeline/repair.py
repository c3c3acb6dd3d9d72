"""Repairs a published version: its corrupt shards from their images, all else from the manifest and the shards.

Repair never changes the manifest: every file that it rewrites must come out with the size and hash that stand in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import apache_beam as beam
from apache_beam.pvalue import AsIter

from beam_pipeline import images, schema, storage
from beam_pipeline.duplicates import SavedGroups, saved_lines
from beam_pipeline.errors import ImageShardsError
from beam_pipeline.joined import SummedFile, run_index, run_rows_array
from beam_pipeline.options import Config
from beam_pipeline.publish import metadata_files, shard_names
from beam_pipeline.published import Damage, shards_of
from beam_pipeline.schema import ShardName
from beam_pipeline.state import JobPlan, JobState, split_plans
from beam_pipeline.transforms import AssignShards, ListImages, MarkDuplicates, SaveDuplicates, WriteShards
from beam_pipeline.writer import index_text


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
    if damage.shards:
        _check_codecs(manifest)
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


# Codecs that have no part in a dataset without images of this format, neither read nor written.
_FORMAT_OF = {"avif": "AVIF", "libtiff": "TIFF", "pillow_heif": "HEIF", "webp": "WEBP", "zlib": "PNG", "zlib_ng": "PNG"}


def _check_codecs(manifest: dict[str, Any]) -> None:
    then, now = manifest["codec"], images.codec_versions()
    source = manifest.get("source")
    formats = {manifest["image"]["format"].upper(), *(source["formats"] if source else _FORMAT_OF.values())}
    parts = {name for name in then.keys() | now.keys() if _FORMAT_OF.get(name) in (None, *formats)}
    different = sorted(name for name in parts if then.get(name) != now.get(name))
    if different:
        made, here = (", ".join(f"{name} {one.get(name, 'none')}" for name in different) for one in (then, now))
        raise ImageShardsError(
            f"can't repair with {here}: the version was made with {made}; install that, or use --overwrite"
        )


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
        for file, parts in _restored_files(config, plan, manifest, damage, saved):
            with state.temporary_file() as out:
                lines = SummedFile(out)
                for part in parts:
                    lines.write(part)
                out.close()
                if lines.sums["sha256"] != manifest["files"][file]:
                    how = "use --overwrite" if config.repair else "a shard is corrupt: use --repair"
                    raise ImageShardsError(f"{file} comes out with other bytes than were published: {how}")
                store.publish(out.name, storage.join(config.dataset_url, file))
        for file in sorted(damage.foreign):
            store.delete(storage.join(config.dataset_url, file))
    state.clear()
    return config.dataset_url


def _restored_files(
    config: Config,
    plan: JobPlan,
    manifest: dict[str, Any],
    damage: Damage,
    saved: Iterable[SavedGroups],
) -> Iterator[tuple[str, Iterable[bytes]]]:
    """(file, its content in parts) of what is corrupt other than the shards, which are valid by now."""
    names = shard_names(config, plan)
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
        # Shards that had rejects are all among the damaged; the others' lines are empty.
        state = JobState(config)
        yield schema.REJECTS_FILE, (state.rejects(name) for name in names if (name.split, name.index) in damage.shards)
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
