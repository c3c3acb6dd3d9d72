"""A version with a base has the bytes of one without; what is unchanged is neither converted nor, if listed, read."""

from __future__ import annotations

import contextlib
import io
import json
import operator
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from beam_pipeline import images, schema, storage
from beam_pipeline.config import Config
from beam_pipeline.conversion.fetch import convert_all
from beam_pipeline.dataset import base
from beam_pipeline.inputs.folders import all_images
from beam_pipeline.schema import table
from beam_pipeline.schema.manifest import builtins_of, file_sums, seal_manifest
from beam_pipeline.storage.local import LocalStorage
from tests import make
from tests.servers import Gcs

FLAGS = ("--splits", "train=0.8,validation=0.2", "--num_shards", "train=3,validation=2")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Input and output of version 1.0.0; one image of it is no image."""
    folder = tmp_path_factory.mktemp("base")
    make.class_folders(folder / "in", {"ant": 25, "bee": 20, "cat": 15}, suffix="png")
    (folder / "in" / "bee" / "text.png").write_text("none")
    finished = make.job(folder / "in", folder / "out", *FLAGS, "--max_reject_fraction", 0.1)
    assert finished.code == 0 and "base" not in finished.err, finished.err
    return folder


@pytest.fixture
def grown(published: Path, tmp_path: Path) -> Path:
    """A copy that may be changed."""
    return shutil.copytree(published, tmp_path, dirs_exist_ok=True)


def write(folder: Path, *more: object, version: str = "1.1.0", out: str = "out") -> make.Finished:
    """Write another version; flags that are given twice count the second time."""
    flags = [*FLAGS, "--max_reject_fraction", 0.1, "--version", version]
    return make.job(folder / "in", folder / out, *flags, *more)


def of_plain(folder: Path, *more: object) -> dict[str, bytes]:
    """Files of version 1.1.0, written without a base."""
    finished = write(folder, *more, "--base", "none", out="plain")
    assert finished.code == 0 and "reused from" not in finished.out, finished.err
    return make.same_each_time(folder / "plain" / "photos" / "1.1.0")


def versions(folder: Path, without: dict[str, bytes], *more: object) -> make.Finished:
    """A job with a base, whose files must be those of one without."""
    finished = write(folder, *more)
    assert finished.code == 0, finished.err
    assert make.same_each_time(folder / "out" / "photos" / "1.1.0") == without
    return finished


def next_config(folder: Path, **more: Any) -> Config:
    """Of the version after 1.0.0."""
    places = {"input": str(folder / "in"), "output": str(folder / "out"), "name": "photos", "version": "1.1.0"}
    splits = {"splits": FLAGS[1], "num_shards": FLAGS[3], "image_size": 24}
    return Config(**{**places, **splits, **more}).in_run(id=str(folder))


def found(folder: Path) -> tuple[int, str]:
    """How many images the next version can reuse, and what is told of the base: without a job."""
    config, _ = base.choose_base(next_config(folder))
    refs = sorted(all_images(config), key=lambda ref: (ref.order_key, ref.path))
    with contextlib.redirect_stderr(io.StringIO()) as told:
        stored = list(base.stored_images(config, refs))
    return sum(one is not None and one.image is not None for one in stored), told.getvalue()


def add(folder: Path) -> None:
    (folder / "cat" / "more.png").write_bytes(make.encoded(make.picture(seed=1000), "PNG"))


def relabel(folder: Path) -> None:
    (folder / "ant" / "0003.png").rename(folder / "bee" / "moved.png")


def replace(folder: Path) -> None:
    """By another picture in as many bytes."""
    first, second = (folder / "ant" / f"000{number}.png" for number in (3, 4))
    size = max(len(first.read_bytes()), len(second.read_bytes()))
    data = second.read_bytes()
    second.write_bytes(first.read_bytes().ljust(size, b"\0"))
    first.write_bytes(data.ljust(size, b"\0"))


def insert_class(folder: Path) -> None:
    (folder / "beaver").mkdir()
    (folder / "beaver" / "0.png").write_bytes(make.encoded(make.picture(seed=1000), "PNG"))


CHANGES: list[tuple[Callable[[Path], None], tuple[str, ...], str]] = [
    (replace, (), "2 converted, 58 reused from 1.0.0, 0 removed"),
    (
        relabel,
        ("--splits", "train=0.5,validation=0.5", "--num_shards", "train=1,validation=5"),
        "1 converted, 59 reused from 1.0.0, 1 removed",
    ),
    (insert_class, ("--one_hot", "--compression", "gzip"), "1 converted, 60 reused from 1.0.0, 0 removed"),
]


@pytest.mark.parametrize(("change", "flags", "summary"), CHANGES)
def test_the_bytes_are_those_of_a_job_without_a_base(
    grown: Path, change: Callable[[Path], None], flags: tuple[str, ...], summary: str
) -> None:
    change(grown / "in")
    finished = versions(grown, of_plain(grown, *flags), *flags)
    assert finished.err.startswith("base: reusing unchanged images from 1.0.0\n")
    moved = "warning: class ids changed against 1.0.0: 'bee' was 1, is 2: raise MAJOR\n"
    assert (moved in finished.err) == (change is insert_class)
    assert f"\n  {summary}\n" in finished.out
    run = json.loads((grown / "out/photos/1.1.0/run.json").read_text())["base"]
    assert run["self_sha256"] == make.manifest(grown / "out/photos/1.0.0")["self_sha256"]


def test_of_unchanged_images_that_a_store_lists_with_md5_none_is_read_and_the_base_in_few_requests(
    gcs: Gcs, grown: Path
) -> None:
    replace(grown / "in")  # a store lists them with another MD5
    add(grown / "in")
    bucket = gcs.new_bucket()
    gcs.put_folder(bucket, "out", grown / "out")
    gcs.put_folder(bucket, "in", grown / "in")
    config, _ = base.choose_base(next_config(grown, input=f"gs://{bucket}/in", output=f"gs://{bucket}/out"))
    refs = sorted(all_images(config), key=lambda ref: (ref.order_key, ref.path))
    before = len(gcs.requests())
    list(convert_all(config, refs, lambda ref, data, md5, *image: None, base.stored_images(config, refs)))
    reads = Counter(name for request in gcs.requests()[before:] if (name := request.object_read))
    new = {"cat/more.png", "ant/0003.png", "ant/0004.png", "bee/text.png"}  # the last one was a reject
    assert {name: reads[name] for name in reads if name.startswith("in/")} == {f"in/{name}": 1 for name in new}
    assert all(reads[f"out/photos/1.0.0/{shard.name}"] <= 2 for shard in make.shard_files(grown / "out/photos/1.0.0"))


def test_an_md5_that_a_manifest_gives_is_not_believed(grown: Path) -> None:
    """Its author may have taken it from the images of last year."""
    rows = ["path,label,md5"]
    for name, data in make.files(grown / "in").items():
        if name != "bee/text.png":
            rows.append(f"{name},{name.split('/')[0]},{schema.hashlib.md5(data).hexdigest()}")
    (grown / "rows.csv").write_text("\n".join(rows))
    flags = ("--layout", "manifest", "--manifest", grown / "rows.csv")
    assert write(grown, *flags, version="2.0.0").code == 0
    replace(grown / "in")
    finished = write(grown, *flags, version="2.1.0")
    assert finished.code == 0 and "0 converted, 58 reused from 2.0.0" in finished.out, finished
    assert "changed 2" in finished.out


@pytest.mark.parametrize("piece_bytes", [1, 5_000])
def test_a_base_shard_is_read_in_pieces(grown: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    monkeypatch.setattr(base, "_PIECE_BYTES", piece_bytes)
    sizes = []

    def note(_: object, url: str, start: int = 0, stop: int | None = None) -> None:
        if "1.0.0/photos-" in url and stop is not None:
            sizes.append(stop - start)

    make.before(monkeypatch, LocalStorage, "read", note)
    assert found(grown) == (60, "")
    assert max(sizes) <= max(piece_bytes, 4_000) and (len(sizes) == 60) == (piece_bytes == 1)


# --- bases that can't be read


def flip_shard(version: Path) -> None:
    shard = make.shard_files(version)[0]
    first = int((version / "index" / f"{shard.name}.idx").read_text().split()[1])
    make.flip_byte(shard, first // 2)


@pytest.mark.parametrize("what", ["flipped shard", "flipped table", "no table"])
def test_what_is_corrupt_in_a_base_is_not_reused(grown: Path, what: str) -> None:
    table = next((grown / "out/photos/1.0.0/index").glob("*-train.tfrecord-00001*.npy"))
    {"flipped shard": flip_shard, "flipped table": make.flip_byte, "no table": Path.unlink}[what](
        grown / "out/photos/1.0.0" if what == "flipped shard" else table
    )
    reused, told = found(grown)
    assert reused == 59 if what == "flipped shard" else 35 <= reused <= 50
    assert "warning: continuing" not in told


def test_after_a_storage_error_the_job_goes_on_without_the_base_and_says_so_once(grown: Path) -> None:
    for shard in make.shard_files(grown / "out/photos/1.0.0"):
        shard.unlink()
    finished = versions(grown, of_plain(grown))
    assert finished.err.count("warning: continuing without base 1.0.0: ") == 1
    assert "60 converted, 0 reused from 1.0.0\n" in finished.out  # how many are gone isn't known


def set_column(name: str, value: object) -> Callable[[Any], None]:
    return lambda columns: columns[name].fill(value)


UNTRUE: dict[str, Callable[[Any], object]] = {
    "source_format=99": set_column("source_format", 99),
    "passthrough=77": set_column("passthrough", 77),
    "source_height=0": set_column("source_height", 0),
    "source_width=2^32-1": set_column("source_width", (1 << 32) - 1),
    "bytes=2^32-1": set_column("bytes", (1 << 32) - 1),
    "bytes=0": set_column("bytes", 0),
    **{
        f"no {name}": operator.methodcaller("pop", name)
        for name in ("name", "source_md5", "source_bytes", "passthrough", "bytes")
    },
    "one row less": lambda columns: columns.update({name: values[:-1] for name, values in columns.items()}),
}


def seal(version: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest of a version, which stays valid by itself."""
    manifest = json.loads((version / "manifest.json").read_text())
    change(manifest)
    (version / "manifest.json").write_bytes(seal_manifest(manifest))


def replace_tables(version: Path, table_of: Callable[[bytes], bytes]) -> None:
    def change(manifest: dict[str, Any]) -> None:
        for split in manifest["splits"].values():
            for shard in split["shards"]:
                file = version / schema.table_file(shard["file"])
                file.write_bytes(data := table_of(file.read_bytes()))
                shard["table"] = builtins_of(file_sums(data))

    seal(version, change)


def with_columns(change: Callable[[Any], object]) -> Callable[[bytes], bytes]:
    """What changes the columns of a record table."""

    def table_of(data: bytes) -> bytes:
        read = table.read_table(data)
        columns = {name: np.array(read[name]) for name in read.dtype.names or ()}
        change(columns)
        types = {name: values.dtype.str if values.ndim == 1 else "(16,)u1" for name, values in columns.items()}
        return table.table_bytes(types, columns)

    return table_of


@pytest.mark.parametrize("way", [0, 1, 2])
def test_records_that_contradict_what_their_tables_say_of_them_are_not_reused(grown: Path, way: int) -> None:
    replace_tables(grown / "out/photos/1.0.0", with_columns(set_column("passthrough", way)))
    assert found(grown) == (0 if way else 60, "")


PLANS: dict[str, Callable[[dict[str, Any]], object]] = {
    "wide cut": lambda splits: splits["train"]["cuts"].__setitem__(-1, "99999999999999999999"),
    "split without shards": lambda splits: splits.update(test=splits["train"]),
    "cut without shard": lambda splits: splits["train"]["cuts"].insert(0, "1"),
}


@pytest.mark.parametrize("lie", [*UNTRUE, "junk", *PLANS])
def test_sealed_tables_and_plans_that_no_job_writes_end_the_base_with_one_notice(grown: Path, lie: str) -> None:
    if lie in PLANS:
        seal(grown / "out/photos/1.0.0", lambda manifest: PLANS[lie](manifest["plan"]["splits"]))
    else:
        replace_tables(grown / "out/photos/1.0.0", with_columns(UNTRUE[lie]) if lie in UNTRUE else lambda _: b"junk")
    reused, told = found(grown)
    assert reused == 0 and told.count("warning: continuing without base 1.0.0: ") == told.count("\n") == 1, told


def test_a_base_whose_manifest_may_not_be_read_is_passed_over_with_a_line(
    grown: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object, url: str, *__: object) -> None:
        if url.endswith("1.0.0/manifest.json"):
            raise storage.StorageError(f"{url}: permission denied (403: no)", "give this account the right to it")

    make.before(monkeypatch, LocalStorage, "read", refuse)
    where = grown / "out/photos/1.0.0/manifest.json"
    line = f"warning: continuing without base 1.0.0: {where}: permission denied (403: no)"
    assert base.choose_base(next_config(grown))[1] == line
    with pytest.raises(storage.StorageError, match="permission denied"):  # a base that is named is wanted
        base.choose_base(next_config(grown, base="1.0.0"))


def test_a_base_that_was_replaced_since_it_was_chosen_is_not_used(grown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make.before(monkeypatch, base, "_open_base", lambda *_: (grown / "out/photos/1.0.0/manifest.json").unlink(True))
    assert found(grown)[0] == 0


# --- which version is the base


def test_the_newest_version_with_the_same_images_is_the_base_and_never_the_version_itself(grown: Path) -> None:
    assert base.choose_base(next_config(grown, version="1.0.0", overwrite=True))[1] == ""
    versions = {"1.2.0": {"seed": 7}, "1.3.0": {"jpeg_quality": 80}, "1.10.0": {"max_pixels": 9999}}
    for version, flags in versions.items():
        shutil.copytree(grown / "out/photos/1.0.0", copy := grown / "out/photos" / version)
        seal(copy, lambda manifest, flags=flags: manifest["configuration"].update(flags))
    for flags, chosen in (
        ({}, "base: reusing unchanged images from 1.0.0"),
        ({"seed": 7}, "base: reusing unchanged images from 1.2.0"),
        ({"seed": 7, "base": "1.2.0"}, "base: reusing unchanged images from 1.2.0"),
        ({"seed": 8}, "base: none, since 1.10.0 was written with another --max_pixels"),
        ({"base": "none"}, ""),
    ):
        told = base.choose_base(next_config(grown, version="1.11.0", **flags))[1]
        assert told.startswith(chosen) and bool(told) == bool(chosen), (flags, told)
    planned = write(grown, "--plan_only")
    assert planned.code == 0 and planned.err.startswith("base: reusing unchanged images from 1.0.0"), planned.err
    assert "\n  60 images reused from 1.0.0: 60 of the 61 sampled are unchanged\n" in planned.out


@pytest.mark.parametrize("change", ["codec", "gzip"])
def test_versions_of_other_codecs_and_compressed_ones_are_no_base(
    grown: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if change == "codec":
        monkeypatch.setattr(images.codec, "OWN_VERSION", "0")
    else:
        seal(grown / "out/photos/1.0.0", lambda manifest: manifest["configuration"].update(compression="gzip"))
    why = {"codec": "was written by other versions of the image libraries", "gzip": "is compressed"}
    assert base.choose_base(next_config(grown))[1].startswith(f"base: none, since 1.0.0 {why[change]}")


@pytest.mark.parametrize(
    ("version", "classes", "told"),
    [
        ("1.1.0", "aal ant bee cat", "'ant' was 0, is 1"),
        ("1.1.0", "ant bee bug cat", "'cat' was 2, is 3"),
        ("1.0.1", "ant cat", "'bee' was 1, is gone"),
        ("1.1.0", "ant bee cat dog", ""),
        ("2.0.0", "aal ant bee cat", ""),
    ],
)
def test_ids_that_differ_from_the_version_before_ask_for_a_raised_major(
    published: Path, version: str, classes: str, told: str
) -> None:
    expected = f"class ids changed against 1.0.0: {told}: raise MAJOR" if told else ""
    assert base.moved_ids(next_config(published, version=version), classes.split()) == expected
