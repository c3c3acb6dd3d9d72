"""The job's steps as Beam transforms: they wire; the functions they call do the work and are tested without Beam."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

import apache_beam as beam
from apache_beam.coders import FastPrimitivesCoder, registry
from apache_beam.metrics import Metrics
from apache_beam.pvalue import AsIter, AsList, AsSingleton
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.windowed_value import WindowedValue

from beam_pipeline import images, listing, metrics, sampling
from beam_pipeline.errors import ImageShardsError
from beam_pipeline.options import Config
from beam_pipeline.progress import report
from beam_pipeline.publish import publish
from beam_pipeline.sampling import Measurement
from beam_pipeline.schema import canonical_json, relative_path_bytes
from beam_pipeline.sharding import (
    Histogram,
    ImageRef,
    ReferenceSum,
    SizeModel,
    SplitPlan,
    listing_fields,
    plan_split,
    sample_size,
    shard_count,
)
from beam_pipeline.state import JobPlan, JobState
from beam_pipeline.writer import ShardSummary, ShardWriter

_PAGE_REFS = 1000
_SAMPLE_CHUNK = 16  # sampled images an element: enough for the fetch threads, few enough to spread over workers
ShardId = tuple[str, int]


class Page(list[ImageRef]):
    """Up to 1,000 references as one element: the runner's cost an element (0.1 ms in process) is paid once a page."""


class PageCoder(beam.coders.Coder):  # type: ignore[misc]
    """References as plain tuples: a third of the bytes and time of pickling named ones."""

    _tuples = FastPrimitivesCoder()

    def encode(self, page: Page) -> bytes:
        return bytes(self._tuples.encode([tuple(ref) for ref in page]))

    def decode(self, encoded: bytes) -> Page:
        return Page(ImageRef._make(fields) for fields in self._tuples.decode(encoded))

    def is_deterministic(self) -> bool:
        return True


registry.register_coder(Page, PageCoder)


def _counter(name: str) -> Any:
    return Metrics.counter(metrics.NAMESPACE, name)


class Survey(NamedTuple):
    """What a listing holds as a whole: number of images, sorted class names."""

    images: int
    classes: tuple[str, ...]


class ListImages(beam.PTransform):  # type: ignore[misc]
    """Lists every image of the input, folders in parallel.

    Input: the pipeline. Output: `Page`s in any order, each image once, the same after a retry; and one `Survey`.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._config = config

    def expand(self, pipeline: Any) -> tuple[Any, Any]:
        listed = (
            pipeline
            | "Start" >> beam.Create([None])
            | "ListClassFolders" >> beam.FlatMap(lambda _, config: listing.class_folders(config), self._config)
            | "SpreadFolders" >> beam.Reshuffle()
            | "ListFolder" >> beam.ParDo(_ListFolderFn(self._config)).with_outputs(_FOUND, main="pages")
        )
        listed["pages"].element_type = Page  # outputs with tags know no types of their own
        pages = listed["pages"] | "SameListForAll" >> beam.Reshuffle()
        survey = listed[_FOUND] | "Survey" >> beam.CombineGlobally(_JoinFolders(self._config.labels)).without_defaults()
        return pages, survey


_FOUND = "found"


class _ListFolderFn(beam.DoFn):  # type: ignore[misc]
    """A class folder → its `Page`s; (class name, number of images) to the output `_FOUND`."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._listed = _counter(metrics.IMAGES_LISTED)
        self._empty = _counter(metrics.CLASSES_EMPTY)
        self._skipped = {
            listing.HIDDEN: _counter(metrics.SKIPPED_HIDDEN),
            listing.OTHER_SUFFIX: _counter(metrics.SKIPPED_OTHER_SUFFIX),
        }

    def process(self, folder: listing.ClassFolder) -> Iterator[Any]:
        found = 0
        refs = listing.list_images(self._config, folder, lambda kind: self._skipped[kind].inc())
        while page := Page(islice(refs, _PAGE_REFS)):
            found += len(page)
            report(images_listed=len(page))
            yield page
        self._listed.inc(found)
        if not found:
            self._empty.inc()
        yield beam.pvalue.TaggedOutput(_FOUND, (folder.label, found))


class _JoinFolders(beam.CombineFn):  # type: ignore[misc]
    """(class name, number of images) of every folder → `Survey`.

    Args:
        fixed: the classes of a labels file, in its order.
    """

    def __init__(self, fixed: tuple[str, ...] | None) -> None:
        self._fixed = fixed

    def create_accumulator(self) -> tuple[int, set[str]]:
        return 0, set()

    def add_input(self, total: tuple[int, set[str]], folder: tuple[str, int]) -> tuple[int, set[str]]:
        total[1].add(folder[0])
        return total[0] + folder[1], total[1]

    def merge_accumulators(self, parts: Iterable[tuple[int, set[str]]]) -> tuple[int, set[str]]:
        images, names = 0, set[str]()
        for count, some in parts:
            images += count
            names |= some
        return images, names

    def extract_output(self, total: tuple[int, set[str]]) -> Survey:
        images, names = total
        if not images:
            raise ImageShardsError("the input has no image: nothing is written")
        unknown = sorted(names - set(self._fixed)) if self._fixed is not None else []
        if unknown:
            raise ImageShardsError(f"class {unknown[0]!r} is not in the labels file: add a line for it")
        return Survey(images, self._fixed if self._fixed is not None else tuple(sorted(names)))


class SampleImages(beam.PTransform):  # type: ignore[misc]
    """Measures the images with the smallest order keys.

    Input: `Page`s. Output: `Measurement`s in any order.
    """

    def __init__(self, config: Config, survey: Any) -> None:
        super().__init__()
        self._config = config
        self._survey = survey

    def expand(self, pages: Any) -> Any:
        return (
            pages
            | "SmallestKeys" >> beam.CombineGlobally(_SmallestKeys()).without_defaults()
            | "ChunkSample" >> beam.FlatMap(_chunks, AsSingleton(self._survey))
            | "SpreadSample" >> beam.Reshuffle()
            | "MeasureImages" >> beam.ParDo(_MeasureImagesFn(self._config), AsSingleton(self._survey))
        )


class _SmallestKeys(beam.CombineFn):  # type: ignore[misc]
    """`Page`s → the 512 references with the smallest order keys, sorted."""

    def create_accumulator(self) -> Page:
        return Page()

    def add_input(self, smallest: Page, page: Page) -> Page:
        return self.merge_accumulators((smallest, page))

    def merge_accumulators(self, pages: Iterable[Page]) -> Page:
        return Page(heapq.nsmallest(512, chain.from_iterable(pages), key=lambda ref: (ref.order_key, ref.path)))

    def extract_output(self, smallest: Page) -> Page:
        return smallest


def _chunks(smallest: Page, survey: Survey) -> Iterator[Page]:
    chosen = smallest[: sample_size(survey.images)]
    for start in range(0, len(chosen), _SAMPLE_CHUNK):
        yield Page(chosen[start : start + _SAMPLE_CHUNK])


class _MeasureImagesFn(beam.DoFn):  # type: ignore[misc]
    def __init__(self, config: Config) -> None:
        self._config = config
        self._sampled = _counter(metrics.IMAGES_SAMPLED)

    def process(self, refs: Page, survey: Survey) -> Iterator[Measurement]:
        self._sampled.inc(len(refs))
        yield from sampling.measure(self._config, len(survey.classes), refs)


class PlanShards(beam.PTransform):  # type: ignore[misc]
    """Decides every shard before one is written, and makes the output ready for them.

    Input: `Page`s. Output: one `JobPlan`, saved as the state's plan.json. Fails the job when too many of the sample
    are rejected.
    """

    def __init__(self, config: Config, survey: Any, sample: Any) -> None:
        super().__init__()
        self._config = config
        self._survey = survey
        self._sample = sample

    def expand(self, pages: Any) -> Any:
        survey, sample = AsSingleton(self._survey), AsList(self._sample)
        return (
            pages
            | "KeysAndSizes" >> beam.ParDo(_KeysAndSizesFn(), survey, sample)
            | "JoinHistograms" >> beam.CombineGlobally(_JoinHistograms()).without_defaults()
            | "CutShards" >> beam.Map(_plan_and_prepare, self._config, survey, sample)
        )


class _Listed:
    """Histograms by split and the sum over all references, of a part of them."""

    def __init__(self) -> None:
        self.histograms: dict[str, Histogram] = {}
        self.references = ReferenceSum()


class _KeysAndSizesFn(beam.DoFn):  # type: ignore[misc]
    """Adds up a bundle's references: one element a bundle leaves this step."""

    def start_bundle(self) -> None:
        self._listed = _Listed()
        self._sizes: SizeModel | None = None

    def process(self, page: Page, survey: Survey, sample: list[Measurement]) -> None:
        if self._sizes is None:
            self._sizes = SizeModel.learn((one.path, one.source_bytes, one.record_bytes) for one in sample)
        histograms = self._listed.histograms
        for ref in page:
            if ref.split not in histograms:
                histograms[ref.split] = Histogram(Histogram.shift_for(survey.images))
            histograms[ref.split].add(ref.order_key, self._sizes.estimate(ref.path, ref.source_bytes))
            self._listed.references.add((*listing_fields(ref), ref.etag.encode()))

    def finish_bundle(self) -> Iterator[Any]:
        window = GlobalWindow()
        yield WindowedValue(self._listed, window.max_timestamp(), (window,))


class _JoinHistograms(beam.CombineFn):  # type: ignore[misc]
    def create_accumulator(self) -> _Listed:
        return _Listed()

    def add_input(self, total: _Listed, part: _Listed) -> _Listed:
        for split, histogram in part.histograms.items():
            total.histograms.setdefault(split, Histogram(histogram.shift)).merge(histogram)
        total.references.merge(part.references)
        return total

    def merge_accumulators(self, parts: Iterable[_Listed]) -> _Listed:
        total = self.create_accumulator()
        for part in parts:
            self.add_input(total, part)
        return total

    def extract_output(self, total: _Listed) -> _Listed:
        return total


def _plan_and_prepare(listed: _Listed, config: Config, survey: Survey, sample: list[Measurement]) -> JobPlan:
    ordered = sorted(sample, key=lambda one: relative_path_bytes(one.path))
    sampling.check_sample(ordered, survey.images, config.max_reject_fraction)
    plan = JobPlan(
        configuration=config.fingerprint(),
        classes=survey.classes,
        columns=config.columns,
        splits=_plan_splits(listed.histograms, config),
        statistics=sampling.statistics(ordered),
        references=f"{listed.references.count}-{listed.references.hex}",
        codec=images.codec_versions(),
    )
    state = JobState(config)
    if config.plan_only:
        state.write("plan_only.json", canonical_json(plan.document()))
    else:
        state.prepare(plan)
        report(now=True, shards_planned=plan.shards, images_planned=survey.images)
    return plan


def _plan_splits(histograms: dict[str, Histogram], config: Config) -> dict[str, SplitPlan]:
    """Cut every split.

    Raises:
        ImageShardsError: no image fell to train.
    """
    if "train" not in histograms:
        found = ", ".join(sorted(histograms))
        raise ImageShardsError(f"no image is in split 'train' (found {found}): see --splits and --layout")
    plans = {}
    for split, histogram in sorted(histograms.items()):
        total = sum(estimated for _, estimated in histogram.bins.values())
        plans[split] = plan_split(histogram, _wanted_shards(config, split, total))
    return plans


def _wanted_shards(config: Config, split: str, total_bytes: int) -> int:
    counts = config.shard_counts
    if isinstance(counts, int):
        return counts
    if counts is not None and split in counts:
        return counts[split]
    return shard_count(total_bytes, config.shard_bytes)


class AssignShards(beam.PTransform):  # type: ignore[misc]
    """Input: `Page`s. Output: (`ShardId`, `Page`): each page parted by shard, in no order."""

    def __init__(self, plan: Any) -> None:
        super().__init__()
        self._plan = plan

    def expand(self, pages: Any) -> Any:
        parted = beam.FlatMap(_part_by_shard, AsSingleton(self._plan)).with_output_types(tuple[tuple[str, int], Page])
        return pages | "BisectKeys" >> parted


def _part_by_shard(page: Page, plan: JobPlan) -> Iterable[tuple[ShardId, Page]]:
    parts: dict[ShardId, Page] = {}
    for ref in page:
        shard = ref.split, plan.splits[ref.split].shard_of(ref.order_key)
        parts.setdefault(shard, Page()).append(ref)
    return parts.items()


class WriteShards(beam.PTransform):  # type: ignore[misc]
    """Input: (`ShardId`, iterable of `Page`). Output: a `ShardSummary` each; a retry writes the same bytes."""

    def __init__(self, config: Config, plan: Any) -> None:
        super().__init__()
        self._config = config
        self._plan = plan

    def expand(self, shards: Any) -> Any:
        return shards | "WriteShard" >> beam.ParDo(_WriteShardFn(self._config), AsSingleton(self._plan))


class _WriteShardFn(beam.DoFn):  # type: ignore[misc]
    def __init__(self, config: Config) -> None:
        self._config = config
        self._records = _counter(metrics.RECORDS_WRITTEN)
        self._rejected = _counter(metrics.IMAGES_REJECTED)
        self._source_bytes = _counter(metrics.SOURCE_BYTES)
        self._written_bytes = _counter(metrics.WRITTEN_BYTES)
        self._shards = {False: _counter(metrics.SHARDS_WRITTEN), True: _counter(metrics.SHARDS_KEPT)}
        self._msec = Metrics.distribution(metrics.NAMESPACE, metrics.SHARD_MSEC)

    def process(self, shard: tuple[ShardId, Iterable[Page]], plan: JobPlan) -> Iterator[ShardSummary]:
        (split, index), pages = shard
        summary = ShardWriter(self._config, plan).write(split, index, chain.from_iterable(pages))
        self._shards[summary.kept].inc()
        if not summary.kept:
            self._records.inc(summary.records)
            self._source_bytes.inc(summary.source_bytes)
            self._written_bytes.inc(summary.bytes)
            self._msec.update(summary.msec)
        self._rejected.inc(sum(summary.rejects.values()))
        yield summary


class PublishDataset(beam.PTransform):  # type: ignore[misc]
    """Publishes once every shard is written.

    Input: one `JobPlan`. Output: the URL of the version.
    """

    def __init__(self, config: Config, summaries: Any, run: dict[str, Any]) -> None:
        super().__init__()
        self._config = config
        self._summaries = summaries
        self._run = run

    def expand(self, plan: Any) -> Any:
        return plan | "Publish" >> beam.Map(_publish, self._config, AsIter(self._summaries), self._run)


def _publish(plan: JobPlan, config: Config, summaries: Iterable[ShardSummary], run: dict[str, Any]) -> str:
    written, planned = len({(one.split, one.index) for one in summaries}), plan.shards
    if written != planned:
        raise ImageShardsError(f"{written} of {planned} shards were written: run the same command again")
    finished = time.time()
    publish(
        config, plan, {**run, "finished_unix_s": int(finished), "seconds": round(finished - run["started_unix_s"], 3)}
    )
    return config.dataset_url
