"""`diff` against a list made by hand, with one order and another; what can't be compared."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import imageshards
import reader
from beam_pipeline import schema
from beam_pipeline.errors import UsageError
from tests import make

FLAGS = ("--splits", "train=0.6,validation=0.4", "--num_shards", "train=4,validation=3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Versions 1.0.0 and, after every kind of change, 1.1.0, and 1.2.0 with another seed."""
    folder = make.class_folders(tmp_path_factory.mktemp("diff") / "in", {"ant": 40, "bee": 30, "cat": 20}).parent
    images = folder / "in"
    for label in ("ant", "bee"):
        (images / label / "twin.jpg").write_bytes(make.encoded(make.picture(seed=502)))
    assert make.job(images, folder / "out", *FLAGS).code == 0
    (images / "ant" / "0000.jpg").unlink()
    other, size = make.encoded(make.picture(seed=500), quality=50), (images / "ant" / "0001.jpg").stat().st_size
    (images / "ant" / "0001.jpg").write_bytes(other.ljust(size, b"\0"))
    (images / "ant" / "0002.jpg").rename(images / "bee" / "0002.moved.jpg")
    for label in ("ant", "bee"):
        (images / label / "twin.jpg").rename(images / label / "renamed.jpg")
    for number in range(30, 40):
        (images / "ant" / f"00{number}.jpg").rename(images / "cat" / f"00{number}.jpg")
    (images / "bee" / "old").mkdir()
    (images / "bee" / "0005.jpg").rename(images / "bee" / "old" / "0005.jpg")
    (images / "beetle").mkdir()
    (images / "beetle" / "new.jpg").write_bytes(make.encoded(make.picture(seed=501)))
    for version, seed in (("1.1.0", 0), ("1.2.0", 7)):
        assert make.job(images, folder / "out", *FLAGS, "--version", version, "--seed", seed).code == 0
    return folder / "out" / "photos"


def by_hand() -> dict[str, Any]:
    relabelled = {(f"ant/00{number}.jpg", f"cat/00{number}.jpg") for number in range(30, 40)}
    relabelled.add(("ant/0002.jpg", "bee/0002.moved.jpg"))
    twins = {(f"{label}/twin.jpg", f"{label}/renamed.jpg") for label in ("ant", "bee")}
    return {
        "removed": {"ant/0000.jpg"},
        "added": {"beetle/new.jpg"},
        "changed": {"ant/0001.jpg"},
        "moved": relabelled | twins | {("bee/0005.jpg", "bee/old/0005.jpg")},
        "relabelled": {after for _, after in relabelled},
    }


@pytest.mark.parametrize("version", ["1.1.0", "1.2.0"])
def test_the_difference_is_that_of_a_list_made_by_hand(folder: Path, version: str) -> None:
    difference = imageshards.tools.diff(str(folder / "1.0.0"), folder / version)
    assert difference
    expected = by_hand()
    assert {kind: set(difference.names[kind]) for kind in expected} == expected
    assert {kind: difference.counts[kind] for kind in expected} == {
        kind: len(names) for kind, names in expected.items()
    }
    splits = [names_of(folder / one) for one in ("1.0.0", version)]
    pairs = [(path, path) for path in splits[0].keys() & splits[1].keys()] + [*expected["moved"]]
    other_split = {after for before, after in pairs if splits[0][before] != splits[1][after]}
    assert set(difference.names["moved_split"]) == other_split and difference.leaked == len(other_split) > 0
    assert difference.classes == {"beetle": (None, 2), "cat": (2, 3)}
    assert difference.configuration == ({"seed": (0, 7)} if version == "1.2.0" else {})


def test_one_version_is_compared_with_the_one_before(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "1.0.5").mkdir()  # not published
    for one, pair in ((folder, ("1.1.0", "1.2.0")), (folder / "1.1.0", ("1.0.0", "1.1.0"))):
        difference = reader.diff(one)
        assert (difference.a, difference.b) == tuple(f"{folder}/{version}" for version in pair)
    (folder / "1.0.5").rmdir()
    assert imageshards.main(["diff", f"{folder}/1.0.0"]) == 2
    line = f"error: {folder}/1.0.0: no earlier version is published next to it: name the other version, too\n"
    assert capsys.readouterr().err == line


def names_of(version: Path) -> dict[str, str]:
    """Path → split, from the records themselves."""
    found = {}
    for split in ("train", "validation"):
        for batch in reader.eval_batches(version, split, global_batch_size=1, features=["filename"]):
            found[batch[0]["filename"][0].decode()] = split
    return found


def test_a_version_does_not_differ_from_itself_or_from_its_copy_in_other_shards(folder: Path, tmp_path: Path) -> None:
    assert not reader.diff(folder / "1.1.0", folder / "1.1.0")
    input = folder.parent.parent / "in"
    assert make.job(input, tmp_path, "--splits", "train=0.6,validation=0.4", "--num_shards", 1).code == 0
    difference = reader.diff(folder / "1.1.0", tmp_path / "photos" / "1.0.0")
    assert not any(difference.counts.values()) and set(difference.configuration) == {"num_shards"}


def test_the_command_prints_and_exits_as_it_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert imageshards.main(["diff", str(folder / "1.0.0"), str(folder / "1.0.0")]) == 0
    assert capsys.readouterr().out == f"{folder}/1.0.0 and {folder}/1.0.0 hold the same images\n"
    assert imageshards.main(["diff", str(folder / "1.0.0"), str(folder / "1.1.0")]) == 1
    text = capsys.readouterr().out
    for line in (
        "1 image with other bytes:\n  ant/0001.jpg\n",
        "  bee/0005.jpg → bee/old/0005.jpg\n",
        "11 images relabelled:\n  ",
        "changed between train and another split, since its path decides: --split_by name keeps its split",
        "ids of 2 classes differ: beetle none → 2, cat 2 → 3\n",
    ):
        assert line in text
    assert imageshards.main(["diff", str(folder / "1.0.0"), str(folder / "1.1.0"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["counts"]["relabelled"] == 11


def moved(folder: Path, flags: list[str], now: list[str]) -> str:
    """What `diff` prints of two versions between which half of a class moved into another one."""
    images = make.class_folders(folder / "in", {"ant": 40, "bee": 40})
    for file in (images / "ant").iterdir():
        file.rename(images / "ant" / f"ant-{file.name}")
    assert make.job(images, folder / "out", *flags).code == 0
    for file in sorted((images / "ant").iterdir())[:30]:
        file.rename(images / "bee" / (file.name if "name" in flags else f"moved.{file.name}"))
    assert make.job(images, folder / "out", *now, "--version", "1.1.0").code == 0
    return str(reader.diff(folder / "out/photos/1.0.0", folder / "out/photos/1.1.0"))


@pytest.mark.parametrize(
    ("flags", "more", "cause"),
    [
        ([], [], "its path decides: --split_by name keeps its split"),
        (["--stratify"], [], "--stratify gives each class its exact shares, also of what moves into it"),
        (["--split_by", "name", "--stratify"], [], "--stratify gives each class its exact shares, also of what moves"),
        (["--split_by", "[^/]+/(.*)"], [], "its path decides: --split_by [^/]+/(.*) takes another part"),
        (["--split_by", "name"], ["--splits", "train=0.3,validation=0.7"], "--splits changed"),
    ],
)
def test_what_moved_is_named_once_and_the_cause_of_a_leak_is_the_true_one(
    tmp_path: Path, flags: list[str], more: list[str], cause: str
) -> None:
    flags = ["--splits", "train=0.5,validation=0.5", *flags]
    lines = moved(tmp_path, flags, [*flags, *more]).splitlines()
    names = [line for line in lines if line.startswith("  ") and ".jpg" in line]
    now = [name.split(" → ")[-1].strip() for name in names]
    assert len(now) == len(set(now)) and all("→" in name for name in names[:20])
    assert "30 images moved:" in lines and "30 images relabelled:" in lines
    assert lines[lines.index("30 images relabelled:") + 1] == "  all of them moved: see there"
    (warning,) = (line for line in lines if line.startswith("warning: "))
    assert f"between train and another split, since {cause}" in warning


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_corrupt_name_is_one_line_with_its_file_and_the_command_that_finds_every_fault_of_its_version(
    is_cut: bool, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    version = Path(shutil.copytree(folder / "1.1.0", tmp_path / "1.1.0"))
    shards, name = {}, b"beetle/new.jpg"  # the one that was added
    for shard in version.glob("photos-*.tfrecord-*"):
        offset = 0
        for number, record in enumerate(schema.unframe(shard.read_bytes())):
            if name in record:
                shards[shard] = number, offset
            offset += len(record) + 16
    ((shard, (number, offset)),) = shards.items()
    data = bytearray(shard.read_bytes())
    data[data.index(name)] ^= 1
    shard.write_bytes(data[:offset] if is_cut else data)
    assert imageshards.main(["diff", str(folder / "1.0.0"), str(version)]) == 1
    reason = "the file ends before this record" if is_cut else "the CRC of the data is wrong"
    found = f"{shard}: record {number} at byte {offset}: {reason}; imageshards verify {version} finds every fault"
    assert capsys.readouterr() == ("", f"error: {found}\n")


def test_what_has_no_names_is_refused_in_a_line(folder: Path, tmp_path: Path) -> None:
    reader.index(str(folder / "1.0.0" / "*.tfrecord-*"), tmp_path / "index")
    with pytest.raises(UsageError, match="its records were not written by imageshards, so they have no names"):
        reader.diff(tmp_path / "index", folder / "1.0.0")
