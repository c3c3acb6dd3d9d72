"""`imageshards index`: anybody's plain TFRecords of images become a dataset like ours."""

from __future__ import annotations

import io
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

import reader
from beam_pipeline import schema
from beam_pipeline.errors import ImageShardsError, Reject, UsageError
from beam_pipeline.images import convert
from imageshards import main
from reader import index, verify
from reader.pixels import decode_pixels
from tests import make
from tests.images import tiffs
from tests.images.test_codec import OWN_SIZE
from tests.images.tiffs import page
from tests.reading.foreign import KINDS, SIZE, example, write, write_examples
from tests.reading.shards import CLASSES, draw, make_dataset


@pytest.mark.parametrize("kind", KINDS)
def test_foreign_files_are_trained_and_evaluated_on_and_verified(tmp_path: Path, kind: str) -> None:
    files = write(tmp_path / "files", kind, {"train-00000": 100, "train-00001": 81, "val-00000": 30})
    info = index(f"{files}/*", str(tmp_path / "index")).info
    assert {name: split.records for name, split in info.splits.items()} == {"train": 181, "val": 30}
    first = int(kind == "slim")
    assert info.num_classes == 3 + first
    assert list(info.classes)[first:] == (list(CLASSES) if kind in ("tutorial", "slim") else ["0", "1", "2"])
    assert info.splits["train"].class_counts[first:] == (61, 60, 60)
    assert info.image.format == ("png" if kind == "tfds" else "jpeg")
    assert info.image.min_size == info.image.max_size == SIZE
    assert all(0.2 < value < 0.8 for value in (*info.image.mean, *info.image.std))

    train = reader.train_dataset(info, "train", global_batch_size=181, seed=1)
    images, labels = next(iter(train))
    assert images.shape == (181, *SIZE, 3)
    assert np.bincount(labels - first).tolist() == [61, 60, 60]
    theirs = reader.record_dataset(f"{files}/train-*", keys=["image/encoded" if kind == "slim" else "image"])
    means = [tf.io.decode_image(next(iter(one.values()))).numpy().mean() for one in theirs]
    assert np.abs(np.sort(images.numpy().mean((1, 2, 3))) - np.sort(means)).max() < 1
    evals = reader.eval_dataset(info, "val", global_batch_size=16)
    assert sum(float(tf.reduce_sum(weights)) for _, _, weights in evals) == 30
    assert verify(info)
    make.flip_byte(files / "train-00001", -6)
    (files / "val-00000").unlink()
    faults = [(Path(fault.file).name, fault.record, fault.what) for fault in verify(info).faults]
    assert faults[:2] == [
        ("val-00000", None, "the file is missing"),
        ("train-00001", 80, "the CRC of the data is wrong"),
    ]


def test_a_command_does_it_and_says_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = write(tmp_path / "files", "slim", {"flowers_train_00.tfrecord": 20})
    names = tmp_path / "names.txt"
    names.write_text("background\nant\nbee\ncat\n")
    assert main(["index", f"{files}/*", "--out", str(tmp_path / "index"), "--labels_file", str(names)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"flowers 1.0.0 at {tmp_path}/index\n  20 records of 20 images, 4 classes")
    assert "class 1 'ant': train 7" in out
    assert out.endswith("\n  image in feature 'image/encoded', class in 'image/class/label'\n")
    assert main(["info", str(tmp_path / "index"), "--hash"]) == 0


def test_the_files_may_lie_in_the_folder_of_the_index_and_move_with_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "here", "keras", {"part-0": 70, "part-1": 3})
    assert index([f"{folder}/part-0", f"{folder}/part-*"], str(folder)).records == 73  # each file once
    folder.rename(tmp_path / "there")
    info = reader.load_info(str(tmp_path / "there"))
    assert [shard.file for shard in info.splits["train"].shards] == ["part-0", "part-1"]
    assert len(list(reader.eval_dataset(info, "train", global_batch_size=73))) == 1


# --- which split a file is in


NO_SPLIT = "no split in the name"
SPLITS: dict[str, Any] = {  # files, pattern(s) below their folder, split → what is said of it
    "Kaggle's": (
        ["train/00-8x8-1.tfrec", "val/00-8x8-1.tfrec", "test/00-8x8-1.tfrec"],
        ["*/*.tfrec"],
        {"train": "folder 'train'", "val": "folder 'val'", "test": "folder 'test'"},
    ),
    "inner folders first": (
        ["train_set_v2/tf/a", "train_set_v2/val/a"],
        ["**"],
        {"train": "folder 'train_set_v2'", "val": "folder 'val'"},
    ),
    "of two patterns": (
        ["Training/a", "Testing/a"],
        ["Training/*", "Testing/*"],
        {"training": "folder 'Training'", "testing": "folder 'Testing'"},
    ),
    "names first": (["val/train-0", "val/holdout-0"], ["val/*"], {"train": "file name", "holdout": "file name"}),
    "of one folder": (["k/val/0", "k/val/1"], ["k/val/*"], {"val": "folder 'val'"}),
    "of one file": (["k/test/0"], ["k/test/0"], {"test": "folder 'test'"}),
    "anybody's": (["test/data/a", "test/data/b"], ["test/data/*"], {"train": NO_SPLIT}),
    "not the word alone": (["test_7/a"], ["test_7/*"], {"train": NO_SPLIT}),
}


@pytest.mark.parametrize("kind", SPLITS)
def test_a_split_is_read_from_the_file_name_outwards(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    files, patterns, expected = SPLITS[kind]
    for file in files:
        write((tmp_path / "k" / file).parent, "keras", {Path(file).name: 1})
    indexed = index([tmp_path / "k" / one for one in patterns], tmp_path / "index")
    assert set(indexed.info.splits) == set(expected)
    each = len(files) // len(expected)
    assert set(indexed.sources) == {f"{name}: {each} file{'s'[: each - 1]} ({why})" for name, why in expected.items()}
    assert sum(split.records for split in indexed.info.splits.values()) == len(files)
    assert not caplog.messages


@pytest.mark.parametrize("files", [["train/a", "held_out/a"], ["Zug/a", "Prüfung/a"], ["a-train", "b"]])
def test_files_that_name_no_split_are_named_where_that_may_merge_what_was_held_out(
    tmp_path: Path, files: list[str], caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in files:
        write((tmp_path / "k" / file).parent, "keras", {Path(file).name: 1})
    unnamed = [str(tmp_path / "k" / file) for file in sorted(files) if "train" not in file]
    assert main(["index", f"{tmp_path}/k/{'*/*' if '/' in files[0] else '*'}", "--out", f"{tmp_path}/index"]) == 0
    (said,) = caplog.messages
    which = f"{len(unnamed)} of 2 files and their folders, all are train: {', '.join(unnamed)}; if some are held out, "
    assert said == f"no split in the names of {which}name them or their folder val or test, or index them by themselves"
    assert "no split in the name" in capsys.readouterr().out.splitlines()[-2]


# --- features


def test_other_features_come_along(tmp_path: Path) -> None:
    files = write(tmp_path / "files", "slim", {"a": 10})
    info = index(f"{files}/a", str(tmp_path / "index")).info
    assert info.manifest["features"] == [
        {"name": "image/class/text", "dtype": "bytes", "list": False},
        {"name": "image/height", "dtype": "int64", "list": False},
        {"name": "image/object/bbox/xmin", "dtype": "float32", "list": True},
    ]
    (batch, _) = next(iter(reader.train_dataset(info, "train", global_batch_size=4, features=["image/height"])))
    assert batch["image/height"].numpy().tolist() == [SIZE[0]] * 4


def test_features_that_some_records_or_files_lack_are_lists(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def write_file(name: str, *more: dict[str, Any]) -> None:
        images = (example(image=draw(number, SIZE), label=number, **one) for number, one in enumerate(more))
        write_examples(tmp_path / name, *images)

    write_file("a", {"tags": [1, 2], "optional": 5, "one": 1}, {"tags": [1, 2, 3], "optional": 5, "one": 2})
    write_file("b", {"tags": [3], "optional": 7, "one": 3}, {"tags": [3], "one": 4})
    info = index(f"{tmp_path}/?", str(tmp_path / "index")).info
    assert {column["name"]: column["list"] for column in info.manifest["features"]} == {
        "one": False,
        "optional": True,
        "tags": True,
    }
    train = reader.eval_dataset(info, "train", global_batch_size=4, features=["tags", "optional"])
    inputs, *_ = next(iter(train))
    assert inputs["tags"].to_list() == [[1, 2], [1, 2, 3], [3], [3]]
    assert inputs["optional"].to_list() == [[5], [5], [7], []]
    write_file("c", {"one": 0.5})
    index(f"{tmp_path}/?", str(tmp_path / "index"))
    assert caplog.messages == ["the index leaves out feature 'one': it is float32 or int64"]


def test_a_feature_that_tensorflow_refuses_in_some_records_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Writers that know no type for a list without a value take any."""
    images = [example(image=draw(number, SIZE), label=number % 2, tags=[7] * (1 + number % 2)) for number in range(6)]
    for number, one in enumerate(images):
        xmin = one.features.feature["xmin"]
        if number in (0, 3):
            xmin.int64_list.SetInParent()
        elif number != 5:  # which has none at all: that is no other type
            xmin.float_list.value.append(0.5)
    file = write_examples(tmp_path / "a", *images)
    info = index(file, str(tmp_path / "index")).info
    assert [(column["name"], column["list"]) for column in info.manifest["features"]] == [("tags", True)]
    assert caplog.messages == ["the index leaves out feature 'xmin': it is float32 or int64"]
    ((inputs, *_),) = reader.eval_dataset(info, "train", global_batch_size=6, features=["tags"])
    assert inputs["tags"].to_list() == [[7], [7, 7]] * 3
    with pytest.raises(UsageError, match="there is no 'xmin'; the records have tags"):
        reader.eval_dataset(info, "train", global_batch_size=6, features=["xmin"])


def test_which_of_several_features_holds_the_class_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_examples(tmp_path / "a", *(example(image=draw(n, SIZE), label=n, **{"class": 0}) for n in range(3)))
    assert index(tmp_path / "a", tmp_path / "index").info.classes == ("0",)
    told = f"{tmp_path}/a: classes are read from 'class', not from 'label'; --class_key chooses"
    assert [*map(str, caplog.messages)] == [told]
    caplog.clear()
    assert index(tmp_path / "a", tmp_path / "index", class_key="label").info.classes == ("0", "1", "2")
    assert not caplog.messages


def test_the_lines_of_a_labels_file_are_class_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, names = write(tmp_path / "files", "keras", {"a": 3}), tmp_path / "names.txt"
    names.write_text("\ufeffant\nbee \ncat\n\n", "utf-8")
    assert index(f"{files}/a", tmp_path / "index", labels_file=names).info.classes == ("ant", "bee", "cat")
    for text, message in (
        (b"ant\n\ncat\n", "'' is empty or repeated; write each class once, one a line"),
        (b"ant\nbee\nant\n", "'ant' is empty or repeated; write each class once, one a line"),
        (b"\xff\xfe", "not UTF-8; give a text file, one class a line"),
        (None, f"{names} is missing; give a text file, one class a line"),
    ):
        names.unlink() if text is None else names.write_bytes(text)
        assert main(["index", f"{files}/a", "--out", str(tmp_path / "other"), "--labels_file", str(names)]) == 2
        assert capsys.readouterr().err == f"error: --labels_file {names}: {message}\n"
    reading, writing = os.pipe()  # the shell's <(printf ...)
    os.write(writing, b"ant\nbee\ncow\n")
    os.close(writing)
    pipe = f"/dev/fd/{reading}"
    assert index(f"{files}/a", tmp_path / "index", labels_file=pipe).info.classes == ("ant", "bee", "cow")


ONE_HOT = {  # label of record n → its class
    "float32": (lambda number: [float(place == number % 3) for place in range(4)], lambda number: number % 3),
    "int64": (lambda number: [int(place == number % 3) for place in range(4)], lambda number: number % 3),
    "an integer": (lambda number: number % 3, lambda number: number % 3),
    "gaps": (lambda number: number % 2 * 7, lambda number: number % 2 * 7),
}


@pytest.mark.parametrize("kind", ONE_HOT)
def test_one_hot_labels_are_class_ids_to_every_reader(tmp_path: Path, kind: str) -> None:
    label, expected = ONE_HOT[kind]
    write_examples(tmp_path / "a", *(example(image=draw(number, SIZE), label=label(number)) for number in range(7)))
    info = index(tmp_path / "a", tmp_path / "index").info
    assert info.num_classes == {"an integer": 3, "gaps": 8}.get(kind, 4)
    ids = [expected(number) for number in range(7)]
    assert [record["label"] for record in reader.records(info, "train")] == list(map(str, ids))
    ((_, labels, _),) = reader.eval_dataset(info, "train", global_batch_size=7)
    assert labels.numpy().tolist() == ids
    chosen = list(reader.eval_batches(info, "train", global_batch_size=7, classes=[info.classes[ids[1]]]))
    assert sum(weights.sum() for _, _, weights in chosen) == ids.count(ids[1])
    assert verify(info)
    assert reader.bench(info, images=7, batch_size=7, image_size=8, repeats=1).rows
    names = tmp_path / "names.txt"
    names.write_text("".join(f"name {number}\n" for number in range(9)))
    assert index(tmp_path / "a", tmp_path / "index", labels_file=names).info.num_classes == 9


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([[0, 1, 0], [0, 0, 1, 0]], "record 1: 1 of 4 values of 'label' aren't 0, and another record has one 1 in 3"),
        ([[0.0, 1.0], [1.0, 1.0]], "record 1: 2 of 2 values of 'label' aren't 0, and another record has one 1 in 2"),
        ([2, [1, 0, 0]], "record 1: 3 values are in 'label', and another record has one class id: give another"),
        ([1, [1, 0]], "record 1: 2 values are in 'label', and another record has one class id: give another"),
        ([[0, 1], 1], "record 1: 1 of 1 value of 'label' aren't 0, and another record has one 1 in 2"),
        (
            [[0.2, 0.8]],
            "record 0: no feature is known to hold a class id (one integer, or a one-hot list); the features are",
        ),
        ([0.5], "record 0: no feature is known to hold a class id"),
    ],
)
def test_a_list_that_is_not_one_hot_in_each_record_is_no_class(tmp_path: Path, labels: list[Any], said: str) -> None:
    write_examples(tmp_path / "a", *(example(image=draw(0, SIZE), label=label) for label in labels))
    with pytest.raises(UsageError, match=re.escape(f"{tmp_path}/a: {said}")):
        index(tmp_path / "a", tmp_path / "index")


@pytest.mark.parametrize("labels", [[[0, 1], [0, 0]], [[0.0, 1.0], [0.0, 0.0]], [0, -1], [None, 1]])
def test_a_record_without_a_class_is_left_out(tmp_path: Path, labels: list[Any]) -> None:
    given = [{"label": label} if label is not None else {} for label in labels]
    write_examples(tmp_path / "a", *(example(image=draw(0, SIZE), **one) for one in given))
    assert index(tmp_path / "a", tmp_path / "index").left_out == {"no_image_or_class": 1}


def test_a_detection_set_is_called_one_and_no_flag_is_answered_by_itself(tmp_path: Path) -> None:
    boxes: dict[str, Any] = {"image__object__class__label": [3, 5], "image__object__bbox__xmin": [0.1, 0.2]}
    write_examples(tmp_path / "a", example(image__encoded=draw(0, SIZE), image__height=12, **boxes))
    needs = "a class id (one integer, or a one-hot list); image/object/class/label (int64, 2) is a list, as det"
    for key, begin in (
        (None, "no feature is known to hold"),
        ("image/object/class/label", "image/object/class/label ("),
    ):
        with pytest.raises(UsageError) as raised:
            index(tmp_path / "a", tmp_path / "index", class_key=key)
        said = str(raised.value)
        assert said.startswith(f"{tmp_path}/a: record 0: {begin}") and needs in said
        assert "; name it by --class_key among: image/height (int64, 1); imageshards.record_dataset reads" in said
    with pytest.raises(UsageError, match=r"'jpg' isn't an image .*; name it by --image_key among: image/encoded"):
        index(tmp_path / "a", tmp_path / "index", image_key="jpg")


@pytest.mark.parametrize("depth", [np.uint8, np.float32])
def test_raw_pixels_are_called_that(tmp_path: Path, depth: Any) -> None:
    pixels = np.full((20, 30, 3), 7, depth).tobytes()
    shape = {"height": 20, "width": 30, "depth": 3}
    write_examples(tmp_path / "a", example(image_raw=pixels, label=1, **shape), example(image_raw=pixels, label=0))
    what = rf"record 0 at byte 0: its {len(pixels):,} bytes are raw pixels, .*: write them as JPEG or PNG"
    with pytest.raises(ImageShardsError, match=what):
        index(tmp_path / "a", tmp_path / "index")


def test_what_is_corrupt_or_does_not_decode_is_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """No reader meets what was left out, and `verify` of the index finds no fault."""
    files = write(tmp_path / "files", "keras", {"a": 200, "b": 30})
    records = list(schema.unframe((files / "a").read_bytes()))
    records[5] = records[5].replace(b"\xff\xd8\xff", b"\xff\xd8\xfe")
    records[70] = b"\xff" + records[70]
    frames = [bytearray(schema.frame(record)) for record in records]
    frames[100][60] ^= 1
    (files / "a").write_bytes(b"".join(frames))
    (files / "b").write_bytes((files / "b").read_bytes()[:-5])
    indexed = index(f"{files}/*", str(tmp_path / "index"))
    assert indexed.left_out == {"decode_error": 1, "not_an_example": 1, "corrupt_record": 2}
    assert [message.split(": ")[0] for message in caplog.messages] == ["left out"] * 4
    info = indexed.info
    assert indexed.records == info.records("train") == sum(info.splits["train"].class_counts) == 226
    assert info.manifest["images"] == 230
    kept = [number % 3 for number in range(200) if number not in (5, 70, 100)]
    ((_, labels, weights),) = reader.eval_batches(info, "train", global_batch_size=226)
    assert labels[:197].tolist() == kept
    assert weights.all()
    assert verify(info)
    assert main(["info", info.url]) == 0
    assert "  left out: corrupt_record 2, decode_error 1, not_an_example 1\n" in capsys.readouterr().out
    assert main(["index", f"{files}/*", "--out", info.url, "--json"]) == 0
    left_out = {"corrupt_record": 2, "decode_error": 1, "not_an_example": 1}
    told = {"dataset": info.url, "records": 226, "left_out": left_out}
    assert json.loads(capsys.readouterr().out) == {**told, "sources": ["train: 2 files (no split in the name)"]}
    make.flip_byte(files / "a", 50)
    (fault,) = verify(info).faults
    assert (fault.record, fault.what) == (0, "the CRC of the data is wrong")


def test_images_of_any_kind_that_decodes_are_indexed(tmp_path: Path) -> None:
    def gif(number: int) -> bytes:
        buffer = io.BytesIO()
        Image.open(io.BytesIO(draw(number, SIZE))).save(buffer, "GIF")
        return buffer.getvalue()

    huge = draw(3, SIZE).replace(struct.pack(">HH", *SIZE), b"\xff\xdc\xff\xdc", 1)  # 65,500 pixels high and wide
    images = [draw(0, SIZE), draw(1, SIZE, "png"), gif(2), b"GIF89a", huge]
    write_examples(tmp_path / "a", *(example(image=image, label=0) for image in images))
    indexed = index(tmp_path / "a", tmp_path / "index")
    assert (indexed.records, indexed.left_out, indexed.info.image.format) == (3, {"decode_error": 2}, "mixed")
    ((pixels, *_),) = reader.eval_batches(indexed.info, "train", global_batch_size=3)
    assert pixels.shape == (3, *SIZE, 3)


DEEP = np.random.default_rng(0).integers(0, 1 << 16, (*SIZE, 3))
AS_WRITTEN = {  # tests/images/test_tiff.py has every kind
    "16 bits, white is zero": page(DEEP[..., :1], 0, 16, order=">"),
    "after a thumbnail": [page(DEEP[:3] >> 8, tags={254: 1}), page(DEEP >> 8)],
    "floats": page(DEEP[..., :1] / 65535, 1, 32, tiffs.FLOAT),
}


@pytest.mark.parametrize("kind", AS_WRITTEN)
def test_a_tiff_in_a_record_is_read_or_rejected_as_the_job_does(kind: str, tmp_path: Path) -> None:
    pages = AS_WRITTEN[kind]
    data = tiffs.tiff(*pages if isinstance(pages, list) else [pages], order=">" if "white" in kind else "<")
    write_examples(tmp_path / "a", example(image=draw(0, SIZE), label=0), example(image=data, label=0))
    indexed = index(tmp_path / "a", tmp_path / "index")
    try:
        expected = np.asarray(Image.open(io.BytesIO(convert(data, OWN_SIZE).data)))
    except Reject as reject:
        assert indexed.left_out == {"decode_error": 1}
        with pytest.raises(ValueError, match=re.escape(f"the image doesn't decode (unsupported: {reject.detail})")):
            decode_pixels(data, 3)
        return
    ((pixels, *_),) = reader.eval_batches(indexed.info, "train", global_batch_size=2)
    assert np.array_equal(pixels[1], expected)
    assert np.array_equal(reader.decode(data, indexed.info), expected)


def drawn(format: str, mode: str = "RGB", side: int = 10_000, **options: Any) -> bytes:
    """A picture of one colour: the larger it is, the more it unpacks to."""
    buffer = io.BytesIO()
    Image.new(mode, (side, side), 90).save(buffer, format, **options)
    return buffer.getvalue()


def peak_bytes(*arguments: str) -> int:
    """The most memory that a command held; it must succeed."""
    program = (
        "import re, sys; from imageshards import main; assert main(sys.argv[1:]) == 0; "
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    )
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, cwd=make.ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout.splitlines()[-1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures by Linux' /proc")
@pytest.mark.soak
def test_no_image_takes_more_memory_than_the_write_side_permits(tmp_path: Path) -> None:
    """A PNG of 10,000 pixels high and wide takes 400 MB, a WebP 1.7 GB; 14,000 are over the limit of pixels."""
    images = draw(0, SIZE), drawn("PNG"), drawn("WEBP"), drawn("PNG", "L", 14_000)
    write_examples(tmp_path / "a", *(example(image=image, label=0) for image in images))
    out = str(tmp_path / "index")
    assert peak_bytes("index", f"{tmp_path}/a", "--out", out) < (1024 + 100) << 20
    info = reader.load_info(out)
    assert info.manifest["rejects"]["by_reason"] == {"decode_error": 2}
    assert info.image.max_size == (10_000, 10_000) and info.manifest["image"]["sampled_images"] == 2
    assert peak_bytes("verify", out) < (1024 + 100) << 20


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures by Linux' /proc")
@pytest.mark.soak
def test_a_huge_record_is_in_memory_three_times_at_most(tmp_path: Path) -> None:
    """As a piece of its file, as a record, and as an image."""
    write_examples(tmp_path / "a", example(image=draw(0, SIZE) + bytes(128 << 20), label=0))
    assert peak_bytes("index", f"{tmp_path}/a", "--out", str(tmp_path / "index")) < (3 * 128 + 100) << 20


def test_mean_and_deviation_are_those_of_the_pixels_that_the_readers_give(tmp_path: Path) -> None:
    deep = Image.fromarray(np.arange(0, 60_000, 250, dtype=np.uint16).reshape(SIZE))
    images = [draw(0, SIZE), draw(1, SIZE, "png"), make.encoded(deep, "PNG")]
    images += [make.encoded(make.picture(SIZE[1], SIZE[0]).convert(mode), "PNG") for mode in ("P", "LA", "RGBA", "1")]
    write_examples(tmp_path / "a", *(example(image=image, label=0) for image in images))
    info = index(tmp_path / "a", tmp_path / "index").info
    ((pixels, *_),) = reader.eval_batches(info, "train", global_batch_size=len(images))
    assert info.manifest["image"]["sampled_images"] == len(images)
    np.testing.assert_allclose(info.image.mean, pixels.mean((0, 1, 2)) / 255, atol=1e-6)
    np.testing.assert_allclose(info.image.std, pixels.std((0, 1, 2)) / 255, atol=1e-6)


def test_gzip_files_can_be_uncompressed_as_the_error_says(tmp_path: Path) -> None:
    """With no suffix, as TensorFlow's tutorial writes them."""
    packed = write(tmp_path / "its files", "keras", {"a": 3}, "GZIP") / "a"
    with pytest.raises(UsageError) as raised:
        index(packed, tmp_path / "index")
    command = re.findall(r"\((zcat < .*) > NEW\)", str(raised.value))[0]
    subprocess.run(["bash", "-c", f"{command} > plain"], cwd=tmp_path, check=True)
    assert index(tmp_path / "plain", tmp_path / "index").records == 3


def test_what_cannot_be_indexed_says_why(tmp_path: Path) -> None:
    out = str(tmp_path / "index")
    packed = write(tmp_path / "gzip", "keras", {"a": 3}, "GZIP")
    write(packed, "keras", {"0": 3})
    files = write(tmp_path / "files", "tutorial", {"a": 70})
    dataset = make_dataset(tmp_path / "1.0.0", {"train": [3]})
    short = tmp_path / "names.txt"
    short.write_text("ant\nbee\n")
    for pattern, where, more, message in (
        (f"{packed}/*", out, {}, rf"a is GZIP, .*: uncompress such files \(zcat < {packed}/a > NEW\), or read"),
        (
            f"{files}/a",
            out,
            {"class_key": "label"},
            r"record 0: label \(bytes, 1\) isn't a class id .*--class_key among: class \(int64, 1\), one_hot_class",
        ),
        (f"{files}/b*", out, {}, r"no file matches .*: .*files holds a"),
        (f"{files}/a", "gs://bucket/x", {}, "--out gs://bucket/x: give a local folder"),
        (f"{files}/a", dataset, {}, "a dataset is published there"),
        (f"{files}/a", out, {"labels_file": str(short)}, "2 names, and class id 2 is in the records"),
    ):
        with pytest.raises(UsageError, match=message):
            index(pattern, where, **more)
    broken = b"".join(schema.frame(example(image=b"GIF89a", label=1).SerializeToString()) for _ in "ab")
    for data, message in (
        (broken, r"a: record 0 at byte 0: the image doesn't decode \(.*\)"),
        (
            b"no TFRecord at all",
            "a: record 0 at byte 0: the CRC of the length is wrong, so the rest of the file is lost",
        ),
        (b"", "a: no record in 1 file"),
    ):
        (files / "a").write_bytes(data)
        with pytest.raises(ImageShardsError, match=message):
            index(f"{files}/a", out)
    assert not Path(out).exists()
