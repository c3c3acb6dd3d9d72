"""Submitting to Dataflow: what the real runner posts, who else may be faster, and what the API may answer."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import traceback
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.portability.api import beam_runner_api_pb2

import beam_pipeline
from beam_pipeline.cli import dataflow, watch
from beam_pipeline.cli.main import parse
from tests import make
from tests.dataflow.api import RESET, FakeDataflow, Message, Step
from tests.dataflow.commands import Command, command, told, work
from tests.dataflow.test_watch import FAILURES, FOUND, ID, LINK, RUNS_ON
from tests.servers import Gcs

PERHAPS = "job 'imageshards-photos-1-0-0' may be running: the same command finds it or submits it"
SUBMITTED = f"job {ID} is submitted: {LINK}"


@pytest.fixture
def one(gcs: Gcs, photos: Path, api: FakeDataflow, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setattr(watch, "_LOOK_EVERY_S", 0.02)
    return command(gcs, photos, api.url)


def test_one_command_submits_watches_and_sums_up_what_was_published(
    gcs: Gcs, api: FakeDataflow, one: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_PROGRESS_EVERY_S", 0.0)
    monkeypatch.setattr(watch, "_LOG_LINE_EVERY_S", 0.0)
    metrics = {"TotalVcpuTime": 5760.0}
    running = Step("RUNNING", metrics=metrics, act=lambda: metrics.update(work(gcs, api.jobs[ID].content)))
    api.steps = [Step("PENDING"), running, Step("DONE", metrics=metrics)]
    finished = one.run("--machine_type=n2d-standard-8", "--num_shards=3")
    assert (finished.code, told(finished.err)) == (
        0,
        [
            SUBMITTED,
            "12:01:00 pending",
            "12:02:00 running",
            "shards 3/3 · images 40/40",
            "12:04:00 done after 4 min 00 s, 1.60 vCPU-hours = 0.20 worker-hours of n2d-standard-8",
        ],
    )
    first, *others = finished.out.splitlines()
    assert first == f"published {one.dataset[3]}/photos/1.0.0"
    assert others[1:] == ["  40 images listed = 40 records + 0 rejects", "  3 classes"]
    again = one.run("--num_shards=3")
    assert (again.code, again.out.partition("\n")[0]) == (0, f"already {first}, nothing written")
    assert len(api.jobs) == 1


def test_a_job_that_failed_is_submitted_again_by_the_same_command_and_goes_on(
    gcs: Gcs, api: FakeDataflow, one: Command
) -> None:
    bucket = one.dataset[1].split("/")[2]
    gcs.put(bucket, "photos/ant/bad.jpg", b"bad")
    failed = Step("FAILED", act=lambda: None)

    def fail() -> None:
        try:
            work(gcs, api.jobs[ID].content)
        except Exception:
            text = (
                f"Error message from worker: generic::unknown: {traceback.format_exc()}\npassed through:\n==>\n  x.cc:1"
            )
            failed.messages = (Message("ERROR", text),)

    failed.act = fail
    api.steps = [Step("RUNNING"), failed]
    flags = ("--max_reject_fraction=0",)
    finished = one.run(*flags)
    rejected = (
        "1 of 41 images rejected, --max_reject_fraction is 0: the first is 'ant/bad.jpg' (not_an_image: 3 bytes, "
    )
    rejected += "beginning 626164); remove them or raise --max_reject_fraction"
    ended = ["12:02:00 running", f"12:04:30 error: {rejected}", "12:04:00 failed after 4 min 00 s"]
    assert (finished.code, told(finished.err)) == (1, [SUBMITTED, *ended, f"error: {rejected}"])
    gcs.put(bucket, "photos/ant/bad.jpg", make.encoded(make.picture()))
    api.steps = [Step("DONE", act=lambda: work(gcs, api.jobs[f"{ID[:-1]}2"].content))]
    finished = one.run(*flags)
    assert (finished.code, finished.out.partition("\n")[0]) == (0, f"published {one.dataset[3]}/photos/1.0.0")


def test_a_job_that_the_api_does_not_know_yet_is_waited_for(api: FakeDataflow, one: Command) -> None:
    api.steps = [Step("RUNNING", errors=(404, 404)), Step("CANCELLED")]
    finished = one.run()
    ended = ["12:04:00 cancelled after 4 min 00 s"]
    error = f"error: job {ID} was cancelled; the same command resumes"
    assert told(finished.err) == [SUBMITTED, "12:02:00 running", *ended, error]


def test_a_job_that_another_command_submitted_meanwhile_is_watched_or_left_alone(
    api: FakeDataflow, one: Command
) -> None:
    def be_faster(content: dict[str, Any]) -> None:
        api.before_create = None
        api.create({**content, "clientRequestId": "another"})

    api.before_create = be_faster
    finished = one.run("--detach")
    assert (finished.code, told(finished.err)) == (0, [FOUND, RUNS_ON])
    api.go_on(ID, Step("DONE"))
    api.before_create = lambda content: be_faster({**content, "labels": {"imageshards": "of another command"}})
    finished = one.run("--detach")
    assert finished.code == 1
    assert told(finished.err)[0].startswith(
        f"error: job {ID[:-1]}2 runs under the name 'imageshards-photos-1-0-0' with"
    )


def test_ctrl_c_while_the_job_is_submitted_says_what_may_have_happened(api: FakeDataflow, one: Command) -> None:
    program = [sys.executable, "-m", "beam_pipeline", *one.dataset, *one.cloud]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:

        def interrupt(_: dict[str, Any]) -> None:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)  # the answer never comes

        api.before_create = interrupt
        out, err = process.communicate(timeout=60)
    line = f"error: interrupted; {PERHAPS}"
    assert (process.returncode, out, told(err)) == (1, "", [line])


def test_two_datasets_with_the_same_options_are_two_jobs(gcs: Gcs, api: FakeDataflow, one: Command) -> None:
    options = PipelineOptions(one.cloud)
    with redirect_stderr(io.StringIO()):
        for name, shards in (("photos", 1), ("cats", 40)):
            config, _ = parse([*one.dataset, f"--name={name}", f"--num_shards={shards}", "--detach"])
            beam_pipeline.run(config, options)
    jobs = [job.content for job in api.jobs.values()]
    assert [job["name"] for job in jobs] == ["imageshards-photos-1-0-0", "imageshards-cats-1-0-0"]
    fleets = [job["environment"]["workerPools"][0]["autoscalingSettings"]["maxNumWorkers"] for job in jobs]
    assert fleets == [1, 10]


@pytest.mark.parametrize("code", [403, 404, 409, 429])
def test_a_refused_submission_is_one_line(api: FakeDataflow, one: Command, code: int) -> None:
    api.create_errors = [code]
    finished = one.run()
    assert (finished.code, finished.out) == (1, "")
    assert told(finished.err) == [f"error: {FAILURES[code]}; nothing was started"]


def test_a_service_that_fails_is_asked_again_by_beam_for_half_a_minute(api: FakeDataflow, one: Command) -> None:
    api.create_errors = [RESET, 500, 500, 500]
    finished = one.run()
    assert (finished.code, told(finished.err)) == (1, [f"error: {FAILURES[500]}; {PERHAPS}"])
    assert api.create_errors == []
    assert one.run("--detach").code == 0


STEPS = {
    *("ListImages", "SampleImages", "PlanShards", "PrepareOutput", "AssignShards", "WriteShards", "RunFacts"),
    "PublishDataset",
}


def test_what_is_posted_names_steps_machines_image_and_labels_and_has_one_size_for_10_and_100_000_images(
    gcs: Gcs, photos: Path, api: FakeDataflow
) -> None:
    flags = [
        *("--machine_type=n2d-standard-8", "--max_num_workers=7", "--disk_size_gb=60", "--num_workers=3"),
        *("--number_of_worker_harness_threads=2", "--service_account_email=me@example.com", "--no_use_public_ips"),
        *("--subnetwork=regions/europe-west4/subnetworks/inside", "--labels=team=vision", "--detach"),
    ]
    posted = []
    for images in (10, 100_000):
        one = command(gcs, photos, api.url)
        bucket = one.dataset[1].split("/")[2]
        rows = "".join(f"class_{number % 5}/{number:06d}.jpg,label_{number % 5}\n" for number in range(images))
        gcs.put(bucket, "images.csv", f"path,label\n{rows}".encode())
        finished = one.run(*flags, "--layout=manifest", f"--manifest=gs://{bucket}/images.csv", f"--seed={images}")
        assert finished.code == 0, finished.err
        (job,) = api.jobs.values()
        api.jobs.clear()
        (name,) = (name for name in gcs.names(bucket) if name.endswith("/pipeline.pb"))
        posted.append((job.content, gcs.get(bucket, name)))
    (few, few_graph), (many, many_graph) = posted
    assert abs(len(json.dumps(many)) - len(json.dumps(few))) < 1000
    assert abs(len(many_graph) - len(few_graph)) < 1000  # Beam numbers its parts in no fixed order
    assert len(json.dumps(many)) + len(many_graph) < 1_000_000  # Dataflow takes 10 MB

    assert few["name"] == "imageshards-photos-1-0-0"
    assert few["labels"].keys() == {dataflow.LABEL, "team"}
    assert few["labels"][dataflow.LABEL] != many["labels"][dataflow.LABEL]
    (workers,) = few["environment"]["workerPools"]
    assert (workers["machineType"], workers["diskSizeGb"], workers["numWorkers"]) == ("n2d-standard-8", 60, 3)
    assert (workers["autoscalingSettings"]["maxNumWorkers"], workers["numThreadsPerWorker"]) == (7, 2)
    assert workers["workerHarnessContainerImage"] == "registry/image:1"
    assert workers["subnetwork"] == "regions/europe-west4/subnetworks/inside"
    assert workers["ipConfiguration"] == 2  # private
    assert few["environment"]["serviceAccountEmail"] == "me@example.com"
    assert "pickled_main_session" not in [package["name"] for package in workers.get("packages", ())]
    graph = beam_runner_api_pb2.Pipeline.FromString(few_graph)
    names = {transform.unique_name for transform in graph.components.transforms.values()}
    assert {name.partition("/")[0] for name in names} >= STEPS


def test_a_plan_is_taken_by_the_same_command_in_another_process(gcs: Gcs, api: FakeDataflow, one: Command) -> None:
    assert one.run("--plan_only", "--detach").code == 0
    api.go_on(ID, Step("RUNNING", act=lambda: work(gcs, api.jobs[ID].content)), Step("DONE"))
    finished = one.run("--plan_only")
    assert (finished.code, finished.out.splitlines()[1:]) == (0, ["3 classes; nothing was written"])


def test_a_plan_is_printed_when_its_job_is_done(gcs: Gcs, api: FakeDataflow, one: Command) -> None:
    api.steps = [Step("DONE", act=lambda: work(gcs, api.jobs[ID].content))]
    finished = one.run("--plan_only")
    assert told(finished.err) == [SUBMITTED, "12:04:00 done after 4 min 00 s"]
    assert (finished.code, finished.out.splitlines()[1:]) == (0, ["3 classes; nothing was written"])
    assert finished.out.startswith("train: 40 images in 1 shard of about ")
