"""CompareShards: today's input and the files of a published version, compared where the data is."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import apache_beam as beam

from beam_pipeline import storage
from beam_pipeline.config import Config
from beam_pipeline.dataset import answers
from beam_pipeline.dataset.compare import read_and_compare, shard_of
from beam_pipeline.errors import ImageShardsError
from beam_pipeline.inputs.folders import ListingSummary
from beam_pipeline.pipeline.elements import Page, Pages, ShardId, by_key, merge_all, reports_errors
from beam_pipeline.schema import MANIFEST_FILE
from beam_pipeline.schema.job import ComparedInputs
from beam_pipeline.schema.manifest import Content, parse_manifest


@dataclasses.dataclass
class CompareShards(beam.PTransform):  # type: ignore[misc]
    """Compares each shard of a published version with the images that are listed for it now; writes nothing.

    With `--repair` images and shards are read.

    Input: (key, iterable of `Page`). Output: one `ComparedInputs`.

    `published`: `self_sha256` of the version's manifest, which each worker process reads.
    """

    config: Config
    published: str

    def expand(self, pages: beam.PCollection[Pages]) -> beam.PCollection[ComparedInputs]:
        some = self.config, self.published
        listed = pages | "AssignShards" >> beam.FlatMap(_assign_shards, *some)
        every = pages.pipeline | "Start" >> beam.Impulse() | "EveryShard" >> beam.FlatMap(_every_shard, *some)
        # One without images has a page without references.
        shards = (listed, every) | "AllShards" >> beam.Flatten() | "GroupByShard" >> beam.GroupByKey()
        parts = shards | "CompareShard" >> beam.Map(_compare_shard, *some)
        return parts | "MergeParts" >> beam.CombineGlobally(merge_all, ComparedInputs).without_defaults()


def _assign_shards(pages: Pages, config: Config, published: str) -> Iterable[tuple[ShardId, Page]]:
    manifest = _manifest(config, published)
    return by_key(chain.from_iterable(pages[1]), lambda ref: shard_of(manifest, ref)).items()


@reports_errors
def _every_shard(_: Any, config: Config, published: str) -> Iterator[tuple[ShardId, Page]]:
    yield from ((key, Page()) for key in _manifest(config, published).shards)


@reports_errors
def _compare_shard(shard: tuple[ShardId, Iterable[Page]], config: Config, published: str) -> ComparedInputs:
    return read_and_compare(config, _manifest(config, published), shard[0], chain.from_iterable(shard[1]))


@reports_errors
def save_comparison(compared: ComparedInputs, config: Config, summary: ListingSummary) -> None:
    """Leave the result for the launcher."""
    compared.references = str(summary.references)
    answers.leave(config, compared)


def _manifest(config: Config, published: str) -> Content:
    return _read_manifest(config.dataset_url, published, config.io_deadline)


@functools.lru_cache(maxsize=1)
def _read_manifest(version_url: str, published: str, deadline_s: float) -> Content:
    url = storage.join(version_url, MANIFEST_FILE)
    manifest = parse_manifest(storage.open_storage(url, deadline_s).read(url), url)[1]
    if manifest.self_sha256 != published:
        raise ImageShardsError(f"{version_url} was published again while it was compared: run the same command again")
    return manifest
