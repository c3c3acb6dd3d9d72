"""ListImages: from the input to pages of references."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import apache_beam as beam
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.windowed_value import WindowedValue

from beam_pipeline import limits, listing, metrics
from beam_pipeline.errors import ImageShardsError
from beam_pipeline.manifest_rows import Row
from beam_pipeline.options import Config
from beam_pipeline.progress import report
from beam_pipeline.sharding import ReferenceSum, reference_fields, sample_size
from beam_pipeline.storage import ListedFile
from beam_pipeline.transforms.elements import KEYED_PAGE, PAGE_REFS, Page, Survey, counter, keyed, smallest


class ListImages(beam.PTransform):  # type: ignore[misc]
    """Lists every image of the input, folders in parallel.

    Input: the pipeline. Output: (key, iterable of `Page`) in any order, each image once; and one `Survey`. A grouping
    keeps the pages, so that all later steps see the same ones after a retry.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._config = config

    def expand(self, pipeline: Any) -> tuple[Any, Any]:
        start = pipeline | "Start" >> beam.Impulse()
        is_manifest = self._config.layout == "manifest"
        pages, found = self._read_manifest(start) if is_manifest else self._list_folders(start)
        pages.element_type = KEYED_PAGE  # outputs with tags know no types of their own
        join = _JoinFound(self._config.labels, self._config.most_references)
        joined = found | "JoinFound" >> beam.CombinePerKey(join)
        return pages | "SameListForAll" >> beam.GroupByKey(), joined | "Survey" >> beam.Values()

    def _list_folders(self, start: Any) -> tuple[Any, Any]:
        folders, beside = start | "ListClassFolders" >> beam.ParDo(_ListClassFoldersFn(self._config)).with_outputs(
            _FOUND, main=_FOLDERS
        )
        folders.element_type = beam.typehints.KV[int, listing.ClassFolder]
        spread = folders | "SpreadFolders" >> beam.GroupByKey()
        pages, found = spread | "ListFolder" >> beam.ParDo(_ListFolderFn(self._config)).with_outputs(
            _FOUND, main=_PAGES
        )
        return pages, (found, beside) | "AllFound" >> beam.Flatten()

    def _read_manifest(self, start: Any) -> tuple[Any, Any]:
        config = self._config
        rows = (
            start
            | "CutManifest" >> beam.FlatMap(lambda _: enumerate(listing.row_reader(config).ranges()))
            | "SpreadRanges" >> beam.GroupByKey()
            | "ReadRows" >> beam.FlatMap(_read_rows, config)
        )
        by_url = {"rows": rows | "RowsByUrl" >> beam.Map(lambda row: (listing.image_url(config, row.path), row))}
        if listing.needs_sizes(config):
            by_url["sizes"] = (
                by_url["rows"]
                | "Prefixes" >> beam.Map(lambda pair: listing.size_prefix(config, pair[0]))
                | "DistinctPrefixes" >> beam.Distinct()
                | "ListSizes" >> beam.FlatMap(lambda prefix: listing.list_sizes(config, prefix))
            )
        # Also without sizes: a path that is given twice may be in two splits, and so in two shards.
        rows = by_url | "JoinByUrl" >> beam.CoGroupByKey() | "RowsWithSizes" >> beam.FlatMap(_rows_with_sizes)
        pages, found = rows | "PageRows" >> beam.ParDo(_PageRowsFn(config)).with_outputs(_FOUND, main=_PAGES)
        return pages, found


_FOLDERS, _PAGES, _FOUND = "folders", "pages", "found"


def _read_rows(numbered: tuple[int, Iterable[tuple[int, int]]], config: Config) -> Iterator[Row]:
    for start, end in numbered[1]:
        yield from listing.row_reader(config).rows(start, end)


class _ListClassFoldersFn(beam.DoFn):  # type: ignore[misc]
    """Anything → (number, class folder); what lies beside those to the output `_FOUND`."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._count = _Counters()

    def process(self, _: Any) -> Iterator[Any]:
        beside = _Found()
        yield from enumerate(listing.class_folders(self._config, beside.skipped.add))
        self._count(beside)
        yield beam.pvalue.TaggedOutput(_FOUND, (None, beside))


class _ListFolderFn(beam.DoFn):  # type: ignore[misc]
    """(number, class folders) → keyed `Page`s; what each holds as a whole to the output `_FOUND`."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._count = _Counters()
        self._empty = counter(metrics.CLASSES_EMPTY)

    def process(self, numbered: tuple[int, Iterable[listing.ClassFolder]]) -> Iterator[Any]:
        for folder in numbered[1]:
            yield from self._list(folder)

    def _list(self, folder: listing.ClassFolder) -> Iterator[Any]:
        found = _Found()
        found.counts[folder.label] = 0  # a folder without images is a class nevertheless
        refs = listing.list_images(self._config, folder, found.skipped.add)
        while page := Page(islice(refs, PAGE_REFS)):
            found.add(page)
            limits.check(found.counts.total(), self._config.most_references)
            report(images_listed=len(page))
            yield keyed(page)
        self._count(found)
        if not found.smallest:
            self._empty.inc()
        yield beam.pvalue.TaggedOutput(_FOUND, (None, found))


def _rows_with_sizes(joined: tuple[str, dict[str, Iterable[Any]]]) -> Iterator[tuple[Row, ListedFile | None]]:
    """The row of one URL with its file in a listing, if there is one.

    Raises:
        ImageShardsError: several rows name it.
    """
    rows = sorted(joined[1]["rows"], key=lambda row: (row.label, row.split or "", row.features))
    if len(rows) > 1:
        first, second = (f"label {row.label!r}" + f" in {row.split}" * bool(row.split) for row in rows[:2])
        raise ImageShardsError(
            f"input {rows[0].path!r} is given twice, with {first} and with {second}: keep one of the two"
        )
    size = next(iter(joined[1].get("sizes", ())), None)
    return ((row, size) for row in rows)


class _PageRowsFn(beam.DoFn):  # type: ignore[misc]
    """(`Row`, its file in a listing or None) → keyed `Page`s; what they hold as a whole to the output `_FOUND`."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._count = _Counters()

    def start_bundle(self) -> None:
        self._maker = listing.RefMaker(self._config)
        self._page = Page()
        self._found = _Found()

    def process(self, pair: tuple[Row, ListedFile | None]) -> Iterator[tuple[int, Page]]:
        self._page.append(listing.row_ref(self._config, self._maker, *pair))
        if len(self._page) == PAGE_REFS:
            full, self._page = self._page, Page()
            self._found.add(full)
            report(images_listed=len(full))
            yield keyed(full)

    def finish_bundle(self) -> Iterator[Any]:
        window = GlobalWindow()
        if self._page:
            self._found.add(self._page)
            yield WindowedValue(keyed(self._page), window.max_timestamp(), (window,))
        self._count(self._found)
        yield beam.pvalue.TaggedOutput(_FOUND, WindowedValue((None, self._found), window.max_timestamp(), (window,)))


class _Found:
    """What has been listed so far: images by class, those with the smallest order keys, and what is no image."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.smallest = Page()
        self.skipped = listing.Skipped()
        self.references = ReferenceSum()

    def add(self, page: Page) -> None:
        """Add listed references."""
        self.counts.update(ref.label for ref in page)
        for ref in page:
            self.references.add(reference_fields(ref))
        self._keep_smallest(page)

    def merge(self, other: _Found) -> None:
        """Add what another worker has listed."""
        self.counts.update(other.counts)
        self._keep_smallest(other.smallest)
        self.skipped.merge(other.skipped)
        self.references.merge(other.references)

    def _keep_smallest(self, page: Page) -> None:
        self.smallest = smallest(chain(self.smallest, page))


class _Counters:
    """Beam's counters of what is listed and what is skipped."""

    def __init__(self) -> None:
        self._listed = counter(metrics.IMAGES_LISTED)
        self._hidden = counter(metrics.SKIPPED_HIDDEN)
        self._other_suffix = counter(metrics.SKIPPED_OTHER_SUFFIX)
        self._outside_classes = counter(metrics.SKIPPED_OUTSIDE_CLASSES)

    def __call__(self, found: _Found) -> None:
        self._listed.inc(found.counts.total())
        self._hidden.inc(found.skipped.hidden)
        self._other_suffix.inc(found.skipped.other_suffix)
        self._outside_classes.inc(found.skipped.outside_classes)


class _JoinFound(beam.CombineFn):  # type: ignore[misc]
    """`_Found`s → `Survey`.

    Args:
        fixed: the classes of a labels file, in its order.
        most: how many images there is memory for, or None.
    """

    def __init__(self, fixed: tuple[str, ...] | None, most: int | None = None) -> None:
        self._fixed = fixed
        self._most = most

    def create_accumulator(self) -> _Found:
        return _Found()

    def add_input(self, total: _Found, part: _Found) -> _Found:
        total.merge(part)
        return total

    def merge_accumulators(self, parts: Iterable[_Found]) -> _Found:
        total = _Found()
        for part in parts:
            total.merge(part)
        return total

    def extract_output(self, total: _Found) -> Survey:
        images = total.counts.total()
        if not images:
            raise ImageShardsError("the input has no image: nothing is written")
        limits.check(images, self._most)
        unknown = sorted(total.counts.keys() - set(self._fixed)) if self._fixed is not None else []
        if unknown:
            raise ImageShardsError(f"class {unknown[0]!r} is not in the labels file: add a line for it")
        classes = self._fixed if self._fixed is not None else tuple(sorted(total.counts))
        sample = Page(total.smallest[: sample_size(images)])
        return Survey(images, classes, sample, total.skipped.document(), total.references)
