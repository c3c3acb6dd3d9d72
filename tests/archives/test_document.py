"""docs/howto/archives.md runs as written; ImageNet's archives give the dataset of the unpacked folders."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path

import imageshards
from beam_pipeline import sample_data
from tests.archives import pack
from tests.blocks import blocks, run
from tests.make import ROOT

WNIDS = ("n01440764", "n01443537", "n01484850")


def stand_in(folder: Path) -> None:
    """A zip as from Kaggle; ImageNet's two archives with three classes, and Kaggle's table of the validation set."""
    sample_data.main([str(folder / "photos"), "--images", "24", "--broken", "0"])
    pictures = [path.read_bytes() for path in sorted((folder / "photos").rglob("*.jpg"))]
    shutil.rmtree(folder / "photos")
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


def test_the_commands_run_and_imagenet_is_one_dataset_that_of_the_unpacked_folders(tmp_path: Path) -> None:
    packed, unpacked = tmp_path / "packed", tmp_path / "unpacked"
    packed.mkdir()
    stand_in(packed)
    with contextlib.chdir(packed):
        for language, text in blocks(ROOT / "docs/howto/archives.md"):
            run(language, text, "docs/howto/archives.md")
    info = imageshards.load_info(packed / "datasets/imagenet")
    assert {name: split.records for name, split in info.splits.items()} == {"train": 12, "validation": 6}
    assert list(info.classes) == sorted(WNIDS)
    assert imageshards.load_info(packed / "datasets/dogs").classes == ("Cat", "Dog")
    for archive in ("ILSVRC2012_img_train", "ILSVRC2012_img_val"):
        _untar(packed / f"{archive}.tar", unpacked / archive)
    for inner in (unpacked / "ILSVRC2012_img_train").glob("*.tar"):
        _untar(inner, inner.with_suffix(""))
        inner.unlink()
    shutil.copy(packed / "imagenet.csv", unpacked)
    with contextlib.chdir(unpacked):
        run("bash", blocks(ROOT / "docs/howto/archives.md")[-1][1].partition("> imagenet.csv\n")[2], "unpacked")
    folders = [folder / "datasets/imagenet/1.0.0" for folder in (packed, unpacked)]
    first, second = [
        {path.relative_to(one).as_posix(): path.read_bytes() for path in one.rglob("*.tfrecord*")} for one in folders
    ]
    assert first == second and first
    assert len({(folder / "manifest.json").read_bytes() for folder in folders}) == 1
