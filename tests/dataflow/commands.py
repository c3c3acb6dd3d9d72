"""A command that submits to Dataflow, the work that its job would do, and what it says of the job."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.portability import python_urns
from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from tests import make
from tests.dataflow.api import PROJECT, REGION
from tests.servers import Gcs


class Command(NamedTuple):
    """A command of the job on Dataflow.

    Args:
        dataset: what says which images become which dataset.
        cloud: Beam's options.
    """

    dataset: list[str]
    cloud: list[str]

    def run(self, *more: str) -> make.Finished:
        """Run it in this process."""
        return make.run(*self.dataset, *self.cloud, *more)


def command(gcs: Gcs, photos: Path, url: str) -> Command:
    """For a dataset that isn't there, in a bucket of its own."""
    bucket = gcs.new_bucket()
    gcs.put_folder(bucket, "photos", photos)
    source, target = f"gs://{bucket}/photos", f"gs://{bucket}/datasets"
    cloud = ["--runner=DataflowRunner", f"--project={PROJECT}", f"--region={REGION}", f"--dataflow_endpoint={url}"]
    return Command(
        ["--input", source, "--output", target, "--name", "photos", "--image_size", "24"],
        [
            *cloud,
            "--no_auth",
            "--machine_type=e2-standard-4",
            f"--temp_location=gs://{bucket}/_dataflow/temp",
            "--sdk_container_image=registry/image:1",
        ],
    )


def work(gcs: Gcs, content: dict[str, Any]) -> Counter[str]:
    """Do what Dataflow's workers would: run the graph that was staged with a job; returns its counters."""
    url = content["environment"]["sdkPipelineOptions"]["options"]["pipelineUrl"]
    bucket, _, name = url.removeprefix("gs://").partition("/")
    graph = beam_runner_api_pb2.Pipeline.FromString(gcs.get(bucket, name))
    for environment in graph.components.environments.values():
        environment.urn, environment.payload = python_urns.EMBEDDED_PYTHON, b""  # not the image
    result = FnApiRunner().run_via_runner_api(graph, PipelineOptions([]))
    counters: Counter[str] = Counter()
    for one in result.metrics().query()["counters"]:
        counters[one.key.metric.name] += one.attempted
    return counters


def told(err: str) -> list[str]:
    """What a command said of its job, and nothing of the defaults and checks before."""
    lines = err.splitlines()
    checks = [number for number, line in enumerate(lines) if line.startswith("ok: ")]
    return lines[checks[-1] + 1 if checks else 0 :]
