"""The command on a version that is published already, is corrupt, or was left by a job that failed."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from beam_pipeline import schema
from beam_pipeline.storage.local import LocalStorage
from tests import make
from tests.cli.conftest import failed, refused, unchanged


@contextlib.contextmanager
def publishing(fails: Callable[[str, list[str]], bool] = lambda url, before: False) -> Iterator[list[str]]:
    """What is written, by URL; on a machine that goes away where `fails` says so of the next URL and those before."""
    urls: list[str] = []

    def note(_: LocalStorage, file: object, url: str, *more: object) -> None:
        if fails(url, urls):
            raise RuntimeError("the machine goes away here")
        urls.append(url)

    with pytest.MonkeyPatch.context() as patch:
        make.before(patch, LocalStorage, "publish", note)
        yield urls


# --- published already


def test_a_stratified_version_is_recognised_refused_with_other_images_and_repaired(
    changed: Path, tmp_path: Path
) -> None:
    flags = ("--splits", "train=80,validation=20", "--num_shards", "2")
    command = (changed, tmp_path / "out", *flags, "--stratify")
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
    (changed / "ant" / "new.jpg").write_bytes(make.encoded(make.picture(seed=1000)))
    failed(make.job(*command), "40 images were listed then, 41 now")
    assert f"--stratify False: {version} is published with True" in make.job(*command[:-1]).err


def edit_keeping_the_size(image: Path) -> None:
    """Another picture of the same number of bytes: a JPEG may end in anything."""
    size = image.stat().st_size
    for quality in range(94, 5, -3):
        data = make.encoded(make.picture(seed=999), quality=quality)
        if len(data) <= size:
            image.write_bytes(data.ljust(size, b"\0"))
            return
    raise AssertionError("no quality gives a file small enough")


@pytest.mark.parametrize(
    ("change", "flags", "now"),
    [
        (Path.unlink, (), "39 now, 1 of 4 shards differ; choose --version 1.10.0 or --overwrite"),
        (lambda image: image.rename(image.with_name("renamed.jpg")), (), "40 now, "),
        (edit_keeping_the_size, ("--repair",), "40 now, 1 of 4 shards differ; "),
    ],
    ids=["removed", "renamed", "edited"],
)
def test_another_input_is_exit_1_with_counts(
    changed: Path, version: Path, change: Callable[[Path], object], flags: tuple[str, ...], now: str
) -> None:
    change(changed / "ant" / "0003.jpg")
    (version.parent / "1.9.0").mkdir()
    with unchanged(version):
        failed(make.again(changed, version, *flags), f"40 images were listed then, {now}")
    (version.parent / "1.9.0").rmdir()


# --- damage and repair


@pytest.mark.parametrize(
    ("name", "kind", "flags"),
    [("photos-train.tfrecord-00000-of-00002", "folder", ()), ("index", "file", ("--repair",))],
)
def test_a_folder_in_the_place_of_a_file_is_told_before_a_repair_begins(
    photos: Path, version: Path, name: str, kind: str, flags: tuple[str, ...]
) -> None:
    (version / name).rename(version.parent / "moved")
    (version / name).write_text("mine") if kind == "file" else (version / name / "mine").mkdir(parents=True)
    with unchanged(version):
        line = f"--output '{version.parent.parent}': {version}/{name} is a {kind}; move it away"
        refused(make.again(photos, version, *flags), 2, line)
    shutil.rmtree(version / name) if kind == "folder" else (version / name).unlink()
    finished = make.again(photos, version, *flags)
    assert (finished.code, finished.out.partition(" ")[0]) == (0, "repaired"), finished.err


def test_a_repair_does_not_believe_the_leftover_of_an_interrupted_one(
    photos: Path, original: Path, version: Path
) -> None:
    for shard in make.shard_files(version):
        make.flip_byte(shard)
    with publishing(fails=lambda url, before: len(before) == 1) as repaired:
        assert make.again(photos, version, "--repair").code == 1
    make.flip_byte(Path(repaired[0]))  # corrupt once more, after the interrupted repair had repaired it
    finished = make.again(photos, version, "--repair")
    assert finished.code == 0, finished.err
    assert make.files(version) == make.files(original)


def test_overwrite_that_fails_before_it_writes_leaves_the_published_version(changed: Path, version: Path) -> None:
    for image in (changed / "bee").iterdir():
        image.write_bytes(b"no image")
    with unchanged(version):
        assert make.again(changed, version, "--overwrite").code == 1


# --- a job that fails


def fail_at_one_shard(folder: Path, version: Path) -> None:
    with publishing(fails=lambda url, before: "validation.tfrecord-00001" in url):
        failed(make.again(folder, version), "the same command resumes")


def test_an_image_with_another_time_voids_what_a_failed_job_left(changed: Path, original: Path, tmp_path: Path) -> None:
    version = tmp_path / "out" / "photos" / "1.0.0"
    fail_at_one_shard(changed, version)
    assert make.shard_files(version)
    os.utime(changed / "ant" / "0000.jpg", ns=(1, 1))  # its bytes are the same, but a listing can't tell
    with publishing() as published:
        assert make.again(changed, version).code == 0
    shards = [str(path) for path in make.shard_files(version)]
    assert len(shards) == 4
    assert set(shards) <= set(published), "none is kept"
    assert make.same_each_time(version) == make.same_each_time(original)
