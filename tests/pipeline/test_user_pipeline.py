"""The transforms in somebody's own pipeline: no launcher checks, locks or waits for anything."""

from __future__ import annotations

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing.util import assert_that, equal_to

from beam_pipeline import Config, ListImages, ReadImages, WriteDataset, schema
from beam_pipeline.dataset.state import JobState
from beam_pipeline.errors import UsageError
from beam_pipeline.schema import example
from reader import load_info
from tests import make
from tests.servers import Gcs

FLAGS = ("--splits", "train=0.8,validation=0.2", "--max_reject_fraction", "0.1")


@pytest.fixture(scope="module")
def published(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command publishes."""
    return make.published(folder, tmp_path_factory.mktemp("command"), *FLAGS)


def config(folder: Path, output: object, **more: object) -> Config:
    values = {"input": str(folder), "output": str(output), "name": "photos", "image_size": 24}
    return Config(**values | {"splits": "train=0.8,validation=0.2", "max_reject_fraction": 0.1} | more)


def records(version: Path) -> list[tuple[str, bytes]]:
    """(path, encoded image) of every record."""
    features = [example.features_of(data) for file in make.shard_files(version) for data in _records(file)]
    return [(example.bytes_of(one["filename"]).decode(), example.bytes_of(one["image"])) for one in features]


def _records(file: Path) -> list[bytes]:
    return list(schema.unframe(file.read_bytes()))


def test_all_three_run_in_one_pipeline_and_write_what_the_command_writes(
    folder: Path, published: Path, tmp_path: Path, options: PipelineOptions
) -> None:
    some, version = config(folder, tmp_path), tmp_path / "photos" / "1.0.0"
    with beam.Pipeline(options=options) as pipeline:
        listed = pipeline | ListImages(some)
        images, rejects = pipeline | ReadImages(some)
        url = pipeline | WriteDataset(some)
        assert_that(listed | "Path" >> beam.Map(lambda ref: ref.path), equal_to(list(make.files(folder))), "listed")
        pairs = images | "Pair" >> beam.Map(lambda image: (image.path, image.data))
        assert_that(pairs, equal_to(records(published)), "images")
        reasons = rejects | "Reason" >> beam.Map(lambda line: (line.path, line.reason))
        assert_that(reasons, equal_to([("bee/broken.jpg", "truncated")]), "rejects")
        assert_that(url, equal_to([str(version)]), "url")
    assert make.same_each_time(version) == make.same_each_time(published)
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["1.0.0"], "nothing is left of the state"


def write(some: Config) -> None:
    """In a pipeline of its own."""
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        pipeline | WriteDataset(some)


def test_a_published_version_is_written_again_only_with_overwrite(
    folder: Path, published: Path, tmp_path: Path
) -> None:
    shutil.copytree(published.parent, tmp_path / "photos")
    with pytest.raises(UsageError, match=r"/1\.0\.0 is published: choose another version, or overwrite=True"):
        write(config(folder, tmp_path))
    write(config(folder, tmp_path, overwrite=True, seed=1))
    version = tmp_path / "photos/1.0.0"
    assert make.manifest(version)["self_sha256"] != make.manifest(published)["self_sha256"]


def test_pipelines_of_one_plan_at_once_publish_it_and_leave_nothing(folder: Path, published: Path, gcs: Gcs) -> None:
    output = f"gs://{gcs.new_bucket()}"
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, [config(folder, output)] * 2))
    manifest = make.manifest(published)
    assert load_info(f"{output}/photos").manifest["self_sha256"] == manifest["self_sha256"]
    assert not JobState(config(folder, output)).has_leftovers()


@pytest.mark.parametrize("transform", [ListImages, ReadImages, WriteDataset])
def test_a_transform_checks_when_it_is_applied_shows_its_flags_and_leaves_nothing_before_it_runs(
    transform: Any, folder: Path, tmp_path: Path
) -> None:
    for given, line in (
        (config(tmp_path / "missing", tmp_path / "out"), "no such folder"),
        ("photos", "^'photos': give an imageshards.Config$"),
        ({"input": "photos"}, "^{'input': 'photos'}: give an imageshards.Config$"),
    ):
        with pytest.raises(UsageError, match=line), beam.Pipeline(runner="FnApiRunner") as pipeline:
            pipeline | transform(given)
    beam.Pipeline(runner="FnApiRunner") | (applied := transform(config(folder, tmp_path / "out")))
    assert not list(tmp_path.iterdir())
    shown = applied.display_data()
    assert shown["input"] == str(folder)
    assert (shown["image_size"], shown["splits"]) == ("[24, 24]", "train=0.8,validation=0.2")
    assert shown.get("dataset", "none") == ("none" if transform is not WriteDataset else f"{tmp_path}/out/photos/1.0.0")


@pytest.mark.parametrize("transform", [ListImages, ReadImages, WriteDataset])
def test_a_collection_of_your_own_is_refused_by_the_transforms_name(transform: Any, folder: Path) -> None:
    for count in (1, 2):
        own = beam.Pipeline() | beam.Create([("circle", b"bytes")])
        given = own if count == 1 else (own, own)
        with pytest.raises(UsageError, match=f"^{transform.__name__} lists its images itself: apply it to the pipel"):
            given | transform(Config(input=str(folder), output=f"{folder}/../out", name="own"))


def test_the_program_of_the_document_runs_as_written_after_the_readme(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--output datasets --name photos" in (make.ROOT / "README.md").read_text()
    make.published(photos, tmp_path / "datasets")
    shutil.copytree(photos, tmp_path / "photos")
    (tmp_path / "photos" / "bee" / "7.jpg").write_bytes((photos / "bee" / "0000.jpg").read_bytes()[:300])
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"```python\n(.*?)```", (make.ROOT / "docs" / "howto" / "beam.md").read_text(), re.DOTALL)
    config = "config = Config(max_reject_fraction=0.1, "
    exec(compile(program.replace("config = Config(", config), "beam.md", "exec"), {})
    *sizes, url = (line for line in capsys.readouterr().out.splitlines() if "RejectLine" not in line)
    assert sorted(line[:6] for line in sizes) == ["('ant'", "('bee'", "('cat'"]
    assert url == f"{tmp_path}/datasets/piped/1.0.0"
