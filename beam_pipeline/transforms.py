"""The job's steps as Beam transforms: they wire; the functions they call do the work and are tested without Beam."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import apache_beam as beam
from apache_beam.coders import FastPrimitivesCoder, registry
from apache_beam.metrics import Metrics
from apache_beam.pvalue import AsSingleton

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

_SAMPLE_CHUNK = 16  # sampled images an element: enough for the fetch threads, few enough to spread over workers
ShardId = tuple[str, int]


class ImageRefCoder(beam.coders.Coder):  # type: ignore[misc]
    """References as plain tuples: a third of the bytes and time of pickling a named tuple."""

    _tuples = FastPrimitivesCoder()

    def encode(self, ref: ImageRef) -> bytes:
        return bytes(self._tuples.encode(tuple(ref)))

    def decode(self, encoded: bytes) -> ImageRef:
        return ImageRef._make(self._tuples.decode(encoded))

    def is_deterministic(self) -> bool:
        return True


registry.register_coder(ImageRef, ImageRefCoder)


def _counter(name: str) -> Any:
    return Metrics.counter(metrics.NAMESPACE, name)


class Listing(NamedTuple):
    """What `ListImages` found: a PCollection of `ImageRef`, and one of a single tuple, the sorted class names."""

    images: Any
    classes: Any


class ListImages(beam.PTransform):  # type: ignore[misc]
    """Lists every image of the input, folders in parallel.

    Input: the pipeline. Output: `Listing`. References come in any order, each once, the same after a retry.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._config = config

    def expand(self, pipeline: Any) -> Listing:
        folders = (
            pipeline
            | "Start" >> beam.Create([None])
            | "ListClassFolders" >> beam.FlatMap(lambda _, config: listing.class_folders(config), self._config)
            | "SpreadFolders" >> beam.Reshuffle()
        )
        refs = folders | "ListFolder" >> beam.ParDo(_ListFolderFn(self._config)).with_output_types(ImageRef)
        labels = folders | "Labels" >> beam.Map(lambda folder: folder.label)
        classes = labels | "ClassNames" >> beam.CombineGlobally(_ClassNames(self._config.labels))
        return Listing(refs | "SameListForAll" >> beam.Reshuffle(), classes)


class _ListFolderFn(beam.DoFn):  # type: ignore[misc]
    def __init__(self, config: Config) -> None:
        self._config = config
        self._listed = _counter(metrics.IMAGES_LISTED)
        self._empty = _counter(metrics.CLASSES_EMPTY)
        self._skipped = {
            listing.HIDDEN: _counter(metrics.SKIPPED_HIDDEN),
            listing.OTHER_SUFFIX: _counter(metrics.SKIPPED_OTHER_SUFFIX),
        }

    def process(self, folder: listing.ClassFolder) -> Iterator[ImageRef]:
        found = 0
        for ref in listing.list_images(self._config, folder, lambda kind: self._skipped[kind].inc()):
            found += 1
            report(images_listed=1)
            yield ref
        self._listed.inc(found)
        if not found:
            self._empty.inc()


class _ClassNames(beam.CombineFn):  # type: ignore[misc]
    """Distinct labels → sorted tuple, or the fixed list of a labels file."""

    def __init__(self, fixed: tuple[str, ...] | None) -> None:
        self._fixed = fixed

    def create_accumulator(self) -> set[str]:
        return set()

    def add_input(self, names: set[str], label: str) -> set[str]:
        names.add(label)
        return names

    def merge_accumulators(self, parts: Iterable[set[str]]) -> set[str]:
        return set().union(*parts)

    def extract_output(self, names: set[str]) -> tuple[str, ...]:
        if self._fixed is None:
            return tuple(sorted(names))
        unknown = sorted(names - set(self._fixed))
        if unknown:
            raise ImageShardsError(f"class {unknown[0]!r} is not in the labels file: add a line for it")
        return self._fixed


class SampleImages(beam.PTransform):  # type: ignore[misc]
    """Measures the images with the smallest order keys.

    Input: `ImageRef`s. Output: one list of `Measurement`, ordered by path. Fails the job when too many are rejected.
    """

    def __init__(self, config: Config, classes: Any) -> None:
        super().__init__()
        self._config = config
        self._classes = classes

    def expand(self, refs: Any) -> Any:
        count = refs | "CountImages" >> beam.combiners.Count.Globally()
        return (
            refs
            | "SmallestKeys" >> beam.combiners.Top.Smallest(512, key=lambda ref: (ref.order_key, ref.path))
            | "ChunkSample" >> beam.FlatMap(_chunks, AsSingleton(count))
            | "SpreadSample" >> beam.Reshuffle()
            | "MeasureImages" >> beam.ParDo(_MeasureImagesFn(self._config), AsSingleton(self._classes))
            | "JoinSample" >> beam.combiners.ToList()
            | "CheckSample" >> beam.Map(_checked_sample, AsSingleton(count), self._config.max_reject_fraction)
        )


def _chunks(smallest: list[ImageRef], count: int) -> Iterator[list[ImageRef]]:
    chosen = smallest[: sample_size(count)]
    for start in range(0, len(chosen), _SAMPLE_CHUNK):
        yield chosen[start : start + _SAMPLE_CHUNK]


class _MeasureImagesFn(beam.DoFn):  # type: ignore[misc]
    def __init__(self, config: Config) -> None:
        self._config = config
        self._sampled = _counter(metrics.IMAGES_SAMPLED)

    def process(self, refs: list[ImageRef], classes: tuple[str, ...]) -> Iterator[Measurement]:
        self._sampled.inc(len(refs))
        yield from sampling.measure(self._config, len(classes), refs)


def _checked_sample(sample: list[Measurement], count: int, max_reject_fraction: float) -> list[Measurement]:
    if not count:
        raise ImageShardsError("the input has no image: nothing is written")
    ordered = sorted(sample, key=lambda one: relative_path_bytes(one.path))
    sampling.check_sample(ordered, count, max_reject_fraction)
    return ordered


class PlanShards(beam.PTransform):  # type: ignore[misc]
    """Decides every shard before one is written, and makes the output ready for them.

    Input: `ImageRef`s. Output: one `JobPlan`, saved as the state's plan.json.
    """

    def __init__(self, config: Config, classes: Any, sample: Any) -> None:
        super().__init__()
        self._config = config
        self._classes = classes
        self._sample = sample

    def expand(self, refs: Any) -> Any:
        count = refs | "CountToPlan" >> beam.combiners.Count.Globally()
        sizes = self._sample | "LearnSizes" >> beam.Map(_size_model)
        return (
            refs
            | "KeysAndSizes" >> beam.ParDo(_KeysAndSizesFn(), AsSingleton(sizes), AsSingleton(count))
            | "JoinHistograms" >> beam.CombineGlobally(_JoinHistograms()).without_defaults()
            | "CutShards" >> beam.Map(make_plan, self._config, AsSingleton(self._classes), AsSingleton(self._sample))
            | "PrepareOutput" >> beam.Map(_prepare_output, self._config)
        )


def _size_model(sample: list[Measurement]) -> SizeModel:
    return SizeModel.learn((one.path, one.source_bytes, one.record_bytes) for one in sample)


class _Listed:
    """Histograms by split and the sum over all references, of a part of them."""

    def __init__(self) -> None:
        self.histograms: dict[str, Histogram] = {}
        self.references = ReferenceSum()


class _KeysAndSizesFn(beam.DoFn):  # type: ignore[misc]
    """Adds up a bundle's references: one element a bundle leaves this step."""

    def start_bundle(self) -> None:
        self._listed = _Listed()

    def process(self, ref: ImageRef, sizes: SizeModel, count: int) -> None:
        histograms = self._listed.histograms
        if ref.split not in histograms:
            histograms[ref.split] = Histogram(Histogram.shift_for(count))
        histograms[ref.split].add(ref.order_key, sizes.estimate(ref.path, ref.source_bytes))
        self._listed.references.add((*listing_fields(ref), ref.etag.encode()))

    def finish_bundle(self) -> Iterator[Any]:
        yield beam.utils.windowed_value.WindowedValue(
            self._listed,
            beam.transforms.window.GlobalWindow().max_timestamp(),
            (beam.transforms.window.GlobalWindow(),),
        )


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


def make_plan(listed: _Listed, config: Config, classes: tuple[str, ...], sample: list[Measurement]) -> JobPlan:
    """The plan of a whole listing.

    Raises:
        ImageShardsError: no image fell to train.
    """
    if "train" not in listed.histograms:
        raise ImageShardsError(
            f"no image is in split 'train' (found {', '.join(sorted(listed.histograms))}): see --splits"
        )
    splits: dict[str, SplitPlan] = {}
    for split, histogram in sorted(listed.histograms.items()):
        total = sum(estimated for _, estimated in histogram.bins.values())
        splits[split] = plan_split(histogram, _wanted_shards(config, split, total))
    return JobPlan(
        configuration=config.fingerprint(),
        classes=classes,
        columns=config.columns,
        splits=splits,
        statistics=sampling.statistics(sample),
        references=f"{listed.references.count}-{listed.references.hex}",
        codec=images.codec_versions(),
    )


def _wanted_shards(config: Config, split: str, total_bytes: int) -> int:
    counts = config.shard_counts
    if isinstance(counts, int):
        return counts
    if counts is not None and split in counts:
        return counts[split]
    return shard_count(total_bytes, config.shard_bytes)


def _prepare_output(plan: JobPlan, config: Config) -> JobPlan:
    state = JobState(config)
    if config.plan_only:
        state.write("plan_only.json", canonical_json(plan.document()))
    else:
        state.prepare(plan)
        shards, count = (sum(getattr(split, what) for split in plan.splits.values()) for what in ("shards", "images"))
        report(now=True, shards_planned=shards, images_planned=count)
    return plan


class AssignShards(beam.PTransform):  # type: ignore[misc]
    """Input: `ImageRef`s. Output: (`ShardId`, `ImageRef`), each once, in no order."""

    def __init__(self, plan: Any) -> None:
        super().__init__()
        self._plan = plan

    def expand(self, refs: Any) -> Any:
        return refs | "BisectKeys" >> beam.Map(_assign, AsSingleton(self._plan)).with_output_types(
            tuple[tuple[str, int], ImageRef]
        )


def _assign(ref: ImageRef, plan: JobPlan) -> tuple[ShardId, ImageRef]:
    return (ref.split, plan.splits[ref.split].shard_of(ref.order_key)), ref


class WriteShards(beam.PTransform):  # type: ignore[misc]
    """Input: (`ShardId`, iterable of `ImageRef`). Output: a `ShardSummary` each; a retry writes the same bytes."""

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

    def process(self, shard: tuple[ShardId, Iterable[ImageRef]], plan: JobPlan) -> Iterator[ShardSummary]:
        (split, index), refs = shard
        summary = ShardWriter(self._config, plan).write(split, index, refs)
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

    Input: `ShardSummary`s. Output: the URL of the manifest, which is written last.
    """

    def __init__(self, config: Config, plan: Any, run: dict[str, Any]) -> None:
        super().__init__()
        self._config = config
        self._plan = plan
        self._run = run

    def expand(self, summaries: Any) -> Any:
        written = summaries | "CountShards" >> beam.combiners.Count.Globally()
        return written | "Publish" >> beam.Map(_publish, self._config, AsSingleton(self._plan), self._run)


def _publish(shards_written: int, config: Config, plan: JobPlan, run: dict[str, Any]) -> str:
    planned = sum(split.shards for split in plan.splits.values())
    if shards_written != planned:
        raise ImageShardsError(f"{shards_written} of {planned} shards were written: run the same command again")
    finished = time.time()
    publish(
        config, plan, {**run, "finished_unix_s": int(finished), "seconds": round(finished - run["started_unix_s"], 3)}
    )
    return config.dataset_url
