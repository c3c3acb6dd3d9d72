"""StratifySplits: the split of each image by its rank in its class, once all of them are listed."""

import dataclasses
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import apache_beam as beam
from apache_beam.pvalue import AsDict

from beam_pipeline.config import Config
from beam_pipeline.inputs.folders import ListingSummary
from beam_pipeline.inputs.references import Hashes, Limits, class_hashes, limits, split_stratified
from beam_pipeline.pipeline.elements import Page, Pages
from beam_pipeline.schema import relative_path_bytes

_BUCKETS = 64  # of classes: a page of a manifest's rows may have a thousand of these


@dataclasses.dataclass
class StratifySplits(beam.PTransform):  # type: ignore[misc]
    """Replaces each image's split by that of its rank in its class: 8 bytes per image are grouped by class for this.

    Input: (key, iterable of `Page`) and one `ListingSummary`. Output: the same two.
    """

    config: Config

    def expand(self, listed: Any) -> Any:
        config, (pages, summary) = self.config, listed
        hashes = pages | "HashPaths" >> beam.FlatMap(_hashes, config) | "GroupByClass" >> beam.GroupByKey()
        of_class = AsDict(hashes | "CutClasses" >> beam.FlatMap(_limits, config))
        split = pages | "AssignSplits" >> beam.Map(_split, config, of_class)
        return split, summary | "SplitSample" >> beam.Map(_split_sample, config, of_class)


def _hashes(pages: Pages, config: Config) -> Iterator[tuple[int, dict[str, Hashes]]]:
    """(bucket, class → split hashes) of a group of pages."""
    buckets: dict[int, dict[str, Hashes]] = {}
    for label, hashes in class_hashes(chain.from_iterable(pages[1]), config).items():
        buckets.setdefault(zlib.crc32(relative_path_bytes(label)) % _BUCKETS, {})[label] = hashes
    yield from buckets.items()


def _limits(bucket: tuple[int, Iterable[dict[str, Hashes]]], config: Config) -> Iterator[tuple[str, Limits]]:
    """(class, its limits) of a bucket of classes."""
    merged: dict[str, Hashes] = {}
    for part in bucket[1]:
        for label, hashes in part.items():
            merged.setdefault(label, array("Q")).extend(hashes)
    yield from ((label, limits(hashes, config)) for label, hashes in merged.items())


def _split(pages: Pages, config: Config, of_class: Mapping[str, Limits]) -> Pages:
    return pages[0], [Page(split_stratified(page, of_class, config)) for page in pages[1]]


def _split_sample(summary: ListingSummary, config: Config, of_class: Mapping[str, Limits]) -> ListingSummary:
    return dataclasses.replace(summary, smallest=list(split_stratified(summary.smallest, of_class, config)))
