"""manifest.json: of one that isn't valid one line says what is wrong."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from beam_pipeline import schema
from beam_pipeline.errors import ImageShardsError, NotPublishedError, OtherFormatError
from beam_pipeline.schema.manifest import FOREIGN_KEY, parse_manifest, seal_manifest
from reader.features import features_of
from reader.info import load_info
from tests.reading.shards import make_dataset

# JSON text that takes the place of a value.
WRONG = ["[]", "{}", '"x"', '""', "null", "-1", "0", "true", "1.5", "1e400", "Infinity", "NaN", str(10**30), "9" * 400]
WRONG += ["9" * 5000, "[" * 100_000 + "]" * 100_000, '"\\ud800"', '["x"]', '{"x":-1}', '"' + "x" * 300 + '"', '"../x"']
PLACE = "a value that no manifest has"

Path_ = tuple[str | int, ...]


def paths(value: Any, below: Path_ = ()) -> Iterator[Path_]:
    """Where every value of a manifest is, but for its own hash, which is made again."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        if (*below, key) != ("self_sha256",):
            yield (*below, key)
            yield from paths(child, (*below, key))


def at(manifest: Any, path: Path_) -> Any:
    for key in path:
        manifest = manifest[key]
    return manifest


def sealed_with(manifest: dict[str, Any], path: Path_, text: str) -> bytes:
    """A manifest with JSON text in place of a value, its hash correct."""
    body = copy.deepcopy(manifest)
    at(body, path[:-1])[path[-1]] = PLACE
    del body["self_sha256"]

    def written(value: dict[str, Any]) -> bytes:
        return schema.canonical_json(value).replace(json.dumps(PLACE).encode(), text.encode())

    return written({**body, "self_sha256": schema.sha256(written(body))})


def check_all_uses(folder: Path, data: bytes) -> bool:
    """Whether a manifest is accepted; then nothing that it is used for ends in a traceback."""
    (folder / schema.MANIFEST_FILE).write_bytes(data)
    try:
        info = load_info(folder)
    except NotPublishedError as error:
        assert len(str(error).splitlines()) == 1 and len(str(error)) < 400
        return False
    assert len(repr(info).splitlines()) == 1
    features_of(info)
    for split in info.splits:
        try:
            assert info.records(split) > 0 and len(info.source(split)) == 16
            assert info.run_table(split).total == info.records(split)
            info.wrong_sizes(split)
        except ImageShardsError as error:  # another run index, say
            assert len(str(error).splitlines()) == 1
    return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_dataset(tmp_path_factory.mktemp("types") / "1.0.0", {"train": [70, 40], "validation": [9]}))


@pytest.fixture(scope="module")
def manifest(folder: Path) -> Any:
    return json.loads((folder / schema.MANIFEST_FILE).read_bytes())


def test_keys_of_a_later_release_are_ignored(folder: Path) -> None:
    data = (folder / schema.MANIFEST_FILE).read_bytes()
    opened, typed = parse_manifest(data, "m")
    assert opened == json.loads(data) == parse_manifest(data, "m")[0]
    assert typed.records == opened["records"]
    shards = {name: len(split["shards"]) for name, split in opened["splits"].items()}
    assert {name: len(split.shards) for name, split in typed.splits.items()} == shards
    opened |= {"new": [1], "image": {**opened["image"], "new": {}}}
    for split in opened["splits"].values():
        split["shards"][0]["new"] = None
    assert parse_manifest(seal_manifest(opened), "m")[0]["new"] == [1]


def test_no_wrong_missing_or_renamed_value_ends_in_a_traceback(folder: Path, manifest: Any) -> None:
    some = [path for path in paths(manifest) if path[:4] != ("splits", "train", "shards", 1)]  # as shard 0
    cases = list(itertools.product(some, WRONG))
    assert len(cases) >= 1000
    accepted = sum(check_all_uses(folder, sealed_with(manifest, *case)) for case in cases)
    assert accepted < len(cases) / 10
    for path, name in itertools.product(some, (None, "\udc80", "", "a/../b", "x" * 300)):
        new = copy.deepcopy(manifest)
        value = at(new, path[:-1]).pop(path[-1])
        if name is not None and isinstance(path[-1], str):
            at(new, path[:-1])[name] = value
        check_all_uses(folder, seal_manifest(new))


SHARD, SECOND = ("splits", "train", "shards", 0), "photos-train.tfrecord-00001-of-00002"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ((*SHARD, "records"), "x", "Expected `int`, got `str` - at `$.splits[...].shards[0].records`"),
        ((*SHARD, "crc32c"), 1 << 32, "Expected `int` <= 4294967295 - at `$.splits[...].shards[0].crc32c`"),
        ((*SHARD, "records"), 69, "$.splits.train.records is 110, its shards have 109"),
        ((*SHARD, "file"), SECOND, "two shards have one file"),
        (("splits", "validation"), {}, "Object missing required field `records` - at `$.splits[...]`"),
        (("splits", "validation", "class_counts"), [9], "$.splits.validation.class_counts needs one number per class"),
        (("records",), 5, "$.records is 5, its splits have others"),
        (("image", "channels"), 2, "Invalid enum value 2 - at `$.image.channels`"),
        (("configuration", "compression"), "\udc80", "surrogates not allowed"),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_one_line_names_what_is_wrong(manifest: Any, path: Path_, value: Any, message: str) -> None:
    with pytest.raises(NotPublishedError) as caught:
        parse_manifest(sealed_with(manifest, path, json.dumps(value)), "a/manifest.json")
    assert str(caught.value).startswith("a/manifest.json: ") and message in str(caught.value)
    assert str(caught.value).endswith("; run the job with --repair")
    assert type(caught.value) is NotPublishedError


def test_of_an_index_the_fix_is_to_index_again(manifest: Any) -> None:
    with pytest.raises(NotPublishedError, match=r"at `\$\.images`; index the files again$"):
        parse_manifest(seal_manifest({**manifest, FOREIGN_KEY: {"image": "i", "class": "c"}, "images": "x"}), "m")


def test_another_format_is_no_damage_whatever_else_it_holds() -> None:
    with pytest.raises(OtherFormatError, match="m has format_version 2, this release reads 1"):
        parse_manifest(seal_manifest({"format_version": 2, "splits": []}), "m")
    for version in (True, "1", None, [], 1.0):
        with pytest.raises(NotPublishedError) as caught:
            parse_manifest(seal_manifest({"format_version": version}), "m")
        assert type(caught.value) is NotPublishedError
