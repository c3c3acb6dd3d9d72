"""Publishing: every image accounted for, every file hashed, no place or time in the manifest, which comes last."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import socket
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from pytest import MonkeyPatch

import reader
from beam_pipeline import images, schema, storage
from beam_pipeline.config import Config
from beam_pipeline.dataset.publish import publish
from beam_pipeline.dataset.shard_files import ShardFiles
from beam_pipeline.dataset.state import JobState
from beam_pipeline.dataset.version import prepare
from beam_pipeline.dataset.writer import ClaimedPlan, ShardWriter
from beam_pipeline.errors import ImageShardsError
from beam_pipeline.inputs.folders import all_images
from beam_pipeline.inputs.references import content_fields, listing_fields
from beam_pipeline.planning.plan import Histogram, plan_split
from beam_pipeline.schema.job import ReferenceSum, Run
from beam_pipeline.schema.manifest import seal_manifest
from beam_pipeline.storage.local import LocalStorage
from tests import make
from tests.servers import Gcs


@pytest.fixture(scope="module")
def version(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    flags = ("--splits", "train=0.7,validation=0.3", "--num_shards", "train=3,validation=2")
    return make.published(photos, tmp_path_factory.mktemp("out"), *flags)


@pytest.fixture(scope="module")
def manifest(version: Path) -> dict:
    return make.manifest(version)


# --- what is in the manifest


def test_fingerprints_are_sums_over_the_images(photos: Path, version: Path, manifest: dict) -> None:
    config = Config(input=str(photos), output="/x", name="photos", splits="train=0.7,validation=0.3")
    listing, content = ReferenceSum(), ReferenceSum()
    for ref in all_images(config):
        listing.add(listing_fields(ref))
        content.add(content_fields(ref, hashlib.md5((photos / ref.path).read_bytes()).digest()))
    assert (manifest["listing_fingerprint"], manifest["content_fingerprint"]) == (listing.hex, content.hex)
    for key in ("listing_fingerprint", "content_fingerprint"):
        shards = [shard[key] for split in manifest["splits"].values() for shard in split["shards"]]
        assert f"{sum(int(one, 16) for one in shards) % (1 << 128):032x}" == manifest[key]


def test_the_manifest_is_canonical_and_tells_no_place_time_or_host(photos: Path, version: Path, manifest: dict) -> None:
    data = (version / "manifest.json").read_bytes()
    assert data == schema.canonical_json(manifest)
    text = data.decode()
    for secret in (str(photos), str(version.parent.parent), socket.gethostname(), "mtime", "etag", "FnApiRunner"):
        assert secret not in text

    def leaves(value: object) -> list[object]:
        if isinstance(value, dict):
            value = [*value, *value.values()]
        return [leaf for one in value for leaf in leaves(one)] if isinstance(value, list) else [value]

    assert not any(isinstance(leaf, float) for leaf in leaves(manifest)), "integers or decimal strings only"
    run = json.loads((version / "run.json").read_bytes())
    assert str(run["started_unix_s"]) not in text


# --- publishing by hand: what goes wrong

Job = tuple[Config, ClaimedPlan]


def write_shards(photos: Path, output: str, shards_written: int = 2, shards: int = 2, **more: Any) -> Job:
    """A job of two shards which is not yet published."""
    flags = {"image_size": 24, "num_shards": shards} | more
    config = Config(input=str(photos), output=output, name="photos", **flags)
    refs = list(all_images(config))
    histogram = Histogram(0)
    for ref in refs:
        histogram.add(ref.order_key, 1)
    split = plan_split(histogram, shards)
    parts = {"classes": ("ant", "bee", "cat"), "splits": {"train": split}, "codec": images.codec_versions()}
    plan = make.plan_of(configuration=config.fingerprint(), inputs="40-abc", **parts)
    claimed = ClaimedPlan(plan, prepare(config, plan))
    for index in range(shards_written):
        ShardWriter(config, claimed).write(
            "train", index, [ref for ref in refs if split.shard_of(ref.order_key) == index]
        )
    return config, claimed


@pytest.fixture
def written(photos: Path, tmp_path: Path) -> Job:
    """A job whose two shards are written and which is not yet published."""
    return write_shards(photos, str(tmp_path))


NOT_WRITTEN = r"shard photos-train.tfrecord-00001-of-00002 was not written"
NOT_LISTED = r"but 40 images were listed: nothing is published"
CHANGED = r"{} is not what this job wrote: nothing is published; run the same command again$"
SIDECAR, SHARD = "_state/1.0.0/shards/train-00001.json", "1.0.0/photos-train.tfrecord-00001-of-00002"
INDEX = "1.0.0/index/photos-train.tfrecord-00001-of-00002.idx"


def one_less(part: str, key: str) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        document = json.loads(data)
        document[part][key] -= 1
        return seal_manifest(document)

    return change


@pytest.mark.parametrize(
    ("file", "change", "line"),
    [
        (SIDECAR, None, NOT_WRITTEN),
        (SIDECAR, lambda data: seal_manifest({**json.loads(data), "plan": "0" * 64}), NOT_WRITTEN),
        (SIDECAR, one_less("counts", "records"), NOT_LISTED),
        (SIDECAR, one_less("shard", "images"), NOT_LISTED),
        (SHARD, None, CHANGED),
        (SHARD, lambda data: data[:-1], CHANGED),
        (SHARD, lambda data: data[:-1] + bytes([data[-1] ^ 1]), CHANGED),
        (INDEX, None, CHANGED),
        (INDEX, lambda data: data[:-1], CHANGED),
        (INDEX, lambda data: data[:-1] + bytes([data[-1] ^ 1]), CHANGED),
    ],
)
def test_what_is_missing_unaccounted_for_or_written_by_something_else_since_is_not_published(
    written: Job, file: str, change: Callable[[bytes], bytes] | None, line: str
) -> None:
    config, plan = written
    path = Path(config.dataset_url).parent / file
    path.write_bytes(change(path.read_bytes())) if change else path.unlink()
    with pytest.raises(ImageShardsError, match=line.format(file.removeprefix("1.0.0/"))):
        publish(config, plan, Run())
    assert not {"manifest.json", "dataset_info.json"} & set(make.files(Path(config.dataset_url)))


def test_a_repeated_publication_finds_its_own(written: Job) -> None:
    # The runner heard nothing of the first: it had published, and tidied up or not.
    config, plan = written
    state = Path(JobState(config).url)
    kept = {path: path.read_bytes() for path in state.rglob("*") if path.is_file()}
    manifest = publish(config, plan, Run())
    assert make.manifest(Path(config.dataset_url)) == json.loads(seal_manifest(manifest))
    assert not JobState(config).has_leftovers()
    before = make.files(Path(config.dataset_url))
    for path, data in kept.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    for _ in range(2):
        again = publish(config, plan, Run())
        assert again.content_fingerprint == manifest.content_fingerprint
        assert make.files(Path(config.dataset_url)) == before
    assert not (state / "plan.json").exists()


def test_a_shard_that_a_job_without_the_claim_wrote_late_goes_and_a_file_of_the_user_stays(written: Job) -> None:
    config, plan = written
    names = {"photos-train.tfrecord-00002-of-00003", "notes.txt"}
    for name in names:
        (Path(config.dataset_url) / name).write_bytes(b"late")
    publish(config, plan, Run())
    assert names & set(make.files(Path(config.dataset_url))) == {"notes.txt"}


# --- publishing while another job of the same version runs


def join(config: Config, **more: bool) -> Config:
    """The configuration of another job."""
    return dataclasses.replace(config, **more).in_run(id=uuid.uuid4().hex)


def names(config: Config) -> set[str]:
    return {file.path for file in storage.open_storage(config.output).files(config.output)}


@pytest.fixture
def remote(gcs: Gcs, photos: Path) -> Job:
    """As `written`, in an object store."""
    return write_shards(photos, f"gs://{gcs.new_bucket()}")


def test_a_job_whose_plan_another_one_has_published_ends_well(remote: Job) -> None:
    config, plan = remote
    second = join(config)
    prepare(second, plan.plan)
    manifest = publish(config, plan, Run())
    before = names(config)
    prepare(second, plan.plan)
    assert ShardWriter(second, plan).write("train", 0, []).was_finished
    assert publish(second, plan, Run()).content_fingerprint == manifest.content_fingerprint
    assert names(config) == before
    assert not any("_state" in name for name in before)


@pytest.mark.parametrize("run", [None, "of other images"])
def test_a_version_that_may_be_of_other_images_is_not_taken_for_ours(remote: Job, run: str | None) -> None:
    # With the same names and sizes: only the etags differ, which run.json alone has.
    config, plan = remote
    second = join(config)
    prepare(second, plan.plan)
    publish(config, plan, Run())
    store, url = storage.open_storage(config.output), f"{config.dataset_url}/run.json"
    store.write(url, json.dumps({"inputs": run}).encode()) if run else store.delete(url)
    with pytest.raises(ImageShardsError, match=r"was published by another job .* run the command again"):
        prepare(second, plan.plan)
    with pytest.raises(ImageShardsError, match="another job has taken over this version"):
        ShardWriter(second, plan).write("train", 0, [])


@pytest.mark.parametrize(("kind", "method"), [(ShardFiles, "read_sidecar"), (JobState, "check")])
def test_a_job_whose_plan_is_published_meanwhile_ends_well(
    remote: Job, kind: type, method: str, monkeypatch: MonkeyPatch
) -> None:
    config, plan = remote
    calls: list[object] = []

    def publish_at_the_second(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) == 2:  # in the middle of it
            publish(join(config), plan, Run())

    make.before(monkeypatch, kind, method, publish_at_the_second)
    publish(config, plan, Run())
    assert len(calls) > 2
    assert not any("_state" in name for name in names(config))


def test_a_manifest_that_came_too_late_is_taken_back(remote: Job, monkeypatch: MonkeyPatch) -> None:
    config, plan = remote
    make.before(monkeypatch, type(storage.open_storage(config.output)), "create", lambda *_: begin_again(config, plan))
    with pytest.raises(ImageShardsError, match="another job has taken over this version"):
        publish(config, plan, Run())
    assert names(config) == {f"photos/_state/1.0.0/{file}" for file in ("claim.json", "plan.json")}


def begin_again(config: Config, plan: ClaimedPlan, **more: bool) -> None:
    """What another job does with another plan and `--restart`."""
    prepare(join(config, restart=True, **more), replace(plan.plan, inputs="other"))


def test_a_local_job_whose_folder_another_one_has_deleted_says_so(
    photos: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    config, plan = write_shards(photos, str(tmp_path))

    def overwrite(*_: object) -> None:
        monkeypatch.undo()  # it lists files, too
        begin_again(config, plan, overwrite=True)

    make.before(monkeypatch, LocalStorage, "files", overwrite)
    with pytest.raises(ImageShardsError, match="another job has taken over this version"):
        publish(config, plan, Run())


@pytest.mark.parametrize(
    ("held", "shards"),
    [("00001-of-00002", 2), ("00001-of-00002", 3), ("00002.idx", 2), ("00002.records.npy", 1),
     ("train-00001.json", 2), ("runs.npy", 3)],
)  # fmt: skip
def test_what_a_job_uploads_after_another_one_has_published_is_not_in_its_version(
    gcs: Gcs, photos: Path, held: str, shards: int, monkeypatch: MonkeyPatch, tmp_path: Path
) -> None:
    url, released, after = f"gs://{gcs.new_bucket()}", [], set[str]()
    config, plan = write_shards(photos, url, shards_written=1)
    refs = list(all_images(config))
    last = [ref for ref in refs if plan.plan.splits["train"].shard_of(ref.order_key) == 1]

    def overwrite(_: object, *arguments: Any) -> None:
        if not released and any(held in str(argument) for argument in arguments):
            released.append(held)
            publish(*write_shards(photos, url, shards, shards=shards, image_size=16, overwrite=True), Run())
            after.update(names(config))

    for method in ("publish", "write"):
        make.before(monkeypatch, type(storage.open_storage(url)), method, overwrite)
    with pytest.raises(ImageShardsError, match=r"has taken over this version|was published by another job"):
        ShardWriter(config, plan).write("train", 1, last)
        publish(config, plan, Run())
    assert released and names(config) == after
    assert reader.verify(gcs.download(url[5:], "photos/1.0.0", tmp_path)).faults == ()


def test_a_manifest_of_another_job_is_not_overwritten(written: Job, monkeypatch: MonkeyPatch) -> None:
    config, plan = written
    path = Path(config.dataset_url) / "manifest.json"
    make.before(monkeypatch, LocalStorage, "create", lambda *_: path.write_bytes(b"theirs"))
    with pytest.raises(ImageShardsError, match="was published by another job while this one was running"):
        publish(config, plan, Run())
    assert path.read_bytes() == b"theirs"


def test_dataset_info_and_the_manifest_are_written_after_all_other_files(
    written: Job, monkeypatch: MonkeyPatch
) -> None:
    config, plan = written
    order: list[str] = []
    for method, position in (("write", 1), ("publish", 2)):
        make.before(monkeypatch, LocalStorage, method, lambda *some, at=position: order.append(some[at]))
    publish(config, plan, Run())
    before = {"index/train.runs.npy", "class.labels.txt", "features.json", "rejects.jsonl", "run.json"}
    assert set(order[:-2]) == {f"{config.dataset_url}/{file}" for file in before}
    assert order[-2:] == [f"{config.dataset_url}/{file}" for file in ("dataset_info.json", "manifest.json")]


def test_all_train_images_rejected_is_an_error(tmp_path: Path) -> None:
    folder = make.class_folders(tmp_path / "in", {"a": 0})
    for number in range(3):
        (folder / "a" / f"{number}.jpg").write_bytes(b"bad")
    finished = make.job(folder, tmp_path / "out", "--max_reject_fraction", "1")
    assert (finished.code, finished.err.count("\n")) == (1, 1)
    assert "split train got no record" in finished.err
    assert not list((tmp_path / "out").rglob("manifest.json"))


def test_rejects_outside_the_sample_count_at_the_end_and_a_higher_limit_resumes(tmp_path: Path) -> None:
    # More than 512 images: a part is sampled, whose limit is wider than the job's.
    folder = make.class_folders(tmp_path / "in", {"a": 1}, size=(8, 8))
    good = (folder / "a" / "0000.jpg").read_bytes()
    for number in range(530):
        (folder / "a" / f"x{number}.jpg").write_bytes(b"bad" if number % 60 == 0 else good)
    finished = make.job(folder, tmp_path / "out", "--max_reject_fraction", "0.001")
    assert (finished.code, finished.err.count("\n")) == (1, 1)
    line = "9 of 531 images rejected (not_an_image 9), --max_reject_fraction is 0.001: nothing is published"
    assert line in finished.err
    assert not list((tmp_path / "out").rglob("manifest.json"))
    (shard,) = make.shard_files(tmp_path / "out" / "photos" / "1.0.0")
    written = shard.stat().st_mtime_ns
    # The limit decides no byte: with a higher one the finished shard is kept.
    version = make.published(folder, tmp_path / "out", "--max_reject_fraction", "0.02")
    assert make.manifest(version)["records"] == 522
    assert shard.stat().st_mtime_ns == written
