"""Near-duplicates and statistics of pictures, on photos of noise with planted copies, leaks, wrong labels, bad ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFilter

import imageshards
from beam_pipeline.errors import ImageShardsError
from reader.info import load_info
from reader.tools import near
from reader.tools.duplicates import find_groups, read_paths
from reader.tools.pictures import FENCES, Pictures, measured, statistics

COPIES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "half": lambda image: image.resize((image.width // 2, image.height // 2)),
    "brighter": lambda image: Image.eval(image, lambda value: min(255, int(value * 1.2))),
    "grey": lambda image: image.convert("L").convert("RGB"),
    "mirrored": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    "cropped": lambda image: image.crop((4, 3, image.width - 4, image.height - 3)),
    "q40": lambda image: image,
}
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


def write(folder: Path, version: str, **options: str) -> None:
    config = {"input": str(folder / "photos"), "output": str(folder / "datasets"), "name": "planted"}
    imageshards.write(imageshards.Config(**config, version=version, splits="train=0.7,test=0.3", **options))


def names(path: Path, kind: str) -> set[str]:
    return {file.relative_to(path / "photos").as_posix() for file in (path / "photos").rglob(f"{kind}_*")}


def test_planted_copies_are_found_excluded_and_gone(planted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url, out = str(planted / "datasets" / "planted" / "1.0.0"), planted / "near.jsonl"
    assert imageshards.main(["duplicates", url, "--near", "--out", str(out)]) == 1
    assert "that look the same" in capsys.readouterr().out
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    groups: dict[str, list[dict[str, object]]] = {}
    for line in lines:
        groups.setdefault(line["group"], []).append(line)
    found = {line["path"] for line in lines}
    assert names(planted, "copy") | names(planted, "wrong") <= found
    for group in groups.values():  # nothing but copies of one photo
        numbers = {str(line["path"]).rpartition("_")[2].partition(".")[0] for line in group}
        assert len(numbers) == 1 or all("black" in str(line["path"]) for line in group), group
    undecided = {str(line["path"]) for group in groups.values() for line in group if "keep" not in line}
    assert names(planted, "wrong") <= undecided
    wrong = [{"path": path, "reason": "wrong label", "keep": False} for path in sorted(names(planted, "wrong"))]
    decided = [line for line in lines if line["path"] not in undecided]
    (planted / "gone.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*decided, *wrong]))
    write(planted, "1.0.1", exclude=str(planted / "gone.jsonl"))
    left = imageshards.tools.duplicates(planted / "datasets" / "planted" / "1.0.1", near=True)
    of_black = [group for group in left.first if all("black" in path for path in group.paths)]
    assert left.groups == len(of_black) <= 1


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


def test_near_pairs_are_those_of_a_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near, "_ROWS", 7)
    monkeypatch.setattr(near, "_TILE", (3, 5))
    rng = np.random.default_rng(1)
    hashes = rng.integers(0, 1 << 63, 40, dtype=np.uint64) * 2
    hashes[20:30] = hashes[:10] ^ (np.uint64(1) << rng.integers(0, 60, 10, dtype=np.uint64))
    hashes[30:33] = hashes[5]
    mirrored = rng.integers(0, 1 << 63, 40, dtype=np.uint64)
    mirrored[35], mirrored[2] = hashes[3] ^ np.uint64(7), hashes[39]
    pairs = near.near_pairs(hashes, mirrored)
    root = near._joined(40, pairs.first, pairs.second)
    expected = np.arange(40)
    for _ in range(40):
        for a in range(40):
            for b in range(a + 1, 40):
                is_near = (
                    min((int(hashes[a]) ^ int(hashes[b])).bit_count(), (int(mirrored[a]) ^ int(hashes[b])).bit_count())
                    <= 8
                )
                if is_near:
                    expected[[a, b]] = min(expected[a], expected[b])
    assert root.tolist() == expected.tolist()
    monkeypatch.setattr(near, "_MAX_PAIRS", 3)
    with pytest.raises(ImageShardsError, match="nearly all look the same"):
        near.near_pairs(hashes, mirrored)


def test_a_chance_pair_of_hashes_gets_a_second_look(planted: Path) -> None:
    info = load_info(planted / "datasets" / "planted" / "1.0.0")
    found = statistics(info)
    found.hash[:] = found.hash[0]  # of all records
    groups = find_groups(info, None, found)
    assert groups.groups == 1 and groups.images <= 4
