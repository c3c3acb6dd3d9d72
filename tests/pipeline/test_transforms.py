"""The transforms on the real in-process runner: what flows between them, and what they count."""

from __future__ import annotations

import hashlib
import json
import logging
import random
import re
import shutil
from collections import Counter
from itertools import islice
from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.metrics import MetricsFilter
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing.util import assert_that, equal_to
from hypothesis import example, given
from hypothesis import strategies as st

import beam_pipeline
from beam_pipeline.config import Config
from beam_pipeline.dataset import shard_queue
from beam_pipeline.errors import ImageShardsError
from beam_pipeline.inputs.folders import ListingSummary, all_images
from beam_pipeline.inputs.references import ImageRef, order_key, sample_size
from beam_pipeline.pipeline import elements, graph, listing
from beam_pipeline.pipeline.elements import Page, PageCoder
from beam_pipeline.pipeline.listing import ListPages
from beam_pipeline.pipeline.planning import PlanShards, SampleImages
from beam_pipeline.schema.job import Run
from tests import make
from tests.servers import Gcs

IN_PROCESS = ["--runner=FnApiRunner"]


def config(input: object, output: Path, **more: object) -> Config:
    return Config(**{"input": str(input), "output": str(output), "name": "photos", "image_size": 24} | more)


texts = st.text(st.characters(codec="utf-8"), max_size=9)
etags = st.binary(min_size=16, max_size=16) | st.integers(0, (1 << 32) - 1) | texts
numbers = st.integers(0, (1 << 64) - 1)
features = st.lists(st.binary(max_size=5), max_size=2).map(tuple)
refs = st.builds(ImageRef, texts, st.integers(0, 1 << 50), etags, texts, st.sampled_from(["a", "b"]), numbers, features)
NO_UTF8 = ImageRef(b"a/caf\xe9.jpg".decode("utf-8", "surrogateescape"), 1, "", "a", "train", 5)


@given(st.lists(refs, max_size=20))
@example([NO_UTF8])
def test_pages_travel_unchanged(some: list[ImageRef]) -> None:
    coder = PageCoder()
    copy = coder.decode(coder.encode(Page(some)))
    assert isinstance(copy, Page)
    assert copy == some
    assert all(isinstance(ref, ImageRef) for ref in copy)


def reference(number: int) -> ImageRef:
    """As a listing of ImageNet on object storage gives it: nothing in it repeats but the class."""
    path = f"n01440764/n01440764_{number * 37}.JPEG"
    md5 = hashlib.md5(path.encode()).digest()
    return ImageRef(path, 80_000 + number * 7919 % 90_000, md5, "n01440764", "train", order_key(path, 0))


@pytest.mark.parametrize(("count", "most_bytes"), [(1000, 40), (33, 56), (1, 130)])
def test_a_reference_that_is_grouped_takes_few_bytes(count: int, most_bytes: int) -> None:
    page = Page(reference(number) for number in range(count))
    assert len(PageCoder().encode(page)) / count <= most_bytes


def test_many_class_folders_share_pages_and_summaries(tmp_path: Path) -> None:
    make.class_folders(tmp_path / "in", {f"c{number:02}": 1 for number in range(31)} | {"empty": 0})
    some = config(tmp_path / "in", tmp_path / "out")
    with beam.Pipeline(options=PipelineOptions(IN_PROCESS)) as job:
        keyed, summary = job | "List" >> ListPages(some)
        lengths = keyed | beam.FlatMap(lambda pair: map(len, pair[1]))
        assert_that(lengths, equal_to([16, 15]), "pages")
        counts = summary | beam.Map(lambda one: (one.images, len(one.classes), one.class_counts["empty"]))
        assert_that(counts, equal_to([(31, 32, 0)]), "summary")
    (empty,) = job.result.metrics().query(MetricsFilter().with_name(elements.CLASSES_EMPTY))["counters"]
    assert empty.committed == 1


def manifest_of(photos: Path, folder: Path) -> Path:
    (folder / "m.jsonl").write_text("\n".join(json.dumps({"path": name, "label": "x"}) for name in make.files(photos)))
    return folder / "m.jsonl"


STRATIFIED = {"splits": "train=75,test=25", "stratify": True}


@pytest.mark.parametrize(("layout", "more"), [
    ("class_folders", {}), ("class_folders", STRATIFIED), ("manifest", STRATIFIED), ("manifest of gs://", {}),
])  # fmt: skip
def test_a_job_lists_every_image_once_as_one_process_does_in_pages_with_one_summary(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gcs: Gcs, layout: str, more: dict[str, object]
) -> None:
    monkeypatch.setattr(listing, "PAGE_REFS", 5)
    monkeypatch.setattr(listing, "_BUCKET_BYTES", 300)
    classes, source = ("ant", "bee", "cat"), photos
    if layout != "class_folders":
        table = {"layout": "manifest", "manifest": str(manifest_of(photos, tmp_path)), "header": ("path", "label")}
        classes, more = ("x",), {**more, **table}
    if "gs://" in layout:
        gcs.put_folder(bucket := gcs.new_bucket(), "in", photos)
        source = f"gs://{bucket}/in"
    some = config(source, tmp_path, **more)
    everything = sorted(all_images(some))
    smallest = sorted(everything, key=lambda ref: (ref.order_key, ref.path))
    with beam.Pipeline(options=PipelineOptions(IN_PROCESS)) as job:
        keyed, summary = job | "List" >> ListPages(some)
        pages = keyed | beam.FlatMap(lambda pair: pair[1])
        assert_that(pages | "Refs" >> beam.FlatMap(list), equal_to(everything), "every image")
        lengths = pages | "Lengths" >> beam.Map(lambda page: 0 < len(page) <= 5) | beam.Distinct()
        assert_that(lengths, equal_to([True]), "pages")
        facts = summary | beam.Map(lambda one: (one.images, one.classes, list(one.smallest)))
        assert_that(facts, equal_to([(40, classes, smallest)]), "summary")
    in_test = Counter(ref.split for ref in everything if ref.label in ("x", "ant"))["test"]
    assert in_test == ((10 if classes == ("x",) else 3) if "stratify" in more else 0)
    sizes = {ref.path: ref.source_bytes for ref in everything}
    assert sizes == {name: len(data) for name, data in make.files(photos).items()}
    assert "gs://" not in layout or all(ref.md5 is not None for ref in everything)


def test_rows_are_compared_with_the_memory_before_they_are_grouped(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "PAGE_REFS", 5)
    table = {"layout": "manifest", "manifest": str(manifest_of(photos, tmp_path)), "header": ("path", "label")}
    rows = listing._read_rows(None, config(photos, tmp_path, **table).in_run(max_references=12))
    assert sum(len(page) for _, page in islice(rows, 2)) == 10
    with pytest.raises(ImageShardsError, match=r"15 images are listed, .* holds references of 12 only"):
        next(rows)


@pytest.mark.parametrize("count", [512, 700])
def test_the_sample_is_the_smallest_keys_in_any_order_and_partition(count: int) -> None:
    found = [ImageRef(f"{number}", 1, "", "a", "train", number * 7919 % 1009) for number in range(count)]
    expected = sorted(found, key=lambda ref: (ref.order_key, ref.path))[: sample_size(count)]
    for seed in range(4):
        shuffled, total = random.Random(seed).sample(found, count), ListingSummary()
        for start in range(0, count, 97):
            part = ListingSummary()
            part.add(shuffled[start : start + 97])
            total.merge(part)
        one = listing.complete(total, config(Path("/in"), Path("/out")))
        assert (one.images, one.classes, one.smallest) == (count, ("a",), expected)


def test_a_worker_logs_each_shard_as_it_is_begun_and_published(
    photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "imageshards"):
        beam_pipeline.run(config(photos, tmp_path, num_shards=2))
    lines = [record.getMessage() for record in caplog.records if record.name == "imageshards"]
    begun, published = "shard train-N: begun, N images", "shard train-N: published, N records, N rejects, N kB, N s"
    assert sorted(re.sub(r"\d[\d.,]*", "N", line) for line in lines) == [begun] * 2 + [published] * 2


def test_sampling_and_planning_in_another_pipeline_leave_nothing(photos: Path, gcs: Gcs) -> None:
    some = Config(input=str(photos), output=f"gs://{(bucket := gcs.new_bucket())}", name="photos")
    with beam.Pipeline(options=PipelineOptions(IN_PROCESS)) as pipeline:
        pages, summary = pipeline | "ListImages" >> ListPages(some)
        sample = summary | "SampleImages" >> SampleImages(some)
        plan = pages | "PlanShards" >> PlanShards(some, summary, sample)
        assert_that(plan | beam.Map(lambda plan: plan.images), equal_to([40]))
    assert not gcs.names(bucket)


def test_counters_have_units_and_add_up(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_queue, "_COUNT_EVERY_S", 0.001)  # images are counted many times while a shard is written
    folder = Path(shutil.copytree(photos, tmp_path / "in"))
    for name in ("ant/bad.jpg", "ant/notes.txt", "ant/.hidden.jpg", "loose.jpeg"):
        (folder / name).write_bytes(b"bad")
    (folder / "empty").mkdir()
    some = config(folder, tmp_path / "out", num_shards=2, max_reject_fraction=0.1)
    job = beam.Pipeline(options=PipelineOptions(IN_PROCESS))
    graph.build(job, some, Run())
    result = job.run()
    result.wait_until_finish()
    found = result.metrics().query(MetricsFilter().with_namespace(elements.NAMESPACE))
    counters: Counter[str] = Counter()
    for one in found["counters"]:  # of each step
        counters[one.key.metric.name] += one.committed
    version = Path(some.dataset_url)
    source_bytes = sum(path.stat().st_size for path in folder.rglob("*.jpg") if not path.name.startswith("."))
    assert counters == {
        elements.IMAGES_LISTED: 41,
        elements.IMAGES_EXCLUDED: 0,
        elements.SKIPPED_HIDDEN: 1,
        elements.SKIPPED_OTHER_SUFFIX: 1,
        elements.SKIPPED_OUTSIDE_CLASSES: 1,
        elements.CLASSES_EMPTY: 1,
        elements.IMAGES_SAMPLED: 41,
        elements.IMAGES_PLANNED: 41,
        elements.SHARDS_PLANNED: 2,
        elements.IMAGES_DONE: 41,
        elements.IMAGES_REJECTED: 1,
        elements.RECORDS_WRITTEN: 40,
        elements.SHARDS_WRITTEN: 2,
        elements.SOURCE_BYTES: source_bytes,
        elements.WRITTEN_BYTES: sum(path.stat().st_size for path in make.shard_files(version)),
    }
    skipped = json.loads((version / "run.json").read_bytes())["skipped"]
    others = dict.fromkeys(("hidden", "hidden_folders", "links"), 0)
    assert skipped == {"hidden_images": 1, "outside_classes": 1, "suffixes": {".txt": 1}, **others}
    (msec,) = (one for one in found["distributions"] if one.key.metric.name == elements.SHARD_MSEC)
    assert msec.committed.count == 2
