"""What a command for Dataflow leaves out: options, name, label, and how shards spread over workers."""

from __future__ import annotations

import dataclasses
import io
import tarfile
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from hypothesis import given
from hypothesis import strategies as st

from beam_pipeline.cli import dataflow
from beam_pipeline.config import Config
from beam_pipeline.inputs.exclude import checked
from tests.dataflow.cloud import Cloud
from tests.make import ROOT
from tests.test_packaging import modules

MAX_THREADS = 12  # that Dataflow gives a process by default
MACHINES = {
    "e2-standard-4": 4, "n1-highmem-16": 16, "c3-standard-8-lssd": 8, "n2-custom-6-3072": 6, "custom-4-8192": 4,
    "n2-custom-6-3072-ext": 6, "e2-medium": 2, "c2d-highcpu-112": 112, "a2-highgpu-1g": None, "f1-micro": None,
    "big": None,
}  # fmt: skip


def config(**more: Any) -> Config:
    return Config(**{"input": "gs://photos", "output": "gs://out/datasets", "name": "photos", **more})


def filled(config: Config, *flags: str) -> dict[str, Any]:
    options = PipelineOptions([*flags, "--project=p", "--region=europe-west4"]).get_all_options()
    return dataflow.defaults(config, options)


def test_cores_are_read_from_the_name_of_a_machine_type() -> None:
    assert {machine: dataflow.cores_of(machine) for machine in MACHINES} == MACHINES


@given(st.integers(1, 5000), st.sampled_from([1, 2, 4, 6, 8, 16, 30, 64, 112]), st.integers(1, 200))
def test_slots_cover_the_shards_and_no_worker_gets_more_than_its_share(shards: int, cores: int, most: int) -> None:
    workers, threads = dataflow.fleet_size(shards, cores, most)
    slots = cores * threads  # of a worker
    assert 1 <= workers <= most and 1 <= threads <= MAX_THREADS
    if shards > most * cores * MAX_THREADS:  # more than may be in work at once: they take turns
        assert (workers, threads) == (most, MAX_THREADS)
        return
    assert workers * slots >= shards
    assert (workers - 1) * slots < shards, "no worker is idle"
    assert threads == ceil(shards / (cores * most)), "no core has more than it must"
    share = ceil(shards / workers)
    assert min(slots, shards) <= share + max(1, cores - 1)  # slots come in multiples of the cores


@pytest.mark.parametrize(
    ("flag", "name"),
    [
        ("--worker_machine_type=n2d-standard-8", "machine_type"),
        ("--temp_location=gs://other/temp", "temp_location"),
        ("--job_name=mine", "job_name"),
        ("--max_num_workers=5", "max_num_workers"),
        ("--number_of_worker_harness_threads=3", "number_of_worker_harness_threads"),
        ("--setup_file=other/setup.py", "setup_file"),
        ("--sdk_container_image=registry/imageshards:1", "setup_file requirements_file requirements_cache"),
    ],
)
def test_what_is_given_has_no_default_and_an_image_is_run_in_place_of_the_package(flag: str, name: str) -> None:
    assert filled(config()).keys() - filled(config(), flag).keys() >= {*name.split()}
    assert filled(config(), flag).get("sdk_location") == ("container" if "image" in flag else None)


@pytest.mark.parametrize(
    ("more", "flags", "workers", "threads"),
    [
        ({}, (), 32, 1),
        ({"num_shards": 1}, (), 1, 1),
        ({"num_shards": 128}, (), 32, 1),
        ({"num_shards": 130}, (), 17, 2),  # 12 threads would put them on 3 workers
        ({"num_shards": 1000}, (), 32, 8),
        ({"num_shards": 33}, ("--machine_type=n1-highmem-16",), 3, 1),
        ({"num_shards": "train=60,validation=4", "splits": "train=0.9,validation=0.1"}, (), 16, 1),
        ({"num_shards": 8, "splits": "train=0.9,validation=0.1"}, ("--machine_type=n1-highmem-16",), 1, 1),
        ({"num_shards": 10_000}, (), 209, 12),  # more than 32 workers can be given
        ({"num_shards": 10_000}, ("--max_num_workers=32",), None, 12),  # they take turns
        ({"num_shards": 130}, ("--max_num_workers=9",), None, 4),
        ({"num_shards": 130}, ("--max_num_workers=99",), 33, 1),  # others of them would be idle
        ({"num_shards": 130}, ("--number_of_worker_harness_threads=1",), 32, None),
        ({"num_shards": 8}, ("--num_workers=4",), 4, 1),  # as many as at the start
        ({"num_shards": 8}, ("--num_workers=3", "--max_num_workers=4"), 3, 1),
        ({"num_shards": 130}, ("--machine_type=a2-highgpu-1g",), 32, 1),
        ({"num_shards": 130, "layout": "split_class_folders"}, (), 32, 1),  # of each split, and nobody knows how many
        ({"num_shards": "train=9", "splits": "train=0.9,validation=0.1"}, (), 32, 1),
    ],
)
def test_workers_and_threads_are_as_few_as_begin_every_shard(
    more: dict[str, Any], flags: tuple[str, ...], workers: int | None, threads: int | None
) -> None:
    options = filled(config(**more), *flags)
    assert (options.get("max_num_workers"), options.get("number_of_worker_harness_threads")) == (workers, threads)


def printed(*flags: str) -> list[str]:
    options = PipelineOptions([*flags, "--project=p", "--region=europe-west4"]).get_all_options()
    one = config(num_shards=130)
    return dataflow.defaults_text(one, options, dataflow.defaults(one, options)).splitlines()


def test_a_machine_type_that_does_not_tell_its_cores_and_workers_that_would_be_idle_are_named() -> None:
    fix = "; the cores of 'big' aren't known here: set --number_of_worker_harness_threads"
    assert printed("--machine_type=big")[-1] == f"  up to 32 workers{fix}"
    assert printed("--machine_type=big", "--number_of_worker_harness_threads=2")[-1] == "  up to 32 workers"
    *lines, last = printed("--max_num_workers=99")
    assert "  --max_num_workers=33 (not 99: the others would be idle)" in lines
    assert last == "  up to 33 workers of 4 cores, 132 shards at a time; the job has 130 shards"


def test_the_label_tells_jobs_of_one_name_apart(tmp_path: Path) -> None:
    lists = {name: tmp_path / f"{name}.txt" for name in ("a", "moved", "other")}
    for name, text in (("a", "cat/0.jpg"), ("moved", "cat/0.jpg"), ("other", "cat/5.jpg")):
        lists[name].write_text(text)
    of_lists = {name: dataflow.label(checked(config(exclude=file))) for name, file in lists.items()}
    more = ({}, {"seed": 1}, {"output": "gs://b"}, {"input": "gs://c"}, {"plan_only": True})
    labels = {dataflow.label(config(**one)) for one in more} | {*of_lists.values()}
    assert len(labels) == 7 and of_lists["a"] == of_lists["moved"]
    assert dataflow.label(config(fetch_concurrency=3)) in labels, "how it goes about it doesn't count"
    assert dataflow.label(dataclasses.replace(config(), labels=("ant", "bee"))) in labels, "files aren't read for it"


def test_a_job_has_the_defaults_and_without_an_image_the_package_and_its_requirements(cloud: Cloud) -> None:
    job = cloud.submit("package-out", "--num_shards=130")
    (workers,) = job["environment"]["workerPools"]
    assert (workers["machineType"], workers["diskSizeGb"]) == ("e2-standard-4", 50)
    assert (workers["autoscalingSettings"]["maxNumWorkers"], workers["numThreadsPerWorker"]) == (17, 2)
    sent = cloud.read("package-out", "requirements.txt")
    assert sent == (ROOT / "deploy" / "requirements-worker-heic.txt").read_bytes()
    with tarfile.open(fileobj=io.BytesIO(cloud.read("package-out", "workflow.tar.gz"))) as package:
        names = {name.partition("/")[2] for name in package.getnames()}
    more = {"setup.py", "constraints.txt", "deploy/Dockerfile", "deploy/requirements-worker.txt"}
    assert modules() | {"beam_pipeline/py.typed", "beam_pipeline/images/resample.c"} | more <= names
    assert not any(name.startswith("tests/") for name in names)
