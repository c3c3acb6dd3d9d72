"""MarkDuplicates: images with the same bytes are found by their MD5, before anything is planned."""

import dataclasses
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import apache_beam as beam
from apache_beam.pvalue import AsSingleton

from beam_pipeline.config import Config
from beam_pipeline.inputs.folders import ListingSummary, smallest
from beam_pipeline.inputs.references import sample_size
from beam_pipeline.pipeline.elements import PAGE_REFS, KeyedPage, Page, Pages, by_key, keyed, reports_errors
from beam_pipeline.planning import duplicates

_GROUPS = "groups"


@dataclasses.dataclass
class MarkDuplicates(beam.PTransform):  # type: ignore[misc]
    """Finds images with the same bytes; with `--duplicates drop` marks all but the first by path.

    Input: (key, iterable of `Page`). Output: the same with MD5s as etags and `duplicate_of`; the `ListingSummary`
    with a sample of unmarked images; and (bucket, `Group`s). Fails the job as `--duplicates` says: nothing is planned.

    `summary`: one `ListingSummary`, of `ListPages`.
    """

    config: Config
    summary: Any

    def expand(self, pages: beam.PCollection[Pages]) -> Any:
        config = self.config
        hashed = pages | "HashImages" >> beam.FlatMap(_hash_pages, config, AsSingleton(self.summary))
        mark = beam.FlatMap(_mark, config).with_output_types(KeyedPage).with_outputs(_GROUPS, main="pages")
        marked, groups = hashed | "GroupByDigest" >> beam.GroupByKey() | "MarkAllButFirst" >> mark
        unmarked = marked | "Unmarked" >> beam.Map(_unmarked) | "SmallestUnmarked" >> beam.CombineGlobally(_smallest_of)
        summary = self.summary | "SampleUnmarked" >> beam.Map(_resampled, AsSingleton(unmarked))
        return marked | "SameMarksForAll" >> beam.GroupByKey(), summary, groups


@reports_errors
def _hash_pages(pages: Pages, config: Config, summary: ListingSummary) -> Iterator[KeyedPage]:
    """(bucket, `Page`) of the references with their MD5s."""
    buckets = duplicates.buckets_for(summary.images)
    for page in pages[1]:
        hashed = duplicates.with_md5s(config, page)
        yield from by_key(hashed, lambda ref: duplicates.bucket_of(ref, buckets)).items()


@reports_errors
def _mark(bucket: Pages, config: Config) -> Iterator[Any]:
    """Keyed `Page`s of a bucket; its groups to the output `_GROUPS`."""
    number, pages = bucket
    groups = duplicates.find_groups(chain.from_iterable(pages), config.image_options.max_image_bytes)
    duplicates.check_duplicates(config, groups)
    marked = duplicates.marked(chain.from_iterable(pages), groups if config.duplicates == "drop" else [])
    while page := Page(islice(marked, PAGE_REFS)):
        yield keyed(page)
    if groups:
        yield beam.pvalue.TaggedOutput(_GROUPS, (number, groups))


def _unmarked(keyed_page: KeyedPage) -> Page:
    return Page(smallest(ref for ref in keyed_page[1] if not ref.duplicate_of))


def _smallest_of(pages: Iterable[Page]) -> Page:
    return Page(smallest(chain.from_iterable(pages)))


def _resampled(summary: ListingSummary, unmarked: Page) -> ListingSummary:
    return dataclasses.replace(summary, smallest=unmarked[: sample_size(summary.images)])
