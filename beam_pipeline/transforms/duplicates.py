"""MarkDuplicates and SaveDuplicates: images with the same bytes are found by their MD5, before or after the shards."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import apache_beam as beam
from apache_beam.pvalue import AsSingleton

from beam_pipeline import duplicates, storage
from beam_pipeline.duplicates import Digest, Group, SavedGroups, Verdict
from beam_pipeline.errors import Reject
from beam_pipeline.fetching import UNCONFIRMED_MD5, check_unchanged, fetch
from beam_pipeline.listing import ListingSummary, image_url, smallest
from beam_pipeline.options import Config
from beam_pipeline.pools import shared_pools
from beam_pipeline.schema import relative_path_bytes
from beam_pipeline.sharding import ImageRef, sample_size
from beam_pipeline.state import JobPlan
from beam_pipeline.transforms.elements import KEYED_PAGE, PAGE_REFS, Page, keyed

_PAGES, _GROUPS, _SMALLEST = "pages", "groups", "smallest"


class MarkDuplicates(beam.PTransform):  # type: ignore[misc]
    """Finds images with the same bytes before anything is planned, and marks all but the first by path.

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
    store = storage.open_storage(config.input or "", config.io_deadline)
    believes = "md5" not in config.header

    def is_known(ref: ImageRef) -> bool:
        return believes and duplicates.listed_md5(ref) is not None

    def read(ref: ImageRef) -> bytes | Reject:
        if is_known(ref):
            return b""
        return fetch(store, image_url(config, ref.path), ref, config.image_options)

    def with_md5(ref: ImageRef, data: bytes | Reject) -> ImageRef:
        if is_known(ref):
            return ref
        try:
            if isinstance(data, Reject):
                raise data
            md5 = hashlib.md5(data, usedforsecurity=False).digest()
            check_unchanged(ref, md5, data)
        except Reject:  # the writer will find it so, and reject it
            return ref._replace(etag=ref.etag.replace("md5:", UNCONFIRMED_MD5))
        return ref._replace(etag=f"md5:{md5.hex()}")

    buckets = duplicates.buckets_for(survey.images)
    pools = shared_pools(config.fetch_concurrency, config.threads)
    for page in pages[1]:
        dealt: dict[int, Page] = {}
        apart = not storage.is_local(config.input or "")
        for ref in pools.map(page, read, with_md5, lambda ref: ref.source_bytes, fetch_apart=apart):
            md5 = duplicates.listed_md5(ref) or ref.order_key.to_bytes(8, "big")
            dealt.setdefault(duplicates.bucket_of(md5, buckets), Page()).append(ref)
        yield from dealt.items()


class _MarkFn(beam.DoFn):  # type: ignore[misc]
    """(bucket, iterable of `Page`) → keyed `Page`s; groups to `_GROUPS`, the sample of its unmarked to `_SMALLEST`."""

    def __init__(self, config: Config) -> None:
        self._most_bytes = config.image_options.max_image_bytes

    def process(self, bucket: tuple[int, Iterable[Page]]) -> Iterator[Any]:
        number, pages = bucket
        digests = (self._digest(ref) for ref in chain.from_iterable(pages))
        groups = duplicates.find_groups(digest for digest in digests if digest is not None)
        first = {group.md5: group.images[0][0] for group in groups}
        marked = (_mark(ref, first) for ref in chain.from_iterable(pages))
        unmarked = Page()
        while page := Page(islice(marked, PAGE_REFS)):
            yield keyed(page)
            unmarked = Page(smallest(chain(unmarked, (ref for ref in page if not ref.duplicate_of))))
        yield beam.pvalue.TaggedOutput(_SMALLEST, unmarked)
        if groups:
            yield beam.pvalue.TaggedOutput(_GROUPS, (number, groups))

    def _digest(self, ref: ImageRef) -> Digest | None:
        md5 = duplicates.listed_md5(ref)
        if md5 is None or ref.source_bytes > self._most_bytes:  # a local file that large isn't read either
            return None
        return duplicates.digest_of(ref, md5)


def _join_smallest(pages: Iterable[Page]) -> Page:
    return Page(smallest(chain.from_iterable(pages)))


def _resampled(survey: ListingSummary, unmarked: Page) -> ListingSummary:
    return dataclasses.replace(survey, smallest=unmarked[: sample_size(survey.images)])


def _mark(ref: ImageRef, first: dict[bytes, bytes]) -> ImageRef:
    kept = first.get(duplicates.listed_md5(ref) or b"")
    if kept is None or not ref.source_bytes or kept == relative_path_bytes(ref.path):
        return ref
    return ref._replace(duplicate_of=kept)


def _checked(page: tuple[int, Page], verdict: Verdict, config: Config) -> tuple[int, Page]:
    verdict.check(config)
    return page


class GroupDigests(beam.PTransform):  # type: ignore[misc]
    """Input: (bucket, `Digest`s) of images that were read. Output: (bucket, `Group`s), where there are any."""

    def expand(self, digests: Any) -> Any:
        return digests | "GroupDigests" >> beam.GroupByKey() | "FindGroups" >> beam.FlatMap(_find_groups)


def _find_groups(bucket: tuple[int, Iterable[list[Digest]]]) -> Iterator[tuple[int, list[Group]]]:
    groups = duplicates.find_groups(chain.from_iterable(bucket[1]))
    if groups:
        yield bucket[0], groups


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
