"""What is checked before a job is submitted: one line each, exit code 0, or the one line of what fails."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import apache_beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from beam_pipeline.cli import dataflow, preflight, service
from beam_pipeline.cli.job import Job
from beam_pipeline.config import Config
from beam_pipeline.conversion.versions import versions
from beam_pipeline.errors import OTHER_IMAGE, ImageShardsError, StorageError
from beam_pipeline.schema.job import document_bytes
from tests import make
from tests.dataflow.cloud import IMAGE, Cloud
from tests.servers import RESET, Answer, telling

JOB = "imageshards-photos-1-0-0"
HERE = f"Python {sys.version_info.major}.{sys.version_info.minor}, Beam {apache_beam.__version__}" + "".join(
    f", {name} {versions()[name]}" for name in ("imageshards", "pillow", "pillow_heif")
)


def checked(cloud: Cloud, *flags: str, **variables: str) -> tuple[int, list[str]]:
    """Exit code and lines of a command that checks only."""
    finished = cloud.run("--preflight", *flags, **variables)
    assert finished.out == ""
    return finished.code, finished.err.splitlines()


def test_what_is_left_out_is_told_then_everything_is_checked_a_line_each_and_nothing_is_left_behind(
    cloud: Cloud,
) -> None:
    names = {"here": HERE, "root": make.ROOT, **vars(cloud)}
    told = Path(__file__).with_name("preflight.txt").read_text().format_map(names).splitlines()
    assert checked(cloud, "--num_shards=130", "--no_use_public_ips") == (0, told)
    assert cloud.gcs.names(cloud.bucket) == []


def test_buckets_in_the_job_s_region_and_an_image_are_fine_and_a_template_asks_no_api(cloud: Cloud) -> None:
    code, lines = checked(cloud, "--region=us-central1", IMAGE, "--template_location=/templates/photos")
    assert (code, [line for line in lines if "Dataflow API" in line or line.startswith("warning")]) == (0, [])
    assert f"ok: bucket gs://{cloud.bucket} is writable, in us-central1" in lines
    assert f"ok: bucket {cloud.source} exists, in us-central1" in lines
    assert f"ok: image registry/image:1, not checked here; a worker stops the job unless it has {HERE}" in lines


OTHER_FLAGS = (
    "error: --output '{0.output}': {0.version} has an unfinished job with other flags (--image_size): "
    "use the same flags, or discard its shards with --restart"
)
STARTS_OVER = "ok: output {0.version} starts over: its existing files will be deleted"


@pytest.mark.parametrize(
    ("planned", "flags", "code", "told"),
    [
        ({}, (), 0, "ok: output {0.version} has an unfinished job; it will be resumed"),
        ({"image_size": 32}, (), 2, OTHER_FLAGS),
        ({"image_size": 32}, ("--restart",), 0, STARTS_OVER),
    ],
)
def test_an_unfinished_job_is_told_before_workers_meet_it(
    cloud: Cloud, planned: dict[str, Any], flags: tuple[str, ...], code: int, told: str
) -> None:
    config = Config(input=cloud.source, output=cloud.output, name="photos", seed=3, **planned)
    plan = document_bytes(make.plan_of(configuration=config.fingerprint()))
    cloud.gcs.put(cloud.bucket, "datasets/photos/_state/1.0.0/plan.json", plan)
    found, lines = checked(cloud, "--seed=3", *flags)
    assert (found, lines[-1 if code else -2]) == (code, told.format(cloud))


@pytest.mark.parametrize("flag", ["--input", "--output", "--temp_location", "--staging_location"])
def test_a_missing_bucket_is_named_with_its_flag(cloud: Cloud, flag: str) -> None:
    code, lines = checked(cloud, f"{flag}=gs://no-such-bucket/at-all")
    fix = "there is no such bucket; create it in region europe-west4, or correct the name"
    assert (code, lines[-1]) == (2, f"error: {flag} 'gs://no-such-bucket': {fix}")


def test_a_bucket_that_may_not_be_written_to_ends_it(cloud: Cloud) -> None:
    with telling(Answer(403, words="me@example.com may not")) as server:
        code, lines = checked(cloud, STORAGE_EMULATOR_HOST=server.url)
    place = f"--output {cloud.output}/photos/_state/1.0.0/preflight-"
    assert code == 1
    assert re.fullmatch(rf"error: {place}.*\(403: .*me@example.com may not.*; nothing was started", lines[-1])


KEY = "GOOGLE_APPLICATION_CREDENTIALS"
LOG_IN = f"run gcloud auth application-default login, or set {KEY}"


@pytest.mark.parametrize(
    ("file", "error"),
    [
        ("", f"there are no Google credentials here; {LOG_IN}"),
        ("gone.json", f"Google's credentials can't be used (File gone.json was not found); correct {KEY}"),
    ],
)
def test_without_credentials_nothing_is_asked(cloud: Cloud, tmp_path: Path, file: str, error: str) -> None:
    code, lines = checked(cloud, NO_GCE_CHECK="true", HOME=str(tmp_path), **{KEY: file})
    assert (code, lines[-1]) == (1, f"error: {error}; nothing was started")
    assert not [line for line in lines if line.startswith("ok: ")]


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, rf"Google's credentials can't be used \(.*the server's words.*\); correct {KEY}"),
        (None, r"Google's API can't be reached \(TransportError\)"),
    ],
)
def test_credentials_that_are_refused_and_those_that_cannot_be_fetched_are_told_apart(
    cloud: Cloud, tmp_path: Path, status: int | None, error: str
) -> None:
    file = tmp_path / "key.json"
    with telling(Answer(status or 0, words="the server's words")) as server:
        url = f"{server.url}/token" if status else "http://127.0.0.1:9/token"  # no network
        file.write_text(json.dumps({**json.loads(cloud.key.read_text()), "token_uri": url}))
        code, lines = checked(cloud, **{KEY: str(file)})
    assert code == 1
    assert re.fullmatch(f"error: {error}; nothing was started", lines[-1])


def test_a_user_s_requests_count_towards_the_quota_of_the_job_s_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "user.json"
    user = {"type": "authorized_user", "client_id": "a", "client_secret": "b", "refresh_token": "c"}
    monkeypatch.setenv(KEY, str(file))
    for own, quota in ({}, "my-project"), ({"quota_project_id": "mine"}, "mine"):
        file.write_text(json.dumps({**user, **own}))
        assert service.credentials("my-project")[0].quota_project_id == quota


def test_the_dataflow_api_is_asked_for_a_job_of_the_name(cloud: Cloud) -> None:
    config = make.parsed(cloud.flags)[0]
    cloud.api.create({"name": JOB, "labels": {dataflow.LABEL: dataflow.label(config)}})
    code, lines = checked(cloud)
    assert code == 0
    assert f"ok: the Dataflow API answers; job {JOB} is already running: 2026-11-23_00_00_00-1" in lines
    cloud.api.list_errors = [RESET, 503]
    assert checked(cloud)[0] == 0, "what passes is waited for"
    with telling(Answer(200, words="<html>Log in</html>")) as server:
        code, lines = checked(cloud, f"--dataflow_endpoint={server.url.replace('127.0.0.1', 'localhost')}")
    no_json = "error: the Dataflow API's answer is not JSON; is it a proxy's?; nothing was started"
    assert (code, lines[-1]) == (1, no_json)


def test_a_bucket_that_may_not_be_looked_at_has_no_known_region_and_nothing_can_be_staged_to_it(cloud: Cloud) -> None:
    config = Config(input="gs://in", output="gs://out", name="photos")
    options = {"region": "europe-west4", "staging_location": "gs://out/_dataflow"}
    with telling(Answer(403)) as server, cloud.environment(STORAGE_EMULATOR_HOST=server.url):
        line = preflight._bucket(config, options, "--input", "gs://in", "gs://in", False)
        with pytest.raises(StorageError) as refused:
            preflight._bucket(config, options, "--output", "gs://out", "gs://out", False)
    unknown = "its region is unknown: this account lacks storage.buckets.get"
    assert line == f"warning: bucket gs://in exists, but {unknown}"
    fix = "give this account roles/storage.legacyBucketReader on gs://out; nothing was started"
    assert str(refused.value) == f"gs://out can't be staged to without storage.buckets.get; {fix}"


@pytest.mark.parametrize(
    ("pins", "why"),
    [
        ("pillow=={pillow}\n", "pillow_heif missing, this launcher {pillow_heif}"),
        ("Pillow == {pillow}\nPillow.Heif==0.1; python_version > '3'", "pillow_heif 0.1, this launcher {pillow_heif}"),
    ],
)
def test_requirements_with_other_codecs_than_the_launchers_are_refused(
    cloud: Cloud, pins: str, why: str, tmp_path: Path
) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text(pins.format_map(versions()))
    code, lines = checked(cloud, f"--requirements_file={file}")
    what = f"it has {why.format_map(versions())}; install its version here, or change it to this one"
    assert (code, lines[-1]) == (2, f"error: --requirements_file '{file}': {what}")


def test_a_local_job_is_checked_too(photos: Path, tmp_path: Path) -> None:
    finished = make.job(photos, tmp_path / "out", "--preflight")
    assert finished.code == 0
    assert f"ok: output {tmp_path}/out/photos/1.0.0 is empty" in finished.err.splitlines()
    assert list(tmp_path.iterdir()) == []
    version = make.published(photos, tmp_path / "done")
    finished = make.job(photos, tmp_path / "done", "--preflight")
    assert finished.out.startswith(f"already published {version}")


@pytest.mark.parametrize(
    ("here", "said"),
    [
        ({"pillow": "12.1.1", "zlib": "1"}, "pillow {pillow}, the launcher 12.1.1 (1 other version differs)"),
        ({"extra": "1"}, "no extra, the launcher 1"),
        ({"pillow_heif": None}, "pillow_heif {pillow_heif}, the launcher none"),
    ],
)
def test_a_worker_with_other_versions_than_the_launchers_writes_nothing(
    here: dict[str, str | None], said: str, photos: Path, tmp_path: Path
) -> None:
    config = Config(input=photos, output=tmp_path / "out", name="photos", image_size=24)
    launcher = {name: version for name, version in {**versions(), **here}.items() if version is not None}
    with pytest.raises(ImageShardsError) as refused:
        Job(None, config).write(config.in_run(launcher=launcher))
    assert str(refused.value) == f"the worker has {said.format_map(versions())}: {OTHER_IMAGE}"
    assert make.files(tmp_path) == {}


def test_workers_of_a_cluster_are_told_the_launchers_versions(photos: Path, tmp_path: Path) -> None:
    config = Config(input=photos, output=tmp_path / "out", name="photos")
    cluster = PipelineOptions(["--runner=PortableRunner", "--job_endpoint=embed"])
    assert Job(cluster, config).configured(config).context.launcher == versions()
    assert Job(None, config).configured(config).context.launcher is None


@pytest.mark.parametrize(
    ("location", "region", "contains"),
    [
        ("europe-west4", "europe-west4", True), ("europe-west1", "europe-west4", False), ("eu", "europe-west4", True),
        ("eur4", "europe-west4", True), ("eur4", "us-east1", False), ("us", "us-central1", True),
        ("us", "europe-west4", False), ("nam4", "us-central1", True), ("nam4", "europe-west4", False),
        ("asia1", "asia-northeast1", True),
    ],
)  # fmt: skip
def test_a_location_of_several_regions_is_taken_for_its_continent(location: str, region: str, contains: bool) -> None:
    assert preflight._contains(location, region) is contains
