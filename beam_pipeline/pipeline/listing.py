"""ListImages: from the input to pages of references."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import apache_beam as beam

from beam_pipeline import storage
from beam_pipeline.config import Config
from beam_pipeline.dataset.progress import report
from beam_pipeline.errors import ImageShardsError, UsageError
from beam_pipeline.inputs import folders, manifest_rows
from beam_pipeline.inputs.folders import ListingSummary
from beam_pipeline.inputs.references import ImageRef, sample_size
from beam_pipeline.pipeline import elements, limits
from beam_pipeline.pipeline.elements import KEYED_PAGE, PAGE_REFS, Page, counter, keyed

_FOLDERS, _PAGES, _PREFIXES, _SUMMARIES = "folders", "pages", "prefixes", "summaries"
_BUCKET_BYTES = 4 << 20  # of a manifest: about 40,000 rows, which one worker holds at a time
_MOST_OPEN = 50  # pages whose references are held while they are dealt to buckets


class ListImages(beam.PTransform):  # type: ignore[misc]
    """Lists every image of the input, folders in parallel.

    Input: the pipeline. Output: (key, iterable of `Page`) in any order, each image once; and one `ListingSummary`. A
    grouping keeps the pages, so that all later steps see the same ones after a retry.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._config = config

    def expand(self, pipeline: Any) -> tuple[Any, Any]:
        start = pipeline | "Start" >> beam.Impulse()
        is_manifest = self._config.layout == "manifest"
        pages, parts = self._read_manifest(start) if is_manifest else self._list_folders(start)
        pages.element_type = KEYED_PAGE  # outputs with tags know no types of their own
        summary = (
            parts
            | "JoinSummaries" >> beam.CombinePerKey(ListingSummary.total)
            | "Summary" >> beam.Values()
            | "CheckSummary" >> beam.Map(_checked, self._config)
        )
        return pages | "SameListForAll" >> beam.GroupByKey(), summary

    def _list_folders(self, start: Any) -> tuple[Any, Any]:
        listed = start | "ListClassFolders" >> beam.FlatMap(_list_class_folders, self._config).with_outputs(
            _SUMMARIES, main=_FOLDERS
        )
        listed[_FOLDERS].element_type = beam.typehints.KV[int, folders.ClassFolder]
        spread = listed[_FOLDERS] | "SpreadFolders" >> beam.GroupByKey()
        pages, parts = spread | "ListFolder" >> beam.FlatMap(_list_folders, self._config).with_outputs(
            _SUMMARIES, main=_PAGES
        )
        return pages, (parts, listed[_SUMMARIES]) | "AllSummaries" >> beam.Flatten()

    def _read_manifest(self, start: Any) -> tuple[Any, Any]:
        """Rows are dealt to buckets by their path, so that one that is given twice is seen: it may be in two splits."""
        rows, prefixes = start | "ReadRows" >> beam.FlatMap(_read_rows, self._config).with_outputs(
            _PREFIXES, main=_PAGES
        )
        rows.element_type = KEYED_PAGE
        sizes = (
            prefixes
            | "SpreadPrefixes" >> beam.GroupByKey()
            | "ListSizes" >> beam.FlatMap(_list_sizes, self._config).with_output_types(KEYED_PAGE)
        )
        buckets = (rows, sizes) | "RowsAndSizes" >> beam.Flatten() | "GroupByPath" >> beam.GroupByKey()
        pages, parts = buckets | "JoinSizes" >> beam.FlatMap(_join_sizes, self._config).with_outputs(
            _SUMMARIES, main=_PAGES
        )
        return pages, parts


def _list_class_folders(_: Any, config: Config) -> Iterator[Any]:
    """(number, class folder); what lies beside those to the output `_SUMMARIES`."""
    beside = ListingSummary()
    yield from enumerate(folders.class_folders(config, beside))
    yield _summarized(beside)


def _list_folders(numbered: tuple[int, Iterable[folders.ClassFolder]], config: Config) -> Iterator[Any]:
    for folder in numbered[1]:
        # A folder without images is a class nevertheless.
        summary = ListingSummary()
        summary.class_counts[folder.label] = 0
        yield from _pages(folders.list_images(config, folder, summary), summary, config)
        if not summary.images:
            counter(elements.CLASSES_EMPTY).inc()


def _pages(refs: Iterator[ImageRef], summary: ListingSummary, config: Config) -> Iterator[Any]:
    """Keyed `Page`s; what they hold together to the output `_SUMMARIES`."""
    while page := Page(islice(refs, PAGE_REFS)):
        summary.add(page)
        limits.check(summary.images, config.most_references)
        report(images_listed=len(page))
        yield keyed(page)
    yield _summarized(summary)


def _summarized(summary: ListingSummary) -> beam.pvalue.TaggedOutput:
    counter(elements.IMAGES_LISTED).inc(summary.images)
    counter(elements.SKIPPED_HIDDEN).inc(summary.hidden)
    counter(elements.SKIPPED_OTHER_SUFFIX).inc(summary.suffixes.total())
    counter(elements.SKIPPED_OUTSIDE_CLASSES).inc(summary.counts[folders.OUTSIDE_CLASSES])
    return beam.pvalue.TaggedOutput(_SUMMARIES, (None, summary))


def _read_rows(_: Any, config: Config) -> Iterator[Any]:
    """(bucket, `Page`) of a manifest's rows; to the output `_PREFIXES` (folder, buckets) where sizes are listed.

    One worker reads them all, and stops before more are grouped than there is memory for.
    """
    url = config.manifest or ""
    buckets = 1 + storage.open_storage(url, config.io_deadline).size(url) // _BUCKET_BYTES
    images, known = 0, set[str]()
    for bucket, page in _dealt(manifest_rows.row_refs(config), buckets):
        images += len(page)
        limits.check(images, config.most_references)
        prefixes = {prefix for ref in page if (prefix := manifest_rows.size_prefix(config, ref))} - known
        known |= prefixes
        yield from (beam.pvalue.TaggedOutput(_PREFIXES, (prefix, buckets)) for prefix in sorted(prefixes))
        yield bucket, page


def _list_sizes(prefix: tuple[str, Iterable[int]], config: Config) -> Iterator[tuple[int, Page]]:
    """(bucket, `Page`) of what is listed below a folder."""
    (buckets,) = prefix[1]
    return _dealt(manifest_rows.listed_refs(config, prefix[0]), buckets)


def _dealt(refs: Iterator[ImageRef], buckets: int) -> Iterator[tuple[int, Page]]:
    """References dealt to buckets by their path, in pages of about 1,000, smaller ones where there are many buckets."""
    while some := list(islice(refs, PAGE_REFS * min(buckets, _MOST_OPEN))):
        pages: dict[int, Page] = {}
        for ref in some:
            pages.setdefault(ref.order_key % buckets, Page()).append(ref)
        yield from pages.items()


def _join_sizes(bucket: tuple[int, Iterable[Page]], config: Config) -> Iterator[Any]:
    """Keyed `Page`s of the rows of one bucket, their sizes found in its listed files or asked for.

    Raises:
        UsageError: several rows name one image.
    """
    rows: dict[str, ImageRef] = {}
    for ref in chain.from_iterable(page for page in bucket[1] if page[0].label):
        if ref.path in rows:
            pair = sorted((ref, rows[ref.path]), key=lambda row: (row.label, row.split, row.features))
            first, second = (f"label {row.label!r}" + ("split" in config.header) * f" in {row.split}" for row in pair)
            raise UsageError(
                f"--manifest {config.manifest!r}: path {ref.path!r} is given twice, with {first} and with {second}: "
                "keep one of the two"
            )
        rows[ref.path] = ref
    for listed in chain.from_iterable(page for page in bucket[1] if not page[0].label):
        if listed.path in rows:
            rows[listed.path] = manifest_rows.sized(config, rows[listed.path], listed)
    yield from _pages((manifest_rows.sized(config, ref) for ref in rows.values()), ListingSummary(), config)


def _checked(total: ListingSummary, config: Config) -> ListingSummary:
    """The summary of the complete listing: its sample cut to size, its classes known."""
    if not total.images:
        raise ImageShardsError("the input has no image: nothing is written")
    limits.check(total.images, config.most_references)
    unknown = sorted(total.class_counts.keys() - set(config.labels)) if config.labels is not None else []
    if unknown:
        raise UsageError(f"--labels_file {config.labels_file!r}: class {unknown[0]!r} is not in it: add a line for it")
    classes = config.labels if config.labels is not None else tuple(sorted(total.class_counts))
    return dataclasses.replace(total, smallest=total.smallest[: sample_size(total.images)], classes=classes)
