"""What is checked before a job is submitted: a line each, exit code 0, or the one line of what fails."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import apache_beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from beam_pipeline.cli import preflight, service
from beam_pipeline.cli.job import Job
from beam_pipeline.config import Config
from beam_pipeline.conversion.versions import versions
from beam_pipeline.errors import OTHER_IMAGE, ImageShardsError, UsageError
from beam_pipeline.schema import canonical_json
from tests import make
from tests.dataflow.api import RESET, FakeDataflow, Step
from tests.dataflow.cloud import Cloud
from tests.servers import Answer, Gcs, telling

HERE = f"Python {sys.version_info.major}.{sys.version_info.minor}, Beam {apache_beam.__version__}" + "".join(
    f", {name} {versions()[name]}" for name in ("imageshards", "pillow", "pillow_heif")
)


def checked(cloud: Cloud, *flags: str) -> tuple[int, list[str]]:
    """Exit code and lines of a command that checks only."""
    finished = make.run(*cloud.flags, "--preflight", *flags)
    assert finished.out == ""
    return finished.code, finished.err.splitlines()


def checked_apart(cloud: Cloud, *flags: str, **environment: str) -> tuple[int, list[str]]:
    """The same in a process with other variables."""
    finished = cloud.run("--preflight", *flags, environment=environment)
    return finished.returncode, finished.stderr.splitlines()


def test_everything_is_checked_a_line_each_and_nothing_is_left_behind(cloud: Cloud) -> None:
    installed = "workers install setup.py and requirements-worker-heic.txt"
    source, output = cloud.input(), f"gs://{cloud.gcs.new_bucket()}"
    code, lines = checked(cloud, f"--input={source}", f"--output={output}")
    slow = "but is in us-central1 and the job in europe-west4: traffic between them costs and is slow"
    assert (code, [line for line in lines if not line.startswith(("Dataflow job ", "  "))]) == (
        0,
        [
            "ok: credentials of me@example.com, project my-project; the job runs in project my-project",
            f"warning: bucket {output} can be written to, {slow}",
            f"warning: bucket {source} is there, {slow}",
            f"ok: {installed}; a worker stops the job unless it has {HERE}",
            "ok: the Dataflow API answers; no job imageshards-photos-1-0-0 runs",
            f"ok: input {source} has images",
            "ok: HEIC images can be decoded",
            f"ok: output {output}/photos/1.0.0 is free",
            "checked; nothing was started",
        ],
    )
    assert cloud.gcs.names(output.removeprefix("gs://")) == []


def test_what_is_left_out_is_printed_before_the_checks(cloud: Cloud) -> None:
    source, bucket = cloud.input(), cloud.gcs.new_bucket()
    more = ("--num_shards=130", "--no_use_public_ips")
    _, lines = checked(cloud, f"--input={source}", f"--output=gs://{bucket}/sets", *more)
    assert lines[:14] == [
        "Dataflow job imageshards-photos-1-0-0 in project my-project, region europe-west4; defaults:",
        "  --job_name=imageshards-photos-1-0-0",
        f"  --temp_location=gs://{bucket}/_dataflow/temp",
        f"  --staging_location=gs://{bucket}/_dataflow/staging",
        "  --machine_type=e2-standard-4",
        "  --disk_size_gb=50",
        "  --autoscaling_algorithm=THROUGHPUT_BASED",
        "  --max_num_workers=17",
        "  --number_of_worker_harness_threads=2",
        f"  --setup_file={make.ROOT}/setup.py",
        f"  --requirements_file={make.ROOT}/deploy/requirements-worker-heic.txt",
        "  --requirements_cache=skip",
        "  136 slots on up to 17 workers of 4 cores, for 130 shards",
        "ok: credentials of me@example.com, project my-project; the job runs in project my-project",
    ]
    needs = "without --sdk_container_image workers need Cloud NAT to install packages"
    assert f"warning: --no_use_public_ips: {needs}" in lines


def test_buckets_in_the_job_s_region_are_fine_and_a_template_asks_no_api(cloud: Cloud, tmp_path: Path) -> None:
    source, output = cloud.input(), f"gs://{cloud.gcs.new_bucket()}"
    more = ("--region=us-central1", f"--template_location={tmp_path}/template")
    code, lines = checked(cloud, f"--input={source}", f"--output={output}", *more)
    assert code == 0
    assert f"ok: bucket {output} can be written to, in us-central1" in lines
    assert f"ok: bucket {source} is there, in us-central1" in lines
    assert not [line for line in lines if "Dataflow API" in line]


def test_an_image_and_an_unfinished_job_are_told(cloud: Cloud) -> None:
    source, bucket = cloud.input(), cloud.gcs.new_bucket()
    flags = (f"--input={source}", f"--output=gs://{bucket}", "--sdk_container_image=registry/imageshards:1")
    config = Config(input=source, output=f"gs://{bucket}", name="photos")
    cloud.gcs.put(bucket, "photos/_state/1.0.0/plan.json", canonical_json({"configuration": config.fingerprint()}))
    code, lines = checked(cloud, *flags)
    assert code == 0
    assert f"ok: image registry/imageshards:1; a worker stops the job unless it has {HERE}" in lines
    assert f"ok: output gs://{bucket}/photos/1.0.0 has an unfinished job; it will be resumed" in lines


def test_an_unfinished_job_with_other_flags_is_told_before_workers_meet_it(cloud: Cloud) -> None:
    source, bucket = cloud.input(), cloud.gcs.new_bucket()
    config = Config(input=source, output=f"gs://{bucket}", name="photos", image_size=32, seed=3)
    cloud.gcs.put(bucket, "photos/_state/1.0.0/plan.json", canonical_json({"configuration": config.fingerprint()}))
    flags = (f"--input={source}", f"--output=gs://{bucket}", "--seed=3")
    code, lines = checked(cloud, *flags)
    what = f"gs://{bucket}/photos/1.0.0 has an unfinished job with other flags (--image_size)"
    fix = "give the same, or --restart discards what it has written"
    assert (code, lines[-1]) == (2, f"error: --output 'gs://{bucket}': {what}: {fix}")
    code, lines = checked(cloud, *flags, "--restart")
    again = f"ok: output gs://{bucket}/photos/1.0.0 starts over; existing files will be deleted"
    assert (code, lines[-2]) == (0, again)


@pytest.mark.parametrize("flag", ["--input", "--output", "--temp_location", "--staging_location"])
def test_a_missing_bucket_is_named_with_its_flag(cloud: Cloud, flag: str) -> None:
    given = {"--input": cloud.input(), "--output": f"gs://{cloud.gcs.new_bucket()}", flag: "gs://no-such-bucket/at-all"}
    code, lines = checked(cloud, *(f"{name}={value}" for name, value in given.items()))
    fix = "there is no such bucket; make it in region europe-west4, or correct the name"
    assert (code, lines[-1]) == (2, f"error: {flag} 'gs://no-such-bucket': {fix}")


def test_a_bucket_that_may_not_be_written_to_ends_it(cloud: Cloud) -> None:
    with telling(Answer(403, words="me@example.com may not")) as server:
        output = f"--output=gs://out-{server.server_port}"
        code, lines = checked_apart(cloud, "--input=gs://in", output, STORAGE_EMULATOR_HOST=server.url)
    assert code == 1
    assert lines[-1].startswith(f"error: {output.replace('=', ' ')}/photos/_state/1.0.0/preflight-")
    assert "(403: " in lines[-1] and "me@example.com may not" in lines[-1]
    assert lines[-1].endswith("; nothing was started")


LOG_IN = "gcloud auth application-default login"


@pytest.mark.parametrize(
    ("file", "error"),
    [
        ("", f"there are no Google credentials here: {LOG_IN}, or set GOOGLE_APPLICATION_CREDENTIALS"),
        (
            "gone.json",
            "Google's credentials can't be used (File gone.json was not found); correct GOOGLE_APPLICATION_CREDENTIALS",
        ),
    ],
)
def test_without_credentials_nothing_is_asked(cloud: Cloud, tmp_path: Path, file: str, error: str) -> None:
    nobody = {"NO_GCE_CHECK": "true", "HOME": str(tmp_path), "GOOGLE_APPLICATION_CREDENTIALS": file}
    code, lines = checked_apart(cloud, "--input=gs://in", "--output=gs://out", **nobody)
    assert (code, lines[-1]) == (1, f"error: {error}; nothing was started")
    assert not [line for line in lines if line.startswith("ok: ")]


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, f"Google's credentials can't be used ({{}}); log in again: {LOG_IN}"),
        (503, "Google's credentials can't be fetched now ({})"),
    ],
)
def test_credentials_that_are_refused_and_those_that_cannot_be_fetched_are_told_apart(
    cloud: Cloud, key: Path, tmp_path: Path, status: int, error: str
) -> None:
    with telling(Answer(status, words="the server's words")) as server:
        file = tmp_path / "key.json"
        file.write_text(json.dumps({**json.loads(key.read_text()), "token_uri": f"{server.url}/token"}))
        given = {"GOOGLE_APPLICATION_CREDENTIALS": str(file)}
        code, lines = checked_apart(cloud, "--input=gs://in", "--output=gs://out", **given)
    before, after = f"error: {error}; nothing was started".split("{}")
    assert code == 1
    assert lines[-1].startswith(before) and lines[-1].endswith(after) and "the server's words" in lines[-1]


def test_without_a_network_credentials_are_not_called_refused(cloud: Cloud, key: Path, tmp_path: Path) -> None:
    file = tmp_path / "key.json"
    file.write_text(json.dumps({**json.loads(key.read_text()), "token_uri": "http://127.0.0.1:9/token"}))
    given = {"GOOGLE_APPLICATION_CREDENTIALS": str(file)}
    code, lines = checked_apart(cloud, "--input=gs://in", "--output=gs://out", **given)
    line = "error: Google's API can't be reached (TransportError); nothing was started"
    assert (code, lines[-1]) == (1, line)


def test_a_user_s_requests_count_towards_the_quota_of_the_job_s_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "user.json"
    user = {"type": "authorized_user", "client_id": "a", "client_secret": "b", "refresh_token": "c"}
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    for own, quota in ({}, "my-project"), ({"quota_project_id": "mine"}, "mine"):
        file.write_text(json.dumps({**user, **own}))
        assert service.credentials("my-project")[0].quota_project_id == quota


def test_the_dataflow_api_is_asked_for_a_job_of_the_name(
    cloud: Cloud, api: FakeDataflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = (f"--input={cloud.input()}", f"--output=gs://{cloud.gcs.new_bucket()}", f"--dataflow_endpoint={api.url}")
    api.steps = [Step("RUNNING")]
    api.create({"name": "imageshards-photos-1-0-0"})
    code, lines = checked(cloud, *flags)
    assert code == 0
    assert (
        "ok: the Dataflow API answers; job imageshards-photos-1-0-0 is already running: 2026-11-23_00_00_00-1" in lines
    )
    api.list_errors = [403]
    refused = "give your account roles/dataflow.developer and enable the Dataflow API; nothing was started"
    code, lines = checked(cloud, *flags)
    assert (code, lines[-1]) == (1, f"error: the Dataflow API answers 403 (the API's own words); {refused}")
    # Whoever submits waits for what passes.
    api.list_errors = [RESET]
    code, lines = checked(cloud, *flags)
    assert code == 0 and "warning: Google's API can't be reached (ConnectionError)" in lines
    with telling(Answer(200, words="<html>Log in</html>")) as server:
        url = server.url.replace("127.0.0.1", "localhost")
        code, lines = checked(cloud, *flags[:2], f"--dataflow_endpoint={url}")
    assert code == 0 and "warning: the Dataflow API answers with something that is not JSON" in lines


def test_another_cloud_s_input_is_looked_at_once(cloud: Cloud) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
    with telling(Answer(404, code="NoSuchBucket")) as server:
        output = f"--output=gs://{cloud.gcs.new_bucket()}"
        code, lines = checked_apart(cloud, "--input=s3://in", output, AWS_ENDPOINT_URL=server.url, **keys)
    assert (code, lines[-2]) == (2, "ok: the Dataflow API answers; no job imageshards-photos-1-0-0 runs")
    assert lines[-1].startswith("error: --input 's3://in'")
    assert not [line for line in lines if "bucket s3://" in line]


def test_a_bucket_that_may_not_be_looked_at_is_not_called_there(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(input="gs://in", output="gs://out", name="photos", io_deadline=3)  # a store of its own
    with telling(Answer(403)) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        line = preflight._bucket(config, "--input", "gs://in", "gs://in", False, "europe-west4")
    lacks = "this account lacks storage.buckets.get"
    assert line == f"warning: bucket gs://in can't be looked at: {lacks}"


@pytest.mark.parametrize(
    ("pins", "why"),
    [
        ("pillow==12.1.1\npillow-heif==1.8.1\n", "pillow 12.1.1, this launcher {pillow}"),
        ("pillow=={pillow}\n", "pillow_heif missing, this launcher {pillow_heif}"),
        ("Pillow == {pillow}\nPillow.Heif==0.1; python_version > '3'", "pillow_heif 0.1, this launcher {pillow_heif}"),
    ],
)
def test_requirements_with_other_codecs_than_the_launchers_are_refused(
    cloud: Cloud, pins: str, why: str, tmp_path: Path
) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text(pins.format_map(versions()))
    output = f"gs://{cloud.gcs.new_bucket()}"
    code, lines = checked(cloud, f"--input={cloud.input()}", f"--output={output}", f"--requirements_file={file}")
    what = f"it has {why.format_map(versions())}; install constraints.txt's here: make setup"
    assert (code, lines[-1]) == (2, f"error: --requirements_file '{file}': {what}")


def test_an_input_with_heic_images_needs_pillow_heif_here(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = {name: version for name, version in versions().items() if name != "pillow_heif"}
    monkeypatch.setattr(preflight, "versions", lambda: without)
    config = Config(input=photos, output=tmp_path, name="photos")
    none = "ok: no HEIC image among the first 1,000 files (a later one would be rejected: no pillow-heif here)"
    assert none in preflight.check_dataset(config)
    phone = tmp_path / "phone"
    (phone / "cat").mkdir(parents=True)
    (phone / "cat" / "IMG_1.HEIC").touch()
    fix = "pip install '.[heic]' here, or leave heic and heif out of --extensions"
    with pytest.raises(UsageError, match="without pillow-heif") as refused:
        list(preflight.check_dataset(dataclasses.replace(config, input=str(phone))))
    what = "'cat/IMG_1.HEIC' is HEIC, which can't be decoded without pillow-heif"
    assert str(refused.value) == f"--input '{phone}': {what}; {fix}"
    assert none in preflight.check_dataset(dataclasses.replace(config, input=str(phone), extensions="jpg"))


def test_a_local_job_is_checked_too(photos: Path, tmp_path: Path) -> None:
    finished = make.job(photos, tmp_path / "out", "--preflight")
    assert finished.code == 0
    assert f"ok: output {tmp_path}/out/photos/1.0.0 is free" in finished.err.splitlines()
    assert make.files(tmp_path) == {}
    version = make.published(photos, tmp_path / "done")
    finished = make.job(photos, tmp_path / "done", "--preflight")
    assert finished.out.startswith(f"already published {version}")


@pytest.mark.parametrize(
    ("here", "said"),
    [
        ({"pillow": "12.1.1"}, "pillow {pillow}, the launcher 12.1.1"),
        ({"pillow": "12.1.1", "zlib": "1"}, "pillow {pillow}, the launcher 12.1.1 (1 other version differs)"),
        ({"imageshards": "0.1.0 (12345678)"}, "imageshards {imageshards}, the launcher 0.1.0 (12345678)"),
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
        Job(None, config).write(dataclasses.replace(config, launcher=launcher))
    assert str(refused.value) == f"the worker has {said.format_map(versions())}: {OTHER_IMAGE}"
    assert make.files(tmp_path) == {}


def test_workers_of_a_cluster_are_told_the_launchers_versions(photos: Path, tmp_path: Path) -> None:
    config = Config(input=photos, output=tmp_path / "out", name="photos")
    cluster = PipelineOptions(["--runner=PortableRunner", "--job_endpoint=embed"])
    assert Job(cluster, config).configured(config).launcher == versions()
    assert Job(None, config).configured(config).launcher is None


@pytest.mark.parametrize(
    ("location", "region", "contains"),
    [
        ("europe-west4", "europe-west4", True), ("europe-west1", "europe-west4", False), ("eu", "europe-west4", True),
        ("eur4", "europe-west4", True), ("eur4", "europe-west1", False), ("us", "us-central1", True),
        ("us", "europe-west4", False), ("nam4", "us-central1", True), ("nam4", "us-west1", False),
        ("asia1", "asia-northeast1", True),
    ],
)  # fmt: skip
def test_a_multi_region_contains_the_regions_of_its_continent_and_a_pair_its_own(
    location: str, region: str, contains: bool
) -> None:
    assert preflight._contains(location, region) is contains


def test_a_bucket_says_in_which_region_it_is(gcs: Gcs) -> None:
    from beam_pipeline.storage.gs import GoogleStorage

    assert GoogleStorage(5).regions(f"gs://{gcs.new_bucket()}/folder") == {"us-central1"}
