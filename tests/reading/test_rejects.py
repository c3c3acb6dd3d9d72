"""`imageshards rejects`: why images got no record, in words, from what the pipeline wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import reader
from beam_pipeline import schema
from beam_pipeline.errors import ImageShardsError, NotPublishedError
from beam_pipeline.schema.manifest import seal_manifest
from imageshards import main
from reader.tools.rejects import in_words
from tests import make
from tests.reading.shards import make_dataset


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rejects")
    images = make.class_folders(folder / "in", {"cat": 4})
    good = make.encoded(make.picture(120, 90))
    broken = {
        "empty": b"",
        "text": "größe, no image".encode(),
        "page": b"<!DOCTYPE html><p>404",
        "zeros": bytes(500),
        "other": b"\x01\x02\x03\xff\xfe\xfd\xfc\xfb\xfa",
        "cut": good[: len(good) // 2],
        "photoshop": b"8BPS\0\1" + bytes(90),
        "wide": make.encoded(make.picture(300, 200)),
        **{f"text{number}": b"some text" for number in range(7)},
    }
    for name, data in broken.items():
        (images / "cat" / f"{name}.jpg").write_bytes(data)
    flags = ("--max_reject_fraction", "1", "--max_pixels", "50000")
    return make.published(images, folder / "out", *flags)


@pytest.mark.parametrize("file", ["", "/rejects.jsonl"])
def test_groups_are_in_words_with_counts_and_a_few_names(
    file: str, version: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rejects", f"{version}{file}"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "15 of 19 images were rejected",
        "text: 8 (not_an_image)",
        "  cat/text.jpg, cat/text0.jpg, cat/text1.jpg, cat/text2.jpg, cat/text3.jpg and 3 more",
        "another kind of file: 1 (not_an_image)",
        "  cat/other.jpg",
        "empty file: 1 (not_an_image)",
        "  cat/empty.jpg",
        "only zeros: 1 (not_an_image)",
        "  cat/zeros.jpg",
        "too many pixels, --max_pixels 50000: 1 (too_many_pixels)",
        "  cat/wide.jpg",
        "truncated JPEG: 1 (truncated)",
        "  cat/cut.jpg",
        "unsupported PSD: 1 (unsupported)",
        "  cat/photoshop.jpg",
        "web page or XML: 1 (not_an_image)",
        "  cat/page.jpg",
        f"all of them: {version}/rejects.jsonl",
    ]
    assert main(["rejects", f"{version}{file}", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["dataset"], document["images"], document["rejected"]) == (str(version), 19, 15)
    assert document["groups"][-1] == {
        "what": "web page or XML", "reason": "not_an_image", "count": 1, "paths": ["cat/page.jpg"],
    }  # fmt: skip
    assert sum(group["count"] for group in document["groups"]) == 15
    assert [group.what for group in reader.rejects(version)] == [group["what"] for group in document["groups"]]


@pytest.fixture(scope="module", params=[20, 600])
def failed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a dataset whose job failed for its rejects, in its sample or at its end; a name forges a line."""
    folder = tmp_path_factory.mktemp("failed")
    images = make.class_folders(folder / "in", {"cat": 1})
    for number in range(1, request.param):  # up to 512 are sampled
        (images / "cat" / f"{number}.jpg").hardlink_to(images / "cat" / "0000.jpg")
    for name in ("a.jpg", "x\n0 of 22 images were rejected\ny.jpg"):
        (images / "cat" / name).write_bytes(b"some text")
    said = make.job(images, folder / "out", "--max_reject_fraction", "0.001").err
    assert f"; see imageshards rejects {folder}/out/photos/1.0.0, remove them or raise --max_reject_fraction" in said
    return folder / "out" / "photos"


@pytest.mark.parametrize("place", [".", "1.0.0", "_state/1.0.0", "_state/1.0.0/rejects.jsonl", "1.0.0/rejects.jsonl"])
def test_those_of_a_job_that_failed_for_them_are_shown(
    failed: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rejects", str(failed / place)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "2 images were rejected",
        "nothing is published: the job stopped for them",
        "text: 2 (not_an_image)",
        "  cat/a.jpg, cat/x\\n0 of 22 images were rejected\\ny.jpg",
        f"all of them: {failed}/_state/1.0.0/rejects.jsonl",
    ]
    assert main(["rejects", str(failed / place), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["dataset"], document["images"], document["rejected"]) == (None, None, 2)
    assert [group.count for group in reader.rejects(str(failed / place))] == [2]


@pytest.mark.parametrize("place", ["out/photos", "out/photos/1.0.0", "nowhere", "in", "out"])
def test_without_any_the_fix_is_that_of_a_dataset_which_is_not_published(tmp_path: Path, place: str) -> None:
    make.class_folders(tmp_path / "in", {"cat": 2})
    (tmp_path / "out" / "photos" / "1.0.0").mkdir(parents=True)
    with pytest.raises(NotPublishedError):
        reader.rejects(tmp_path / place)


def test_no_reject_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rejects", make_dataset(tmp_path / "1.0.0", {"train": [3]})]) == 0
    assert capsys.readouterr().out == "0 of 3 images were rejected\n"


@pytest.mark.parametrize(
    ("reason", "detail", "words"),
    [
        ("unsupported", "HEIF: install imageshards[heic] on the workers", None),
        ("unsupported", "JPEG of 40x30 pixels, 99 bytes", "unsupported JPEG"),
        ("unsupported", "camera raw, 99 bytes", "unsupported camera raw"),
        ("decode_error", "PNG, 99 bytes", "corrupt PNG"),
        ("too_many_bytes", "99 bytes, --max_image_bytes 50", "too many bytes, --max_image_bytes 50"),
        ("too_many_pixels", "9x9 pixels of WEBP RGB take 1621 MiB, --max_pixels 7 permits 1 MiB",
         "too many pixels, --max_pixels 7 permits 1 MiB"),
        ("vanished", "not found", "gone before it was read"),
        ("changed", "listed with 5 bytes, read 6", "changed after it was listed"),
        ("a_new_reason", "{x}", "a new reason"),
    ],
)  # fmt: skip
def test_what_differs_between_images_is_not_in_the_words(reason: str, detail: str, words: str | None) -> None:
    assert in_words(reason, detail) == (words or f"unsupported {detail}")


def test_every_reason_has_words() -> None:
    for reason in schema.RejectReason:
        assert "_" not in in_words(reason, "x")


@pytest.mark.parametrize("data", [b"", b"{}\n", b"no JSON\n", None])
def test_a_file_that_is_not_the_published_one_is_told(version: Path, tmp_path: Path, data: bytes | None) -> None:
    copy = Path(shutil.copytree(version, tmp_path / "1.0.0"))
    file = copy / schema.REJECTS_FILE
    file.unlink() if data is None else file.write_bytes(data)
    with pytest.raises(ImageShardsError, match=r"rejects\.jsonl isn't the file that was published; run the job with"):
        reader.rejects(copy)


def test_an_index_tells_reasons_without_names(tmp_path: Path) -> None:
    dataset = Path(make_dataset(tmp_path / "1.0.0", {"train": [3]}))
    manifest = make.manifest(dataset)
    manifest["rejects"]["by_reason"] = {"corrupt_record": 2}
    del manifest["files"][schema.REJECTS_FILE]
    (dataset / schema.MANIFEST_FILE).write_bytes(seal_manifest(manifest))
    assert [(group.what, group.count, group.paths) for group in reader.rejects(dataset)] == [("corrupt record", 2, [])]
