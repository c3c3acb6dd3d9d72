"""ImageNet's archives as docs/howto/archives.md takes them, for tests/test_pages.py, which runs that page."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path

import imageshards
from tests.archives import pack
from tests.blocks import blocks, run
from tests.make import ROOT, files

WNIDS = ("n01440764", "n01443537", "n01484850")


def stand_in(folder: Path) -> None:
    """A zip as from Kaggle; ImageNet's two archives with three classes, and Kaggle's table of the validation set."""
    pictures = [path.read_bytes() for path in sorted((folder / "photos").rglob("*.jpg"))[:24]]
    dogs = {f"PetImages/{('Cat', 'Dog')[number % 2]}/{number}.jpg": data for number, data in enumerate(pictures)}
    (folder / "dogs.zip").write_bytes(pack.zipped(dogs))
    training = {f"{wnid}/{wnid}_{n}.JPEG": pictures[n] for n, wnid in enumerate(WNIDS * 4)}
    validation = {f"ILSVRC2012_val_{n:08}.JPEG": pictures[12 + n] for n in range(1, 7)}
    (folder / "ILSVRC2012_img_train.tar").write_bytes(pack.tarred(pack.each(pack.tarred, ".tar")(training)))
    (folder / "ILSVRC2012_img_val.tar").write_bytes(pack.tarred(validation))
    rows = [f"{Path(name).stem},{WNIDS[n % 3]} {n} 2 3 4 " for n, name in enumerate(validation)]
    (folder / "LOC_val_solution.csv").write_text("\n".join(["ImageId,PredictionString", *rows, ""]))


def _untar(archive: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    subprocess.run(["tar", "-xf", archive, "-C", folder], check=True)


def of_the_unpacked_folders(packed: Path) -> None:
    """ImageNet is one dataset, that of the folders that its archives are unpacked into."""
    info = imageshards.load_info(packed / "datasets/imagenet")
    assert {name: split.records for name, split in info.splits.items()} == {"train": 12, "validation": 6}
    assert list(info.classes) == sorted(WNIDS)
    assert imageshards.load_info(packed / "datasets/dogs").classes == ("Cat", "Dog")
    unpacked = packed / "unpacked"
    for archive in ("ILSVRC2012_img_train", "ILSVRC2012_img_val"):
        _untar(packed / f"{archive}.tar", unpacked / archive)
    for inner in (unpacked / "ILSVRC2012_img_train").glob("*.tar"):
        _untar(inner, inner.with_suffix(""))
        inner.unlink()
    shutil.copy(packed / "imagenet.csv", unpacked)
    with contextlib.chdir(unpacked):
        run("bash", blocks(ROOT / "docs/howto/archives.md")[-1][1].partition("> imagenet.csv\n")[2], "unpacked")
    first, second = (files(folder / "datasets/imagenet/1.0.0") for folder in (packed, unpacked))
    shards = [name for name in first if ".tfrecord" in name]
    assert shards and all(first[name] == second[name] for name in [*shards, "manifest.json"])
