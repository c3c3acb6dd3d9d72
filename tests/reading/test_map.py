"""`records`: by number, by file name, in lists; the same as the stream's; how much it reads; PyTorch and Grain."""

from __future__ import annotations

import io
import pickle
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import reader
import reader.map
from beam_pipeline import schema, storage
from beam_pipeline.errors import CorruptRecordError, ImageShardsError, UsageError
from beam_pipeline.schema.table import table_bytes
from reader.tools.requests import Request, SlowStorage
from tests import make, servers
from tests.reading.shards import each_record, offsets

CLASSES = {"ant": 560, "bee": 400, "cat": 240}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """1,200 records in two splits, in four shards each, of three columns."""
    folder = tmp_path_factory.mktemp("map")
    photos = make.class_folders(folder / "photos", CLASSES, size=(12, 9))
    flags = ("--splits", "train=0.9,validation=0.1", "--num_shards", "4", "--image_size", "8x12")
    return str(make.published(photos, folder / "datasets", *flags))


def names(records: Any) -> list[str]:
    return [one["filename"] for one in records]


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return list(one) == list(other) and all(np.array_equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("split", ["train", "validation", "train[:10%]", "train[70:-3]", "validation[5:]+train[500:]"])
def test_records_by_number_are_those_of_the_stream(url: str, split: str) -> None:
    records = reader.records(url, split)
    evals = reader.eval_batches(url, split, global_batch_size=50, features=["filename", "size"])
    expected = list(each_record(evals))
    assert len(records) == len(expected) == reader.load_info(url).records(split)
    for number, other in enumerate(expected):
        one = records[number]
        assert np.array_equal(one["image"], other["image"]) and one["image"].dtype == np.uint8
        assert (one["class"], one["size"].tolist()) == (other["class"], other["size"].tolist())
        assert one["filename"] == other["filename"].decode() and one["label"] == one["filename"].split("/")[0]
    assert names(records[names(records)]) == names(records) == [other["filename"].decode() for other in expected]


def test_slices_lists_and_negative_numbers_are_those_of_a_list(url: str) -> None:
    records = reader.records(url, "train[:200]", features=["filename"])
    expected = names(records)
    for key in (slice(None), slice(5, 90), slice(-3, None), slice(150, 20, -7), slice(10, 10), slice(190, 900)):
        assert names(records[key]) == expected[key]
    for number in (-200, -1, 0, 199, np.int64(7), np.uint8(3)):
        assert records[number]["filename"] == expected[int(number)]
    some = [3, -1, 3, 64, 63, 65, 3, 0]
    for keys in (some, tuple(some), np.array(some), [*some[:-1], expected[0]]):
        assert names(records[keys]) == names(records.__getitems__(keys)) == [expected[number] for number in some]
    assert records[[]] == [] and len({id(one) for one in records[[3, 3]]}) == 2


def test_images_are_decoded_as_asked_for(url: str) -> None:
    stored, sized = reader.records(url, "validation", decode=False), reader.records(url, "validation", image_size=6)
    evals = reader.eval_batches(url, "validation", global_batch_size=8, image_size=6)
    (images, _, _) = next(iter(evals))
    assert all(np.array_equal(one["image"], image) for one, image in zip(sized[:8], images, strict=True))
    assert stored[0]["image"][:2] == b"\xff\xd8" and isinstance(stored[0]["image"], bytes)
    pixels = np.asarray(Image.open(io.BytesIO(stored[3]["image"])))
    assert np.array_equal(pixels, reader.records(url, "validation")[3]["image"])
    assert [*reader.records(url, "validation", features=[])[0]] == ["image", "class", "label"]
    one = reader.records(url, "validation", features=["size", "label", "class"], classes={"cat": "pet"})[0]
    assert [*one] == ["image", "class", "label", "size"] and (one["class"], one["label"]) == (0, "pet")


def test_images_of_mixed_sizes_come_in_theirs(tmp_path: Path) -> None:
    photos = make.class_folders(tmp_path / "photos", {"ant": 2, "bee": 3}, size=(30, 20))
    make.class_folders(photos / "bee" / "more", {"large": 2}, size=(44, 50))
    url = make.published(photos, tmp_path / "datasets", "--image_size", "none")
    records = reader.records(url, "train")
    assert sorted(one["image"].shape for one in records) == [(20, 30, 3)] * 5 + [(50, 44, 3)] * 2
    assert all(one["image"].shape[:2] == tuple(one["size"]) for one in records)
    assert {one["image"].shape for one in reader.records(url, "train", image_size=16)} == {(16, 16, 3)}


def test_what_is_not_there_is_named(url: str) -> None:
    records = reader.records(url, "train[:100]")
    inside, outside = records[0]["filename"], reader.records(url, "validation")[0]["filename"]
    for number in (100, -101, 1 << 70):
        with pytest.raises(IndexError, match=rf"^there is no record {number}: train\[:100\] has 100, numbered from 0$"):
            records[number]
    for name, hint in (
        ("cat/none.jpg", ""),
        ("", ""),
        (outside, ": it is in validation"),
        (reader.records(url, "train")[100]["filename"], ": it is in train"),
        (f"photos/more/{inside}", f": did you mean '{inside}'?"),
    ):
        with pytest.raises(KeyError) as caught:
            records[name]
        assert caught.value.args == (f"train[:100] has no record of {name!r}{hint}",)
        assert name not in records and inside in records and 3 not in records
    for key in (1.5, None, b"cat/1.jpg", [0, None], {3}, np.array([True, False])):
        with pytest.raises(TypeError, match="integer"):
            records[key]
    with pytest.raises(UsageError, match=r"there is no split 'val'"):
        reader.records(url, "val")
    with pytest.raises(UsageError, match=r"features=\['age'\]: there is no 'age'"):
        reader.records(url, "train", features=["age"])


def test_selected_records_are_numbered_and_named_as_the_stream_s(url: str) -> None:
    def odd(columns: Any) -> Any:
        return columns["name"] % 2 == 1

    for split, chosen in (
        ("train", {"classes": ["cat", "bee"]}),
        ("train[100:700]", {"classes": {"ant": "pet", "cat": "pet", "bee": "insect"}, "where": odd}),
        ("validation+train[:50]", {"where": odd}),
    ):
        records = pickle.loads(pickle.dumps(reader.records(url, split, **chosen)))
        evals = reader.eval_batches(url, split, global_batch_size=40, features=["filename"], **chosen)
        rows = list(each_record(evals))
        assert records.classes == evals.classes and len(records) == len(rows) < reader.load_info(url).records(split)
        for one, other in zip(records, rows, strict=True):
            assert np.array_equal(one["image"], other["image"]) and one["filename"] == other["filename"].decode()
            assert (one["class"], one["label"]) == (other["class"], records.classes[other["class"]])
        found = names(records)
        assert names(records[found]) == found and names(records[[-1, 3]]) == [found[-1], found[3]]
    left_out = next(one["filename"] for one in reader.records(url, "train") if one["label"] == "ant")
    with pytest.raises(KeyError, match=f"train has no record of '{left_out}': it is in train, but not selected"):
        reader.records(url, "train", classes=["bee"])[left_out]


def test_twins_of_one_order_key_are_told_apart(tmp_path: Path) -> None:
    """A name in two Unicode normal forms."""
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    twins = [f"cat/{name}" for name in make.ODD_NAMES if name.startswith("twin")]
    for number, name in enumerate(twins):
        (tmp_path / "photos" / name).write_bytes(make.encoded(make.picture(seed=number)))
    records = reader.records(make.published(tmp_path / "photos", tmp_path / "datasets"), "train")
    assert len(twins) == 2 and names(records[twins]) == twins


def test_a_corrupt_record_is_named_and_the_others_are_read(tmp_path: Path, url: str) -> None:
    target = tmp_path / "1.0.0"
    shutil.copytree(url, target)
    shard = make.shard_files(target)[1]
    begins = offsets(target, shard.name)
    before = reader.load_info(target).splits["train"].shards[0].records
    make.flip_byte(shard, begins[7] + 100)
    make.flip_byte(shard, begins[9] + 2)  # its length
    records = reader.records(target, "train")
    for row, fault in ((7, "the CRC of the data is wrong"), (9, "the CRC of the length is wrong")):
        for key in (before + row, [0, before + 8, before + row]):
            with pytest.raises(CorruptRecordError) as caught:
                records[key]
            assert str(caught.value) == f"{shard}: record {row} at byte {begins[row]}: {fault}"
    assert same(records[before + 8], reader.records(url, "train")[before + 8])
    shard.write_bytes(shard.read_bytes()[: begins[20] + 5])
    with pytest.raises(CorruptRecordError, match=r"record 20 at byte \d+: the file ends inside this record"):
        records[before + 15 : before + 30]
    shard.unlink()
    with pytest.raises(CorruptRecordError, match=rf"^{shard}: record 3 at byte \d+: the file is missing$"):
        records[before + 3]


def test_a_table_of_other_records_is_named(tmp_path: Path, url: str) -> None:
    target = tmp_path / "1.0.0"
    shutil.copytree(url, target)
    info = reader.load_info(target)
    shard = info.splits["train"].shards[2]
    lengths, file = info.load_table(shard)["bytes"], target / schema.table_file(shard.file)
    of_other_runs = file.read_bytes().replace(lengths.tobytes(), np.roll(lengths, 3).tobytes())
    for data in (of_other_runs, table_bytes({"bytes": "<u4"}, {"bytes": lengths.tolist()})):
        file.write_bytes(data)
        records, named = reader.records(target, "train"), rf"{shard.file}.* record table .*run the job with --repair$"
        assert len(records[100:110]) == 10  # of another shard
        for key in (700, [700, 5]):
            with pytest.raises(ImageShardsError, match=named):
                records[key]
        with pytest.raises(ImageShardsError, match=named):
            reader.train_batches(target, "train", global_batch_size=8, image_size=8, seed=0, classes=["bee"])


def test_an_index_of_third_party_files_is_read_by_number(tmp_path: Path, url: str) -> None:
    for shard in make.shard_files(Path(url)):
        (tmp_path / shard.name).write_bytes(shard.read_bytes())
    first = make.shard_files(tmp_path)[0]
    make.flip_byte(first, offsets(url, first.name)[70] + 50)  # left out: a run ends before it
    made = reader.index(f"{tmp_path}/photos-*", tmp_path / "index")
    assert made.records == 1199
    records, ours = reader.records(made.info, "train"), reader.records(url, "train")
    expected = [*range(70), *range(71, len(ours))]
    for number, original in enumerate(expected):
        one, other = records[number], ours[original]
        assert np.array_equal(one["image"], other["image"]) and one["filename"] == other["filename"]
        assert (one["class"], one["label"]) == (other["class"], other["label"])
    with pytest.raises(
        UsageError, match=r"isn't in the order of its file names: give record numbers, not 'ant/0\.jpg'"
    ):
        records["ant/0.jpg"]


def test_one_record_is_one_request_and_a_thousand_are_no_more_than_their_bytes(url: str, gcs: servers.Gcs) -> None:
    bucket = gcs.new_bucket()
    gcs.put_folder(bucket, "photos/1.0.0", Path(url))
    seen: list[Request] = []
    with storage.wrapped(lambda store: SlowStorage(store, 0, seen.append)):
        records = reader.records(f"gs://{bucket}/photos", "train")
        local, info = reader.records(url, "train"), reader.load_info(url)
        lengths = np.concatenate([info.load_table(shard)["bytes"] for shard in info.splits["train"].shards])
        assert len(records[range(0, len(records), 100)]) > 10  # each shard's table is read
        chosen = np.random.default_rng(0).choice(len(records), 1000, replace=False)
        for keys, requests, share in (([500], 1, 1.01), (chosen, 1000, 1.2), ([3] * 9, 1, 1.01), (range(100), 2, 1.01)):
            before = len(gcs.requests())
            seen.clear()
            found = records.__getitems__(keys)
            asked = gcs.requests()[before:]
            assert all((one.object_read or "").startswith("photos/1.0.0/photos-train.") for one in asked)
            assert 0 < len(asked) == len(seen) <= requests
            assert sum(one.bytes_read for one in seen) <= share * lengths[np.unique(keys)].sum()
            assert all(same(one, local[int(number)]) for one, number in zip(found, keys, strict=True))
        records[local[0]["filename"]]  # reads the names of its shard
        before = len(gcs.requests())
        assert same(records[local[0]["filename"]], local[0]) and len(gcs.requests()) == before + 1


@pytest.mark.soak
def test_a_batch_is_read_32_at_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the tables of the shards that it touches first."""
    monkeypatch.setattr(reader.runs, "_GAP_BYTES", 0)
    running, most, lock, all_there = 0, 0, threading.Lock(), threading.Event()

    class Remote(SlowStorage):
        def read_range(self, *arguments: Any) -> Any:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
                if running == 32:
                    all_there.set()
            all_there.wait(1)  # on a busy machine the last of 32 threads starts late
            try:
                return super().read_range(*arguments)
            finally:
                with lock:
                    running -= 1

    with storage.wrapped(lambda store: Remote(store, 0.001)):
        records = reader.records(url, "train", decode=False)
        found = records.__getitems__(range(0, 1000, 10))
    assert names(found) == names(reader.records(url, "train")[range(0, 1000, 10)])
    assert most == 32


def test_the_offsets_of_many_shards_stay_within_their_bound(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reader.map._KEPT_BYTES == 64 << 20
    largest = max(shard.records for shard in reader.load_info(url).splits["train"].shards)
    monkeypatch.setattr(reader.map, "_KEPT_BYTES", 2 * 2 * 4 * largest)  # half of it is for two of four shards
    loaded: list[str] = []
    make.before(monkeypatch, reader.tables, "Columns", lambda info, shard: loaded.append(shard.file))
    records, expected = reader.records(url, "train"), names(reader.records(url, "train"))
    loaded.clear()
    for number in [*range(0, len(records), 50), *range(0, len(records), 50)]:
        assert records[number]["filename"] == expected[number]
    assert len(loaded) in (7, 8) and names(records) == expected
    loaded.clear()
    last = [records[number]["filename"] for number in (-1, -2, -3)]
    assert last == expected[:-4:-1] and not loaded


def test_threads_share_it_and_processes_get_a_copy(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader.map, "_KEPT_BYTES", 3000)
    records, numbers = (
        reader.records(url, "train", features=["filename"]),
        np.random.default_rng(1).integers(0, 900, 600),
    )
    expected = names(reader.records(url, "train"))
    with ThreadPoolExecutor(8) as pool:
        single = pool.map(lambda number: records[int(number)], numbers)
        assert names(single) == [expected[number] for number in numbers]
        parts = np.split(numbers, 20)
        for part, found in zip(parts, pool.map(lambda part: names(records[part]), parts), strict=True):
            assert found == [expected[number] for number in part]
    again = pickle.loads(pickle.dumps(records))
    assert names(again) == expected and [*again[0]] == ["image", "class", "label", "filename"]
    assert len(pickle.dumps(records)) < 20_000


def test_it_shows_itself_in_a_notebook(url: str, tmp_path: Path) -> None:
    records = reader.records(url, "train[:1_000]", decode=False)
    assert repr(records) == "Records(photos 1.0.0 train[:1_000]: 1,000 records of 3 classes)"
    shown = records._repr_html_()
    assert shown.startswith(f'<p>{records!r}</p><img src="data:image/jpeg;base64,') and len(shown) < 100_000
    shutil.copytree(url, tmp_path / "1.0.0")
    shard = make.shard_files(tmp_path / "1.0.0")[0]
    make.flip_byte(shard, 100)
    assert f"{shard}: record 0 at byte 0: " in reader.records(tmp_path / "1.0.0", "train")._repr_html_()


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # more workers than cores
@pytest.mark.parametrize(
    ("workers", "context"), [(0, None), (2, "fork"), pytest.param(1, "spawn", marks=pytest.mark.soak)]
)
def test_it_is_a_map_style_dataset_for_pytorch(url: str, workers: int, context: str | None) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'imageshards[torch]'")
    records, expected = reader.records(url, "validation"), reader.records(url, "validation")
    order = torch.randperm(len(records), generator=torch.Generator().manual_seed(3))
    more = {"batch_size": 16, "sampler": order.tolist(), "num_workers": workers, "multiprocessing_context": context}
    seen: list[str] = []
    for batch in torch.utils.data.DataLoader(records, **more):
        for image, label, filename in zip(batch["image"], batch["class"], batch["filename"], strict=True):
            one = expected[filename]
            assert np.array_equal(image, one["image"]) and int(label) == one["class"]
        seen += batch["filename"]
    assert seen == [expected[number]["filename"] for number in order.tolist()]


def test_it_is_a_data_source_for_grain(url: str) -> None:
    grain = pytest.importorskip("grain", reason="Grain is not installed: pip install 'imageshards[test]'")
    records = reader.records(url, "train", features=["filename"])
    assert isinstance(records, grain.sources.RandomAccessDataSource)
    dataset = grain.MapDataset.source(records).shuffle(seed=0).batch(32)
    read = [pair for batch in dataset for pair in zip(batch["filename"], batch["image"], strict=True)]
    assert sorted(name for name, _ in read) == sorted(names(records)) and len(read) == len(records)
    assert all(np.array_equal(image, records[str(name)]["image"]) for name, image in read[:40])
