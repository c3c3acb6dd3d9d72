"""`--duplicates`: what is reported, dropped and refused, and that it stays so through resume, repair and on gs://."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_pipeline import schema
from beam_pipeline.inputs.references import ImageRef, order_key
from beam_pipeline.pipeline import writing
from beam_pipeline.planning import duplicates
from beam_pipeline.planning.duplicates import find_groups
from tests import make
from tests.servers import Gcs

FLAGS = ("--splits", "train=0.8,validation=0.2", "--num_shards", "2")


# --- pure


@given(st.lists(st.binary(min_size=16, max_size=16)), st.integers(0, 10**9))
def test_buckets_ascend_with_the_digest(digests: list[bytes], images: int) -> None:
    buckets = duplicates.buckets_for(images)
    numbers = [duplicates.bucket_of(ref(md5, "a", "x", "train"), buckets) for md5 in sorted(digests)]
    assert numbers == sorted(numbers)
    assert all(0 <= number < buckets for number in numbers)


A = b"\1" * 16


def ref(md5: bytes, path: str, label: str, split: str, size: int = 5) -> ImageRef:
    return ImageRef(path, size, f"md5:{md5.hex()}", label, split, 1)


TWINS = [ref(A, "b", "cat", "train"), ref(A, "a", "dog", "validation")]


@pytest.mark.parametrize(
    "change",
    [{"source_bytes": 0}, {"source_bytes": 10}, {"etag": "mtime_ns:5"}, {"etag": f"unconfirmed-md5:{A.hex()}"}],
)
def test_an_image_without_content_that_was_seen_is_no_duplicate(change: dict[str, Any]) -> None:
    assert len(find_groups(TWINS, 9)) == 1
    assert find_groups([one._replace(**change) for one in TWINS], 9) == []


# --- jobs


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 pictures, each another one."""
    return make.class_folders(tmp_path_factory.mktemp("distinct"), {"ant": 14, "bee": 13, "cat": 13})


@pytest.fixture(scope="module")
def copied(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pictures with three copies: two of one picture, in its class."""
    folder = Path(shutil.copytree(photos, tmp_path_factory.mktemp("copied") / "in"))
    shutil.copy(folder / "ant/0003.jpg", folder / "ant/0001_again.jpg")
    shutil.copy(folder / "ant/0003.jpg", folder / "ant/zz.jpg")
    shutil.copy(folder / "bee/0000.jpg", folder / "bee/copy.jpg")
    return folder


def groups_of(version: Path) -> list[list[str]]:
    lines = (version / schema.DUPLICATES_FILE).read_text().splitlines()
    documents: list[dict[str, Any]] = [json.loads(line) for line in lines]
    assert [one["md5"] for one in documents] == sorted(one["md5"] for one in documents)
    return sorted([image["path"] for image in one["images"]] for one in documents)


COPIES = [["ant/0001_again.jpg", "ant/0003.jpg", "ant/zz.jpg"], ["bee/0000.jpg", "bee/copy.jpg"]]


@pytest.fixture(scope="module")
def done(copied: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[make.Finished, Path]]:
    """Mode → what the job said, its version."""
    found = {}
    for mode in ("keep", "report", "drop"):
        out = tmp_path_factory.mktemp(mode)
        finished = make.job(copied, out, *FLAGS, "--duplicates", mode, "--max_reject_fraction", "0")
        assert finished.code == 0, finished.err
        found[mode] = finished, out / "photos" / "1.0.0"
    return found


Done = dict[str, tuple[make.Finished, Path]]


def test_report_names_groups_and_leaves_every_record(done: Done) -> None:
    (finished, version), (_, kept) = done["report"], done["keep"]
    assert "  5 images with exact duplicates in 2 groups: see duplicates.jsonl" in finished.out
    assert "warning: exact duplicates" not in finished.err  # all are of one class and split
    assert "--duplicates report reads every image once more, before planning" in finished.err
    assert groups_of(version) == COPIES
    counts = make.manifest(version)["duplicates"]
    assert (counts["groups"], counts["images"], counts["across_classes"]) == (2, 5, 0)
    reported, plain = make.files(version), make.files(kept)
    assert all(reported[shard.name] == plain[shard.name] for shard in make.shard_files(kept))
    assert schema.DUPLICATES_FILE not in plain and "duplicates" not in make.manifest(kept)


def test_report_counts_leaks_between_splits_and_classes(tmp_path: Path) -> None:
    for split in ("train", "validation"):
        make.class_folders(tmp_path / "in" / split, {"a": 3, "b": 3}, size=(20, 20))  # the same pictures in both
    shutil.copy(tmp_path / "in/train/a/0000.jpg", tmp_path / "in/train/b/other.jpg")
    flags = ("--layout", "split_class_folders", "--duplicates", "report")
    counts = make.manifest(make.published(tmp_path / "in", tmp_path / "out", *flags))["duplicates"]
    assert counts == {"groups": 6, "images": 13, "across_classes": 1, "across_splits": 6}


def test_drop_keeps_the_smallest_path_and_counts_no_failure(done: Done, copied: Path) -> None:
    finished, version = done["drop"]
    assert "--duplicates drop reads every image once more, before planning" in finished.err
    lines = map(json.loads, (version / schema.REJECTS_FILE).read_text().splitlines())
    assert {line["path"]: line["detail"] for line in lines if line["reason"] == "duplicate"} == {
        "ant/0003.jpg": "the same bytes as 'ant/0001_again.jpg'",
        "ant/zz.jpg": "the same bytes as 'ant/0001_again.jpg'",
        "bee/copy.jpg": "the same bytes as 'bee/0000.jpg'",
    }
    manifest = make.manifest(version)
    assert (manifest["images"], manifest["records"], manifest["rejects"]["by_reason"]) == (43, 40, {"duplicate": 3})
    assert groups_of(version) == COPIES
    before = make.traces(version)
    again = make.job(copied, version.parent.parent, *FLAGS, "--duplicates", "drop")
    assert again.out.startswith("already published") and make.traces(version) == before


@pytest.mark.parametrize("mode", ["drop", "report"])
def test_repair_restores_shards_and_duplicates(mode: str, done: Done, copied: Path, tmp_path: Path) -> None:
    flags, whole = (*FLAGS, "--duplicates", mode), make.files(done[mode][1])
    version = Path(shutil.copytree(done[mode][1], tmp_path / "photos/1.0.0"))
    (version / schema.DUPLICATES_FILE).unlink()
    make.shard_files(version)[0].unlink()
    assert make.job(copied, tmp_path, *flags).code == 0
    assert make.files(version) == whole
    for path in (version / schema.DUPLICATES_FILE, version / schema.REJECTS_FILE, make.shard_files(version)[1]):
        if path.stat().st_size:
            make.flip_byte(path)
    assert make.job(copied, tmp_path, *flags, "--repair").out.split()[0] == "repaired"
    assert make.files(version) == whole


@pytest.mark.parametrize("mode", ["drop", "report"])
def test_a_resumed_job_finds_the_same_duplicates(
    mode: str, done: Done, copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = (*FLAGS, "--duplicates", mode)

    def interrupted(*_: object) -> None:
        raise RuntimeError("the last step dies")

    with monkeypatch.context() as patch:
        patch.setattr(writing, "publish", interrupted)
        assert make.job(copied, tmp_path, *flags).code == 1
    finished = {path: make.traces(path) for path in make.shard_files(tmp_path / "photos/1.0.0")}
    assert len(finished) == 4
    version = make.published(copied, tmp_path, *flags)
    assert make.same_each_time(version) == make.same_each_time(done[mode][1])
    assert {path: make.traces(path) for path in finished} == finished


def test_a_manifest_s_wrong_md5_makes_no_duplicate(photos: Path, tmp_path: Path) -> None:
    names = sorted(make.files(photos))[:4]
    right = hashlib.md5((photos / names[0]).read_bytes()).hexdigest()
    rows = "".join(f"{name},x,{right if number < 2 else ''}\n" for number, name in enumerate(names))
    (tmp_path / "rows.csv").write_text(f"path,label,md5\n{rows}")
    flags = ("--layout", "manifest", "--manifest", tmp_path / "rows.csv", "--max_reject_fraction", "0.5")
    version = make.published(photos, tmp_path / "out", *flags, "--duplicates", "fail")
    (reject,) = map(json.loads, (version / schema.REJECTS_FILE).read_text().splitlines())
    assert (reject["path"], reject["reason"]) == (names[1], "changed"), "as without --duplicates"


@pytest.mark.parametrize(
    ("mode", "line"),
    [
        ("fail", "'ant/0001_again.jpg' and 'ant/0003.jpg' hold the same bytes"),
        ("drop", "'bee/0001.jpg' and 'cat/bee.jpg' hold the same bytes, but their classes are 'bee' and 'cat'"),
    ],
)
def test_fail_and_drop_of_two_classes_name_two_paths_and_plan_nothing(
    copied: Path, tmp_path: Path, mode: str, line: str
) -> None:
    folder = Path(shutil.copytree(copied, tmp_path / "in"))
    shutil.copy(folder / "bee/0001.jpg", folder / "cat/bee.jpg")
    shutil.copy(folder / "bee/0002.jpg", folder / "cat/bee2.jpg")
    finished = make.job(folder, tmp_path / "out", "--duplicates", mode)
    fix = "take files away, or list them with --duplicates report"
    assert (finished.code, finished.err.splitlines()[-1]) == (1, f"error: --duplicates {mode}: {line}; {fix}")
    assert not make.files(tmp_path / "out")


def test_fail_passes_where_all_differ_are_empty_or_too_large(photos: Path, gcs: Gcs, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(photos, tmp_path / "in"))
    for name in ("x.png", "y.png"):
        (folder / "ant" / name).write_bytes(make.encoded(make.noise(64, 64), "PNG"))
        (folder / "bee" / name).write_bytes(b"")
    flags = (*FLAGS, "--duplicates", "fail", "--max_image_bytes", "10kB", "--max_reject_fraction", "0.5")
    version = make.published(folder, tmp_path / "local", *flags)
    assert make.manifest(version)["rejects"]["by_reason"] == {"too_many_bytes": 2, "not_an_image": 2}
    assert make.manifest(version)["duplicates"] == {"groups": 0, "images": 0, "across_classes": 0, "across_splits": 0}
    assert (version / schema.DUPLICATES_FILE).read_bytes() == b""
    gcs.put_folder(bucket := gcs.new_bucket(), "in", folder)
    assert make.dataset_hash(make.published(f"gs://{bucket}/in", tmp_path / "remote", *flags)) == make.dataset_hash(
        version
    )


def test_broken_copies_count_once_against_the_limit(photos: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(photos, tmp_path / "in"))
    for number in range(3):
        (folder / f"ant/broken{number}.jpg").write_bytes(b"not an image")
    version = make.published(folder, tmp_path, "--duplicates", "drop", "--max_reject_fraction", "0.03")
    assert make.manifest(version)["rejects"]["by_reason"] == {"duplicate": 2, "not_an_image": 1}


def test_the_sample_is_taken_of_images_that_are_not_dropped(tmp_path: Path) -> None:
    folder = make.class_folders(tmp_path / "in", {"a": 600}, size=(8, 8))
    keys = {path: order_key(f"a/{path.name}", 0) for path in (folder / "a").iterdir()}
    first = sorted(keys, key=lambda path: keys[path])[:70]  # the sample would be 64 of these
    for path in first:
        path.write_bytes((folder / "a" / "0000.jpg").read_bytes())
    manifest = make.manifest(make.published(folder, tmp_path / "out", "--duplicates", "drop"))
    assert manifest["rejects"]["by_reason"]["duplicate"] >= 69
    assert manifest["image"]["sampled_images"] == 64


def test_on_gs_the_listing_s_md5s_are_used_for_the_same_bytes(
    done: Done, copied: Path, gcs: Gcs, tmp_path: Path
) -> None:
    gcs.put_folder(bucket := gcs.new_bucket(), "in", copied)
    before = len(gcs.requests())
    finished = make.job(f"gs://{bucket}/in", f"gs://{bucket}/out", *FLAGS, "--duplicates", "drop")
    assert finished.code == 0, finished.err
    assert "reads each image that is listed without an MD5 once more" in finished.err
    reads = [request.object_read or "" for request in gcs.requests()[before:]]
    assert sum(name.startswith("in/") for name in reads) == 2 * 40  # the sample and the shards; a dropped one never
    there = gcs.download(bucket, "out/photos/1.0.0", tmp_path / "there")
    assert make.same_each_time(there) == make.same_each_time(done["drop"][1])
