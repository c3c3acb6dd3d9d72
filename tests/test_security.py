"""Names of a bucket, a folder or a manifest stay data; no manifest leads out of its folder; no secret is kept
(docs/security.md)."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

import imageshards
from beam_pipeline import schema, storage
from beam_pipeline.cli import job
from beam_pipeline.errors import NotPublishedError
from beam_pipeline.schema.manifest import parse_manifest, seal_manifest
from tests import make
from tests.servers import Gcs

ROOT = make.ROOT
VERSION = "photos/1.0.0"
# Everything that a version may hold; no part of a name comes from the input but a split, which is a-z, 0-9 and _.
OURS = re.compile(
    r"photos-[a-z][a-z0-9_]*\.tfrecord-\d{5}-of-\d{5}"
    r"|index/photos-[a-z][a-z0-9_]*\.tfrecord-\d{5}-of-\d{5}\.(idx|records\.npy)|index/[a-z][a-z0-9_]*\.runs\.npy"
    r"|class\.labels\.txt|features\.json|dataset_info\.json|rejects\.jsonl|manifest\.json|run\.json|report\.html"
)
# Below one class folder of a bucket: where would a careless program write these, and what would a shell make of them?
# fmt: off
HOSTILE_NAMES = (
    "../../../escaped.jpg", "a../../../escaped.jpg", "/etc/escaped.jpg", "a\\..\\..\\escaped.jpg", "a//b.jpg",
    "%2e%2e%2fescaped.jpg", "$(touch escaped).jpg", "`touch escaped`.jpg", "; touch escaped;.jpg",
    "| touch escaped.jpg", "-rf.jpg", "--overwrite.jpg", "<script>alert(1)</script>.jpg", "{0}%s%n.jpg",
    "\u202egpj.exe.jpg", "bell\x07 escape\x1b[31m.jpg", "'\"\t.jpg",
)
# Folder names, and so labels.
HOSTILE_LABELS = (
    "..", "up\\..\\..", "C:", "~root", "$(touch escaped)", "-rf", "--output=x", "<b>bold</b>", "%2e%2e",
    "a&b,c:d", "nül",
)
# fmt: on


def assert_confined(written: Iterable[str], output: str = "out") -> None:
    """Only the published version was written next to the input, and in it only names of ours."""
    new = [name for name in written if not name.startswith("in/")]
    prefix = f"{output}/{VERSION}/"
    assert new
    assert not [name for name in new if not (name.startswith(prefix) and OURS.fullmatch(name[len(prefix) :]))]


@pytest.fixture
def hostile_bucket(gcs: Gcs) -> tuple[str, set[str]]:
    """A bucket with pictures under hostile names and labels, some beside the input; its name, the input's images."""
    bucket = gcs.new_bucket()
    names = [f"cat/{name}" for name in HOSTILE_NAMES] + [f"{label}/a.jpg" for label in HOSTILE_LABELS]
    for number, name in enumerate(names):
        gcs.put(bucket, f"in/{name}", make.encoded(make.picture(seed=number)))
    return bucket, {name for name in names if not name.startswith(".") and "/." not in name}  # others are hidden


def test_object_names_never_leave_the_output(
    gcs: Gcs, hostile_bucket: tuple[str, set[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, names = hostile_bucket
    root = tmp_path / "a" / "b" / "c"
    root.mkdir(parents=True)
    monkeypatch.chdir(root)
    version = make.published(f"gs://{bucket}/in", root / "out", "--splits", "train=0.5,validation=rest")
    assert make.manifest(version)["records"] == len(names)
    records = b"".join(shard.read_bytes() for shard in make.shard_files(version))
    assert not [name for name in names if name.encode() not in records]
    assert_confined(make.files(tmp_path), "a/b/c/out")
    before = gcs.names(bucket)
    finished = make.job(f"gs://{bucket}/in", f"gs://{bucket}/out")
    assert finished.code == 0, finished.err
    assert_confined(set(gcs.names(bucket)) - set(before))


def test_a_job_asks_of_its_buckets_only_what_its_roles_allow(gcs: Gcs, photos: Path) -> None:
    source, target = gcs.new_bucket(), gcs.new_bucket()
    gcs.put_folder(source, "in", photos)
    before = len(gcs.requests())
    finished = make.job(f"gs://{source}/in", f"gs://{target}/out")
    assert finished.code == 0, finished.err
    asked = {
        (request.method, bucket, bool(re.search(rf"/b/{bucket}/o([/?]|$)", request.target)))
        for request in gcs.requests()[before:]
        for bucket in (source, target)
        if f"/b/{bucket}" in request.target
    }
    assert {(method, of_objects) for method, bucket, of_objects in asked if bucket == source} == {("GET", True)}
    methods = {(method, of_objects) for method, bucket, of_objects in asked if bucket == target}
    assert {("GET", True), ("POST", True), ("DELETE", True)} <= methods
    assert methods <= {("GET", True), ("POST", True), ("PUT", True), ("DELETE", True)}
    assert not [one for one in gcs.requests()[before:] if re.search(r"/(acl|iam)\b|rewriteTo|copyTo", one.target)]


def manifest_job(tmp_path: Path, *rows: dict[str, str]) -> make.Finished:
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "in" / "rows.jsonl").write_text(lines)
    more = ("--layout", "manifest", "--manifest", tmp_path / "in" / "rows.jsonl", "--max_reject_fraction", "0.9")
    return make.job(tmp_path / "in", tmp_path / "out", *more)


def test_a_manifest_s_labels_are_only_ever_content(tmp_path: Path) -> None:
    labels = sorted({"../../up", "/etc", "a/b", *HOSTILE_LABELS, "nul\x00", "\x1b[31m"})
    make.class_folders(tmp_path / "in", {"cat": len(labels)})
    rows = [{"path": f"cat/{number:04d}.jpg", "label": label} for number, label in enumerate(labels)]
    finished = manifest_job(tmp_path, *rows)
    assert finished.code == 0, finished.err
    assert make.manifest(tmp_path / "out" / VERSION)["classes"] == labels
    assert_confined(make.files(tmp_path))


# A name that turns a terminal red, and one that titles its window.
ESCAPES = ("\x1b[31mred", "\x9b31mred", "\x1b]0;title\x07")


@pytest.mark.parametrize("name", ESCAPES)
def test_no_name_reaches_a_terminal_as_an_escape_sequence(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    make.class_folders(tmp_path / "in", {"cat": 3})
    (tmp_path / "in" / "cat" / f"x.{name}").touch()
    finished = make.job(tmp_path / "in", tmp_path / "out")
    shown = repr(name)[1:-1]
    assert f"1 file skipped: not an image suffix (.{shown} 1)" in finished.out
    version = tmp_path / "out" / VERSION
    (shard,) = make.shard_files(version)
    shutil.copyfile(shard, tmp_path / f"{name}.tfrecord")
    flipped = tmp_path / f"{name} flipped.tfrecord"
    shutil.copyfile(shard, flipped)
    make.flip_byte(flipped, -6)
    manifest = make.manifest(version)
    manifest["files"][name] = "0" * 64
    (version / "manifest.json").write_bytes(seal_manifest(manifest))
    for command, said in (
        (["verify", str(version)], f"{version}/{shown}: the file is missing"),
        (["info", "--hash", str(version)], f"{version}/{shown} is missing"),
        (["index", f"{tmp_path}/*.tfrecord", "--out", str(tmp_path / "index")], "5 records of 6 images"),
    ):
        imageshards.main(command)
        out, err = capsys.readouterr()
        assert said in out + err
        assert "".join((out + err).split("\n")).isprintable()
    (left_out,) = caplog.messages
    assert left_out.startswith(f"left out: {tmp_path}/{shown} flipped.tfrecord: record 2 at byte ")


def test_what_a_manifest_s_path_reads_beside_the_input_never_shows(tmp_path: Path) -> None:
    make.class_folders(tmp_path / "in", {"cat": 3})
    (tmp_path / "secret.txt").write_text("canary-5150 root:x:0:0")
    rows = [{"path": f"cat/000{number}.jpg", "label": "cat"} for number in range(3)]
    # With more .. than there are folders above, a path would be told in its one spelling, which has as many.
    missing = os.path.relpath("/no/such.jpg", tmp_path / "in")
    paths = ["../secret.txt", str(tmp_path / "secret.txt"), missing]
    finished = manifest_job(tmp_path, *rows, *({"path": path, "label": "cat"} for path in paths))
    assert finished.code == 0, finished.err
    assert {reject["path"] for reject in make.rejects(tmp_path / "out" / VERSION)} == set(paths)
    written = b"".join(make.files(tmp_path / "out").values())
    assert b"canary-5150" not in written and "canary-5150" not in finished.out + finished.err


def test_nothing_shipped_unpickles_arrays_or_models() -> None:
    # Other calls that would run data are lint's: the rules S in pyproject.toml.
    shipped = [path for folder in ("beam_pipeline", "reader", "deploy") for path in (ROOT / folder).rglob("*.py")]
    assert len(shipped) > 40
    unsafe = re.compile(
        r"allow_pickle=(?!False)|safe_mode=(?!True)|np\.load\((?!.*, allow_pickle=False\))|torch\.load\(|joblib"
    )
    assert not [path for path in shipped if unsafe.search(path.read_text())]


CANARY = "canary-8f14e45f"
SECRET_VARIABLES = ("AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_KEY", "GOOGLE_AUTH_TOKEN_FOR_TESTING", "HF_TOKEN")


def test_secrets_of_the_environment_are_not_written_or_said(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in SECRET_VARIABLES:
        monkeypatch.setenv(name, CANARY)
    finished, refused = make.job(photos, tmp_path / "out"), make.job(photos, tmp_path / "out", "--version", "one")
    assert (finished.code, refused.code) == (0, 2)
    assert CANARY not in finished.out + finished.err + refused.out + refused.err
    written = make.files(tmp_path)
    assert f"out/{VERSION}/{schema.RUN_FILE}" in written
    assert not [name for name, data in written.items() if CANARY.encode() in data]


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
                parse_manifest(seal_manifest(hostile), "m")
            assert str(error.value) == f"m names {name!r}, which {said}"


def test_a_name_with_an_at_sign_is_no_password() -> None:
    urls = ("abfs://container@account.dfs.core.windows.net/a", "gs://bucket/a:b@c", "/local/a:b@c")
    assert not any(storage.has_password(url) for url in urls)


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
