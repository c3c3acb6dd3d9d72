"""SampleImages and PlanShards decide every shard before one is written; `prepare_output` clears the output for them."""

import dataclasses
from collections.abc import Iterator
from itertools import chain
from typing import Any

import apache_beam as beam
from apache_beam.pvalue import AsList, AsSingleton
from apache_beam.transforms.window import GlobalWindows

from beam_pipeline.config import Config
from beam_pipeline.dataset import answers, base
from beam_pipeline.dataset.progress import report
from beam_pipeline.dataset.version import prepare
from beam_pipeline.dataset.writer import ClaimedPlan
from beam_pipeline.inputs.folders import ListingSummary
from beam_pipeline.pipeline import elements
from beam_pipeline.pipeline.elements import KeyedPage, Page, Pages, counter, keyed, merge_all, reports_errors
from beam_pipeline.planning import sampling
from beam_pipeline.planning.plan import EstimatedSizes, SizeModel, plan_job
from beam_pipeline.planning.sampling import Measurement
from beam_pipeline.schema.job import Plan, PlannedJob

_SAMPLE_CHUNK = 32  # sampled images per element: as many as are fetched at a time, few enough to spread over workers


@dataclasses.dataclass
class SampleImages(beam.PTransform):  # type: ignore[misc]
    """Measures the images with the smallest order keys, spread over the workers.

    Input: one `ListingSummary`. Output: `Measurement`s.
    """

    config: Config

    def expand(self, summary: beam.PCollection[ListingSummary]) -> beam.PCollection[Measurement]:
        chunks = summary | "ChunkSample" >> beam.FlatMap(_chunks) | "SpreadSample" >> beam.GroupByKey()
        return chunks | "MeasureImages" >> beam.FlatMap(_measure, self.config, AsSingleton(summary))


def _chunks(summary: ListingSummary) -> Iterator[KeyedPage]:
    report(images_to_sample=len(summary.smallest))
    for start in range(0, len(summary.smallest), _SAMPLE_CHUNK):
        yield keyed(Page(summary.smallest[start : start + _SAMPLE_CHUNK]))


@reports_errors
def _measure(chunk: Pages, config: Config, summary: ListingSummary) -> Iterator[Measurement]:
    refs = list(chain.from_iterable(chunk[1]))
    counter(elements.IMAGES_SAMPLED).inc(len(refs))
    for measurement in sampling.measure(config, len(summary.classes), refs):
        report(images_sampled=1)
        yield measurement


@dataclasses.dataclass
class PlanShards(beam.PTransform):  # type: ignore[misc]
    """Decides every shard; nothing is written. Fails the job if too many of the sample are rejected.

    Input: (key, iterable of `Page`). Output: one `Plan`.

    `summary`: one `ListingSummary`; `sample`: `Measurement`s.
    """

    config: Config
    summary: Any
    sample: Any

    def expand(self, pages: beam.PCollection[Pages]) -> beam.PCollection[Plan]:
        summary, sample = AsSingleton(self.summary), AsList(self.sample)
        return (
            pages
            | "EstimateSizes" >> beam.ParDo(_EstimateSizesFn(), summary, sample)
            | "MergeEstimates" >> beam.CombineGlobally(merge_all, EstimatedSizes).without_defaults()
            | "CutShards" >> beam.Map(_plan, self.config, summary, sample)
        )


class _EstimateSizesFn(beam.DoFn):  # type: ignore[misc]
    """Adds up a bundle's references: one element per bundle leaves this step."""

    def start_bundle(self) -> None:
        self._total = EstimatedSizes()
        self._model: SizeModel | None = None

    def process(self, pages: Pages, summary: ListingSummary, sample: list[Measurement]) -> None:
        if self._model is None:
            self._model = SizeModel.learn((image.path, image.source_bytes, image.record_bytes) for image in sample)
        self._total.add(chain.from_iterable(pages[1]), self._model, summary.images)

    def finish_bundle(self) -> Iterator[Any]:
        yield GlobalWindows.windowed_value_at_end_of_window(self._total)


@reports_errors
def _plan(sizes: EstimatedSizes, config: Config, summary: ListingSummary, sample: list[Measurement]) -> Plan:
    sampling.check_sample(config, sample, summary.images)
    return plan_job(sizes, config, summary, sample)


@reports_errors
def save_plan(plan: Plan, config: Config, summary: ListingSummary, sample: list[Measurement]) -> None:
    """For `--plan_only`: leave the plan for the launcher, with what an estimate of the work needs to know."""
    unchanged, unread = base.unchanged(config, summary.smallest[: len(sample)])
    planned = PlannedJob(
        plan=plan,
        source_bytes=summary.source_bytes,
        sampled=len(sample),
        unchanged=unchanged,
        unread=unread,
        cpu_s=sampling.cpu_s_per_image(sample),
        excluded=summary.exclusion,
    )
    answers.leave(config, planned)


@reports_errors
def prepare_output(plan: Plan, config: Config) -> ClaimedPlan:
    """Acquire the write claim, and delete what another plan left of the version.

    Raises:
        ImageShardsError: another job is writing the version.
    """
    claimed = ClaimedPlan(plan, prepare(config, plan))
    report(shards_planned=plan.shards, images_planned=plan.images)
    counter(elements.SHARDS_PLANNED).inc(plan.shards)
    counter(elements.IMAGES_PLANNED).inc(plan.images)
    return claimed
