"""`reader.torch.ShardDataset`: each record once over ranks and workers, equal steps, states, fork and spawn."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import reader
from beam_pipeline import schema
from beam_pipeline.errors import CorruptRecordError, UsageError
from beam_pipeline.examples import bytes_feature, float_feature, int64_feature
from reader.picking import pick
from reader.runs import RunReader
from tests.make import ROOT
from tests.reading.shards import CLASSES, make_dataset

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install '.[torch]'")

RECORDS = 301


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> reader.DatasetInfo:
    counts = {"train": [130, 100, 71], "validation": [40, 11]}
    return reader.load_info(make_dataset(tmp_path_factory.mktemp("torch") / "1.0.0", counts))


def dataset(info: reader.DatasetInfo, **options: Any) -> Any:
    options = {"split": "train", "batch_size": 8, "threads": 2, **options}
    return reader.torch.ShardDataset(info, options.pop("split"), **options)


def loader(one: Any, workers: int, context: str | None = None) -> Any:
    return torch.utils.data.DataLoader(
        one, batch_size=None, num_workers=workers, multiprocessing_context=context if workers else None
    )


@pytest.fixture(scope="module")
def number_of(info: reader.DatasetInfo) -> dict[bytes, int]:
    """Pixels of a record → its number: every picture is another one."""
    numbers = {}
    for number, record in enumerate(RunReader(info.storage, info.run_table("train")).read(np.arange(RECORDS))):
        pixels = reader.pillow.to_array(reader.pillow.decode(pick(record, b"image", b"class")[0], 3))
        numbers[pixels.tobytes()] = number
    assert len(numbers) > 200  # the drawing repeats itself now and then
    return numbers


def seen(batches: Iterator[Any], number_of: dict[bytes, int]) -> list[list[int]]:
    """The record numbers of each batch; checks shapes and labels on the way."""
    found = []
    for images, labels in batches:
        assert images.dtype == torch.uint8 and labels.dtype == torch.int64
        assert images.shape[1:] == (3, 16, 24) and images.is_contiguous(memory_format=torch.channels_last)
        numbers = [number_of[image.permute(1, 2, 0).numpy().tobytes()] for image in images]
        assert [number % len(CLASSES) for number in numbers] == labels.tolist()
        found.append(numbers)
    return found


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_each_record_once_over_ranks_and_workers(
    info: reader.DatasetInfo, number_of: dict[bytes, int], ranks: int, workers: int
) -> None:
    expected = Counter(
        number_of[image.permute(1, 2, 0).numpy().tobytes()]
        for images, _ in dataset(info, shuffle=False)
        for image in images
    )
    steps = set()
    found: Counter[int] = Counter()
    for rank in range(ranks):
        one = dataset(info, rank=rank, world_size=ranks)
        batches = seen(loader(one, workers), number_of)
        assert max(map(len, batches)) <= 8 and min(map(len, batches)) >= 7 - (workers == 3)
        steps.add(len(batches))
        assert len(batches) == one.steps_per_epoch(workers)
        found.update(number for batch in batches for number in batch)
    assert len(steps) == 1
    assert found == expected and found.total() == RECORDS


def test_epochs_differ_and_repeat(info: reader.DatasetInfo, number_of: dict[bytes, int]) -> None:
    one = dataset(info, seed=3)
    first = seen(one, number_of)
    one.set_epoch(1)
    second = seen(one, number_of)
    one.set_epoch(0)
    assert seen(one, number_of) == first != second
    assert seen(dataset(info, seed=4), number_of) != first


def test_workers_that_persist_see_a_new_epoch(info: reader.DatasetInfo, number_of: dict[bytes, int]) -> None:
    one = dataset(info)
    kept = torch.utils.data.DataLoader(one, batch_size=None, num_workers=1, persistent_workers=True)
    first = seen(kept, number_of)
    one.set_epoch(1)
    assert seen(kept, number_of) != first


def test_workers_that_persist_read_whole_epochs_after_a_resumed_one(info: reader.DatasetInfo) -> None:
    before = dataset(info)
    before.set_epoch(3)
    one = dataset(info)
    one.load_state_dict(before.state_dict(6, 2))
    kept = torch.utils.data.DataLoader(one, batch_size=None, num_workers=2, persistent_workers=True)
    counts = []
    for epoch in (3, 4, 5):
        one.set_epoch(epoch)
        counts.append(sum(len(labels) for _, labels in kept))
    assert counts[1:] == [RECORDS, RECORDS] and counts[0] < RECORDS - 6 * 6


@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_of_one_record_resume_without_repeating_any(info: reader.DatasetInfo, shuffle: bool) -> None:
    """40 records and 3 ranks: some make a step less, which `steps_per_epoch` says."""
    options = {"split": "train[:40]", "batch_size": 1, "shuffle": shuffle, "world_size": 3}
    shares = [[labels.tolist() for _, labels in dataset(info, rank=rank, **options)] for rank in range(3)]
    assert sorted(map(len, shares)) == [13, 13, 14]
    for rank, expected in enumerate(shares):
        assert dataset(info, rank=rank, **options).steps_per_epoch() == len(expected)
        for steps in (1, 2, 12):
            again = dataset(info, rank=rank, **options)
            again.load_state_dict(dataset(info, rank=rank, **options).state_dict(steps))
            assert [labels.tolist() for _, labels in again] == expected[steps:]


def test_the_order_is_that_of_train_dataset(info: reader.DatasetInfo, number_of: dict[bytes, int]) -> None:
    stream = reader.train_dataset(info, "train", global_batch_size=1, seed=5)
    theirs = [number_of[images[0].numpy().tobytes()] for images, _ in stream.take(RECORDS)]
    assert [number for batch in seen(dataset(info, seed=5), number_of) for number in batch] == theirs


def test_drop_last_gives_full_batches_only(info: reader.DatasetInfo, number_of: dict[bytes, int]) -> None:
    batches = [seen(dataset(info, drop_last=True, rank=rank, world_size=3), number_of) for rank in range(3)]
    assert {len(batch) for rank in batches for batch in rank} == {8}
    assert {len(rank) for rank in batches} == {RECORDS // 3 // 8}
    with pytest.raises(UsageError, match=r"batch_size=302 with drop_last: 301 records for 1 readers .* fill no batch"):
        next(iter(dataset(info, batch_size=302, drop_last=True)))
    ended = dataset(info, drop_last=True, batch_size=RECORDS)
    ended.load_state_dict(ended.state_dict(steps=1))
    assert list(ended) == []


def test_numbers_of_any_kind_make_the_same_state(info: reader.DatasetInfo) -> None:
    plain = dataset(info).state_dict(steps=5, num_workers=2)
    others = dataset(info, batch_size=np.int64(8), rank=np.int64(0), world_size=np.int64(1), seed=np.int64(0))
    assert json.dumps(others.state_dict(steps=torch.tensor(5), num_workers=np.int64(2))) == json.dumps(plain)


@pytest.mark.parametrize("workers", [0, 3])
def test_a_state_resumes_at_any_step(info: reader.DatasetInfo, number_of: dict[bytes, int], workers: int) -> None:
    whole = dataset(info, seed=2)
    whole.set_epoch(4)
    expected = seen(loader(whole, workers), number_of)
    for steps in (0, 1, 2, 17, len(expected) - 1):
        state = json.loads(json.dumps(whole.state_dict(steps, workers)))
        again = dataset(info, seed=2)
        again.load_state_dict(state)
        assert seen(loader(again, workers), number_of) == expected[steps:]


def test_the_state_without_workers_counts_what_was_handed_out(
    info: reader.DatasetInfo, number_of: dict[bytes, int]
) -> None:
    one, expected = dataset(info), seen(dataset(info), number_of)
    iterator = iter(one)
    for _ in range(7):
        next(iterator)
    again = dataset(info)
    again.load_state_dict(one.state_dict())
    iterator = iter(again)
    assert seen((next(iterator) for _ in range(3)), number_of) == expected[7:10]
    last = dataset(info)
    last.load_state_dict(again.state_dict())
    assert seen(last, number_of) == expected[10:]


@pytest.mark.parametrize(("steps", "ranks", "workers", "batch_size"), [(5, 2, 3, 8), (1, 3, 0, 16), (11, 1, 1, 5)])
def test_other_ranks_and_workers_share_what_is_unread(
    info: reader.DatasetInfo, number_of: dict[bytes, int], steps: int, ranks: int, workers: int, batch_size: int
) -> None:
    trained: list[int] = []
    state: dict[str, Any] = {}
    for rank in range(2):
        one = dataset(info, rank=rank, world_size=2)
        trained += [number for batch in seen(loader(one, 2), number_of)[:steps] for number in batch]
        state = one.state_dict(steps, 2)
    rest: list[int] = []
    for rank in range(ranks):
        other = dataset(info, rank=rank, world_size=ranks, batch_size=batch_size)
        other.load_state_dict(state)
        rest += [number for batch in seen(loader(other, workers), number_of) for number in batch]
    every = [number for batch in seen(dataset(info, shuffle=False), number_of) for number in batch]
    assert sorted(trained + rest) == sorted(every)


def test_torchdata_resumes_each_worker(info: reader.DatasetInfo, number_of: dict[bytes, int]) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata: pip install torchdata")
    whole = stateful.StatefulDataLoader(dataset(info), batch_size=None, num_workers=2, snapshot_every_n_steps=1)
    iterator = iter(whole)
    for _ in range(9):
        next(iterator)
    state = whole.state_dict()
    expected = seen(iterator, number_of)
    again = stateful.StatefulDataLoader(dataset(info), batch_size=None, num_workers=2, snapshot_every_n_steps=1)
    again.load_state_dict(state)
    assert seen(again, number_of) == expected


def test_evaluation_is_in_file_order(info: reader.DatasetInfo) -> None:
    labels = torch.cat([labels for _, labels in dataset(info, split="validation", shuffle=False)])
    assert labels.tolist() == [number % len(CLASSES) for number in range(51)]
    parts = [dataset(info, split="validation", shuffle=False, rank=rank, world_size=4) for rank in range(4)]
    assert torch.cat([labels for part in parts for _, labels in part]).tolist() == labels.tolist()


@pytest.mark.parametrize("records", [7, 8])
def test_evaluation_of_single_records_resumes_in_its_last_round(info: reader.DatasetInfo, records: int) -> None:
    def make() -> Any:
        return dataset(info, split=f"train[:{records}]", shuffle=False, batch_size=1, features=["filename"])

    every = [batch["filename"] for batch, _ in loader(make(), 3)]
    assert len(every) == records
    for steps in range(5, records):
        resumed = make()
        resumed.load_state_dict(make().state_dict(steps, num_workers=3))
        assert [batch["filename"] for batch, _ in loader(resumed, 3)] == every[steps:]


def test_transforms_get_the_seeds_of_train_dataset(info: reader.DatasetInfo) -> None:
    theirs = reader.train_dataset(info, "train", global_batch_size=7, augment=reader.augment.flip_crop, seed=1)
    ours = dataset(info, batch_size=7, transform=reader.pillow.flip_crop, seed=1)
    for (images, labels), (expected, expected_labels) in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(images.permute(0, 2, 3, 1).numpy(), expected.numpy())
        assert labels.tolist() == expected_labels.numpy().tolist()


def test_transforms_may_return_tensors(info: reader.DatasetInfo) -> None:
    def to_float(image: Any, seed: int) -> Any:
        return torch.from_numpy(np.array(image)).float().mean((0, 1)), seed

    (means, seeds), labels = next(iter(dataset(info, transform=to_float, drop_last=True)))
    assert means.shape == (8, 3) and len(set(seeds.tolist())) == 8 and len(labels) == 8


@pytest.mark.parametrize("mode", ["crop", "stretch", "pad"])
def test_resized_images_show_the_same_window_as_train_dataset(tmp_path: Path, mode: str) -> None:
    """Filters differ: by at most 2 of 255 in the mean, and by nothing in the black that pads."""
    large = reader.load_info(make_dataset(tmp_path / "1.0.0", {"train": [20]}, size=(60, 80)))
    for size in ((30, 40), (45, 30), (100, 120), 48):
        options = {"image_size": size, "resize_mode": mode}
        images = next(iter(dataset(large, drop_last=True, **options)))[0].permute(0, 2, 3, 1).numpy()
        theirs = next(iter(reader.train_dataset(large, "train", global_batch_size=8, **options)))[0].numpy()
        assert np.abs(images.astype(int) - theirs).mean() < 2.5
        np.testing.assert_array_equal((images == 0).all(-1), (theirs == 0).all(-1))


def test_crops_show_the_windows_of_train_dataset(tmp_path: Path) -> None:
    large = reader.load_info(make_dataset(tmp_path / "1.0.0", {"train": [20]}, size=(60, 80)))
    options = {"image_size": (48, 32), "seed": 4}
    crop = reader.pillow.random_resized_crop((0.3, 1.0), then=reader.pillow.flip)
    images = next(iter(dataset(large, drop_last=True, transform=crop, **options)))[0].permute(0, 2, 3, 1).numpy()
    theirs = reader.augment.random_resized_crop((0.3, 1.0), then=reader.augment.flip)
    expected = next(iter(reader.train_dataset(large, "train", global_batch_size=8, augment=theirs, **options)))[0]
    assert np.abs(images.astype(int) - expected.numpy()).mean() < 2.5  # filters differ
    with pytest.raises(UsageError, match="random_resized_crop resizes its crops: give image_size"):
        dataset(large, transform=crop)


def test_crop_windows_are_those_of_tensorflow() -> None:
    import tensorflow as tf

    generator = np.random.default_rng(0)
    seeds = generator.integers(-(2**31), 2**31, (500, 2)).astype(np.int32)
    sizes = generator.integers(1, 3000, (500, 2))
    for bounds in (((0.08, 1.0), (3 / 4, 4 / 3)), ((0.9, 1.0), (2.0, 3.0))):
        expected = reader.augment.random_resized_crop(*bounds).windows(tf.constant(sizes), tf.constant(seeds))
        crop = reader.pillow.random_resized_crop(*bounds)
        numbers = seeds.view(np.int64)[:, 0].tolist()
        ours = [crop.window(tuple(size), seed) for size, seed in zip(sizes.tolist(), numbers, strict=True)]
        differences = np.abs(np.array(ours) - expected.numpy())
        assert differences.max() <= 1 and differences.any(1).sum() <= 2  # where exp is rounded in another way
    for scale, ratio in (((0.5, 0.2), (1, 2)), ((0, 1), (1, 2)), ((0.1, 1), (2, 1))):
        with pytest.raises(UsageError, match=r"scale=|ratio="):
            reader.pillow.random_resized_crop(scale, ratio)


COLUMNS: Any = [
    ("age", "int64", False, int64_feature, lambda number: (number - 3,)),
    ("weight", "float32", False, float_feature, lambda number: (number / 2,)),
    ("codes", "int64", True, int64_feature, lambda number: range(number % 3)),
    ("words", "bytes", True, bytes_feature, lambda number: [b"w"] * (number % 2)),
]


def test_features_come_beside_the_image_as_train_dataset_gives_them(tmp_path: Path) -> None:
    tagged = reader.load_info(make_dataset(tmp_path / "1.0.0", {"train": [40]}, columns=COLUMNS, one_hot=True))
    names = ["age", "weight", "codes", "words", "filename", "size", "one_hot_class"]
    theirs = reader.train_dataset(tagged, "train", global_batch_size=8, features=names, seed=2)
    one = dataset(tagged, features=names, seed=2)
    for (inputs, labels), (expected, expected_labels) in zip(loader(one, 1), theirs, strict=True):
        assert list(inputs) == ["image", *names]
        assert labels.tolist() == expected_labels.numpy().tolist()
        for name in ("age", "weight", "size", "one_hot_class"):
            assert inputs[name].numpy().dtype == expected[name].numpy().dtype
            np.testing.assert_array_equal(inputs[name].numpy(), expected[name].numpy())
        assert inputs["filename"] == expected["filename"].numpy().tolist()
        assert [codes.tolist() for codes in inputs["codes"]] == expected["codes"].to_list()
        assert inputs["words"] == expected["words"].to_list()
        np.testing.assert_array_equal(inputs["image"].permute(0, 2, 3, 1).numpy(), expected["image"].numpy())


def test_a_record_without_a_wanted_feature_is_damaged(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "1.0.0", {"train": [9]}, columns=COLUMNS)
    spoil(folder, range(2, 3), lambda record: record.replace(b"\x03age", b"\x03egg"))
    tagged = reader.load_info(folder)
    assert sum(len(labels) for _, labels in dataset(tagged)) == 9
    with pytest.raises(CorruptRecordError, match=r"record 2 at byte \d+: it isn't an Example with .* \('age' has 0"):
        list(dataset(tagged, features=["age"]))
    one = dataset(tagged, features=["age"], on_error="skip")
    assert sum(len(inputs["age"]) for inputs, _ in one) == 9 and reader.skipped(one) == 1


def test_damage_is_named_or_skipped(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "1.0.0", {"train": [70]})
    path = Path(folder) / "photos-train.tfrecord-00000-of-00001"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    damaged = reader.load_info(folder)
    with pytest.raises(
        CorruptRecordError, match=r"00000-of-00001: record \d+ at byte \d+: the CRC of the data is wrong"
    ):
        list(dataset(damaged))
    one = dataset(damaged, on_error="skip")
    assert sum(len(labels) for _, labels in one) == 70
    assert reader.skipped(one) == 1
    evals = dataset(damaged, on_error="skip", shuffle=False)
    assert sum(len(labels) for _, labels in evals) == 69


def spoil(folder: str, numbers: range, change: Any) -> None:
    """Rewrite some records of a dataset's only shard at their own length, with right CRCs."""
    path = Path(folder) / "photos-train.tfrecord-00000-of-00001"
    records = list(schema.unframe(path.read_bytes()))
    for number in numbers:
        changed = change(records[number])
        assert len(changed) == len(records[number]) and changed != records[number]
        records[number] = changed
    path.write_bytes(b"".join(map(schema.frame, records)))


def test_a_batch_of_damaged_records_only_is_left_out_of_evaluation(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "1.0.0", {"train": [40]})
    spoil(folder, range(8, 16), lambda record: record.replace(b"\xff\xd8\xff", b"\xff\xd8\xfe"))
    damaged = reader.load_info(folder)
    one = dataset(damaged, on_error="skip", shuffle=False)
    iterator = iter(one)
    assert [len(next(iterator)[1]) for _ in range(2)] == [8, 8]
    state = one.state_dict()
    assert [len(labels) for _, labels in iterator] == [8, 8] and reader.skipped(one) == 8
    again = dataset(damaged, on_error="skip", shuffle=False)
    again.load_state_dict(state)
    assert [len(labels) for _, labels in again] == [8, 8]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: record.replace(b"\x05class", b"\x05cless"), r"it isn't an Example with .* \(.*'class'"),
        (lambda record: record.replace(b"\xff\xd8\xff", b"\xff\xd8\xfe"), r"the image doesn't decode \(Unidentif"),
        (lambda record: record.replace(b"\x1a\x03\n\x01\x02", b"\x1a\x03\n\x01\x07"), "class 7: there are 3"),
    ],
)
def test_a_record_of_wrong_content_is_named_as_train_dataset_names_it(
    tmp_path: Path, change: Any, message: str
) -> None:
    folder = make_dataset(tmp_path / "1.0.0", {"train": [9]})
    spoil(folder, range(2, 3), change)
    damaged = reader.load_info(folder)
    with pytest.raises(CorruptRecordError, match=rf"record 2 at byte \d+: {message}"):
        list(dataset(damaged))
    one = dataset(damaged, on_error="skip")
    assert sum(len(labels) for _, labels in one) == 9 and reader.skipped(one) == 1


def test_memory_that_runs_out_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(encoded: bytes, channels: int) -> Any:
        raise MemoryError

    monkeypatch.setattr("reader.pillow_batches.decode", no_memory)
    small = reader.load_info(make_dataset(tmp_path / "1.0.0", {"train": [3]}))
    with pytest.raises(MemoryError):
        list(dataset(small, on_error="skip"))


@pytest.mark.parametrize("channels", [1, 3])
def test_16_bit_gray_pngs_have_the_pixels_that_tensorflow_gives(channels: int) -> None:
    import tensorflow as tf

    deep = (np.arange(20 * 30, dtype=np.uint32) * 109 % 65536).astype(np.uint16).reshape(20, 30)
    buffer = io.BytesIO()
    Image.fromarray(deep).save(buffer, "PNG")
    ours = reader.pillow.to_array(reader.pillow.decode(buffer.getvalue(), channels))
    np.testing.assert_array_equal(ours, tf.io.decode_png(buffer.getvalue(), channels=channels).numpy())


def test_wrong_arguments_say_so(info: reader.DatasetInfo, tmp_path: Path) -> None:
    for options, message in (
        ({"batch_size": 0}, "batch_size=0: at least 1"),
        ({"batch_size": 2.5}, "batch_size=2.5: a whole number"),
        ({"rank": 2, "world_size": 2}, "rank=2, world_size=2"),
        ({"resize_mode": "squash"}, "resize_mode='squash': one of stretch, crop, pad"),
        ({"split": "test"}, "there is no split 'test'"),
        ({"transform": "flip"}, r"transform='flip': a function f\(image, seed\)"),
        ({"features": ["age"]}, "there is no 'age'; the records have class, label"),
    ):
        with pytest.raises(UsageError, match=message):
            dataset(info, **options)
    with pytest.raises(UsageError, match=r"give what reader\.load_info"):
        dataset("datasets/photos/1.0.0")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="steps=-1: at least 0"):
        dataset(info).state_dict(steps=-1)
    with pytest.raises(UsageError, match="made with another seed: 1"):
        dataset(info).load_state_dict(dataset(info, seed=1).state_dict())
    with pytest.raises(UsageError, match="not a state"):
        dataset(info).load_state_dict({**dataset(info).state_dict(), "parts": "x"})
    mixed = make_dataset(tmp_path / "1.0.0", {"train": [9]}, size_of=lambda number: (16, 16 + number))
    with pytest.raises(UsageError, match="mixed shapes"):
        list(dataset(reader.load_info(mixed)))


def test_no_tensorflow_is_loaded_and_spawned_workers_read(info: reader.DatasetInfo) -> None:
    program = f"""
import sys, torch, reader
if __name__ == "__main__":
    dataset = reader.torch.ShardDataset(reader.load_info({info.url!r}), "train", batch_size=32)
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    print(sum(len(labels) for _, labels in loader), "tensorflow" in sys.modules, "apache_beam" in sys.modules)
"""
    path = Path(info.url) / "program.py"
    path.write_text(program)
    command = [sys.executable, "-W", "ignore", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    path.unlink()
    assert done.stdout.split() == [str(RECORDS), "False", "False"], done.stderr
