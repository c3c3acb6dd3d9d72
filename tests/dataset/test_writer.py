"""One shard: records in order, its sidecar last, nothing half-written after an exception, the same bytes each time."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import tempfile
from collections.abc import Iterable
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from PIL import Image

from beam_pipeline import images, schema
from beam_pipeline.config import Config
from beam_pipeline.conversion.fetch import Converted, convert_all
from beam_pipeline.dataset.result import ShardResult
from beam_pipeline.dataset.state import JobState
from beam_pipeline.dataset.writer import ShardWriter, index_text
from beam_pipeline.errors import ImageShardsError, Reject
from beam_pipeline.inputs.folders import all_images
from beam_pipeline.inputs.references import ImageRef
from beam_pipeline.planning.cuts import SplitPlan
from beam_pipeline.planning.plan import JobPlan
from beam_pipeline.schema import RejectReason, ShardName
from tests import make
from tests.servers import Gcs

NAME = ShardName("photos", "train", 0, 1)


def config(input: object, output: object, **more: object) -> Config:
    return Config(**{"input": str(input), "output": str(output), "name": "photos", "image_size": 24} | more)


def plan_of(some: Config, classes: Iterable[str], images_planned: int = 0) -> JobPlan:
    """A plan of one train shard, of a job that may write it."""
    plan = JobPlan(
        configuration=some.fingerprint(),
        classes=tuple(classes),
        columns=(),
        splits={"train": SplitPlan(images_planned, 1, ())},
        statistics={},
        references="",
        codec=images.codec_versions(),
    )
    claim = JobState(some).claim
    claim.hold()
    claim.take(plan.sha256)
    return plan


def read_shard(data: bytes) -> list[str]:
    """File names of a shard's records, in order."""
    import tensorflow as tf

    examples = map(tf.train.Example.FromString, schema.unframe(data))
    return [example.features.feature["filename"].bytes_list.value[0].decode() for example in examples]


@pytest.fixture
def job(photos: Path, tmp_path: Path) -> tuple[Config, JobPlan, list[ImageRef]]:
    some = config(photos, tmp_path / "out")
    refs = list(all_images(some))
    return some, plan_of(some, ["ant", "bee", "cat"], len(refs)), refs


# --- a shard


def test_records_are_in_order_of_key_and_path_whatever_order_the_references_come_in(job, tmp_path: Path) -> None:
    some, plan, refs = job
    written = []
    for number in range(3):
        out = dataclasses.replace(some, output=str(tmp_path / f"out{number}"))
        random.Random(number).shuffle(refs)
        JobState(out).claim.hold()
        ShardWriter(out, plan).write("train", 0, iter(refs))
        written.append((Path(out.dataset_url) / NAME.file).read_bytes())
    assert written[0] == written[1] == written[2]
    assert read_shard(written[0]) == [ref.path for ref in sorted(refs, key=lambda ref: (ref.order_key, ref.path))]


def test_a_sidecar_says_what_is_in_the_shard(job) -> None:
    some, plan, refs = job
    summary = ShardWriter(some, plan).write("train", 0, refs)
    data = (Path(some.dataset_url) / NAME.file).read_bytes()
    sidecar = JobState(some).sidecar(NAME)
    assert sidecar is not None
    assert (summary.images, summary.records, summary.bytes, summary.kept) == (40, 40, len(data), False)
    assert summary.source_bytes == sidecar["source_bytes"] == sum(ref.source_bytes for ref in refs)
    assert sidecar["plan"] == plan.sha256
    assert (sidecar["bytes"], sidecar["crc32c"]) == (len(data), google_crc32c.value(data))
    assert (sidecar["images"], sidecar["records"], sidecar["rejects"]) == (40, 40, {})
    assert sidecar["class_counts"] == {"0": 14, "1": 13, "2": 13}
    assert sidecar["min_size"] == sidecar["max_size"] == [24, 24]
    index = (Path(some.dataset_url) / NAME.index_file).read_bytes()
    assert sidecar["index"]["sha256"] == hashlib.sha256(index).hexdigest()
    assert sidecar["index"]["bytes"] == len(index)


def test_the_text_index_leads_to_every_record(job) -> None:
    some, plan, refs = job
    ShardWriter(some, plan).write("train", 0, refs)
    data = (Path(some.dataset_url) / NAME.file).read_bytes()
    lines = (Path(some.dataset_url) / NAME.index_file).read_text().splitlines()
    places = [tuple(map(int, line.split())) for line in lines]
    assert [data[offset : offset + length] for offset, length in places] == [
        schema.frame(record) for record in schema.unframe(data)
    ]
    assert sum(length for _, length in places) == len(data)


def test_index_text_has_known_bytes() -> None:
    assert index_text([20, 300, 16]) == b"0 20\n20 300\n320 16\n"
    assert index_text([]) == b""


# --- finished shards


def test_a_finished_shard_is_kept(job) -> None:
    some, plan, refs = job
    first = ShardWriter(some, plan).write("train", 0, refs)
    before = make.traces(Path(some.output))
    again = ShardWriter(some, plan).write("train", 0, refs)
    assert again.kept
    assert make.traces(Path(some.output)) == before
    assert (again.records, again.bytes, again.rejects) == (first.records, first.bytes, first.rejects)


def test_a_shard_of_another_plan_is_written_anew(job) -> None:
    some, plan, refs = job
    ShardWriter(some, plan).write("train", 0, refs)
    assert not ShardWriter(some, dataclasses.replace(plan, references="other")).write("train", 0, refs).kept


@pytest.mark.parametrize(
    "damage",
    ["truncated", "missing", "sidecar missing", "sidecar broken", "sidecar in part", "index missing", "index flipped"],
)
def test_a_shard_that_is_not_whole_is_written_anew(job, damage: str) -> None:
    some, plan, refs = job
    ShardWriter(some, plan).write("train", 0, refs)
    index = Path(some.dataset_url) / NAME.index_file
    whole_index = index.read_bytes()
    shard, sidecar = Path(some.dataset_url) / NAME.file, Path(JobState(some).url) / "shards" / "train-00000.json"
    whole = shard.read_bytes()
    if damage == "truncated":
        shard.write_bytes(whole[:-1])
    elif damage == "sidecar broken":
        sidecar.write_bytes(b"{")
    elif damage == "sidecar in part":
        sidecar.write_bytes(schema.canonical_json({"plan": plan.sha256}))
    elif damage == "index flipped":
        make.flip_byte(index)
    else:
        {"missing": shard, "sidecar missing": sidecar, "index missing": index}[damage].unlink()
    assert not ShardWriter(some, plan).write("train", 0, refs).kept
    assert shard.read_bytes() == whole
    assert index.read_bytes() == whole_index


def test_a_remote_shard_with_another_crc_is_written_anew(gcs: Gcs, photos: Path) -> None:
    bucket = gcs.new_bucket()
    some = config(photos, f"gs://{bucket}/out")
    refs = list(all_images(some))
    plan = plan_of(some, ["ant", "bee", "cat"], len(refs))
    ShardWriter(some, plan).write("train", 0, refs)
    name = f"out/photos/1.0.0/{NAME.file}"
    whole = gcs.get(bucket, name)
    assert ShardWriter(some, plan).write("train", 0, refs).kept
    gcs.put(bucket, name, whole[:-1] + bytes((whole[-1] ^ 1,)))
    assert not ShardWriter(some, plan).write("train", 0, refs).kept
    assert gcs.get(bucket, name) == whole


# --- an exception in the middle


@pytest.fixture(scope="module")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """45 links to noise of 330 kB: as PNG of its own size a record of it doesn't shrink."""
    folder = tmp_path_factory.mktemp("heavy")
    (folder / "a").mkdir()
    (folder / "noise.png").write_bytes(make.encoded(make.noise(350, 310), "PNG", compress_level=0))
    for number in range(45):
        (folder / "a" / f"{number:02d}.png").symlink_to(folder / "noise.png")
    return folder


@pytest.mark.parametrize("mebibytes", [1, 12])
@pytest.mark.parametrize("remote", [False, True], ids=["local", "gs"])
def test_an_exception_in_the_middle_leaves_no_object_and_no_temporary_file(
    heavy: Path, gcs: Gcs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mebibytes: int, remote: bool
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    bucket = gcs.new_bucket()
    output = f"gs://{bucket}/out" if remote else tmp_path / "out"
    some = config(heavy, output, image_size="none", image_format="png")
    refs = sorted(all_images(some), key=lambda ref: (ref.order_key, ref.path))
    record = (heavy / "noise.png").stat().st_size
    position = (mebibytes << 20) // record + 2
    assert position < len(refs)
    refs[position] = refs[position]._replace(label="a class that the plan hasn't")  # raises when its record is made
    plan = plan_of(some, ["a"], len(refs))
    with pytest.raises(KeyError, match="a class that the plan hasn't"):
        ShardWriter(some, plan).write("train", 0, refs)
    # Which job writes the version, and what was being decoded, are there; nothing else.
    assert [name for name in gcs.names(bucket) if "/claim.json" not in name and "/inflight/" not in name] == []
    files = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()]
    assert [name for name in files if "/claim.json" not in name and "/inflight/" not in name] == []
    # And then, without the fault, the whole shard.
    refs[position] = refs[position]._replace(label="a")
    summary = ShardWriter(some, plan).write("train", 0, refs)
    assert summary.records == 45
    assert summary.bytes > 13 << 20
    assert list(tmp_path.rglob("*.tmp")) == []
    if remote:
        name = f"out/photos/1.0.0/{NAME.file}"
        sidecar = JobState(some).sidecar(NAME)
        assert sidecar is not None
        assert google_crc32c.value(gcs.get(bucket, name)) == sidecar["crc32c"]


def test_a_failed_upload_leaves_no_object_no_sidecar_and_no_temporary_file(
    photos: Path, gcs: Gcs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    some = config(photos, "gs://no-such-bucket-at-all/out")
    refs = list(all_images(some))
    with pytest.raises((FileNotFoundError, ImageShardsError)):
        ShardWriter(some, plan_of(some, ["ant", "bee", "cat"], 40)).write("train", 0, refs)
    assert list(tmp_path.iterdir()) == []


# --- rejects


def rejected_of(some: Config) -> list[dict[str, str]]:
    sidecar = JobState(some).sidecar(NAME)
    assert sidecar is not None
    return sidecar["rejected"]


def test_what_vanished_or_changed_is_a_reject(job) -> None:
    some, plan, refs = job
    refs[0] = refs[0]._replace(path="ant/gone.jpg")
    refs[1] = refs[1]._replace(source_bytes=refs[1].source_bytes + 1)
    refs[2] = refs[2]._replace(etag="md5:" + "0" * 32)
    refs[3] = refs[3]._replace(source_bytes=1 << 40)
    summary = ShardWriter(some, plan).write("train", 0, refs)
    assert summary.rejects == {"vanished": 1, "changed": 2, "too_many_bytes": 1}
    assert summary.records + 4 == summary.images == 40
    rejected = {reject["path"]: (reject["reason"], reject["detail"]) for reject in rejected_of(some)}
    assert rejected["ant/gone.jpg"][0] == "vanished"
    expected = f"listed with {refs[1].source_bytes} bytes, read {refs[1].source_bytes - 1}"
    assert rejected[refs[1].path] == ("changed", expected)


def test_rejects_are_lines_in_the_order_of_the_records(job, photos: Path) -> None:
    some, plan, refs = job
    broken = [ref._replace(path=f"{ref.path}.gone") for ref in refs]
    ShardWriter(some, plan).write("train", 0, broken)
    paths = [reject["path"] for reject in rejected_of(some)]
    assert paths == [ref.path for ref in sorted(broken, key=lambda ref: (ref.order_key, ref.path))]


def convert_one(some: Config, ref: ImageRef) -> Converted[bytes]:
    (found,) = convert_all(some, [ref], lambda ref, data, md5: data[::-1])
    return found


def test_a_file_over_the_byte_limit_is_not_fetched(gcs: Gcs) -> None:
    bucket = gcs.new_bucket()
    gcs.put(bucket, "in/a.jpg", b"x" * 500)
    some = config(f"gs://{bucket}/in", "/out", max_image_bytes=100)
    before = len(gcs.requests())
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
        (f"md5:{hashlib.md5(b'data').hexdigest()}", True),
        (f"md5:{hashlib.md5(b'dat2').hexdigest()}", False),
        (f"crc32c:{google_crc32c.value(b'data'):08x}", True),
        (f"crc32c:{google_crc32c.value(b'dat2'):08x}", False),
    ],
)
def test_what_was_read_is_compared_with_what_was_listed(tmp_path: Path, etag: str, fine: bool) -> None:
    (tmp_path / "a.jpg").write_bytes(b"data")
    found = convert_one(config(tmp_path, "/out"), ImageRef("a.jpg", 4, etag, "a", "train", 0))
    assert (found.md5, found.source_bytes) == (hashlib.md5(b"data").digest(), 4), "rejected or not"
    if fine:
        assert found.result == b"atad"
        return
    assert isinstance(found.result, Reject)
    assert found.result.reason == RejectReason.CHANGED


def test_a_reject_holds_nothing_of_its_image_in_memory(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"data")

    def refuse(ref: ImageRef, data: bytes, md5: bytes) -> None:
        raise Reject(RejectReason.TRUNCATED, "cut")

    (found,) = convert_all(config(tmp_path, "/out"), [ImageRef("a.jpg", 4, "", "a", "train", 0)], refuse)
    assert isinstance(found.result, Reject)
    assert (found.result.reason, found.result.__traceback__, found.result.__context__) == ("truncated", None, None)


# --- the result


def test_results_come_back_from_their_sidecars_and_add_up(job) -> None:
    some, plan, refs = job
    refs[0] = refs[0]._replace(path="ant/gone.jpg")
    writer = ShardWriter(some, plan)
    total = ShardResult()
    for part in (refs[:15], refs[15:16], refs[16:]):
        result = writer.write("train", 0, part)
        JobState(some).clear()
        JobState(some).claim.hold()
        document = json.loads(schema.canonical_json(result.to_json()))
        assert json.loads(schema.canonical_json(ShardResult.from_json(document).to_json())) == document
        total.merge(ShardResult.from_json(document))
    at_once = writer.write("train", 0, refs).to_json()
    one_file = ("plan", "file", "bytes", "crc32c", "etag", "runs", "index")
    merged = total.to_json()
    assert {key: merged[key] for key in merged if key not in one_file} == {
        key: at_once[key] for key in at_once if key not in one_file
    }


def test_an_image_given_twice_is_an_error_that_names_both(job) -> None:
    some, plan, refs = job
    twice = [*refs, refs[5]._replace(label="cat")]
    with pytest.raises(ImageShardsError) as caught:
        ShardWriter(some, plan).write("train", 0, twice)
    assert repr(refs[5].path) in str(caught.value)
    assert repr(refs[5].label) in str(caught.value)
    assert "'cat'" in str(caught.value)


# --- sizes and gzip


def test_sizes_of_mixed_images_are_the_extremes_of_each_side(tmp_path: Path) -> None:
    folder = tmp_path / "in" / "a"
    folder.mkdir(parents=True)
    for number, size in enumerate([(10, 30), (20, 20), (30, 10), (15, 15)]):
        Image.fromarray(np.zeros((size[1], size[0], 3), np.uint8)).save(folder / f"{number}.png")
    some = config(tmp_path / "in", tmp_path / "out", image_size="none")
    ShardWriter(some, plan_of(some, ["a"], 4)).write("train", 0, all_images(some))
    sidecar = JobState(some).sidecar(NAME)
    assert sidecar is not None
    assert (sidecar["min_size"], sidecar["max_size"]) == ([10, 10], [30, 30])


def test_a_gzip_shard_holds_the_plain_shards_bytes(job, tmp_path: Path) -> None:
    import gzip

    some, plan, refs = job
    ShardWriter(some, plan).write("train", 0, refs)
    packed = dataclasses.replace(some, output=str(tmp_path / "packed"), compression="gzip")
    JobState(packed).claim.hold()
    ShardWriter(packed, plan).write("train", 0, refs)
    plain = (Path(some.dataset_url) / NAME.file).read_bytes()
    data = (Path(packed.dataset_url) / NAME.file).read_bytes()
    assert gzip.decompress(data) == plain
    sidecar = JobState(packed).sidecar(NAME)
    assert sidecar is not None
    assert (sidecar["bytes"], sidecar["crc32c"]) == (len(data), google_crc32c.value(data))
    assert (sidecar["runs"], sidecar["index"]) == ([], None)
    assert not (Path(packed.dataset_url) / "index").exists()


def test_tensorflow_reads_a_gzip_shard(job, tmp_path: Path) -> None:
    import tensorflow as tf

    some, plan, refs = job
    packed = dataclasses.replace(some, compression="gzip")
    ShardWriter(packed, plan).write("train", 0, refs)
    file = str(Path(packed.dataset_url) / NAME.file)
    assert sum(1 for _ in tf.data.TFRecordDataset([file], compression_type="GZIP")) == 40
