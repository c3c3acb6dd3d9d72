"""`--exclude`: the bytes of a job over an input without these images, on every way that an image takes into a job."""

from __future__ import annotations

import json
import os
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.testing.util import assert_that, equal_to

from beam_pipeline import Config, ListImages, schema
from beam_pipeline.inputs.exclude import checked
from beam_pipeline.inputs.folders import all_images
from beam_pipeline.inputs.references import class_hashes, limits, split_stratified
from beam_pipeline.pipeline import graph
from beam_pipeline.pipeline.listing import ListPages
from tests import make
from tests.servers import BODY, Answer, Gcs, telling

SPLITS = ("--splits", "train=0.7,validation=0.3", "--num_shards", "2")
# A class that loses all its images stays, else the id of `cat` would move.
GONE = ["ant/0003.jpg", "cat/kittens/0001.jpg", *(f"bee/{number:04d}.jpg" for number in range(13))]


def line(path: str, **more: object) -> str:
    return json.dumps({"path": path, **more}) + "\n"


GROUPS = (
    line("ant/0001.jpg", group="kept", keep=True, reason="exact duplicate")
    + line("ant/0003.jpg", group="kept", distance=0)
    + line("cat/kittens/0001.jpg", group="left out", keep=False)
    + line("cat/0001.jpg", group="left out")
    + "".join(line(path, group="all of it", keep=False) for path in GONE[2:4])
    + "".join(line(path, keep=False) for path in GONE[4:6])
    + "".join(map(line, GONE[6:]))
    + line("ant/0005.jpg", keep=True)
    + line("ant/0005.jpg")
)
LISTS: dict[str, bytes] = {
    "no suffix": "\r\n \r\n".join(["", *(f"./{path}" for path in GONE), ""]).encode("utf-8-sig"),
    "CRLF.JSONL": ("\n" + GROUPS).replace("\n", "\r\n").encode("utf-8-sig"),
}


def same_but_for_the_list(version: Path) -> dict[str, Any]:
    """Every file that is the same each time; of the manifest all but how the command was written."""
    files: dict[str, Any] = make.same_each_time(version)
    data = json.loads(files.pop(schema.MANIFEST_FILE))
    flags = {name: value for name, value in data["configuration"].items() if name not in ("exclude", "labels")}
    return files | {"manifest": data | {"configuration": flags, "self_sha256": None}}


def excluded(version: Path) -> dict[str, Any]:
    """What run.json says of the list."""
    return dict(json.loads((version / schema.RUN_FILE).read_bytes())["excluded"])


@pytest.fixture(scope="module")
def expected(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a job over a copy without these images writes, with all its classes."""
    output = tmp_path_factory.mktemp("without")
    shutil.copytree(photos, output / "in")
    (output / "labels.txt").write_text("ant\nbee\ncat\n")
    for path in GONE:
        (output / "in" / path).unlink()
    flags = (*SPLITS, "--labels_file", output / "labels.txt")
    return same_but_for_the_list(make.published(output / "in", output / "out", *flags))


@pytest.fixture
def gone(tmp_path: Path) -> Path:
    """A list of `GONE`."""
    (tmp_path / "gone.jsonl").write_text(GROUPS)
    return tmp_path / "gone.jsonl"


@pytest.mark.parametrize("name", LISTS)
def test_the_bytes_are_those_without_the_images_and_all_classes_stay(
    name: str, photos: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(LISTS[name])
    finished = make.job(photos, tmp_path / "out", *SPLITS, "--exclude", tmp_path / name)
    assert finished.code == 0 and f"\n  15 images excluded by {tmp_path / name}\n" in finished.out, finished
    version = tmp_path / "out/photos/1.0.0"
    assert same_but_for_the_list(version) == expected
    configuration = make.manifest(version)["configuration"]
    assert excluded(version) == {
        "list": str(tmp_path / name),
        "sha256": configuration["exclude"],
        "images": 15,
        "unmatched": 0,
        "unmatched_paths": [],
    }


# --- inputs


def odd_names(folder: Path) -> list[str]:
    """Both forms of a name are its images, and a name needn't be UTF-8."""
    names = [unicodedata.normalize(form, "größe é.jpg") for form in ("NFC", "NFD")]
    names.append(os.fsdecode(b"caf\xe9 \\ .jpg"))
    for number, name in enumerate(names):
        (folder / "ant" / name).write_bytes(make.encoded(make.picture(seed=100 + number)))
    return [f"ant/{name}" for name in names]


def split_folders(folder: Path) -> list[str]:
    for split in ("train", "validation"):
        (folder / split).mkdir()
    for label in ("ant", "bee", "cat"):
        shutil.copytree(folder / label, folder / "validation" / label)
        (folder / label).rename(folder / "train" / label)
    return ["train/ant/0001.jpg", *(f"validation/{path}" for path in GONE)]


def by_rows(folder: Path) -> list[str]:
    """Rows by full path too, some outside the input."""
    files = [path.relative_to(folder) for path in sorted(folder.rglob("*.jpg"))]
    rows = [f"{f'{folder}/' * (number % 2)}{path},{path.parts[0]},{number}" for number, path in enumerate(files)]
    (folder.parent / "rows.csv").write_text("\n".join(["path,label,n:int64", *rows]))
    return GONE


INPUTS: dict[str, tuple[Callable[[Path], list[str]], dict[str, Any]]] = {
    "odd names": (odd_names, {}),
    "split folders": (split_folders, {"layout": "split_class_folders", "splits": None}),
    "stratified": (lambda folder: GONE, {"stratify": True}),
    "manifest": (by_rows, {"layout": "manifest", "header": ("path", "label", "n:int64")}),
}


@pytest.mark.parametrize(("kind", "suffix"), [*((kind, "jsonl") for kind in list(INPUTS)[1:]), ("odd names", "txt")])
def test_every_kind_of_input_loses_its_images_the_same_way(
    kind: str, suffix: str, photos: Path, tmp_path: Path
) -> None:
    folder, (prepare, flags) = Path(shutil.copytree(photos, tmp_path / "in")), INPUTS[kind]
    paths = prepare(folder)
    listed = [unicodedata.normalize("NFC", path) for path in paths]
    text = "".join(map(line, listed)) if suffix == "jsonl" else "".join(f"{path}\n" for path in listed)
    (gone := tmp_path / f"gone.{suffix}").write_text(text, errors="surrogateescape")
    if kind == "manifest":
        flags = {**flags, "manifest": tmp_path / "rows.csv"}
    places = {"input": folder, "output": tmp_path / "out", "name": "photos", "splits": SPLITS[1]}
    complete = Config(**{**places, **flags, "stratify": False})
    expected = [ref for ref in all_images(complete) if ref.path not in paths]
    some = checked(Config(**{**places, **flags, "exclude": gone}))
    if some.stratify:  # the ranks are those of the images that stay
        cuts = {label: limits(hashes, some) for label, hashes in class_hashes(expected, some).items()}
        expected = list(split_stratified(expected, cuts, some))
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        pages, summary = pipeline | ListPages(some)
        refs = pages | beam.FlatMap(lambda pair: [ref for page in pair[1] for ref in page])
        assert_that(refs, equal_to(expected), "in the job")
        counts = summary | beam.Map(lambda one: (one.classes, one.excluded, one.exclusion.unmatched))
        assert_that(counts, equal_to([(("ant", "bee", "cat"), len(paths), 0)]), "counts")
    assert sorted(all_images(some)) == sorted(expected), "in the launcher"


def test_a_bucket_s_images_and_a_list_in_it_by_full_urls(
    gcs: Gcs, photos: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    bucket = gcs.new_bucket()
    gcs.put_folder(bucket, "in", photos)
    gcs.put(bucket, "gone", "".join(f"gs://{bucket}/in/{path}\n" for path in GONE).encode())
    url = f"gs://{bucket}"
    finished = make.job(f"{url}/in", f"{url}/out", *SPLITS, "--exclude", f"{url}/gone")
    assert finished.code == 0 and f"  15 images excluded by {url}/gone\n" in finished.out, finished
    assert same_but_for_the_list(gcs.download(bucket, "out/photos/1.0.0", tmp_path)) == expected


# --- engines


def test_a_transform_in_a_pipeline_leaves_them_out(photos: Path, gone: Path, tmp_path: Path) -> None:
    some = Config(input=photos, output=tmp_path, name="photos", exclude=gone)
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        paths = pipeline | ListImages(some) | beam.Map(lambda ref: ref.path)
        assert_that(paths, equal_to(sorted(make.files(photos).keys() - set(GONE))))


def test_the_graph_does_not_hold_the_list(photos: Path, tmp_path: Path) -> None:
    sizes = set()
    for lines in (1, 10_000):
        (tmp_path / "gone.txt").write_text("a/1.jpg\n" * lines)
        some = Config(input=photos, output=tmp_path, name="photos", exclude=tmp_path / "gone.txt").in_run(id="1")
        pipeline = beam.Pipeline(runner="FnApiRunner")
        pipeline | ListImages(some)
        sizes.add(pipeline.to_runner_api().ByteSize())
    assert max(sizes) - min(sizes) < 100


# --- versions


def test_a_published_version_is_that_of_its_list_wherever_it_is(photos: Path, gone: Path, tmp_path: Path) -> None:
    version, moved = make.published(photos, tmp_path, *SPLITS, "--exclude", gone), tmp_path / "moved.jsonl"
    before, sha256 = make.files(version), make.manifest(version)["configuration"]["exclude"]
    gone.rename(moved)
    again = make.job(photos, tmp_path, *SPLITS, "--exclude", moved)
    assert again.code == 0 and again.out.startswith("already published "), again
    assert f"\n  15 images excluded by {gone}\n" in again.out, "as run.json says"

    is_published = f"{version} is published with"
    choose = "choose --version 1.0.1 or --overwrite"
    of_then = f"{str(gone)!r} (SHA-256 {sha256[:12]}…)"
    plain = make.job(photos, tmp_path, *SPLITS)
    assert (plain.code, plain.err) == (2, f"error: --exclude none: {is_published} {of_then}; {choose}\n")
    gone.write_text(GROUPS + line("ant/0000.jpg"))
    other = make.job(photos, tmp_path, *SPLITS, "--exclude", gone)
    assert other.code == 2 and other.err.endswith(f": {is_published} {of_then}; {choose}\n"), other
    assert other.err.startswith(f"error: --exclude {str(gone)!r} (SHA-256 ")
    assert make.files(version) == before


# --- what is said of a list


def test_the_plan_and_its_estimate_are_without_them(photos: Path, gone: Path, tmp_path: Path) -> None:
    gone.write_text(GROUPS + line("dog/1.jpg"))
    finished = make.job(photos, tmp_path / "out", "--num_shards", "1", "--exclude", gone, "--plan_only")
    lines = finished.out.splitlines()
    assert finished.code == 0 and lines[0].startswith("train: 25 images in 1 shard"), finished
    assert f"15 images excluded by {gone}" in lines
    assert "1 path of --exclude without an image, such as 'dog/1.jpg'" in finished.out
    assert "from 25 sampled images" in finished.out


def test_paths_without_an_image_are_counted_and_three_named(photos: Path, gone: Path, tmp_path: Path) -> None:
    # Also those that stay: of that group no image is left.
    paths = ["nowhere/1.jpg", f"/else{photos}/ant/0001.jpg", "ant/0001.JPG", "ant"]
    gone.write_text(line("ant/gone.jpg", group="1", keep=True) + line("ant/0001.jpg", group="1") + line("ant/0001.jpg"))
    gone.write_text(gone.read_text() + "".join(map(line, paths * 2)))
    finished = make.job(photos, tmp_path, *SPLITS, "--exclude", gone)
    assert finished.code == 0 and f"  1 image excluded by {gone}\n" in finished.out, finished
    found = excluded(tmp_path / "photos/1.0.0")
    assert (found["images"], found["unmatched"], len(found["unmatched_paths"])) == (1, 5, 3)
    assert set(found["unmatched_paths"]) < {*paths, "ant/gone.jpg"}
    names = ", ".join(map(repr, found["unmatched_paths"]))
    warning = f"5 paths of --exclude without an image, such as {names}: write paths below --input, such as cat/1.jpg"
    assert f"warning: {warning}\n" in finished.err


@pytest.mark.parametrize("change", ["gone", "changed", "malformed"])
def test_a_worker_that_finds_another_list_fails_with_one_line(
    change: str, photos: Path, gone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha256 = schema.sha256(gone.read_bytes())
    acts: dict[str, Callable[..., object]] = {
        "gone": lambda *_: gone.unlink(),
        "changed": lambda *_: gone.write_text(GROUPS + "\n"),
        "malformed": lambda *_: gone.write_text("no JSON"),
    }
    make.before(monkeypatch, graph, "build", acts[change])
    finished = make.job(photos, tmp_path / "out", *SPLITS, "--exclude", gone)
    assert (finished.code, finished.err) == (
        1,
        f"error: --exclude '{gone}': a worker doesn't find the list that the command read (SHA-256 {sha256[:12]}…): "
        "put it back where every worker can read it, and run the same command again\n",
    )


def test_a_web_address_is_read_and_what_it_is_asked_with_not_kept(photos: Path, tmp_path: Path) -> None:
    with telling(Answer(BODY, words="ant/0003.jpg\n")) as server:
        url = f"{server.url}/gone.txt"
        finished = make.job(photos, tmp_path, "--exclude", f"{url}?signature=secret")
    assert finished.code == 0 and f"  1 image excluded by {url}\n" in finished.out, finished
    assert "secret" not in (tmp_path / "photos/1.0.0/run.json").read_text()
