"""Submitting to Dataflow: what the real runner posts, who else may be faster, and what the API may answer."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr
from typing import Any

import pytest
from apache_beam.options.pipeline_options import PipelineOptions

import beam_pipeline
from beam_pipeline import storage
from beam_pipeline.cli import dataflow
from beam_pipeline.conversion import fetch
from tests import make
from tests.dataflow.api import FakeDataflow, Step
from tests.dataflow.cloud import IMAGE, Cloud, told
from tests.dataflow.test_watch import FAILURES, FOUND, ID, RUNS_ON, SUBMITTED, without_times
from tests.servers import RESET

PERHAPS = "job 'imageshards-photos-1-0-0' may be running: the same command finds it or submits it"
BEGIN = SUBMITTED[0]


@pytest.fixture
def one(cloud: Cloud) -> Cloud:
    """The command, with workers that run an image."""
    cloud.flags.append(IMAGE)
    return cloud


def test_one_command_submits_watches_and_sums_up_what_was_published(api: FakeDataflow, one: Cloud) -> None:
    metrics: dict[str, float] = {}
    api.steps = [
        Step("PENDING"),
        Step("RUNNING", metrics=metrics, act=lambda: metrics.update(one.work())),
        Step("DONE"),
    ]
    finished = one.run("--num_shards=3")
    assert (finished.code, without_times(told(finished.err))) == (0, [*SUBMITTED, "pending", "running", "done"])
    first, *others = finished.out.splitlines()
    assert first == f"published {one.version}"
    assert others[1:3] == ["  10 images listed = 10 records + 0 rejects", "  5 classes"]
    assert others[3] == f"  look at it: imageshards report {one.version}"
    assert " CPU-seconds to convert; read " in others[4]
    again = one.run("--num_shards=3")
    assert (again.code, again.out.partition("\n")[0]) == (0, f"already {first}, nothing written")
    assert len(api.jobs) == 1


def test_a_job_that_another_command_submitted_meanwhile_is_watched_or_left_alone(api: FakeDataflow, one: Cloud) -> None:
    def be_faster(content: dict[str, Any]) -> None:
        api.before_create = None
        api.create({**content, "clientRequestId": "another"})

    api.before_create = be_faster
    finished = one.run("--detach")
    assert (finished.code, told(finished.err)) == (0, [BEGIN, FOUND, RUNS_ON])
    api.go_on(ID, Step("DONE"))
    api.before_create = lambda content: be_faster({**content, "labels": {"imageshards": "of another command"}})
    finished = one.run("--detach")
    assert finished.code == 1
    others = f"error: job {ID[:-1]}2 runs under the name 'imageshards-photos-1-0-0' with"
    assert told(finished.err)[1].startswith(others)


def test_two_datasets_with_the_same_options_are_two_jobs(api: FakeDataflow, one: Cloud) -> None:
    options = PipelineOptions(make.parsed(one.flags)[1])
    with one.environment(), redirect_stderr(io.StringIO()):
        for name, shards in (("photos", 1), ("cats", 40)):
            config, _ = make.parsed([*one.flags, f"--name={name}", f"--num_shards={shards}", "--detach"])
            beam_pipeline.run(config, options)
    jobs = [job.content for job in api.jobs.values()]
    assert [job["name"] for job in jobs] == ["imageshards-photos-1-0-0", "imageshards-cats-1-0-0"]
    fleets = [job["environment"]["workerPools"][0]["autoscalingSettings"]["maxNumWorkers"] for job in jobs]
    assert fleets == [1, 10]


@pytest.mark.soak
def test_a_service_that_fails_is_asked_again_by_beam_for_half_a_minute(api: FakeDataflow, one: Cloud) -> None:
    api.create_errors = [RESET, 500, 500, 500]
    finished = one.run()
    assert (finished.code, told(finished.err)) == (1, [BEGIN, f"error: {FAILURES[500]}; {PERHAPS}"])
    assert api.create_errors == []
    assert one.run("--detach").code == 0


def test_what_is_posted_names_image_and_labels_and_has_one_size_for_10_and_100_000_images(
    one: Cloud,
) -> None:
    posted = []
    for images in (10, 100_000):
        rows = "".join(f"class_{number % 5}/{number:06d}.jpg,label_{number % 5}\n" for number in range(images))
        output, manifest = f"out-of-{images}-images", f"{images}.csv"
        one.gcs.put(one.bucket, manifest, f"path,label\n{rows}".encode())
        given = (f"--output=gs://{one.gcs.new_bucket(output)}", f"--seed={images}", "--layout=manifest")
        finished = one.run("--labels=team=imageshards", "--detach", *given, f"--manifest=gs://{one.bucket}/{manifest}")
        assert finished.code == 0, finished.err
        (job,) = one.api.jobs.values()
        one.api.jobs.clear()
        posted.append((job.content, one.read(output, "/pipeline.pb")))
    (few, few_graph), (many, many_graph) = posted
    assert abs(len(json.dumps(many)) - len(json.dumps(few))) < 1000
    assert abs(len(many_graph) - len(few_graph)) < 1000  # Beam numbers its parts in no fixed order
    assert len(json.dumps(many)) + len(many_graph) < 1_000_000  # Dataflow takes 10 MB

    assert few["name"] == "imageshards-photos-1-0-0"
    assert few["labels"].keys() == {dataflow.LABEL, "team"}
    assert few["labels"][dataflow.LABEL] != many["labels"][dataflow.LABEL]
    (workers,) = few["environment"]["workerPools"]
    assert workers["workerHarnessContainerImage"] == "registry/image:1"
    assert "pickled_main_session" not in [package["name"] for package in workers.get("packages", ())]


@pytest.mark.parametrize("begun", [SUBMITTED, [FOUND]])
def test_a_plan_is_printed_when_its_job_is_done_by_the_command_that_submitted_it_or_the_same_one_later(
    api: FakeDataflow, one: Cloud, begun: list[str]
) -> None:
    api.steps = [Step("RUNNING", act=one.work), Step("DONE")]
    if begun == [FOUND]:
        assert one.run("--plan_only", "--detach").code == 0
    finished = one.run("--plan_only")
    assert without_times(told(finished.err)) == [*begun, "running", "done"]
    assert finished.out.startswith("train: 10 images in 1 shard of about ")
    classes, resizes, _, cores, *_ = finished.out.splitlines()[1:]
    assert (finished.code, classes) == (0, "5 classes; nothing was written") and resizes.startswith("resize: ")
    assert cores.endswith(" on 128 cores if none is idle"), "32 workers of e2-standard-4"


def test_repair_compares_in_a_job_and_rewrites_a_corrupt_shard_in_another(api: FakeDataflow, one: Cloud) -> None:
    api.steps = [Step("RUNNING", act=one.work), Step("DONE")]
    assert one.run("--num_shards=3").code == 0
    bucket, _ = storage.bucket_and_name(one.version)
    name = next(name for name in one.gcs.names(bucket) if name.endswith("-00001-of-00003"))
    data = one.gcs.get(bucket, name)
    one.gcs.put(bucket, name, data[:-1] + bytes([data[-1] ^ 1]))
    finished = one.run("--num_shards=3", "--repair")
    assert (finished.code, finished.out.partition("\n")[0]) == (0, f"repaired {one.version}"), finished.err
    assert "comparing: a job on DataflowRunner reads 10 images and 3 shards" in finished.err.splitlines()
    assert "repairing 1 corrupt shard" in finished.err.splitlines()
    jobs = [job.content["name"] for job in api.jobs.values()]
    assert jobs == ["imageshards-photos-1-0-0", "imageshards-photos-1-0-0-compare", "imageshards-photos-1-0-0"]
    assert one.gcs.get(bucket, name) == data
    assert not [name for name in one.gcs.names(bucket) if "_state" in name]


@pytest.mark.parametrize(
    ("flags", "threads"), [pytest.param((), 2, marks=pytest.mark.soak), (("--decode_threads=5",), 5)]
)
def test_a_process_decodes_with_few_threads_as_there_is_one_for_each_core(
    api: FakeDataflow, one: Cloud, flags: tuple[str, ...], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = set()
    make.before(monkeypatch, fetch, "shared_pool", lambda _, decode_threads: used.add(decode_threads))
    api.steps = [Step("RUNNING", act=one.work), Step("DONE")]
    finished = one.run(*flags)
    assert (finished.code, used) == (0, {threads})
    assert ("  --decode_threads=2" in finished.err.splitlines()) is (not flags)
