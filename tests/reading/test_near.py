"""Near-duplicates and statistics of pictures, on photos of noise with planted copies, leaks, wrong labels, bad ones."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFilter

import imageshards
from beam_pipeline.errors import ImageShardsError
from reader.info import load_info
from reader.tools import near
from reader.tools.duplicates import find_groups
from reader.tools.pictures import FENCES, Pictures, measured, statistics
from reader.tools.read import read_paths
from tests.reading import shards

COPIES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "half": lambda image: image.resize((image.width // 2, image.height // 2)),
    "brighter": lambda image: Image.eval(image, lambda value: min(255, int(value * 1.2))),
    "grey": lambda image: image.convert("L").convert("RGB"),
    "mirrored": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    "cropped": lambda image: image.crop((4, 3, image.width - 4, image.height - 3)),
    "q40": lambda image: image,
}
COSINES = np.cos(np.pi * (2 * np.arange(32) + 1) * np.arange(8)[:, None] / 64)
LOWER_HALF = np.uint64((1 << 32) - 1)  # what a mirror changes
CLASSES, ORIGINALS = ("ant", "bee", "cat"), 60


def photo(seed: int, width: int = 240, height: int = 180) -> Image.Image:
    """What has the spectrum of a photo: noise of all sizes, the large ones stronger."""
    rng, total = np.random.default_rng(seed), np.zeros((height, width, 3))
    for cells in (3, 6, 12, 24, 48, 96):
        noise = rng.uniform(0, 255, (cells, cells, 3)).astype(np.uint8)
        total += np.asarray(Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)) * (3 / cells)
    total = (total - total.mean()) / total.std() * 55 + 120
    total += rng.normal(0, 12, (height, width, 1))
    return Image.fromarray(np.clip(total, 0, 255).astype(np.uint8))


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos, and what is wrong with some; the kind is the beginning of a file's name."""
    folder = tmp_path_factory.mktemp("near")
    for name in CLASSES:
        (folder / "photos" / name).mkdir(parents=True)
    for number in range(ORIGINALS):
        photo(number).save(folder / "photos" / CLASSES[number % 3] / f"original_{number}.jpg", quality=92)
    for number, (kind, change) in enumerate(list(COPIES.items()) * 3):
        path = folder / "photos" / CLASSES[number % 3] / f"copy_{kind}_{number}.jpg"
        change(photo(number)).save(path, quality=40 if kind == "q40" else 90)
    for number in range(20, 25):
        photo(number).save(folder / "photos" / CLASSES[(number + 1) % 3] / f"wrong_{number}.jpg", quality=80)
    for number in range(3):
        Image.new("RGB", (240, 180), (number,) * 3).save(folder / "photos" / CLASSES[number] / f"black_{number}.png")
    for number in range(30, 34):
        blurred = photo(number).filter(ImageFilter.GaussianBlur(5))
        blurred.save(folder / "photos" / CLASSES[number % 3] / f"blurred_{number}.jpg", quality=90)
    write(folder, "1.0.0")
    return folder


def write(folder: Path, version: str, splits: str = "train=0.7,test=0.3", **options: str) -> None:
    config = {"input": str(folder / "photos"), "output": str(folder / "datasets"), "name": "planted"}
    imageshards.write(imageshards.Config(**config, version=version, splits=splits, **options))


def encoded(image: Image.Image) -> memoryview:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=90)
    return memoryview(buffer.getvalue())


def of_photo(path: str) -> str:
    return "black" if "black" in path else path.rpartition("_")[2].partition(".")[0]


def names(path: Path, kind: str) -> set[str]:
    return {file.relative_to(path / "photos").as_posix() for file in (path / "photos").rglob(f"{kind}_*")}


def split_of(url: str) -> dict[str, str]:
    info = load_info(url)
    of = {name: read_paths(info, [name], np.arange(info.records(name))) for name in info.splits}
    return {path.decode(): name for name, paths in of.items() for path in paths}


def test_planted_copies_are_found_excluded_and_gone(planted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url, out = str(planted / "datasets" / "planted" / "1.0.0"), planted / "near.jsonl"
    assert imageshards.main(["duplicates", url, "--near", "--out", str(out), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    groups: dict[str, list[str]] = {}
    for line in lines:
        groups.setdefault(line["group"], []).append(line["path"])
    expected: dict[str, list[str]] = {}
    for path in sorted(split_of(url)):
        expected.setdefault(of_photo(path), []).append(path)
    assert sorted(groups.values()) == sorted(paths for paths in expected.values() if len(paths) > 1)
    leaks = [paths for paths in groups.values() if len({split_of(url)[path] for path in paths}) > 1]
    labels = [paths for paths in groups.values() if len({path.partition("/")[0] for path in paths}) > 1]
    assert said["across_splits"] == len(leaks) >= 2 and said["across_labels"] == len(labels) == 5 + 1  # and black ones
    undecided = {line["path"] for line in lines if "keep" not in line}
    assert undecided == {path for paths in labels for path in paths} >= names(planted, "wrong")
    decided = [line for line in lines if line["path"] not in undecided]
    bad = sorted(names(planted, "wrong") | names(planted, "black"))
    decided += [{"path": path, "reason": "looked at", "keep": False} for path in bad]
    (planted / "gone.jsonl").write_text("".join(json.dumps(line) + "\n" for line in decided))
    write(planted, "1.0.1", exclude=str(planted / "gone.jsonl"))
    capsys.readouterr()
    assert imageshards.main(["duplicates", str(Path(url).parent / "1.0.1"), "--near"]) == 0
    assert capsys.readouterr().out.startswith("no two of ")


def test_suspicious_pictures_are_the_planted_ones(planted: Path) -> None:
    info = load_info(planted / "datasets" / "planted" / "1.0.0")
    found = statistics(info)
    assert len(found) == info.records("all") and len(list(found.rows())) == len(found)
    assert json.dumps(next(found.rows()))
    suspects = {}
    for reason, suspect in found.suspicious().items():
        paths = read_paths(info, list(found.splits), np.sort(suspect.rows))
        suspects[reason] = {path.decode() for path in paths}
    black, soft = names(planted, "black"), names(planted, "blurred")
    assert soft <= suspects.pop("blurred") <= soft | names(planted, "copy_half")  # which are softer than the others
    assert suspects == {"dark": black, "bright": set(), "flat": black, "one_colour": black}
    worst = found.suspicious()["dark"]
    assert worst.values.tolist() == sorted(worst.values) and worst.values[-1] < worst.threshold


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("image_format", ["jpeg", "png"])
def test_pictures_of_any_size_have_numbers(channels: int, image_format: str, tmp_path: Path) -> None:
    sizes = [(1, 1), (2, 2), (3, 500), (40, 30), (256, 200), (700, 900), (1300, 1100)]
    url = shards.make_dataset(
        tmp_path / "1.0.0",
        {"train": [len(sizes)], "empty": [0]},
        size_of=lambda number: sizes[number],
        image_format=image_format,
        channels=channels,
        with_names=True,
    )
    found = statistics(url)
    numbers = [found.mean, found.spread, found.one_colour, found.sharpness]
    assert found.splits == ("train",) and all(np.isfinite(column).all() for column in numbers)
    for row, size in enumerate(sizes):
        whole = np.asarray(Image.open(io.BytesIO(shards.draw(row, size, image_format, channels))).convert("L"))
        assert abs(found.mean[row] - whole.mean()) < 3 and abs(found.spread[row] - whole.std()) < 6, size
    assert not imageshards.tools.duplicates(url, near=True)


def test_splits_that_are_empty_or_all_of_them(tmp_path: Path) -> None:
    url = shards.make_dataset(tmp_path / "1.0.0", {"train": [4, 3], "test": [2], "empty": [0]})
    found = statistics(url)
    assert [row["split"] for row in found.rows()] == ["test"] * 2 + ["train"] * 7  # in the manifest's order
    assert found.record.tolist() == [0, 1, *range(7)]
    none = statistics(shards.make_dataset(tmp_path / "none", {"train": [0]}))
    assert len(none) == 0 and list(none.rows()) == []
    assert all(len(suspect.rows) == 0 for suspect in none.suspicious().values())


def test_a_corrupt_record_is_named_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url, message = shards.flipped(tmp_path / "1.0.0", [3, 3], 2)
    assert imageshards.main(["duplicates", url, "--near", "--out", str(tmp_path / "list")]) == 1
    said = capsys.readouterr()
    assert said.out == "" and message in said.err and said.err.count("\n") == 1
    assert not (tmp_path / "list").exists()


def test_thresholds_follow_the_dataset() -> None:
    """Among pictures of stars none is dark."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(50):
        image = np.zeros((64, 64, 3), np.uint8)
        image[rng.integers(0, 64, 40), rng.integers(0, 64, 40)] = 255
        rows.append(measured(image))
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    stars = Pictures(np.zeros(50, np.uint16), np.arange(50), *columns, splits=("train",))  # type: ignore[arg-type]
    assert {reason: len(suspect.rows) for reason, suspect in stars.suspicious().items()} == dict.fromkeys(FENCES, 0)


def with_hashes(hashes: Any, mirrored: Any) -> Pictures:
    """Pictures whose other numbers all differ."""
    numbers = np.random.default_rng(4).random((4, len(hashes)), np.float32)
    return Pictures(
        np.zeros(len(hashes), np.uint16), np.arange(len(hashes)), *numbers, hashes, mirrored, splits=("train",)
    )


def test_near_pairs_are_those_of_a_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near, "_ROWS", 7)
    monkeypatch.setattr(near, "_TILE", (3, 5))
    rng = np.random.default_rng(1)
    hashes = rng.integers(0, 1 << 63, 40, dtype=np.uint64) * 2
    hashes[20:30] = hashes[:10] ^ (np.uint64(1) << rng.integers(0, 60, 10, dtype=np.uint64))
    hashes[30:33] = hashes[5]
    hashes[[35, 2]] = hashes[[3, 39]] ^ LOWER_HALF
    mirrored = hashes ^ rng.integers(0, 1 << 32, 40, dtype=np.uint64)
    mirrored[35], mirrored[2] = hashes[3] ^ np.uint64(7), hashes[39]

    def plain(of: Any, a: int, b: int) -> bool:
        return (int(of[min(a, b)]) ^ int(hashes[max(a, b)])).bit_count() <= 8

    found = with_hashes(hashes, mirrored)
    pairs = near.near_pairs(found)
    named = {(min(a, b), max(a, b), m) for a, b, m in zip(*(part.tolist() for part in pairs), strict=True)}
    every = [(a, b) for a in range(40) for b in range(a + 1, 40)]
    assert named == {(*pair, m) for m, of in enumerate([hashes, mirrored]) for pair in every if plain(of, *pair)}
    monkeypatch.setattr(near, "_MAX_PAIRS", 3)
    with pytest.raises(ImageShardsError, match="nearly all look the same"):
        near.near_pairs(found)


def test_of_very_many_pictures_with_one_hash_each_is_compared_and_copies_always() -> None:
    hashes = np.full(5_000, 7, np.uint64)
    found = with_hashes(hashes, hashes ^ LOWER_HALF)
    for name in ("mean", "spread", "one_colour", "sharpness"):
        getattr(found, name)[2_500:] = getattr(found, name)[:2_500]  # each has one copy
    pairs = near.near_pairs(found)
    assert len(pairs.first) < 3 * len(found)
    assert set(np.concatenate([pairs.first, pairs.second]).tolist()) == set(range(5_000))
    assert {(a, a + 2_500) for a in range(2_500)} <= set(zip(pairs.first.tolist(), pairs.second.tolist(), strict=True))


def of_waves(waves: np.ndarray[Any, np.dtype[np.float64]]) -> Image.Image:
    """A picture whose cosine transform has these 8 x 8 waves, but for brightness and contrast."""
    scale = np.where(np.arange(8) == 0, 0.5, 1)
    grey = COSINES.T @ (waves * scale * scale[:, None]) @ COSINES
    grey = (grey - grey.mean()) / np.abs(grey - grey.mean()).max() * 110 + 128
    return Image.fromarray(grey.astype(np.uint8)).convert("RGB").resize((128, 128), Image.Resampling.BICUBIC)


def groups_of(folder: Path, images: dict[str, Image.Image]) -> list[list[str]]:
    """The groups of these pictures that the command names."""
    (folder / "photos" / "ant").mkdir(parents=True)
    for name, image in images.items():
        image.save(folder / "photos" / "ant" / f"{name}.png")
    write(folder, "1.0.0", "train=1")
    found = imageshards.tools.duplicates(folder / "datasets" / "planted" / "1.0.0", near=True)
    return sorted(sorted(Path(path).stem for path in group.paths) for group in found.first)


def test_a_picture_without_one_or_all_sides_of_its_border_is_alike_and_others_are_not() -> None:
    pictures = [photo(number) for number in range(20)]
    small = np.array([near.look_of(encoded(picture), 3)[0] for picture in pictures], np.uint8)
    for box in ((6, 5, 234, 175), (12, 9, 240, 180), (0, 0, 228, 171), (12, 0, 240, 171), (12, 9, 228, 171)):
        part = np.array([near.look_of(encoded(picture.crop(box)), 3)[0] for picture in pictures], np.uint8)
        for is_mirrored in (False, True):
            seen = part[:, :, ::-1] if is_mirrored else part
            mirrored = np.full(20, is_mirrored)
            assert near._alike(small, seen, mirrored).all() and near._alike(seen, small, mirrored).all(), box
            assert not near._alike(small, np.roll(seen, 1, axis=0), mirrored).any()


@pytest.mark.parametrize("other", ["a", "z"])  # its record is before those of the copies, or behind
def test_copies_are_found_though_another_picture_has_their_hash(other: str, tmp_path: Path) -> None:
    signs = np.repeat([1.0, -1.0], 32)
    np.random.default_rng(0).shuffle(signs[1:])  # the first is the brightness
    signs = signs.reshape(8, 8)
    is_strong = np.random.default_rng(1).random((8, 8)) < 0.5
    copied, unlike = (of_waves(np.where(strong, 1, 0.1) * signs) for strong in (is_strong, ~is_strong))
    assert measured(np.asarray(copied))[4] == measured(np.asarray(unlike))[4]
    images = {"copied": copied, "half": COPIES["half"](copied), other: unlike, "exact": copied}
    assert groups_of(tmp_path, images) == [["copied", "exact", "half"]]


def test_a_nearly_symmetric_picture_and_its_mirror_image_are_near(tmp_path: Path) -> None:
    waves = np.random.default_rng(2).uniform(0.8, 1.2, (8, 8))
    waves[:, 1::2] = 0
    waves[:4, 1] = 3
    picture = of_waves(waves)
    mirrored = COPIES["mirrored"](picture)
    hashes = [measured(np.asarray(one))[4] for one in (picture, mirrored)]
    assert (hashes[0] ^ hashes[1]).bit_count() <= 8
    assert np.corrcoef(np.asarray(picture).ravel(), np.asarray(mirrored).ravel())[0, 1] < 0.7
    assert groups_of(tmp_path, {"one": picture, "two": mirrored}) == [["one", "two"]]


def test_a_chance_pair_of_hashes_gets_a_second_look(planted: Path) -> None:
    info = load_info(planted / "datasets" / "planted" / "1.0.0")
    found = statistics(info)
    expected = find_groups(info, None, found)
    found.hash[:] = found.mirrored[:] = found.hash[0]  # of all records
    groups = find_groups(info, None, found)
    assert 0 < groups.groups <= expected.groups and groups.images <= expected.images
    assert groups.candidates > expected.candidates >= expected.images - expected.groups
    for group in groups.first:
        assert len({of_photo(path) for path in group.paths}) == 1, group


def test_pictures_of_one_shape_and_other_colours_are_no_copies_but_a_grey_copy_is(tmp_path: Path) -> None:
    (tmp_path / "photos" / "ant").mkdir(parents=True)
    for number in range(20):
        grey = np.asarray(photo(number).convert("L")).astype(np.float32)
        tints = (
            {"red": (1, 0.5, 0.4), "blue": (0.4, 0.5, 1), "green": (0.5, 1, 0.5)}
            if number < 6
            else {"red": (1, 0.5, 0.4)}
        )
        if number > 15:
            tints["grey"] = (0.6, 0.6, 0.6)
        for name, tint in tints.items():
            pixels = np.stack([grey * part for part in tint], 2).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / "ant" / f"{name}_{number}.jpg", quality=90)
    write(tmp_path, "1.0.0")
    found = imageshards.tools.duplicates(tmp_path / "datasets" / "planted" / "1.0.0", near=True)
    groups = sorted(sorted(path.removeprefix("ant/") for path in group.paths) for group in found.first)
    assert groups == [[f"grey_{number}.jpg", f"red_{number}.jpg"] for number in range(16, 20)]


def test_plain_pictures_are_copies_only_if_they_have_one_colour(tmp_path: Path) -> None:
    colours = [tuple(map(int, colour)) for colour in np.random.default_rng(0).integers(0, 256, (60, 3))]
    images = {f"{number:02}": Image.new("RGB", (240, 180), colour) for number, colour in enumerate(colours)}
    images["copy"] = Image.new("RGB", (90, 70), colours[-1])
    assert groups_of(tmp_path, images) == [["59", "copy"]]
