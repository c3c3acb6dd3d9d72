"""A comparison as a job finds what the launcher finds, and reads where the workers are."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import apache_beam as beam
import msgspec
import pytest

from beam_pipeline.config import Config
from beam_pipeline.dataset import answers
from beam_pipeline.dataset.compare import Comparison, compare
from beam_pipeline.errors import ImageShardsError
from beam_pipeline.pipeline import graph
from beam_pipeline.schema.job import ComparedInputs
from beam_pipeline.schema.manifest import Content, Manifest
from tests import make


@pytest.fixture(scope="module")
def original(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An input and its published version."""
    folder = tmp_path_factory.mktemp("original")
    shutil.copytree(photos, folder / "in")
    (folder / "in" / "bee" / "broken.jpg").write_bytes(b"bad")
    make.published(folder / "in", folder / "out", *make.TWO_SPLITS, "--max_reject_fraction", "0.1")
    return folder


def in_job(config: Config, published: Content) -> ComparedInputs:
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        graph.build_comparison(pipeline, config, published.self_sha256)
    return answers.take(config, ComparedInputs)


def outcome(config: Config, published: Content, inputs: ComparedInputs | None) -> Comparison | str:
    try:
        return compare(config, published, inputs)
    except ImageShardsError as error:
        return str(error)


SHARD = "out/photos/1.0.0/photos-train.tfrecord-00001-of-00002"
CHANGES: dict[str, Callable[[Path], object]] = {
    "nothing": lambda folder: None,
    "a shard is flipped": lambda folder: make.flip_byte(folder / SHARD),
    "a shard is cut": lambda folder: (folder / SHARD).write_bytes(b""),
    "a shard is gone": lambda folder: (folder / SHARD).unlink(),
    "an index is flipped": lambda folder: make.flip_byte(next((folder / "out/photos/1.0.0/index").glob("*.idx"))),
    "labels are gone": lambda folder: (folder / "out/photos/1.0.0/class.labels.txt").unlink(),
    "an image is flipped": lambda folder: make.flip_byte(folder / "in/ant/0003.jpg"),
    "an image is new": lambda folder: shutil.copy(folder / "in/ant/0003.jpg", folder / "in/ant/x.jpg"),
    "a class is new": lambda folder: shutil.copytree(folder / "in/ant", folder / "in/bat"),
    "an image is gone": lambda folder: (folder / "in/cat/0007.jpg").unlink(),
}


@pytest.mark.parametrize("repair", [False, True], ids=["by listing", "--repair"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_job_finds_what_the_launcher_finds(original: Path, tmp_path: Path, change: str, repair: bool) -> None:
    folder = Path(shutil.copytree(original, tmp_path / "copy"))
    CHANGES[change](folder)
    flags = {"image_size": 24, "splits": "train=0.8,validation=0.2", "num_shards": 2, "max_reject_fraction": 0.1}
    config = Config(input=str(folder / "in"), output=str(folder / "out"), name="photos", repair=repair, **flags)
    published = Manifest("", make.manifest(folder / "out/photos/1.0.0")).content
    before = make.traces(folder)
    found = in_job(config, published)
    assert make.traces(folder).keys() == before.keys(), "it leaves nothing"
    assert found.were_read == repair
    assert outcome(config, published, found) == outcome(config, published, None)


def test_a_version_that_is_published_again_meanwhile_is_no_answer(original: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(original, tmp_path / "copy"))
    config = Config(input=str(folder / "in"), output=str(folder / "out"), name="photos")
    published = Manifest("", make.manifest(folder / "out/photos/1.0.0")).content
    with pytest.raises(Exception, match=r"was published again while it was compared: run the same command again"):
        in_job(config, msgspec.structs.replace(published, self_sha256="0" * 64))
