"""SampleImages and PlanShards: every shard is decided before one is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import apache_beam as beam
from apache_beam.pvalue import AsList, AsSingleton
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.windowed_value import WindowedValue

from beam_pipeline import images
from beam_pipeline.config import Config
from beam_pipeline.dataset.progress import report
from beam_pipeline.dataset.state import JobState
from beam_pipeline.errors import ImageShardsError
from beam_pipeline.inputs.folders import ListingSummary
from beam_pipeline.inputs.references import ReferenceSum
from beam_pipeline.pipeline import elements
from beam_pipeline.pipeline.elements import KEYED_PAGE, Page, counter, keyed
from beam_pipeline.planning import sampling
from beam_pipeline.planning.cuts import Histogram, SizeModel, SplitPlan, plan_split, shard_count
from beam_pipeline.planning.plan import JobPlan
from beam_pipeline.planning.sampling import Measurement
from beam_pipeline.schema import relative_path_bytes

_SAMPLE_CHUNK = 16  # sampled images an element: enough for the fetch threads, few enough to spread over workers


class SampleImages(beam.PTransform):  # type: ignore[misc]
    """Measures the images with the smallest order keys, spread over the workers.

    Input: one `ListingSummary`. Output: `Measurement`s in any order.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._config = config

    def expand(self, survey: Any) -> Any:
        return (
            survey
            | "ChunkSample" >> beam.FlatMap(_chunks).with_output_types(KEYED_PAGE)
            | "SpreadSample" >> beam.GroupByKey()
            | "MeasureImages" >> beam.ParDo(_MeasureImagesFn(self._config), AsSingleton(survey))
        )


def _chunks(survey: ListingSummary) -> Iterator[tuple[int, Page]]:
    for start in range(0, len(survey.smallest), _SAMPLE_CHUNK):
        yield keyed(Page(survey.smallest[start : start + _SAMPLE_CHUNK]))


class _MeasureImagesFn(beam.DoFn):  # type: ignore[misc]
    def __init__(self, config: Config) -> None:
        self._config = config
        self._sampled = counter(elements.IMAGES_SAMPLED)

    def process(self, chunk: tuple[int, Iterable[Page]], survey: ListingSummary) -> Iterator[Measurement]:
        refs = list(chain.from_iterable(chunk[1]))
        self._sampled.inc(len(refs))
        yield from sampling.measure(self._config, len(survey.classes), refs)


class PlanShards(beam.PTransform):  # type: ignore[misc]
    """Decides every shard before one is written, and makes the output ready for them.

    Input: (key, iterable of `Page`). Output: one `JobPlan`, saved as the state's plan.json. Fails the job when too many
    of the sample are rejected.
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
            | "JoinHistograms" >> beam.CombinePerKey(_JoinHistograms())
            | "CutShards" >> beam.Map(_plan_and_prepare, self._config, survey, sample)
        )


class _Listed:
    """Histograms by split, and the sum over dropped duplicates, of a part of the references."""

    def __init__(self) -> None:
        self.histograms: dict[str, Histogram] = {}
        self.dropped = ReferenceSum()


class _KeysAndSizesFn(beam.DoFn):  # type: ignore[misc]
    """Adds up a bundle's references: one element a bundle leaves this step."""

    def start_bundle(self) -> None:
        self._listed = _Listed()
        self._sizes: SizeModel | None = None

    def process(self, pages: tuple[int, Iterable[Page]], survey: ListingSummary, sample: list[Measurement]) -> None:
        if self._sizes is None:
            self._sizes = SizeModel.learn((one.path, one.source_bytes, one.record_bytes) for one in sample)
        histograms = self._listed.histograms
        for ref in chain.from_iterable(pages[1]):
            if ref.split not in histograms:
                histograms[ref.split] = Histogram(Histogram.shift_for(survey.images))
            # A dropped duplicate has its place in the order, but no record.
            estimate = 1 if ref.duplicate_of else self._sizes.estimate(ref.path, ref.source_bytes)
            histograms[ref.split].add(ref.order_key, estimate)
            if ref.duplicate_of:
                self._listed.dropped.add((relative_path_bytes(ref.path), ref.duplicate_of))

    def finish_bundle(self) -> Iterator[Any]:
        window = GlobalWindow()
        yield WindowedValue((None, self._listed), window.max_timestamp(), (window,))


class _JoinHistograms(beam.CombineFn):  # type: ignore[misc]
    def create_accumulator(self) -> _Listed:
        return _Listed()

    def add_input(self, total: _Listed, part: _Listed) -> _Listed:
        for split, histogram in part.histograms.items():
            total.histograms.setdefault(split, Histogram(histogram.shift)).merge(histogram)
        total.dropped.merge(part.dropped)
        return total

    def merge_accumulators(self, parts: Iterable[_Listed]) -> _Listed:
        total = self.create_accumulator()
        for part in parts:
            self.add_input(total, part)
        return total

    def extract_output(self, total: _Listed) -> _Listed:
        return total


def _plan_and_prepare(
    joined: tuple[None, _Listed], config: Config, survey: ListingSummary, sample: list[Measurement]
) -> JobPlan:
    _, listed = joined
    state = JobState(config)
    state.attempts.end_sampling()
    ordered = sorted(sample, key=lambda one: relative_path_bytes(one.path))
    sampling.check_sample(ordered, survey.images, config.max_reject_fraction)
    plan = JobPlan(
        configuration=config.fingerprint(),
        classes=survey.classes,
        columns=config.columns,
        splits=_plan_splits(listed.histograms, config),
        statistics=sampling.statistics(ordered),
        references=f"{survey.references}, dropped {listed.dropped}",
        codec=images.codec_versions(),
    )
    if config.plan_only:
        state.save_plan_only(plan)
    else:
        rejects = state.attempts.rejects()
        state.prepare(plan)  # may delete all that an earlier attempt left
        for image, reject in rejects.items():
            state.attempts.add_reject(image, reject)
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
    counts = config.num_shards
    if isinstance(counts, int):
        return counts
    if counts is not None and split in counts:
        return counts[split]
    return shard_count(total_bytes, config.target_shard_bytes)
