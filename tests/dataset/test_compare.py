"""A published version under the same command again: what is compared, what counts as damage, how repair ends."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import apache_beam as beam
import msgspec
import pytest

from beam_pipeline import images, schema
from beam_pipeline.config import Config
from beam_pipeline.dataset import answers
from beam_pipeline.dataset.compare import (
    CorruptFiles,
    ShardSums,
    _compare_inputs,
    compare,
    compare_listing,
    compare_shard,
    shard_of,
)
from beam_pipeline.inputs.folders import all_images
from beam_pipeline.pipeline import graph
from beam_pipeline.schema.job import ComparedInputs
from beam_pipeline.schema.manifest import Content, Manifest, seal_manifest
from beam_pipeline.storage.local import LocalStorage
from tests import make
from tests.servers import Gcs


def comparison_of(photos: Path, version: Path, **more: object) -> tuple[Config, Content]:
    """What is compared: a command and a manifest."""
    values: dict[str, object] = {"input": str(photos), "output": str(version.parent.parent), "name": "photos"}
    flags = {"image_size": 24, "splits": "train=0.8,validation=0.2", "num_shards": 2}
    return Config(**values | flags | more), Manifest("", make.manifest(version)).content


def in_job(config: Config, published: Content) -> ComparedInputs:
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        graph.build_comparison(pipeline, config, published.self_sha256)
    return answers.take(config, ComparedInputs)


def damage(photos: Path, version: Path, **more: object) -> CorruptFiles:
    config, published = comparison_of(photos, version, **more)
    if config.repair:
        return compare(config, published, in_job(config, published)).corrupt
    return compare_listing(config, published).corrupt


def assert_repaired(photos: Path, version: Path, original: Path, *flags: str) -> make.Finished:
    finished = make.again(photos, version, *flags)
    assert finished.code == 0, finished.err
    assert make.files(version) == make.files(original)
    return finished


def test_an_image_in_a_split_that_had_none_is_another_input(photos: Path, version: Path) -> None:
    config, published = comparison_of(photos, version)
    ref = next(all_images(config))._replace(split="test")
    assert shard_of(published, ref) == ("test", 0)
    (sums := ShardSums()).add(ref, None)
    compared = compare_shard(published.shards.get(("test", 0)), sums, environment=0)
    assert (compared.images, compared.different) == (1, 1)


def test_only_repair_reads_every_byte(photos: Path, version: Path) -> None:
    make.flip_byte(make.shard_files(version)[3])
    make.flip_byte(version / "index/photos-train.tfrecord-00000-of-00002.idx")
    make.flip_byte(version / "index/photos-train.tfrecord-00001-of-00002.records.npy")
    make.flip_byte(version / "features.json")
    assert not damage(photos, version)
    corrupt = frozenset({("train", 0), ("train", 1), ("validation", 1)})
    assert damage(photos, version, repair=True) == CorruptFiles(corrupt, frozenset({"features.json"}))


OTHERS = ("class.labels.txt", "index/train.runs.npy")
OF_SHARDS = (
    "index/photos-train.tfrecord-00000-of-00002.idx",
    "index/photos-validation.tfrecord-00001-of-00002.records.npy",
    "photos-validation.tfrecord-00000-of-00002",
)


def test_other_files_that_are_cut_missing_or_too_many_are_damage(photos: Path, original: Path, version: Path) -> None:
    foreign = {"photos-train.tfrecord-00007-of-00009", "index/test.runs.npy"}
    for name in (*OTHERS, *OF_SHARDS):
        (version / name).write_bytes((version / name).read_bytes()[:-1])
    for name in ("features.json", "index/photos-train.tfrecord-00001-of-00002.idx"):
        (version / name).unlink()
    (version / "rejects.jsonl").write_bytes(b"longer")
    for name in foreign:
        (version / name).write_bytes(b"left over")
    corrupt = frozenset({("train", 0), ("train", 1), ("validation", 0), ("validation", 1)})
    others = frozenset({*OTHERS, "features.json", "rejects.jsonl"})
    assert damage(photos, version) == CorruptFiles(corrupt, others, frozenset(foreign))
    finished = assert_repaired(photos, version, original)
    told, warning = finished.err.splitlines()
    assert told.startswith(
        "repairing 4 corrupt shards and 4 missing or corrupt files (class.labels.txt, features.json, "
    )
    assert told.endswith(" and 2 unexpected files (index/test.runs.npy, photos-train.tfrecord-00007-of-00009)")
    assert warning.startswith("warning: fewer than 5 records of 3 classes in split 'validation': ")
    assert finished.out.startswith(f"repaired {version}\n") and not (version.parent / "_state").exists()


def test_another_class_folder_without_images_is_no_other_input(photos: Path, version: Path, tmp_path: Path) -> None:
    # An empty class would get an id and move those after it: the version has other classes.
    folder = Path(shutil.copytree(photos, tmp_path / "in"))
    (folder / "aardvark").mkdir()
    assert make.again(folder, version).out.startswith("already published")


@pytest.mark.parametrize("codec", ["another", "the same"])
def test_a_shard_that_comes_out_with_other_bytes_is_not_repaired(
    photos: Path, version: Path, tmp_path: Path, codec: str
) -> None:
    folder = Path(shutil.copytree(photos, tmp_path / "in"))
    for image in folder.rglob("*.jpg"):  # as if a codec gave other pixels
        make.flip_byte(image)
    manifest = make.manifest(version)
    if codec == "another":
        manifest["codec"]["pillow"] = "0.1"
        (version / schema.MANIFEST_FILE).write_bytes(seal_manifest(manifest))
    others = {shard.name: shard.read_bytes() for shard in make.shard_files(version)[1:]}
    make.shard_files(version)[0].unlink()
    finished = make.again(folder, version, "--max_reject_fraction", "1")
    why = r"pillow was 0\.1, is [0-9.]+" if codec == "another" else "an image of it has changed"
    assert finished.code == 1
    assert re.search(rf"comes out with other bytes than were published: {why}; use --overwrite\n$", finished.err)
    assert {shard.name: shard.read_bytes() for shard in make.shard_files(version)} == others


def test_other_versions_of_codecs_are_fine_if_the_bytes_are_the_same(
    photos: Path, original: Path, version: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "codec_versions", lambda: {"pillow": "0.1"})
    (version / "class.labels.txt").unlink()
    make.shard_files(version)[0].unlink()
    assert_repaired(photos, version, original)


def test_a_gzip_version_is_compared_and_repaired(photos: Path, tmp_path: Path) -> None:
    version = make.published(photos, tmp_path / "out", *make.TWO_SPLITS, "--compression", "gzip")
    before = Path(shutil.copytree(version, tmp_path / "before"))
    make.flip_byte(make.shard_files(version)[0])
    make.flip_byte(version / "class.labels.txt")
    assert_repaired(photos, version, before, "--compression", "gzip", "--repair")


def test_a_run_index_is_not_made_of_a_corrupt_record_table(photos: Path, original: Path, version: Path) -> None:
    table = "index/photos-train.tfrecord-00001-of-00002.records.npy"
    make.flip_byte(version / table)
    (version / "index/train.runs.npy").unlink()
    finished = make.again(photos, version)
    assert (finished.code, finished.err.splitlines()[-1]) == (1, f"error: {table} is corrupt: use --repair")
    assert_repaired(photos, version, original, "--repair")


def test_a_repair_does_not_believe_the_leftover_of_an_interrupted_one(
    photos: Path, version: Path, original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for shard in make.shard_files(version):
        make.flip_byte(shard)
    repaired: list[str] = []

    def note(_: LocalStorage, file: object, url: str, *more: object) -> None:
        if repaired:
            raise RuntimeError("the machine goes away here")
        repaired.append(url)

    with monkeypatch.context() as patch:
        make.before(patch, LocalStorage, "publish", note)
        assert make.again(photos, version, "--repair").code == 1
    make.flip_byte(Path(repaired[0]))  # corrupt once more, after the interrupted repair had repaired it
    assert_repaired(photos, version, original, "--repair")


def test_overwrite_that_fails_before_it_writes_leaves_the_published_version(
    photos: Path, version: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(photos, tmp_path / "in"))
    for image in (folder / "bee").iterdir():
        image.write_bytes(b"no image")
    before = make.traces(version)
    assert make.again(folder, version, "--overwrite").code == 1
    assert make.traces(version) == before


def test_a_stratified_version_is_recognised_refused_with_other_images_and_repaired(
    photos: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(photos, tmp_path / "in"))
    command = (folder, tmp_path / "out", "--splits", "train=80,validation=20", "--num_shards", "2", "--stratify")
    version = make.published(*command)
    counts = {split: one["class_counts"] for split, one in make.manifest(version)["splits"].items()}
    assert counts == {"train": [11, 10, 10], "validation": [3, 3, 3]}
    files = make.files(version)
    for flag in ((), ("--repair",)):
        finished = make.job(*command, *flag)
        assert finished.out.startswith(f"already published {version}, nothing written"), finished.err
        assert "were touched" not in finished.err
    make.shard_files(version)[0].unlink()
    (version / schema.REJECTS_FILE).unlink()
    assert make.job(*command).out.startswith("repaired")
    assert make.files(version) == files
    (folder / "ant" / "new.jpg").write_bytes(make.encoded(make.picture(seed=1000)))
    assert "40 images were listed then, 41 now" in make.job(*command).err
    assert f"--stratify False: {version} is published with True" in make.job(*command[:-1]).err


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_job_lists_what_the_launcher_lists(photos: Path, version: Path, tmp_path: Path, is_changed: bool) -> None:
    folder = Path(shutil.copytree(photos, tmp_path / "in", copy_function=shutil.copy2))
    if is_changed:
        shutil.copytree(folder / "ant", folder / "bat")
    config, published = comparison_of(folder, version)
    before = make.traces(version.parent.parent)
    found = in_job(config, published)
    assert make.traces(version.parent.parent).keys() == before.keys(), "it leaves nothing"
    assert found == _compare_inputs(config, published)
    assert bool(found.different) == is_changed


def test_a_version_that_is_published_again_meanwhile_is_no_answer(photos: Path, version: Path) -> None:
    config, published = comparison_of(photos, version)
    with pytest.raises(Exception, match=r"was published again while it was compared: run the same command again"):
        in_job(config, msgspec.structs.replace(published, self_sha256="0" * 64))


# --- what was compared, and what wasn't


def compared(photos: Path, version: Path, *flags: str) -> tuple[str, str]:
    """What a rerun that writes nothing compared, as it says; its warnings."""
    before = make.traces(version)
    finished = make.again(photos, version, *flags)
    assert finished.code == 0, finished.err
    assert make.traces(version) == before
    assert [path.name for path in version.parent.iterdir()] == ["1.0.0"], "no state is left"
    lines = finished.out.splitlines()
    assert lines[0] == f"already published {version}, nothing written"
    return lines[1].strip(), without_few(finished.err)


def without_few(stderr: str) -> str:
    """What a job says, without the warning that classes have few records, as in most tests."""
    return "".join(line for line in stderr.splitlines(True) if "fewer than 5 records" not in line)


FILES = "4 shards and 10 other files match the"
TOUCHED = (
    "warning: images were touched, copied or moved since this version was published: their etags or mtimes differ from "
    "run.json; --repair compares their contents\n"
)


def test_what_a_killed_publisher_left_goes_with_the_same_command(photos: Path, version: Path) -> None:
    (state := version.parent / "_state/1.0.0/shards").mkdir(parents=True)
    for file in ("../plan.json", "train-00000.json"):  # the claim goes first
        (state / file).write_text("{}")
    assert compared(photos, version)[1] == ""


def test_a_rerun_says_what_it_compared_and_takes_files_of_others_for_no_damage(photos: Path, version: Path) -> None:
    for name in ("README.md", "report.html", "index/notes.txt", "pics-train.tfrecord-00000-of-00001"):
        (version / name).write_text("mine")
    unread = "contents of files and 40 images were not checked: --repair checks them"
    assert compared(photos, version) == (f"{FILES} sizes in the manifest; {unread}", "")
    read = f"{FILES} sizes and CRCs in the manifest, 40 images match the MD5s that were published"
    assert compared(photos, version, "--repair") == (read, "")


def test_in_a_bucket_checksums_of_the_listing_are_compared_and_a_flipped_bit_is_repaired_or_told(
    gcs: Gcs, photos: Path, original: Path, version: Path, tmp_path: Path
) -> None:
    bucket = gcs.new_bucket()
    gcs.put_folder(bucket, "in", photos)
    gcs.put_folder(bucket, "out/photos/1.0.0", version)
    url, output, before = f"gs://{bucket}/in", f"gs://{bucket}/out", len(gcs.requests())
    first = f"already published {output}/photos/1.0.0, nothing written\n  {FILES} sizes and CRCs in the manifest"
    for source, more in (
        (url, ", 40 images match the MD5s that were published\n"),
        (photos, "; contents of 40 images were"),
    ):
        finished = make.job(source, output, *make.TWO_SPLITS)
        assert finished.out.startswith(first + more)
        assert (finished.code, without_few(finished.err)) == (0, "")
    assert {request.method for request in gcs.requests()[before:]} == {"GET"}, "nothing is written"
    make.flip_byte(make.shard_files(version)[1])
    make.flip_byte(version / "features.json")
    gcs.put_folder(bucket, "out/photos/1.0.0", version)
    finished = make.job(photos, output, *make.TWO_SPLITS)
    repairing = "repairing 1 corrupt shard and 1 missing or corrupt file (features.json)\n"
    assert (finished.code, without_few(finished.err)) == (0, repairing)
    assert make.files(gcs.download(bucket, "out/photos/1.0.0", tmp_path / "now")) == make.files(original)
    image = gcs.get(bucket, "in/ant/0003.jpg")
    gcs.put(bucket, "in/ant/0003.jpg", image[:-1] + bytes([image[-1] ^ 1]))
    finished = make.job(url, output, *make.TWO_SPLITS)
    assert finished.code == 1 and "40 images were listed then, 40 now, 1 of 4 shards differ" in finished.err


def test_a_touched_image_is_warned_of_until_contents_are_compared(photos: Path, version: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(photos, tmp_path / "in", copy_function=shutil.copy2))
    assert compared(folder, version)[1] == ""
    image = folder / "ant" / "0003.jpg"
    image.write_bytes(image.read_bytes())
    assert compared(folder, version)[1] == TOUCHED
    assert compared(folder, version, "--repair")[1] == ""


@pytest.mark.parametrize(
    "run", [b"", b"[" * 100_000, b'{"images": 40}', b'{"skipped": []}', b'{"skipped": {"suffixes": 5}}']
)
def test_a_version_without_a_sum_of_its_listing_is_accepted(
    photos: Path, version: Path, tmp_path: Path, run: bytes
) -> None:
    (version / schema.RUN_FILE).write_bytes(run)
    folder = Path(shutil.copytree(photos, tmp_path / "in", copy_function=shutil.copy))
    assert compared(folder, version)[1] == ""


def test_repair_compares_images_of_shards_without_a_reject_of_the_moment(photos: Path, tmp_path: Path) -> None:
    # An image that couldn't be read then has no MD5 in its shard's fingerprint; the other shards have all of theirs.
    folder = Path(shutil.copytree(photos, tmp_path / "in"))
    (folder / "ant" / "gone.jpg").symlink_to("nowhere")
    version = make.published(folder, tmp_path / "out", *make.TWO_SPLITS, "--max_reject_fraction", "0.1")
    shards = Manifest("", make.manifest(version)).content.shards.values()
    count = sum(shard.images for shard in shards if shard.images == shard.records)
    assert 0 < count < 40
    read = f"{FILES} sizes and CRCs in the manifest, {count} images match the MD5s that were published"
    assert compared(folder, version, "--repair") == (read, "")
    for image in (folder / "bee").iterdir():
        make.flip_byte(image)
    finished = make.job(folder, tmp_path / "out", *make.TWO_SPLITS, "--repair")
    assert finished.code == 1
    assert "41 images were listed then, 41 now, 3 of 4 shards differ" in finished.err
