"""From an input to references: which files are images, their class and split, what is skipped; what is told before."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_pipeline import storage
from beam_pipeline.config import Config
from beam_pipeline.errors import UsageError
from beam_pipeline.inputs import folders
from beam_pipeline.inputs.checks import check_input, read_labels
from beam_pipeline.inputs.folders import ClassFolder, ListingSummary, all_images, class_folders, list_images
from beam_pipeline.inputs.references import (
    ImageRef,
    class_hashes,
    limits,
    order_key,
    split_hash,
    split_hasher,
    split_stratified,
)
from beam_pipeline.schema.job import Skipped
from tests import make
from tests.servers import Bucket, Gcs


def config(input: object, **more: object) -> Config:
    return Config(input=str(input), output="/nowhere", name="x", **more)


def touch(folder: Path, *names: str) -> Path:
    """Files of one byte, their folders too."""
    return make.put_files(folder, dict.fromkeys(names, b"1"))


LOCAL_AND_GS = pytest.mark.parametrize("bucket", ["local", "gs"], indirect=True)


# --- classes and splits


@LOCAL_AND_GS
def test_classes_are_the_folders_and_nested_folders_belong_to_theirs_and_hidden_ones_are_none(bucket: Bucket) -> None:
    labels = {"b/1.jpg": "b", "a/1.jpg": "a", "a/deep/er/2.jpg": "a", "a//3.jpg": "a"}
    if storage.is_local(bucket.url):
        del labels["a//3.jpg"]
    for name in (*labels, "loose.jpg", ".git/1.jpg"):
        bucket.put(f"in/{name}", b"1")
    for url in (f"{bucket.url}/in", f"{bucket.url}/in/"):
        refs = {ref.path: ref for ref in all_images(config(url))}
        assert {path: ref.label for path, ref in refs.items()} == labels
        assert {(ref.split, ref.source_bytes) for ref in refs.values()} == {("train", 1)}
        assert all(ref.order_key == order_key(path, 0) for path, ref in refs.items())
    above = {ref.path: ref.label for ref in all_images(config(bucket.url))}
    assert above == dict.fromkeys((f"in/{name}" for name in (*labels, "loose.jpg")), "in"), "the bucket itself"


# --- property: an image's split depends on its path alone


def test_adding_and_removing_images_moves_none_to_another_split_whatever_the_seed(tmp_path: Path) -> None:
    shares = "train=0.5,validation=0.3,test=rest"
    touch(tmp_path, *(f"{label}/{number:03d}.jpg" for label in "abc" for number in range(60)))
    before = {ref.path: ref.split for ref in all_images(config(tmp_path, splits=shares))}
    assert set(before.values()) == {"train", "validation", "test"}
    for number in range(0, 60, 3):
        (tmp_path / "a" / f"{number:03d}.jpg").unlink()
    touch(tmp_path, *(f"new/{number}.jpg" for number in range(100)))
    after = {ref.path: ref.split for ref in all_images(config(tmp_path, splits=shares, seed=77, version="2.0.0"))}
    assert {path: after[path] for path in after if path in before} == {
        path: before[path] for path in before if path in after
    }


def test_split_by_keeps_what_belongs_together_and_a_path_without_a_match_is_dealt_by_itself(tmp_path: Path) -> None:
    touch(tmp_path, *(f"a/patient{patient}_{frame}.jpg" for patient in range(12) for frame in range(5)))
    touch(tmp_path, *(f"a/{number}.jpg" for number in range(30)))
    shares = {"splits": "train=0.5,validation=0.5"}
    refs = list(all_images(config(tmp_path, **shares, split_by=r"(patient\d+)_|x()")))
    of_patient: dict[str, set[str]] = {}
    for ref in refs:
        if "patient" in ref.path:
            of_patient.setdefault(ref.path.partition("_")[0], set()).add(ref.split)
    assert len(of_patient) == 12 and all(len(splits) == 1 for splits in of_patient.values())
    assert len(set().union(*of_patient.values())) == 2
    without = {ref.path: ref.split for ref in all_images(config(tmp_path, **shares))}
    others = [ref for ref in refs if "patient" not in ref.path]
    assert {ref.path: ref.split for ref in others} == {ref.path: without[ref.path] for ref in others}


def test_an_image_that_is_moved_to_another_class_keeps_its_split_with_split_by_name_alone(tmp_path: Path) -> None:
    names = [f"{day}/{number:02d}.jpg" for day in ("mon", "tue") for number in range(40)]

    def splits(label: str, **more: object) -> list[str]:
        folder = touch(tmp_path / label, *(f"{label}/{name}" for name in names))
        refs = {ref.path: ref.split for ref in all_images(config(folder, splits="train=50,test=50", **more))}
        return [refs[f"{label}/{name}"] for name in names]

    assert splits("cat", split_by="name") == splits("a dog", split_by="name")
    assert splits("cat") != splits("a dog")
    assert config(tmp_path, split_by="name").fingerprint()["split_by"] == "name"


@pytest.mark.parametrize("path", ["1.jpg", "/data/cat/1.jpg", "gs://bucket/cat/1.jpg"])
def test_the_name_of_a_row_without_a_folder_below_the_input_is_its_path(path: str) -> None:
    table = {"layout": "manifest", "manifest": "/m.csv", "header": ("path", "label"), "splits": "train=50,test=50"}
    hashers = [split_hasher(config("/in", **table, **more)) for more in ({"split_by": "name"}, {})]
    assert hashers[0](path) == hashers[1](path)
    assert hashers[0]("cat/1.jpg") == hashers[1]("1.jpg") != hashers[0]("cat/a/1.jpg") == hashers[1]("a/1.jpg")


# --- which files are images


IMAGES = ("a.jpg", "A.JPG", "x/y.JPEG", "é.Png", "a.jfif", "a b.c.jpg", " .jpg x.png", "x.y/a.jpg", "a\n.jpg", "a.jpg ")
OTHERS = ("a.txt", "a.jpg.txt", "jpg", "x/png", "Thumbs.db", "a.psd", "jpg/a", "x.jpg/a", "a.")


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        *((path, None) for path in IMAGES),
        *((path, folders.OTHER_SUFFIX) for path in OTHERS),
        *((path, folders.HIDDEN_IMAGES) for path in (".a.jpg", "x/.a.jpg", ".x/a.jpg", "x/.y/a.PNG", "._a.jpg")),
        *((path, folders.HIDDEN) for path in (".DS_Store", "x/.jpg", ".git/config", "x/.y/a.txt")),
    ],
)
def test_images_are_known_by_name(path: str, kind: str | None) -> None:
    assert folders.why_skipped(path) == kind


def test_what_is_skipped_is_counted_by_kind_and_adds_up(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.jpg", "a/2.txt", "a/x/3.psd", "a/.4.jpg", "a/.5/6.jpg", "a/.DS_Store", "a/7", "b/8.txt")
    skipped = ListingSummary()
    for label, images in (("a", ["a/1.jpg"]), ("b", [])):
        of_folder = ListingSummary()
        found = list_images(config(tmp_path), ClassFolder(f"{label}/", label, None, f"{label}/"), of_folder)
        assert [ref.path for ref in found] == images
        skipped.merge(of_folder)
    assert skipped.hidden == 3
    assert skipped.skipped == Skipped(hidden=1, hidden_images=2, suffixes={".txt": 2, ".psd": 1, "none": 1})


@LOCAL_AND_GS
@pytest.mark.parametrize("layout", ["class_folders", "split_class_folders"])
def test_what_is_next_to_the_class_folders_is_counted(bucket: Bucket, layout: str) -> None:
    for name in ("train/a/1.jpg", "train/2.jpg", "3.PNG", "notes.txt", ".DS_Store", ".cat/4.jpg", ".5.jpg"):
        bucket.put(name, b"1")
    skipped = ListingSummary()
    class_folders(config(bucket.url, layout=layout), skipped)
    outside = 2 if layout == "split_class_folders" else 1
    assert skipped.skipped == Skipped(1, 1, 1, outside, {".txt": 1})


def test_a_suffix_of_its_own_for_each_file_takes_no_memory() -> None:
    skipped = ListingSummary()
    for number in range(1000):
        skipped.skip(folders.OTHER_SUFFIX, f"a/part.{number}")
    assert (len(skipped.suffixes), skipped.suffixes["others"]) == (21, 980)


def test_a_link_to_a_folder_above_gives_no_image_a_second_name_or_class(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.jpg", "b/2.jpg")
    for link, target in (("a/loop", ".."), ("a/me", tmp_path / "a"), ("all", ".")):
        (tmp_path / link).symlink_to(target)
    assert sorted(ref.path for ref in all_images(config(tmp_path))) == ["a/1.jpg", "b/2.jpg"]


# --- --stratify: the exact shares in each class, the same in any order, and few images that another one moves


SHARES = (
    {"train": Fraction(4, 5), "test": Fraction(1, 5)},
    {"a": Fraction(1, 3), "b": Fraction(1, 2), "train": Fraction(1, 6)},
)
numbers = st.sets(st.integers(0, 400), min_size=1, max_size=60)


def stratified(input: object = "/in", **more: object) -> Config:
    return config(input, **{"splits": "train=80,test=20", "stratify": True} | more)


def splits(paths: list[str], some: Config) -> dict[str, str]:
    refs = [ImageRef(path, 1, "", path.partition("/")[0], "", 0) for path in paths]
    cuts = {label: limits(hashes, some) for label, hashes in class_hashes(refs, some).items()}
    return {ref.path: ref.split for ref in split_stratified(refs, cuts, some)}


@given(numbers, st.sampled_from(SHARES))
def test_each_class_has_its_exact_shares(some: set[int], shares: dict[str, Fraction]) -> None:
    paths = [f"cat/{number}.jpg" for number in some]
    counts = Counter(splits(paths, stratified(splits=shares)).values())
    assert sum(counts.values()) == len(paths)
    assert all(abs(counts[split] - len(paths) * share) < 1 for split, share in shares.items())


@given(numbers, numbers, st.sampled_from(SHARES), st.randoms(use_true_random=False))
def test_another_image_moves_at_most_one_for_each_border_of_splits_and_none_of_another_class(
    some: set[int], dogs: set[int], shares: dict[str, Fraction], order: object
) -> None:
    paths = [f"cat/{number}.jpg" for number in some] + [f"dog/{number}.jpg" for number in dogs]
    before = splits(paths, stratified(splits=shares))
    order.shuffle(paths)  # type: ignore[attr-defined]
    assert splits(paths, stratified(splits=shares)) == before
    after = splits([*paths, "cat/new.jpg"], stratified(splits=shares))
    moved = [path for path in paths if before[path] != after[path]]
    assert len(moved) <= len(shares) - 1
    assert all(path.startswith("cat/") for path in moved)


def test_images_of_a_class_with_the_same_hash_stay_together() -> None:
    paths = [f"cat/{number}.jpg" for number in range(50)]
    paths = sorted(paths, key=split_hash)
    twin = "cat/\u00e9.jpg", "cat/e\u0301.jpg"
    for count in range(1, 50):
        of = splits([*paths[:count], *twin], stratified())
        assert of[twin[0]] == of[twin[1]]


def test_a_row_of_a_class_that_the_first_listing_did_not_have_gets_a_split() -> None:
    ref = ImageRef("new/1.jpg", 1, "", "new", "", 0)
    assert [one.split for one in split_stratified([ref], {}, stratified())] == ["train"]


def test_with_the_name_the_same_names_have_the_same_splits_in_every_class() -> None:
    by_name = stratified(split_by="name", splits="train=50,test=50")
    cats, dogs = (splits([f"{label}/{number}.jpg" for number in range(100)], by_name) for label in ("cat", "dog"))
    assert list(cats.values()) == list(dogs.values())


# --- what is told before there is a job; to the letter: tests/cli/messages.txt


def refused(some: Config) -> str:
    with pytest.raises(UsageError) as caught:
        check_input(some)
    return str(caught.value)


LOOKED_FOR = "looked for DIR/CLASS/image.jpg, found"


def test_of_many_images_directly_in_a_folder_the_first_thousand_are_counted(tmp_path: Path) -> None:
    folder = touch(tmp_path / "in", *(f"{number}.jpg" for number in range(1_001)))
    assert refused(config(folder)).startswith(f"--input '{folder}': 1,000 images or more directly in it; ")


def test_hidden_files_and_those_of_other_suffixes_are_counted_where_there_is_no_image(tmp_path: Path) -> None:
    folder = touch(tmp_path, "a/1.txt", "b/.2.jpg")
    what = "no image in 2 class folders (1 file without an image suffix, 1 hidden)"
    assert refused(config(folder)).startswith(f"--input '{folder}': {what}")


def test_what_is_wrong_with_a_bucket(gcs: Gcs) -> None:
    assert refused(config("gs://not-there/in")) == "--input 'gs://not-there/in': no such bucket"
    bucket = gcs.new_bucket()
    url = f"gs://{bucket}"
    assert refused(config(url)) == f"--input '{url}': {LOOKED_FOR} nothing"
    gcs.put(bucket, "1.jpg", b"x")
    assert refused(config(url)) == f"--input '{url}': {LOOKED_FOR} no class folders"
    gcs.put(bucket, "a/1.jpg", b"1")
    check_input(config(f"{url}/"))
    gcs.put(bucket, "a.tgz", b"an archive")
    gcs.put(bucket, "b.tar/a/1.jpg", b"1")
    assert refused(config(f"{url}/a.tgz")).startswith(
        f"--input '{url}/a.tgz': an archive that can't be read in place; "
    )
    check_input(config(f"{url}/b.tar"))


@pytest.mark.parametrize("name", ["a ", "a\nb", "\u00a0a", "a\u2028b", " "])
def test_class_names_that_tfds_would_change(tmp_path: Path, name: str) -> None:
    assert refused(config(touch(tmp_path, f"{name}/1.jpg"))) == (
        f"class folder {name!r}: write a name in UTF-8 without line breaks or white space around it"
    )


def test_class_names_that_are_fine_those_of_splits_too(tmp_path: Path) -> None:
    like_systems_folders = ["#1", "$5", "%", "100%", "@home", "__background__"]
    names = [*like_systems_folders, "a b", "a,b", "found", "größe", "lost", "macosx", "n01440764", "recycler", "~"]
    check_input(config(touch(tmp_path / "in", *(f"{name}/1.jpg" for name in names))))
    assert [folder.label for folder in class_folders(config(tmp_path / "in"), ListingSummary())] == sorted(names)
    for number, classes in enumerate((("train",), ("train", "bus"), ("test", "dev"))):
        check_input(config(touch(tmp_path / str(number), *(f"{name}/1.jpg" for name in classes))))


@pytest.mark.parametrize("data", [b"dog\ncat\n", b"dog\r\ncat", b"\xef\xbb\xbfdog\ncat\n", b"dog\ncat\n\n \n"])
def test_labels_are_the_lines_of_their_file_in_their_order(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "labels.txt").write_bytes(data)
    assert read_labels(str(tmp_path / "labels.txt"), 1) == ("dog", "cat")


@pytest.mark.parametrize(
    "data", [b"\ndog\ncat\n", b"dog\n\ncat\n", b"dog\ncat ", b"dog\r\n\r\ncat\r\n", b"dog\n \t\ncat"]
)
def test_an_empty_line_before_a_class_or_white_space_around_one_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "labels.txt").write_bytes(data)
    with pytest.raises(UsageError, match="--labels_file: class "):
        read_labels(str(tmp_path / "labels.txt"), 1)
