"""On which level the classes are: folder shapes that are taken, and those that are a question before a job."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest

from beam_pipeline import schema
from beam_pipeline.config import Config
from beam_pipeline.errors import UsageError
from beam_pipeline.inputs import checks, folders
from beam_pipeline.inputs.checks import check_input, read_labels
from beam_pipeline.inputs.folders import ListingSummary, all_images, class_folders
from tests.inputs.test_folders import LOCAL_AND_GS, config, refused, touch
from tests.servers import Bucket

FLAG = "if they are classes give --folders_are_classes"
SPLITS = "are they splits? give --layout split_class_folders"
SPLIT_LAYOUT = {"layout": "split_class_folders"}


def tree(*folders: str, images: int = 2) -> list[str]:
    return [f"{folder}/{number}.jpg" for folder in folders for number in range(images)]


def each(above: str, below: str) -> list[str]:
    """Images in every folder of `below` in every folder of `above`."""
    return tree(*(f"{one}/{two}" for one in above.split() for two in below.split()))


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (each("Training Testing", "cat dog"), "its folders are splits, not classes: Testing, Training; give --layout "
         f"split_class_folders --split_folders Testing=test,Training=train; {FLAG}"),
        (tree("training_set", "test_set"), "its folders are splits, not classes: test_set, training_set; "),
        (each("train2017", "cat dog fox") + each("val2017", "cat"), "its folders are splits, not classes: train2017, "),
        (tree("train (1)", "test (1)"), "its folders are splits, not classes: test (1), train (1); "),
        (each("training", "cat dog") + each("holdout", "cat fox"), "its folders are splits, not classes: holdout, "),
        (tree("Train", "Val"), "its folders are splits, not classes: Train, Val; "),
        (each("seg_train seg_test", "sea ice"), "its folders are splits, not classes: seg_test, seg_train; "),
        (each("A B", "cat dog"), f"all 2 class folders hold the sub-folders 'cat', 'dog': {SPLITS} --split_folders "
         f"A=SPLIT,B=SPLIT; {FLAG}"),
        (each("A B", "a b c d e"), "all 2 class folders hold the sub-folders 'a', 'b', 'c' and 2 more: "),
        (each("A", "cat dog") + each("B", "cat"), "all 2 class folders hold the sub-folders 'cat': "),
        ([*each("A B", "cat dog"), "A/grid.png"], "all 2 class folders hold the sub-folders 'cat', 'dog': "),
        ([*each("A B", "cat dog"), "A/.x/1.jpg", "B/@eaDir/1.jpg", "__MACOSX/1.jpg", "docs/a.txt"],
         "2 class folders hold the sub-folders 'cat', 'dog': "),
        ([*each("A B", "cat dog"), *tree("C")], "2 class folders hold the sub-folders 'cat', 'dog': "),
        (each("seg_train/seg_train seg_test/seg_test", "sea ice") + tree("seg_pred/seg_pred"),
         "2 class folders hold the sub-folders 'ice', 'sea': are these the classes? move them up to DIR/CLASS, "),
        (each("A/images B/images", "cat dog"), "all 2 class folders hold the sub-folders 'cat', 'dog': are these the "),
        (each("photos", "cat dog"), "all images of its only class 'photos' are in the sub-folders 'cat', 'dog': if "
         "these are the classes give --input 'DIR/photos'; if 'photos' is one give --folders_are_classes"),
        (each("photos", "cat dog") + tree("extra"), "all images of class 'photos' are in the sub-folders 'cat', 'dog': "
         "if these are the classes give --input 'DIR/photos'; if 'photos' is one give --folders_are_classes"),
        (each("photos", "all"), "all images of its only class 'photos' are in the sub-folders 'all': "),
        (["photos/LICENSE", "docs/a.txt", *each("photos", "cat dog")], "all images of its only class 'photos' are in"),
        (each("data/photos", "cat dog"), "all images of its only class 'data' are in the sub-folders 'photos': "),
        (each(" ".join(f"batch{number}" for number in range(40)), "cat dog"), "16 class folders hold the sub-folders "),
    ],
)  # fmt: skip
def test_class_folders_that_look_like_splits_or_folders_above_the_classes_are_a_question(
    tmp_path: Path, names: list[str], what: str
) -> None:
    touch(tmp_path, *names)
    what = f"--input '{tmp_path}': {what}".replace("DIR/photos", f"{tmp_path}/photos")
    assert refused(config(tmp_path)).startswith(what)
    check_input(config(tmp_path, folders_are_classes=True))


@pytest.mark.parametrize(
    "names",
    [
        tree("cat", "dog"),
        tree("cat"),
        tree("train", "car"),
        tree("freight_train", "steam_train"),
        each("cat", "2020 2021") + tree("dog", "eel"),  # one class alone has folders
        each("cat", "2020 2021") + each("dog", "2022 2023"),
        each("cat", "2020") + tree("dog"),
        each("cat", "a b c") + each("dog", "c d e"),
        each("n01 n02 n03", "images"),  # Tiny ImageNet
        each("n01", "images") + each("n02", "pictures"),
        [*each("n01 n02", "images"), *(f"{n}/boxes/{n}.txt" for n in ("n01", "n02"))],
        [*each("cat dog", "left right"), *tree("cat", "dog", images=3)],
        ["cat/1.jpg", "cat/a/2.jpg", "cat/b/2.jpg", *each("dog", "a b"), *tree("eel", "fox")],
        [*each("cat", "a"), *each("dog", "a"), *tree("eel")],
        [*tree("cat"), "photos/.git/1.jpg", "empty/a.txt"],
    ],
)
def test_shapes_that_are_class_folders_are_taken_as_ever(tmp_path: Path, names: list[str]) -> None:
    check_input(config(touch(tmp_path, *names)))


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (each("train/images test/images", "cat dog"), "all images of its only class 'train/images' are in the sub-f"),
        (each("photos/train photos/test", "cat dog"), "all 2 class folders hold the sub-folders 'cat', 'dog': are th"),
        (each("train", "cat dog") + each("test", "cat"), ""),
        (each("train/cat test/cat", "2020 2021") + tree("train/dog", "test/dog"), ""),
        (each("train/cat train/dog test/cat test/dog", "images"), ""),
    ],
)
def test_split_folders_one_level_off_are_a_question_too(tmp_path: Path, names: list[str], what: str) -> None:
    of_splits = config(touch(tmp_path, *names), **SPLIT_LAYOUT)
    if not what:
        return check_input(of_splits)
    assert refused(of_splits).startswith(f"--input '{tmp_path}': {what}".replace("train/images'", "test/images'"))


@LOCAL_AND_GS
def test_a_large_class_folder_costs_a_page_and_large_splits_are_found(bucket: Bucket, monkeypatch: object) -> None:
    monkeypatch.setattr(checks, "_FILES_SEEN", 4)  # type: ignore[attr-defined]
    monkeypatch.setattr(checks, "_MAX_STRAYS", 3)  # type: ignore[attr-defined]
    for name in each("A B", "cat dog") + tree("A/cat", "B/cat", images=9):
        bucket.put(f"nested/{name}", b"1")
    for name in [*tree("cat", "dog", images=9), *each("cat dog", "a b")]:
        bucket.put(f"flat/{name}", b"1")
    with pytest.raises(UsageError, match="all 2 class folders hold the sub-folders 'cat', 'dog': are they splits"):
        check_input(config(f"{bucket.url}/nested"))
    check_input(config(f"{bucket.url}/flat"))


# --- --split_folders


def test_split_folders_are_mapped_and_two_may_be_one_split(tmp_path: Path) -> None:
    touch(tmp_path, *each("Training extra Testing", "cat dog"))
    some = config(tmp_path, **SPLIT_LAYOUT, split_folders="Training=train, extra=train,Testing=test")
    check_input(some)
    splits = {ref.path: ref.split for ref in all_images(some)}
    assert len(splits) == 12
    assert all(split == ("test" if path.startswith("Testing/") else "train") for path, split in splits.items())
    assert some.fingerprint()["split_folders"] == {"Testing": "test", "Training": "train", "extra": "train"}
    assert some == config(tmp_path, **SPLIT_LAYOUT, split_folders=some.split_folders)
    other_order = config(tmp_path, **SPLIT_LAYOUT, split_folders="Testing=test,extra=train,Training=train")
    assert schema.canonical_json(other_order.fingerprint()) == schema.canonical_json(some.fingerprint())
    assert config(tmp_path, **SPLIT_LAYOUT).fingerprint()["split_folders"] is None
    assert some.known_splits == ("test", "train")


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (None, "--input: folder 'Testing' can't be a split: give --split_folders Testing=test,Training=train"),
        ("Training=train", "--split_folders: folder 'Testing' has no split: add Testing=SPLIT, or move it away"),
        ("Training=train,Testing=test,Val=val",
         "--split_folders: folder 'Val' isn't there: leave it out"),
    ],
)  # fmt: skip
def test_a_folder_without_a_split_and_a_split_without_a_folder_are_named(
    tmp_path: Path, given: str | None, what: str
) -> None:
    touch(tmp_path, *each("Training Testing", "cat dog"))
    assert refused(config(tmp_path, **SPLIT_LAYOUT, split_folders=given)) == what


# --- Unicode, systems' folders, files without a suffix

NFC, NFD = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))


@pytest.mark.parametrize("names", [tree(NFC, NFD, "dog"), tree("K", "\u212a"), tree("Å", "\u212b", "A\u030a")])
def test_one_class_in_two_unicode_forms_is_an_error_that_shows_both(tmp_path: Path, names: list[str]) -> None:
    text = refused(config(touch(tmp_path, *names)))
    assert text.endswith("are one name in two Unicode forms: rename one, or merge the two")
    assert text.isascii() and "\\u" in text


def test_a_class_of_another_form_in_another_split_is_an_error(tmp_path: Path) -> None:
    touch(tmp_path, *tree(f"train/{NFC}", f"test/{NFD}", "train/dog", "test/dog"))
    assert "'caf\\xe9'" in refused(config(tmp_path, **SPLIT_LAYOUT))


def test_the_labels_file_is_compared_by_its_letters_and_its_form_stays(tmp_path: Path) -> None:
    touch(tmp_path / "in", *tree(NFD, "dog"))
    labels = read_labels(str(Path(tmp_path, "labels.txt").write_text(f"{NFC}\ndog\n") and tmp_path / "labels.txt"), 1)
    some = Config(input=str(tmp_path / "in"), output="/nowhere", name="x", labels=labels)
    check_input(some)
    assert {ref.label for ref in all_images(some)} == {NFC, "dog"}
    (tmp_path / "both.txt").write_text(f"{NFC}\n{NFD}\n")
    with pytest.raises(UsageError, match="two Unicode forms"):
        read_labels(str(tmp_path / "both.txt"), 1)


SYSTEM = ("@eaDir", "$RECYCLE.BIN", "$Recycle.Bin", "__MACOSX", "lost+found", "System Volume Information", "#recycle",
          "@Recycle", "FOUND.000", "#snapshot")  # fmt: skip


@LOCAL_AND_GS
@pytest.mark.parametrize("layout", ["class_folders", "split_class_folders"])
def test_folders_of_systems_are_skipped_and_counted_at_any_depth(bucket: Bucket, layout: str) -> None:
    above = "train/" if layout == "split_class_folders" else ""
    names = [f"{above}{folder}{name}/1.jpg" for name in SYSTEM for folder in ("", "cat/", "cat/a/b/")]
    for name in [*names, f"{above}cat/1.jpg", f"{above}cat/Thumbs.db", f"{above}cat/lost+found and more/2.jpg"]:
        bucket.put(name, b"1")
    some, total = config(bucket.url, layout=layout), ListingSummary()
    (cat,) = class_folders(some, total)
    assert len(list(folders.list_images(some, cat, total))) == 2
    skipped = (total.skipped.hidden, total.skipped.hidden_images, total.skipped.hidden_folders)
    assert skipped == (0, 2 * len(SYSTEM), len(SYSTEM))


def test_files_with_any_suffix_and_none_are_images_if_asked_for_and_hidden_ones_stay_hidden(tmp_path: Path) -> None:
    touch(tmp_path, "cat/img001", "cat/2.dcm", "cat/3.jpg", "cat/.DS_Store", "cat/.4.jpg", "loose", ".x/1")
    assert "or give --extensions any" in refused(config(touch(tmp_path / "in", "cat/img001")))
    some, total = config(tmp_path, extensions="any"), ListingSummary()
    cat = next(folder for folder in class_folders(some, total) if folder.label == "cat")
    assert {ref.path for ref in folders.list_images(some, cat, total)} == {"cat/img001", "cat/2.dcm", "cat/3.jpg"}
    assert (total.hidden, total.counts[folders.OUTSIDE_CLASSES], total.skipped.suffixes) == (3, 1, {})
    assert some.fingerprint()["extensions"] == ["any"]
