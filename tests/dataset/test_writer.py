"""One shard: records in order, its sidecar last, nothing half-written after an exception, the same bytes each time."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import google_crc32c
import msgspec
import pytest

from beam_pipeline import images
from beam_pipeline.config import Config
from beam_pipeline.conversion.fetch import Converted, convert_all
from beam_pipeline.dataset import writer
from beam_pipeline.dataset.claim import SupersededError
from beam_pipeline.dataset.shard_files import ShardFiles
from beam_pipeline.dataset.state import JobState
from beam_pipeline.dataset.writer import ClaimedPlan, Finished, ShardWriter
from beam_pipeline.errors import ImageShardsError, Reject
from beam_pipeline.inputs.folders import all_images
from beam_pipeline.inputs.references import ImageRef
from beam_pipeline.schema import RejectReason, ShardName
from beam_pipeline.schema.job import Counts, Sidecar
from beam_pipeline.schema.manifest import PlannedSplit
from beam_pipeline.storage import Etag, open_storage
from tests import make
from tests.servers import S3, Gcs

NAME = ShardName("photos", "train", 0, 1)
CLASSES = ("ant", "bee", "cat")


def config(input: object, output: object, **more: object) -> Config:
    return Config(**{"input": str(input), "output": str(output), "name": "photos", "image_size": 24} | more)


class Job:
    """A job that may write its one shard."""

    def __init__(self, some: Config, classes: Iterable[str] = CLASSES) -> None:
        self.config, self.refs = some, list(all_images(some))
        self.version, self.state = Path(some.dataset_url), JobState(some)
        self.shard, self.index = self.version / NAME.file, self.version / NAME.index_file
        split = {"train": PlannedSplit(len(self.refs), 1, ())}
        parts = {"configuration": some.fingerprint(), "classes": tuple(classes), "codec": images.codec_versions()}
        self.plan = make.plan_of(splits=split, **parts)
        self.state.claim.acquire(self.plan.sha256)

    def finish(self, refs: Iterable[ImageRef] | None = None) -> Finished:
        return ShardWriter(self.config, ClaimedPlan(self.plan)).write("train", 0, self.refs if refs is None else refs)

    def write(self, refs: Iterable[ImageRef] | None = None) -> Sidecar:
        """As if nothing were finished yet."""
        finished = self.finish(refs)
        assert finished.sidecar and not finished.was_finished
        return finished.sidecar

    def elsewhere(self, output: Path, **more: object) -> Job:
        return Job(dataclasses.replace(self.config, output=str(output), **more))

    @property
    def sidecar(self) -> Sidecar:
        found = ShardFiles(self.config, NAME).read_sidecar()
        assert found is not None
        return found


@pytest.fixture
def job(photos: Path, tmp_path: Path) -> Job:
    return Job(config(photos, tmp_path / "out"))


# --- a shard


@pytest.mark.parametrize("etag", [{}, {"etag": "mtime_ns:1"}], ids=["the same", "changed meanwhile"])
def test_an_image_that_a_listing_repeats_fails_the_shard(job: Job, etag: dict[str, str]) -> None:
    job.refs.insert(5, job.refs[20]._replace(**etag))
    with pytest.raises(
        ImageShardsError, match=rf"^'{job.refs[21].path}' is listed twice: nothing is published; run the"
    ):
        job.write()
    assert not job.shard.exists()


# --- finished shards


def test_a_finished_shard_is_kept(job: Job) -> None:
    first = job.write()
    before = make.traces(Path(job.config.output))
    assert job.finish() == (first, True)
    assert make.traces(Path(job.config.output)) == before


def test_images_are_counted_as_done_once_when_they_are_written_and_when_their_shard_is_kept(job: Job) -> None:
    for _ in range(2):
        shards = ShardWriter(job.config, ClaimedPlan(job.plan))
        shards.write("train", 0, job.refs)
        assert (shards.newly_done(), shards.newly_done()) == (40, 0)


@pytest.mark.parametrize(
    ("what", "damage"),
    [("shard", "cut"), ("shard", "gone"), ("sidecar", "gone"), ("sidecar", "cut"), ("sidecar", "of another plan"),
     ("index", "gone"), ("index", "flipped")],
)  # fmt: skip
def test_a_shard_that_is_cut_or_of_another_plan_is_rewritten(job: Job, what: str, damage: str) -> None:
    job.write()
    before = make.files(job.version)
    sidecar = Path(job.state.url) / "shards" / "train-00000.json"
    path = {"shard": job.shard, "index": job.index, "sidecar": sidecar}[what]
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "flipped":
        make.flip_byte(path)
    else:
        job.plan = msgspec.structs.replace(job.plan, inputs="other")
    job.write()
    assert make.files(job.version) == before


def test_a_remote_shard_with_another_crc_is_rewritten(gcs: Gcs, photos: Path) -> None:
    bucket, name = gcs.new_bucket(), f"out/photos/1.0.0/{NAME.file}"
    job = Job(config(photos, f"gs://{bucket}/out"))
    job.write()
    complete = gcs.get(bucket, name)
    assert job.finish().was_finished
    gcs.put(bucket, name, complete[:-1] + bytes((complete[-1] ^ 1,)))
    job.write()
    assert gcs.get(bucket, name) == complete


def test_a_job_that_lost_its_claim_while_it_converted_replaces_nothing_in_a_store_without_conditions(
    s3: S3, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An upload to s3:// replaces whatever is there.
    output = f"s3://{s3.new_bucket()}/out"
    job, shard = Job(config(photos, output)), f"{output}/photos/1.0.0/{NAME.file}"

    def take_over(*_: object) -> None:
        monkeypatch.undo()
        Job(config(photos, output, restart=True, jpeg_quality=50)).write()
        theirs.append(open_storage(shard).read(shard))

    theirs: list[bytes] = []
    make.before(monkeypatch, writer, "convert_all", take_over)
    with pytest.raises(SupersededError, match="another job has taken over this version"):
        job.write()
    assert open_storage(shard).read(shard) == theirs[0]


# --- an exception in the middle


@pytest.mark.parametrize("remote", [False, True], ids=["local", "gs"])
def test_an_exception_in_the_middle_leaves_no_object_and_no_temporary_file(
    gcs: Gcs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: bool
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    for folder in ("tmp", "in/a"):
        (tmp_path / folder).mkdir(parents=True)
    noise = make.encoded(make.noise(350, 310), "PNG", compress_level=0)  # 330 kB, and so is its record
    for number in range(9):
        (tmp_path / "in" / "a" / f"{number}.png").write_bytes(noise)
    bucket = gcs.new_bucket()
    output = f"gs://{bucket}/out" if remote else tmp_path / "out"
    job = Job(config(tmp_path / "in", output, image_size="none", image_format="png"), "a")
    whole = sorted(job.refs, key=lambda ref: (ref.order_key, ref.path))
    # Raises when its record is made, with more than 1 MiB, a temporary file's buffer, before it.
    with pytest.raises(KeyError, match="a class that the plan hasn't"):
        job.write([*whole[:6], whole[6]._replace(label="a class that the plan hasn't"), *whole[7:]])
    # Which job writes the version, and what was being decoded, are there; nothing else.
    left = [*gcs.names(bucket), *make.files(tmp_path)]
    assert [
        name for name in left if not name.startswith("in/") and not {"claim.json", "inflight"} & {*name.split("/")}
    ] == []
    # And then, without the fault, the complete shard.
    shard = job.write().shard
    assert shard.records == 9 and shard.bytes > 2 << 20
    assert list(tmp_path.rglob("*.tmp")) == []
    data = gcs.get(bucket, f"out/photos/1.0.0/{NAME.file}") if remote else job.shard.read_bytes()
    assert google_crc32c.value(data) == job.sidecar.shard.crc32c


# --- rejects


def test_what_vanished_or_changed_is_a_reject(job: Job) -> None:
    refs = job.refs
    refs[0] = refs[0]._replace(path="ant/gone.jpg")
    refs[1] = refs[1]._replace(source_bytes=refs[1].source_bytes + 1)
    refs[2] = refs[2]._replace(etag=bytes(16))
    refs[3] = refs[3]._replace(source_bytes=1 << 40)
    sidecar = job.write()
    assert sidecar.counts.rejects == {"vanished": 1, "changed": 2, "too_many_bytes": 1}
    assert sidecar.counts.records + 4 == sidecar.shard.images == 40
    rejected = {line.path: (line.reason, line.detail) for line in sidecar.rejected}
    assert rejected["ant/gone.jpg"][0] == "vanished"
    expected = f"listed with {refs[1].source_bytes} bytes, read {refs[1].source_bytes - 1}"
    assert rejected[refs[1].path] == ("changed", expected)


def convert_one(some: Config, ref: ImageRef) -> Converted[bytes]:
    (found,) = convert_all(some, [ref], lambda ref, data, md5: data[::-1])
    return found


def test_a_file_over_the_byte_limit_is_not_fetched(gcs: Gcs) -> None:
    bucket = gcs.new_bucket()
    gcs.put(bucket, "in/a.jpg", b"x" * 500)
    before = len(gcs.requests())
    some = config(f"gs://{bucket}/in", "/out", max_image_bytes=100)
    found = convert_one(some, ImageRef("a.jpg", 500, "", "a", "train", 0))
    assert isinstance(found.result, Reject)
    expected = (RejectReason.TOO_MANY_BYTES, "500 bytes, --max_image_bytes 100")
    assert (found.result.reason, found.result.detail) == expected
    assert (found.md5, found.source_bytes) == (b"", 0)
    assert len(gcs.requests()) == before


@pytest.mark.parametrize(
    ("etag", "fine"),
    [
        ("", True),
        ("mtime_ns:5", True),
        (hashlib.md5(b"data").digest(), True),
        (hashlib.md5(b"dat2").digest(), False),
        (google_crc32c.value(b"data"), True),
        (google_crc32c.value(b"dat2"), False),
    ],
)
def test_what_was_read_is_compared_with_what_was_listed(tmp_path: Path, etag: Etag, fine: bool) -> None:
    (tmp_path / "a.jpg").write_bytes(b"data")
    found = convert_one(config(tmp_path, "/out"), ImageRef("a.jpg", 4, etag, "a", "train", 0))
    assert (found.md5, found.source_bytes) == (hashlib.md5(b"data").digest(), 4), "rejected or not"
    result = found.result.reason if isinstance(found.result, Reject) else found.result
    assert result == (b"atad" if fine else RejectReason.CHANGED)


def test_a_reject_holds_nothing_of_its_image_in_memory(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"data")

    def refuse(ref: ImageRef, data: bytes, md5: bytes) -> None:
        raise Reject(RejectReason.TRUNCATED, "cut")

    (found,) = convert_all(config(tmp_path, "/out"), [ImageRef("a.jpg", 4, "", "a", "train", 0)], refuse)
    assert isinstance(found.result, Reject)
    assert (found.result.reason, found.result.__traceback__, found.result.__context__) == ("truncated", None, None)


# --- counts


def test_counts_of_parts_add_up(job: Job) -> None:
    job.refs[0] = job.refs[0]._replace(path="ant/gone.jpg")
    total = Counts()
    for part in (job.refs[:15], job.refs[15:16], job.refs[16:]):
        total.merge(job.write(part).counts)
        shutil.rmtree(job.state.url)
        job.state.claim.acquire(job.plan.sha256)
    complete = job.write().counts
    total.cpu_s = complete.cpu_s
    assert total == complete


# --- sizes and gzip


def test_a_gzip_shard_holds_the_plain_shards_bytes_and_tensorflow_reads_it(job: Job, tmp_path: Path) -> None:
    import tensorflow as tf

    job.write()
    packed = job.elsewhere(tmp_path / "packed", compression="gzip")
    packed.write()
    data, sidecar = packed.shard.read_bytes(), packed.sidecar
    assert gzip.decompress(data) == job.shard.read_bytes()
    assert (sidecar.shard.bytes, sidecar.shard.crc32c) == (len(data), google_crc32c.value(data))
    assert (sidecar.runs, sidecar.index) == ((), None)
    assert [path.name for path in (packed.version / "index").iterdir()] == [f"{packed.shard.name}.records.npy"]
    tables = [make.files(one.version / "index")[f"{one.shard.name}.records.npy"] for one in (packed, job)]
    assert tables[0] == tables[1], "of uncompressed records"
    assert sum(1 for _ in tf.data.TFRecordDataset([str(packed.shard)], compression_type="GZIP")) == 40
