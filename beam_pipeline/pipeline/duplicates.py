"""MarkDuplicates and SaveDuplicates: images with the same bytes are found by their MD5, before anything is planned."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import apache_beam as beam
from apache_beam.pvalue import AsSingleton

from beam_pipeline.config import Config
from beam_pipeline.conversion.fetch import UNCONFIRMED_MD5, Converted, convert_all, listed_md5
from beam_pipeline.dataset import duplicates
from beam_pipeline.dataset.duplicates import Group, SavedGroups, Verdict
from beam_pipeline.errors import Reject
from beam_pipeline.inputs.folders import ListingSummary, smallest
from beam_pipeline.inputs.references import ImageRef, sample_size
from beam_pipeline.pipeline.elements import KEYED_PAGE, PAGE_REFS, Page, keyed
from beam_pipeline.planning.plan import JobPlan
from beam_pipeline.schema import relative_path_bytes

_PAGES, _GROUPS, _SMALLEST = "pages", "groups", "smallest"


class MarkDuplicates(beam.PTransform):  # type: ignore[misc]
    """Finds images with the same bytes; with `--duplicates drop` marks all but the first by path.

    Input: (key, iterable of `Page`). Output: the same with MD5s as etags and `duplicate_of`; the `ListingSummary`
    with a sample of unmarked images; and (bucket, `Group`s). Fails the job as `--duplicates` says, before a page
    leaves.

    `survey`: one `ListingSummary`, of `ListImages`.
    """

    def __init__(self, config: Config, survey: Any) -> None:
        super().__init__()
        self._config = config
        self._survey = survey

    def expand(self, pages: Any) -> tuple[Any, Any, Any]:
        config = self._config
        marked = (
            pages
            | "HashImages" >> beam.FlatMap(_hash_pages, config, AsSingleton(self._survey)).with_output_types(KEYED_PAGE)
            | "GroupByDigest" >> beam.GroupByKey()
            | "MarkAllButFirst" >> beam.ParDo(_MarkFn(config)).with_outputs(_GROUPS, _SMALLEST, main=_PAGES)
        )
        marked[_PAGES].element_type = KEYED_PAGE  # outputs with tags know no types of their own
        marked[_SMALLEST].element_type = Page
        verdict = (
            marked[_GROUPS]
            | "Judge" >> beam.Map(lambda bucketed: Verdict.of(config, bucketed[1]))
            | "JoinVerdicts" >> beam.CombineGlobally(Verdict.total)
        )
        checked = marked[_PAGES] | "CheckVerdict" >> beam.Map(_checked, AsSingleton(verdict), config).with_output_types(
            KEYED_PAGE
        )
        unmarked = marked[_SMALLEST] | "SmallestUnmarked" >> beam.CombineGlobally(_join_smallest)
        survey = self._survey | "SampleUnmarked" >> beam.Map(_resampled, AsSingleton(unmarked))
        return checked | "SameMarksForAll" >> beam.GroupByKey(), survey, marked[_GROUPS]


def _hash_pages(
    pages: tuple[int, Iterable[Page]], config: Config, survey: ListingSummary
) -> Iterator[tuple[int, Page]]:
    """References with MD5s as etags, as far as they can be read, dealt to buckets.

    A store's listing is believed; what a manifest says may be wrong, and an image that only looks like another be lost.
    """
    believes = "md5" not in config.header
    buckets = duplicates.buckets_for(survey.images)
    for page in pages[1]:
        known: list[ImageRef] = []
        unknown: list[ImageRef] = []
        for ref in page:
            (known if believes and listed_md5(ref) else unknown).append(ref)
        read = map(_with_md5, convert_all(config, unknown, lambda *_: None))
        dealt: dict[int, Page] = {}
        for ref in chain(known, read):
            md5 = listed_md5(ref) or ref.order_key.to_bytes(8, "big")
            dealt.setdefault(duplicates.bucket_of(md5, buckets), Page()).append(ref)
        yield from dealt.items()


def _with_md5(read: Converted[None]) -> ImageRef:
    ref = read.ref
    if isinstance(read.result, Reject):  # the writer will find it so, and reject it
        return ref._replace(etag=ref.etag.replace("md5:", UNCONFIRMED_MD5))
    return ref._replace(etag=f"md5:{read.md5.hex()}")


class _MarkFn(beam.DoFn):  # type: ignore[misc]
    """(bucket, iterable of `Page`) → keyed `Page`s; groups to `_GROUPS`, the sample of its unmarked to `_SMALLEST`."""

    def __init__(self, config: Config) -> None:
        self._drops = config.duplicates == "drop"
        self._most_bytes = config.image_options.max_image_bytes

    def process(self, bucket: tuple[int, Iterable[Page]]) -> Iterator[Any]:
        number, pages = bucket
        groups = duplicates.find_groups(chain.from_iterable(pages), self._most_bytes)
        first = {group.md5: group.images[0][0] for group in groups} if self._drops else {}
        marked = (_mark(ref, first) for ref in chain.from_iterable(pages))
        unmarked = Page()
        while page := Page(islice(marked, PAGE_REFS)):
            yield keyed(page)
            unmarked = Page(smallest(chain(unmarked, (ref for ref in page if not ref.duplicate_of))))
        yield beam.pvalue.TaggedOutput(_SMALLEST, unmarked)
        if groups:
            yield beam.pvalue.TaggedOutput(_GROUPS, (number, groups))


def _join_smallest(pages: Iterable[Page]) -> Page:
    return Page(smallest(chain.from_iterable(pages)))


def _resampled(survey: ListingSummary, unmarked: Page) -> ListingSummary:
    return dataclasses.replace(survey, smallest=unmarked[: sample_size(survey.images)])


def _mark(ref: ImageRef, first: dict[bytes, bytes]) -> ImageRef:
    kept = first.get(listed_md5(ref) or b"")
    if kept is None or not ref.source_bytes or kept == relative_path_bytes(ref.path):
        return ref
    return ref._replace(duplicate_of=kept)


def _checked(page: tuple[int, Page], verdict: Verdict, config: Config) -> tuple[int, Page]:
    verdict.check(config)
    return page


class SaveDuplicates(beam.PTransform):  # type: ignore[misc]
    """Input: (bucket, `Group`s). Output: `SavedGroups`, whose lines lie in the state folder of the plan.

    `plan`: one `JobPlan`; the state is ready for it when there is one.
    """

    def __init__(self, config: Config, plan: Any) -> None:
        super().__init__()
        self._config = config
        self._plan = plan

    def expand(self, groups: Any) -> Any:
        return groups | "SaveGroups" >> beam.Map(_save, self._config, AsSingleton(self._plan))


def _save(bucketed: tuple[int, list[Group]], config: Config, _: JobPlan) -> SavedGroups:
    return duplicates.save(config, *bucketed)
