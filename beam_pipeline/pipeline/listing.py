"""ListPages: from the input to pages of references; StratifySplits: their splits by rank, once all are listed."""

import dataclasses
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from typing import Any

import apache_beam as beam
from apache_beam.pvalue import AsDict

from beam_pipeline import storage
from beam_pipeline.config import Config, wrong
from beam_pipeline.conversion.versions import check_versions
from beam_pipeline.dataset.progress import report
from beam_pipeline.errors import ImageShardsError, UsageError
from beam_pipeline.inputs import exclude, folders, limits, manifest_rows, references
from beam_pipeline.inputs.folders import ClassFolder, ListingSummary
from beam_pipeline.inputs.references import Hashes, ImageRef, Limits, check_forms, sample_size
from beam_pipeline.pipeline import elements
from beam_pipeline.pipeline.elements import (
    PAGE_REFS,
    KeyedPage,
    Page,
    Pages,
    by_key,
    counter,
    keyed,
    merge_all,
    reports_errors,
)
from beam_pipeline.schema import relative_path_bytes

_FOLDERS, _SUMMARIES = "folders", "summaries"
_BUCKET_BYTES = 4 << 20  # of a manifest: about 40,000 rows, which one worker holds at a time
_MAX_OPEN = 50  # pages whose references are held while they are sorted into buckets

_FOLDERS_AT_A_TIME = 16  # class folders that one element holds
_CLASS_BUCKETS = 64  # a page of a manifest's rows may have a thousand classes


@dataclasses.dataclass
class ListPages(beam.PTransform):  # type: ignore[misc]
    """Lists every image of the input, folders in parallel.

    Input: the pipeline. Output: (key, iterable of `Page`) in any order, each image once; and one `ListingSummary`. A
    grouping keeps the pages, so that all later steps see the same ones after a retry.
    """

    config: Config

    def expand(self, pipeline: beam.Pipeline) -> Any:
        start = pipeline | "Start" >> beam.Impulse()
        is_manifest = self.config.layout == "manifest"
        pages, parts = self._read_manifest(start) if is_manifest else self._list_folders(start)
        merged = parts | "MergeSummaries" >> beam.CombineGlobally(merge_all, ListingSummary).without_defaults()
        summary = merged | "CompleteSummary" >> beam.Map(complete, self.config)
        listed = pages | "SameListForAll" >> beam.GroupByKey(), summary
        return (listed | "StratifySplits" >> StratifySplits(self.config)) if self.config.stratify else listed

    def _list_folders(self, start: Any) -> tuple[Any, Any]:
        list_all = beam.FlatMap(_list_class_folders, self.config).with_output_types(tuple[int, ClassFolder])
        list_one = beam.FlatMap(_list_folders, self.config).with_output_types(KeyedPage)
        numbered, outside = start | "ListClassFolders" >> list_all.with_outputs(_SUMMARIES, main="folders")
        spread = numbered | "SpreadFolders" >> beam.GroupByKey()
        pages, parts = spread | "ListFolder" >> list_one.with_outputs(_SUMMARIES, main="pages")
        return pages, (parts, outside) | "AllSummaries" >> beam.Flatten()

    def _read_manifest(self, start: Any) -> tuple[Any, Any]:
        """Rows are grouped by a hash of their path, so that a repeated path is found: it may be in two splits."""
        read = beam.FlatMap(_read_rows, self.config).with_output_types(KeyedPage)
        rows, to_list = start | "ReadRows" >> read.with_outputs(_FOLDERS, main="rows")
        sizes = to_list | "SpreadFolders" >> beam.Reshuffle() | "ListSizes" >> beam.FlatMap(_list_sizes, self.config)
        buckets = (rows, sizes) | "RowsAndSizes" >> beam.Flatten() | "GroupByPath" >> beam.GroupByKey()
        join = beam.FlatMap(_join_sizes, self.config).with_output_types(KeyedPage)
        pages, parts = buckets | "JoinSizes" >> join.with_outputs(_SUMMARIES, main="pages")
        return pages, parts


@reports_errors
def _list_class_folders(_: Any, config: Config) -> Iterator[Any]:
    """(group, class folder); files outside them are in the summary."""
    check_versions(config)  # long before anything is decoded
    summary = ListingSummary()
    for number, folder in enumerate(folders.class_folders(config, summary)):
        yield number // _FOLDERS_AT_A_TIME, folder
    yield _counted(summary)


@reports_errors
def _list_folders(group: tuple[int, Iterable[ClassFolder]], config: Config) -> Iterator[Any]:
    """The images of some class folders; the first pages of all of them are fetched at the same time."""
    total = ListingSummary()  # one for all: 100,000 summaries of a folder each take longer than its listing

    def refs() -> Iterator[ImageRef]:
        for part, first, rest in listings:
            yield from chain(first.result(), rest)
            total.merge(part)
            if not first.result():
                counter(elements.CLASSES_EMPTY).inc()

    with ThreadPoolExecutor(_FOLDERS_AT_A_TIME) as threads:
        listings = []
        for folder in group[1]:
            total.class_counts[folder.label] += 0  # a folder without images is a class, too
            part = ListingSummary()  # of skipped files, which threads count
            images = folders.list_images(config, folder, part)
            listings.append((part, threads.submit(list, islice(images, PAGE_REFS)), images))
        yield from _pages(refs(), total, config)


def _pages(refs: Iterator[ImageRef], summary: ListingSummary, config: Config) -> Iterator[Any]:
    """Keyed `Page`s of the images that `--exclude` doesn't leave out, and `summary`, which counts them."""
    refs = exclude.kept(config, refs, summary)
    while page := Page(islice(refs, PAGE_REFS)):
        summary.add(page)
        limits.check(summary.images, config.context.max_references)
        report(images_listed=len(page))
        counter(elements.IMAGES_LISTED).inc(len(page))
        yield keyed(page)
    yield _counted(summary)


def _counted(summary: ListingSummary) -> beam.pvalue.TaggedOutput:
    counter(elements.IMAGES_EXCLUDED).inc(summary.excluded)
    counter(elements.SKIPPED_HIDDEN).inc(summary.hidden)
    counter(elements.SKIPPED_OTHER_SUFFIX).inc(summary.suffixes.total())
    counter(elements.SKIPPED_OUTSIDE_CLASSES).inc(summary.counts[folders.OUTSIDE_CLASSES])
    return beam.pvalue.TaggedOutput(_SUMMARIES, summary)


@reports_errors
def _read_rows(_: Any, config: Config) -> Iterator[Any]:
    """(bucket, `Page`) of a manifest's rows; to the output `_FOLDERS` what is listed for sizes, see `_list_sizes`.

    One worker reads them all, and stops before more are grouped than there is memory for.
    """
    check_versions(config)
    url = config.manifest
    buckets = 1 + storage.open_storage(url, config.io_deadline).size(url) // _BUCKET_BYTES
    images, to_list = 0, dict[str, set[str]]()
    for bucket, page in _by_bucket(manifest_rows.row_refs(config), buckets):
        images += len(page)
        limits.check(images, config.context.max_references)
        manifest_rows.note_folders(config, page, to_list)
        yield bucket, page
    for folder, holding in sorted(to_list.items()):
        yield beam.pvalue.TaggedOutput(_FOLDERS, (folder, sorted(holding), buckets))


@reports_errors
def _list_sizes(to_list: tuple[str, list[str], int], config: Config) -> Iterator[KeyedPage]:
    """(bucket, `Page`) of the files below a folder, without labels; in archives those of the folders that hold rows."""
    folder, holding, buckets = to_list
    return _by_bucket(manifest_rows.listed_refs(config, folder, frozenset(holding)), buckets)


def _by_bucket(refs: Iterator[ImageRef], buckets: int) -> Iterator[KeyedPage]:
    """References by a hash of their path, in pages of about 1,000; smaller ones if there are many buckets."""
    while some := list(islice(refs, PAGE_REFS * min(buckets, _MAX_OPEN))):
        yield from by_key(some, lambda ref: ref.order_key % buckets).items()


@reports_errors
def _join_sizes(bucket: Pages, config: Config) -> Iterator[Any]:
    """Keyed `Page`s of the rows of one bucket, with the sizes of its listed files, and their summary.

    Raises:
        UsageError: several rows name one image.
    """
    rows: dict[str, ImageRef] = {}
    for ref in chain.from_iterable(page for page in bucket[1] if page[0].label):
        if ref.path in rows:
            raise _repeated(config, ref, rows[ref.path])
        rows[ref.path] = ref
    files = chain.from_iterable(page for page in bucket[1] if not page[0].label)
    listed = manifest_rows.by_path(ref for ref in files if ref.path in rows)
    refs = (manifest_rows.fill_in_size(ref, listed.get(ref.path)) for ref in rows.values())
    yield from _pages(refs, ListingSummary(), config)


def _repeated(config: Config, *rows: ImageRef) -> UsageError:
    ordered = sorted(rows, key=lambda row: (row.label, row.split, row.features))
    first, second = (f"label {row.label!r}" + ("split" in config.header) * f" in {row.split}" for row in ordered)
    what = f"path {rows[0].path!r} is given twice, with {first} and with {second}: keep one of the two"
    boxes = "several boxes are one row, with lists such as 0.1;0.5 in columns such as xmin:float32[]"
    return wrong("--manifest", config.manifest, f"{what}; {boxes}")


@reports_errors
def complete(summary: ListingSummary, config: Config) -> ListingSummary:
    """The summary of a complete listing, with its classes and a sample of the right size.

    Raises:
        ImageShardsError: no image, or more than there is memory for.
        UsageError: a class isn't in the labels file.
    """
    if not summary.images:
        why = f": --exclude {config.exclude!r} leaves out all {summary.excluded:,}" if summary.excluded else ""
        raise ImageShardsError(f"the input has no image{why}: nothing is written")
    limits.check(summary.images, config.context.max_references)
    check_forms(summary.class_counts)
    unknown = sorted(summary.class_counts.keys() - set(config.labels)) if config.labels is not None else []
    if unknown:
        raise wrong("--labels_file", config.labels_file, f"class {unknown[0]!r} is not in it: add a line for it")
    classes = config.labels if config.labels is not None else tuple(sorted(summary.class_counts))
    sample, exclusion = summary.smallest[: sample_size(summary.images)], exclude.outcome(config, summary)
    return dataclasses.replace(summary, smallest=sample, classes=classes, exclusion=exclusion, on_list=array("Q"))


# --- `--stratify`


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
    for label, hashes in references.class_hashes(chain.from_iterable(pages[1]), config).items():
        buckets.setdefault(zlib.crc32(relative_path_bytes(label)) % _CLASS_BUCKETS, {})[label] = hashes
    yield from buckets.items()


def _limits(bucket: tuple[int, Iterable[dict[str, Hashes]]], config: Config) -> Iterator[tuple[str, Limits]]:
    """(class, its limits) of a bucket of classes."""
    merged: dict[str, Hashes] = {}
    for part in bucket[1]:
        for label, hashes in part.items():
            merged.setdefault(label, array("Q")).extend(hashes)
    yield from ((label, references.limits(hashes, config)) for label, hashes in merged.items())


def _split(pages: Pages, config: Config, of_class: Mapping[str, Limits]) -> Pages:
    return pages[0], [Page(references.split_stratified(page, of_class, config)) for page in pages[1]]


def _split_sample(summary: ListingSummary, config: Config, of_class: Mapping[str, Limits]) -> ListingSummary:
    return dataclasses.replace(summary, smallest=list(references.split_stratified(summary.smallest, of_class, config)))
