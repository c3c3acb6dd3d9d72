"""Jobs that read archives: the dataset of the unpacked folders, also after a repair, and with a base."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import make
from tests.archives import pack
from tests.archives.test_archives import put
from tests.servers import Bucket

NAMES = [name for name in make.ODD_NAMES if name.endswith(".jpg")]


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    """Class folders with all kinds of names, and a file that is no image."""
    names = [f"{label}/{name}" for label in ("größe", "dog") for name in NAMES]
    pictures = {name: make.encoded(make.picture(seed=seed)) for seed, name in enumerate(names)}
    return {**pictures, "dog/notes.txt": b"text", "dog/corrupt.jpg": b"no picture"}


def put_folder(bucket: Bucket, files: pack.Files) -> str:
    put(bucket, {f"unpacked {len(files)}/{name}": data for name, data in files.items()})
    return f"{bucket.url}/unpacked {len(files)}"


SPLITS = (*make.TWO_SPLITS, "--max_reject_fraction", "0.1")


@pytest.mark.parametrize(
    ("bucket", "form"),
    [
        *(("local", form) for form in ("zip", "tar of tars", "folder of zips")),
        *(("gs", "tar of tars"), ("gs", "folder of zips"), ("s3", "zip")),
    ],
    indirect=["bucket"],
)
def test_a_dataset_has_one_hash_whatever_its_images_are_packed_in(
    bucket: Bucket, files: dict[str, bytes], form: str, tmp_path: Path
) -> None:
    pack_files, url = pack.FORMS[form]
    put(bucket, pack_files(files))
    packed = make.published(f"{bucket.url}/{url}", tmp_path / "packed", *SPLITS)
    expected = make.published(put_folder(bucket, files), tmp_path / "folder", *SPLITS)
    assert make.manifest(packed)["records"] == 2 * len(NAMES)
    assert make.dataset_hash(packed) == make.dataset_hash(expected)


@pytest.mark.parametrize(
    "bucket", ["local", *(pytest.param(place, marks=pytest.mark.soak) for place in ("gs", "s3"))], indirect=True
)
def test_a_repair_and_a_base_take_an_archive_for_its_folder(
    bucket: Bucket, files: dict[str, bytes], tmp_path: Path
) -> None:
    more = {**files, "dog/new.jpg": make.encoded(make.picture(seed=99))}
    put(bucket, {"in.zip": pack.zipped(files), "more.tar": pack.tarred(more)})
    folder = put_folder(bucket, files)
    version = make.published(f"{bucket.url}/in.zip", tmp_path / "out", *SPLITS)
    before = make.dataset_hash(version)
    for damage, input in ((make.flip_byte, folder), (Path.unlink, f"{bucket.url}/in.zip")):
        damage(make.shard_files(version)[0])
        finished = make.job(input, tmp_path / "out", *SPLITS, "--repair")
        assert finished.code == 0, finished.err
        assert make.dataset_hash(version) == before
    make.published(folder, tmp_path / "of a folder", *SPLITS)
    next_version, hashes = (*SPLITS, "--version", "1.1.0"), set()
    for output, then in (("out", put_folder(bucket, more)), ("of a folder", f"{bucket.url}/more.tar")):
        finished = make.job(then, tmp_path / output, *next_version)
        assert finished.code == 0 and f"1 converted, {2 * len(NAMES)} reused from 1.0.0" in finished.out, finished
        hashes.add(make.dataset_hash(tmp_path / output / "photos/1.1.0"))
    assert make.job(f"{bucket.url}/more.tar", tmp_path / "alone", *next_version, "--base", "none").code == 0
    assert hashes == {make.dataset_hash(tmp_path / "alone/photos/1.1.0")}
