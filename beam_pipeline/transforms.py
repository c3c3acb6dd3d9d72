"""The job's steps as transforms for anybody's Beam pipeline; none of them needs the command line.

with beam.Pipeline() as pipeline:
    url = pipeline | WriteDataset(Config(input="gs://bucket/photos", output="gs://bucket/datasets", name="photos"))
"""

import dataclasses
import time
import uuid
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import apache_beam as beam

from beam_pipeline.config import Config
from beam_pipeline.conversion.decoder import Decoder
from beam_pipeline.conversion.fetch import convert_all
from beam_pipeline.conversion.versions import versions
from beam_pipeline.dataset.base import choose_base
from beam_pipeline.dataset.preconditions import check_unpublished, no_empty_folders, read_manifest, resolve
from beam_pipeline.errors import Reject, UsageError
from beam_pipeline.images import EncodedImage
from beam_pipeline.inputs.references import ImageRef
from beam_pipeline.pipeline import elements, graph
from beam_pipeline.pipeline.elements import Pages, counter, reports_errors
from beam_pipeline.pipeline.listing import ListPages
from beam_pipeline.schema.job import RejectLine, Run

__all__ = ["ConvertedImage", "ImageRef", "ListImages", "ReadImages", "RejectLine", "WriteDataset"]

_REJECTS = "rejects"


class ConvertedImage(NamedTuple):
    """An image as `WriteDataset` stores it.

    Attributes:
        path: relative to the input, with `/` separators.
        label: class name.
        split: `train`, `validation`, ...
        data: the encoded image, JPEG or PNG.
        height, width: in pixels.
    """

    path: str
    label: str
    split: str
    data: bytes
    height: int
    width: int


@dataclasses.dataclass(eq=False)
class _OfConfig(beam.PTransform):  # type: ignore[misc]
    config: Config

    def display_data(self) -> dict[str, str]:
        """The input and what decides bytes, for a job's page."""
        return {"input": self.config.input} | {name: str(value) for name, value in self.config.fingerprint().items()}

    def _resolved(self, pipeline: Any, for_output: bool = True) -> Config:
        if not isinstance(pipeline, beam.pvalue.PBegin):
            what = f"{type(self).__name__} lists its images itself: apply it to the pipeline, not to a collection"
            raise UsageError(f"{what}; write your own images to files, and list them in a manifest")
        return resolve(self.config, for_output)


@dataclasses.dataclass(eq=False)
class ListImages(_OfConfig):
    """Lists the images of an input; reads none of them.

    Input: the pipeline. Output: an `ImageRef` (path, bytes, etag, label, split, order key) for each image, once, in no
    order.

    `config`: of the input, the splits and the seed; output and name aren't used.

    Raises UsageError when it is applied: the input has no images, or one of its flags is invalid.
    """

    def expand(self, pipeline: Any) -> beam.PCollection[ImageRef]:
        pages, _ = pipeline | ListPages(self._resolved(pipeline, for_output=False))
        return pages | "Flatten" >> beam.FlatMap(_refs)


def _refs(pages: Pages) -> Iterator[ImageRef]:
    yield from chain.from_iterable(pages[1])


@dataclasses.dataclass(eq=False)
class ReadImages(_OfConfig):
    """Reads and converts the images of an input, and writes nothing anywhere.

    Input: the pipeline. Output: two collections, in no order: a `ConvertedImage` for each image, with the bytes that
    `WriteDataset` would store, and a `RejectLine` (path, reason, detail) for each that can't be converted.

        images, rejects = pipeline | ReadImages(config)

    An image on which a decoder crashes fails its bundle: nothing is kept to tell the next attempt.

    `config`: of the input and the images; output and name aren't used.

    Raises UsageError when it is applied: the input has no images, or one of its flags is invalid.
    """

    def expand(self, pipeline: Any) -> Any:
        config = self._resolved(pipeline, for_output=False).in_run(launcher=versions())
        pages, _ = pipeline | ListPages(config)
        convert = beam.FlatMap(_converted, config).with_output_types(ConvertedImage)
        parts = pages | "ConvertImages" >> convert.with_outputs(_REJECTS, main="images")
        return parts.images, parts[_REJECTS]


@reports_errors
def _converted(pages: Pages, config: Config) -> Iterator[Any]:
    decoder = Decoder(config.image_options, None, isolated=False)

    def convert(ref: ImageRef, data: bytes, md5: bytes) -> EncodedImage:
        return decoder.convert(ref.path, data, md5)

    for ref, image, *_ in convert_all(config, chain.from_iterable(pages[1]), convert):
        if isinstance(image, Reject):
            counter(elements.IMAGES_REJECTED).inc()
            line = RejectLine(ref.path, str(image.reason), image.detail)
            yield beam.pvalue.TaggedOutput(_REJECTS, line)
        else:
            yield ConvertedImage(ref.path, ref.label, ref.split, image.data, image.height, image.width)


@dataclasses.dataclass(eq=False)
class WriteDataset(_OfConfig):
    """Writes and publishes a dataset version; as `imageshards write` does.

    Input: the pipeline. Output: the version's URL, one string, once it is published; a failure fails the pipeline and
    publishes nothing, and the same configuration resumes it.

    One pipeline writes a version: the step that plans acquires the claim, and a pipeline with other images or flags
    fails with one line. Pipelines with the same plan share it, so one that was killed is resumed by the next.

    `config`: as of `beam_pipeline.run`; `restart=True` discards what an unfinished pipeline wrote.

    Raises when it is applied: UsageError, the configuration or the input can't be used; the version is published.
    """

    def expand(self, pipeline: Any) -> Any:
        config = self._resolved(pipeline)
        if config.plan_only or config.repair:
            raise UsageError("WriteDataset: leave out plan_only and repair, which imageshards write has")
        if not config.overwrite and read_manifest(config) is not None:
            raise UsageError(f"{config.dataset_url} is published: choose another version, or overwrite=True")
        with no_empty_folders(config):
            check_unpublished(config)
        config, _ = choose_base(config.in_run(id=uuid.uuid4().hex, launcher=versions()))
        runner = type(pipeline.pipeline.runner).__name__
        run = Run(runner=runner, started_unix_s=int(time.time()), versions=graph.software_versions())
        return graph.build(pipeline, config, run)

    def display_data(self) -> dict[str, str]:
        return super().display_data() | {"dataset": self.config.dataset_url}
