"""What a plan expects, a finished job says and a server sees agree; dollars are sums that can be done by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from beam_pipeline.cli import cost
from beam_pipeline.cli.cost import Fleet
from beam_pipeline.config import Config
from beam_pipeline.schema.job import Run, UnitPrices
from beam_pipeline.storage.usage import load_prices
from tests import make
from tests.servers import Gcs, Request

NOTE = "list price, without discounts"


def config(input: str = "gs://b/in", output: str = "gs://b/out", **flags: str) -> Config:
    return Config(input=input, output=output, name="photos", **flags)


def billed(requests: list[Request]) -> tuple[int, int]:
    """Operations that list or write, and that read: an upload is one in however many parts, deleting is free."""
    lists = sum(one.listed_prefix is not None for one in requests)
    uploads = sum(one.method == "POST" and "uploadType=" in one.target for one in requests)
    return lists + uploads, sum(one.method in ("GET", "HEAD") for one in requests) - lists


def told(text: str) -> tuple[int, int]:
    """The requests of a plan or a summary."""
    found = re.search(r"; ([\d,]+) requests that read, ([\d,]+) that list or write", text)
    assert found, text
    return int(found[2].replace(",", "")), int(found[1].replace(",", ""))


def test_plan_job_and_server_count_the_same_requests(gcs: Gcs, photos: Path) -> None:
    source, target = gcs.new_bucket(), gcs.new_bucket()
    gcs.put_folder(source, "in", photos)
    places = (f"gs://{source}/in", f"gs://{target}", "--splits", "train=0.7,validation=0.3", "--num_shards", "3")
    plan = make.job(*places, "--plan_only")
    before = len(gcs.requests())
    job = make.job(*places)
    assert (plan.code, job.code) == (0, 0), plan.err + job.err
    seen = billed(gcs.requests()[before:])
    run = json.loads(gcs.get(target, "photos/1.0.0/run.json"))
    assert (run["used"]["lists_and_writes"], run["used"]["reads"]) == told(job.out)
    for counted in (told(plan.out), told(job.out)):
        assert all(abs(ours - theirs) <= 2 for ours, theirs in zip(counted, seen, strict=True)), (counted, seen)
    price = load_prices().at().requests(*told(job.out))
    assert run["dollars"] == {"requests": pytest.approx(price)}
    assert f"  ${price:.4f} for requests: {NOTE} (https://cloud.google.com/storage/pricing" in job.out


def test_a_local_job_has_no_price_and_says_what_it_used(photos: Path, tmp_path: Path) -> None:
    plan, job = (make.job(photos, tmp_path, *more) for more in (("--plan_only",), ()))
    used = json.loads((tmp_path / "photos/1.0.0/run.json").read_text())["used"]
    assert (used["reads"], used["lists_and_writes"]) == (0, 0) and used["cpu_s"] > 0
    images = sum(path.stat().st_size for path in photos.rglob("*.jpg"))
    assert used["bytes_read"] >= 2 * images, "all 40 are in the sample, too"
    for text in (plan.out, job.out):
        assert "CPU-seconds" in text and "$" not in text and "request" not in text, text


def test_a_local_manifest_expects_no_requests(photos: Path, tmp_path: Path) -> None:
    names = sorted(path.relative_to(photos).as_posix() for path in photos.rglob("*.jpg"))
    (tmp_path / "rows.csv").write_text("path,label\n" + "".join(f"{name},{name[:3]}\n" for name in names))
    flags = ("--layout", "manifest", "--manifest", tmp_path / "rows.csv")
    plan = make.job(photos, tmp_path / "out", *flags, "--plan_only")
    assert plan.code == 0, plan.err
    assert "estimated cost" in plan.out and "request" not in plan.out


def test_what_a_plan_expects_to_be_read_is_read(photos: Path, tmp_path: Path) -> None:
    plan, job = (make.job(photos, tmp_path, *more) for more in (("--plan_only",), ()))
    expected, used = (re.search(r"reads? ([\d.]+) (\wB)", one.out) for one in (plan, job))
    assert expected and used and expected[2] == used[2], plan.out + plan.err + job.out + job.err
    assert float(expected[1]) == pytest.approx(float(used[1]), rel=0.05), "a plan and sidecars are read, too"


@pytest.mark.soak
def test_worker_processes_add_to_what_the_job_used(photos: Path, tmp_path: Path) -> None:
    workers = ("--direct_num_workers", "2", "--direct_running_mode", "multi_processing")
    finished = make.job(photos, tmp_path, "--num_shards", "4", *workers)
    assert finished.code == 0, finished.err
    used = json.loads((tmp_path / "photos/1.0.0/run.json").read_text())["used"]
    images = sum(path.stat().st_size for path in photos.rglob("*.jpg"))
    written = sum(path.stat().st_size for path in (tmp_path / "photos/1.0.0").glob("*.tfrecord-*"))
    assert used["bytes_read"] >= images and used["bytes_written"] > written


def test_a_plan_says_what_its_base_saves(photos: Path, tmp_path: Path) -> None:
    make.published(photos, tmp_path)
    plan = make.job(photos, tmp_path, "--version", "1.1.0", "--plan_only")
    assert "  base 1.0.0: about 40 images from it (40 of 40 in the sample are unchanged) save " in plan.out
    assert len(plan.out.splitlines()) - plan.out[: plan.out.index("estimated")].count("\n") <= 5


def test_a_core_hour_of_dataflow_is_a_vcpu_its_memory_and_its_part_of_the_disk() -> None:
    options = {"max_num_workers": 8, "machine_type": "e2-standard-4", "disk_size_gb": 50, "region": "europe-west4"}
    fleet = cost.dataflow_fleet(options)
    prices = cost.prices_of(config(), fleet)
    assert (fleet.cores, fleet.where) == (32, "up to 8 workers of e2-standard-4")
    assert prices.core_hour == pytest.approx(0.056 + 4 * 0.003557 + 12.5 * 0.000054, abs=1e-6)
    memory = {
        kind: cost.prices_of(config(), fleet._replace(machine_type=f"n2-{kind}-4")) for kind in ("highmem", "highcpu")
    }
    custom = cost.prices_of(config(), fleet._replace(machine_type="n2-custom-4-8192")).core_hour
    assert custom == pytest.approx(prices.core_hour - 2 * 0.003557, abs=2e-6), "2 GB a core"
    assert memory["highmem"].core_hour - memory["highcpu"].core_hour == pytest.approx(7 * 0.003557, abs=2e-6)


def test_a_store_that_is_not_googles_has_no_price_without_a_file_of_them(tmp_path: Path) -> None:
    here = Fleet("this machine", 2)
    assert cost.prices_of(config("s3://b/in", "s3://b/out"), here) == UnitPrices()
    assert cost.prices_of(config(str(tmp_path), "gs://b/out"), here).class_b_per_1000 == 0.0004


def test_a_bill_is_dataflows_metrics_by_prices() -> None:
    counts = {"TotalVcpuTime": 18.2 * 3600, "TotalMemoryUsage": 72_800 * 3600, "TotalPdUsage": 227.5 * 3600}
    # 18.2 · 0.056 = 1.0192, 72.8 · 0.003557 = 0.2590, 227.5 · 0.000054 = 0.0123
    assert cost.bill_text(config(), "us-central1", counts) == f"$1.29 ({NOTE})"


def test_a_version_of_an_older_release_has_no_line_of_its_cost() -> None:
    assert cost.spent_text(Run(images=3)) == []
