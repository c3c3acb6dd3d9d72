"""What must not be believed of a manifest, and what must not be kept of a command line (docs/security.md)."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import reader
from beam_pipeline import schema, storage
from beam_pipeline.cli import job
from beam_pipeline.errors import NotPublishedError
from beam_pipeline.schema.manifest import open_manifest, seal_manifest
from tests import make
from tests.servers import Gcs

OUTSIDE = (
    "../../escaped.txt",
    "/escaped.txt",
    "a/../../escaped.txt",
    "..",
    "a//b",
    "./a",
    "..\\escaped.txt",
    "nul\0",
    "",
)


def sealed(manifest: dict[str, Any], files: dict[str, str]) -> bytes:
    return seal_manifest({**manifest, "files": {**manifest["files"], **files}, "file_sizes": {}})


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_manifest_that_names_a_file_outside_its_folder_is_not_believed(name: str) -> None:
    said = "is outside its folder: don't use this dataset"
    for kind in ("photos", "indexed"):
        published = json.loads((make.ROOT / "tests" / "schema" / "manifests" / f"{kind}.json").read_bytes())
        shards = copy.deepcopy(published)
        next(iter(shards["splits"].values()))["shards"][0]["file"] = name
        files = {**published, "files": {**published["files"], name: "0" * 64}, "file_sizes": {}}
        # `imageshards index` names shards that are anywhere
        for hostile in (files, shards)[: 1 if kind == "indexed" and name.startswith("/") else 2]:
            with pytest.raises(NotPublishedError) as error:
                open_manifest(seal_manifest(hostile), "m")
            assert str(error.value) == f"m names {name!r}, which {said}"


def test_a_copy_of_a_hostile_dataset_writes_nothing(gcs: Gcs, photos: Path, tmp_path: Path) -> None:
    version = make.published(photos, tmp_path / "out")
    bucket, evil = gcs.new_bucket(), b"written where it shouldn't be"
    manifest = sealed(make.manifest(version), {"../../escaped.txt": hashlib.sha256(evil).hexdigest()})
    (version / schema.MANIFEST_FILE).write_bytes(manifest)
    gcs.put_folder(bucket, "a/b", version)
    gcs.put(bucket, "a/b/../../escaped.txt", evil)
    with pytest.raises(NotPublishedError, match="is outside its folder"):
        reader.copy(f"gs://{bucket}/a/b", tmp_path / "x" / "y" / "copy")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("flag", ["input", "output", "manifest", "labels_file"])
def test_a_password_in_a_url_is_refused_and_not_repeated(flag: str, photos: Path, tmp_path: Path) -> None:
    finished = make.job(photos, tmp_path / "out", f"--{flag}", "ftp://me:canary@host/folder")
    assert finished.code == 2
    assert finished.err == (
        f"error: --{flag} '***': leave the password out; credentials come from the store's usual variables\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_password_in_a_manifest_s_row_stops_the_job(photos: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("path,label\nftp://me:canary@host/a.jpg,cat\n")
    finished = make.job(photos, tmp_path / "out", "--layout", "manifest", "--manifest", rows)
    assert finished.code in (1, 2)
    assert "line 2: its path holds a password" in finished.err and "canary" not in finished.err


@pytest.mark.parametrize(
    "url", ["abfs://container@account.dfs.core.windows.net/a", "gs://bucket/a:b@c", "/local/a:b@c"]
)
def test_a_name_with_an_at_sign_is_no_password(url: str) -> None:
    assert not storage.has_password(url)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("--s3_secret_access_key=canary", "--s3_secret_access_key=***"),
        ("--s3_secret_access_key canary --name x", "--s3_secret_access_key *** --name x"),
        ("--azure_connection_string A=b;AccountKey=canary", "--azure_connection_string ***"),
        ("--s3_session_token=canary==", "--s3_session_token=***"),
        ("--input=https://h/a?x=1&sig=canary&token=canary", "--input=https://h/a?x=1&sig=***&token=***"),
        ("--input photos --one_hot", "--input photos --one_hot"),
        ("--split_by key=([a-z]+)", "--split_by key=([a-z]+)"),
        ("", ""),  # `run` from Python
    ],
)
def test_a_kept_command_line_shows_no_secret(given: str, kept: str) -> None:
    assert job.without_secrets(given.split()) == kept.split()


def test_run_json_keeps_no_secret(photos: Path, tmp_path: Path) -> None:
    version = make.published(photos, tmp_path / "out", "--s3_secret_access_key", "canary-8f14", "--s3_verify=canary")
    run = (version / schema.RUN_FILE).read_text()
    assert "canary-8f14" not in run
    assert "--s3_verify=canary" in run
