"""Memory for references, held against what is listed."""

from __future__ import annotations

from pathlib import Path

import apache_beam as beam
import pytest

from beam_pipeline import Config
from beam_pipeline.errors import ImageShardsError
from beam_pipeline.inputs import limits
from beam_pipeline.pipeline import graph
from beam_pipeline.schema.job import Run

LINE = (
    "40 images are listed, but this machine's free memory holds references of 39 only: "
    "give it more memory, or use --runner DataflowRunner, which keeps them on disks"
)


def test_unknown_memory_sets_no_limit_and_this_machine_has_some() -> None:
    limits.check(10**12, None)
    limits.check(40, 40)
    most = limits.max_references(limits.IN_PROCESS_BYTES)
    assert most is None or most > 10_000


def test_a_job_whose_references_do_not_fit_stops_with_one_line_and_writes_nothing(photos: Path, tmp_path: Path) -> None:
    config = Config(input=str(photos), output=str(tmp_path), name="photos", image_size=24).in_run(max_references=39)
    job = beam.Pipeline(runner="FnApiRunner")
    graph.build(job, config, Run())
    with pytest.raises(ImageShardsError, match=LINE):
        job.run()
    assert not list(tmp_path.rglob("*.tfrecord*"))
