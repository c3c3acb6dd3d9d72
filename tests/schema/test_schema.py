"""The on-disk contract: names, framing, run rows, canonical JSON, the manifest's own hash."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_pipeline import schema
from beam_pipeline.errors import CorruptRecordError, NotPublishedError
from beam_pipeline.schema import ShardName
from beam_pipeline.schema.manifest import parse_manifest, seal_manifest

# As a job wrote it.
MANIFEST = json.loads((Path(__file__).parent / "manifests" / "photos.json").read_bytes())

names = st.from_regex(r"[a-z][a-z0-9_]{0,20}", fullmatch=True)


# --- names


def test_a_shard_is_named_as_tfds_reads_it() -> None:
    name = ShardName("photos", "train", 3, 12)
    assert name.file == "photos-train.tfrecord-00003-of-00012"
    assert name.index_file == "index/photos-train.tfrecord-00003-of-00012.idx"
    assert schema.runs_file("train") == "index/train.runs.npy"


@given(names, names, st.integers(0, 10**7), st.integers(1, 10**7))
def test_every_shard_name_parses_back(dataset: str, split: str, index: int, count: int) -> None:
    name = ShardName(dataset, split, index, count)
    assert ShardName.parse(name.file) == name


SHARD = "photos-train.tfrecord-00003-of-00012"
NO_SHARDS = ("manifest.json", f"{SHARD}.idx", f"{SHARD}.tmp", f"x/{SHARD}", f"{SHARD}\n", SHARD.title())
NO_SHARDS += ("photos-train.tfrecord-3-of-12", SHARD.replace("-train", ""))


@pytest.mark.parametrize("file", NO_SHARDS)
def test_other_files_are_no_shards(file: str) -> None:
    assert ShardName.parse(file) is None


# --- framing


def test_a_frame_has_known_bytes() -> None:
    assert schema.frame(b"abc").hex() == "0300000000000000" + "b099490e" + "616263" + "6e57f121"
    assert len(schema.frame(b"abc")) == 3 + schema.FRAME_BYTES


SOME = st.lists(st.binary(max_size=60), min_size=1, max_size=6)


def starts_of(some: list[bytes]) -> list[int]:
    """Where each frame begins, and the end."""
    return list(itertools.accumulate((len(schema.frame(record)) for record in some), initial=0))


@given(SOME, st.data())
def test_any_flipped_bit_is_found_and_located(some: list[bytes], data: st.DataObject) -> None:
    shard = bytearray(b"".join(map(schema.frame, some)))
    position = data.draw(st.integers(0, len(shard) - 1))
    shard[position] ^= 1 << data.draw(st.integers(0, 7))
    number, offset = max((n, start) for n, start in enumerate(starts_of(some)) if start <= position)
    with pytest.raises(CorruptRecordError) as caught:
        for seen, record in enumerate(schema.unframe(bytes(shard))):
            assert record == some[seen]
    assert (caught.value.record, caught.value.offset) == (number, offset)


@given(SOME, st.data())
def test_a_cut_inside_a_record_is_found_and_located(some: list[bytes], data: st.DataObject) -> None:
    *starts, size = starts_of(some)
    length = data.draw(st.integers(1, size - 1).filter(lambda cut: cut not in starts))
    number, offset = max((n, start) for n, start in enumerate(starts) if start < length)
    with pytest.raises(CorruptRecordError, match=f"record {number} at byte {offset}: the file ends"):
        list(schema.unframe(b"".join(map(schema.frame, some))[:length]))


# --- run rows


@given(st.integers(0, 9), st.lists(st.integers(16, 10_000), max_size=300))
def test_runs_of_64_records_cover_a_shard_without_gaps(shard: int, lengths: list[int]) -> None:
    rows = schema.run_rows(shard, lengths)
    counts = [64] * (len(lengths) // 64) + [len(lengths) % 64] * (len(lengths) % 64 > 0)
    assert [(row[0], row[3]) for row in rows] == [(shard, count) for count in counts]
    ends = list(itertools.accumulate((row[2] for row in rows), initial=0))
    assert ([row[1] for row in rows], ends[-1]) == (ends[:-1], sum(lengths))


def test_a_run_row_is_18_little_endian_bytes() -> None:
    row = np.array([(1, 2, 3, 4)], schema.RUN_DTYPE)
    assert row.tobytes().hex() == "01000000" + "0200000000000000" + "03000000" + "0400"


# --- canonical JSON

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=15,
)


@given(st.dictionaries(st.text(), values, max_size=4))
def test_canonical_json_reads_back_and_does_not_depend_on_insertion_order(value: dict[str, object]) -> None:
    data = schema.canonical_json(value)
    assert json.loads(data) == value
    assert schema.canonical_json(dict(reversed(list(value.items())))) == data


def test_canonical_json_has_known_bytes_and_keeps_a_name_that_is_no_utf8() -> None:
    assert schema.canonical_json({"b": [1, None, True], "a": "é\n☃"}) == '{"a":"é\\n☃","b":[1,null,true]}\n'.encode()
    text = schema.canonical_json({"path": b"caf\xe9.jpg".decode("utf-8", "surrogateescape")})
    assert text == b'{"path":"caf\\udce9.jpg"}\n'
    assert schema.relative_path_bytes(json.loads(text)["path"]) == b"caf\xe9.jpg"


# --- the manifest's own hash


def test_a_sealed_manifest_opens() -> None:
    manifest = {key: value for key, value in MANIFEST.items() if key != "self_sha256"} | {"classes": ["é", "b", "c"]}
    data = seal_manifest(manifest)
    opened = parse_manifest(data, "m")[0]
    assert opened == manifest | {"self_sha256": schema.sha256(schema.canonical_json(manifest))}
    assert seal_manifest(opened) == data, "sealing again changes nothing"


@given(st.integers(min_value=0), st.integers(1, 255))
def test_no_changed_byte_of_a_manifest_is_believed(position: int, change: int) -> None:
    data = bytearray(seal_manifest(MANIFEST))
    data[position % len(data)] ^= change
    with pytest.raises(NotPublishedError):
        parse_manifest(bytes(data), "m")


@pytest.mark.parametrize("data", [b"", b"[]", b"1", b"{}", b"\xff\xfe", b'{"format_version":1}'])
def test_what_is_no_manifest_says_so(data: bytes) -> None:
    line = r"m is corrupt: no manifest can be read from it; run the job with --repair"
    with pytest.raises(NotPublishedError, match=line):
        parse_manifest(data, "m")


@pytest.mark.parametrize(
    "data",
    [
        seal_manifest({"format_version": 1}).replace(b'"format_version":1', b'"format_version":3'),  # a flipped bit
        json.dumps(json.loads(seal_manifest(MANIFEST)), indent=1).encode(),
    ],
    ids=["another format", "reformatted"],
)
def test_a_manifest_of_another_hash_is_corrupt_so_that_repair_may_repair_it(data: bytes) -> None:
    with pytest.raises(NotPublishedError, match="its self_sha256 doesn't match; run the job with --repair") as caught:
        parse_manifest(data, "m")
    assert type(caught.value) is NotPublishedError
