"""`reader.torch`: ranks, workers and epochs; transforms; states; what a `DataLoader` may be asked for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reader
from beam_pipeline.errors import CorruptRecordError, UsageError
from tests import servers
from tests.make import ROOT
from tests.reading.shards import flipped, make_dataset

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install '.[torch]'")

RECORDS = 301


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> reader.DatasetInfo:
    counts = {"train": [130, 100, 71], "validation": [40, 11]}
    return reader.load_info(make_dataset(tmp_path_factory.mktemp("torch") / "1.0.0", counts))


def dataset(info: Any, **options: Any) -> Any:
    return reader.torch.ShardDataset(info, "train", **{"batch_size": 8, "features": ["filename"], **options})


def loader(one: Any, workers: int, **options: Any) -> Any:
    return torch.utils.data.DataLoader(one, batch_size=None, num_workers=workers, **options)


def seen(batches: Iterable[Any]) -> list[list[int]]:
    """The record numbers of each batch; checks shapes and labels on the way."""
    found = []
    for inputs, labels in batches:
        numbers = [int(name[-10:-4]) for name in inputs["filename"]]
        assert labels.dtype == torch.int64 and labels.tolist() == [number % 3 for number in numbers]
        assert inputs["image"].dtype == torch.uint8 and inputs["image"].shape == (len(labels), 3, 16, 24)
        assert inputs["image"].is_contiguous(memory_format=torch.channels_last)
        found.append(numbers)
    return found


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    ("workers", "context", "persistent"),
    [(0, None, False), (2, "fork", False), (2, "fork", True), (2, "spawn", True)],
)
def test_two_epochs_hold_each_record_once_with_any_workers(
    info: reader.DatasetInfo, workers: int, context: str | None, persistent: bool, drop_last: bool
) -> None:
    one = dataset(info, drop_last=drop_last)
    options = {"multiprocessing_context": context, "persistent_workers": persistent}
    batches = loader(one, workers, **options if workers else {})
    epochs = []
    for epoch in range(2):
        one.set_epoch(epoch)
        epochs.append(seen(batches))
        read = flat(epochs[-1])
        assert len(set(read)) == len(read) == (RECORDS if not drop_last else len(epochs[-1]) * 8)
        assert len(read) > RECORDS - 9 * max(1, workers)
        assert len(epochs[-1]) == one.steps_per_epoch(workers)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_make_equally_many_steps_and_share_all_records(
    info: reader.DatasetInfo, shuffle: bool, workers: int
) -> None:
    ranks = [seen(loader(dataset(info, shuffle=shuffle, rank=rank, world_size=3), workers)) for rank in range(3)]
    assert len({len(batches) for batches in ranks}) == 1
    read = [number for batches in ranks for number in flat(batches)]
    assert sorted(read) == list(range(RECORDS))
    if not shuffle and not workers:
        assert read == list(range(RECORDS))


def test_ranks_of_torch_distributed_are_found(info: reader.DatasetInfo, tmp_path: Path) -> None:
    program = """
import sys, torch, reader
rank = int(sys.argv[2])
torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[3], rank=rank, world_size=2)
loader = reader.torch.loader(sys.argv[1], "train", batch_size=8, features=["filename"])
print(len(loader), *(name[-10:-4].decode() for inputs, _ in loader for name in inputs["filename"]))
torch.distributed.destroy_process_group()
"""
    command = [sys.executable, "-W", "ignore", "-c", program, info.url]
    processes = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0].split() for process in processes]
    assert [output[0] for output in outputs] == ["19", "19"]
    assert sorted(int(number) for output in outputs for number in output[1:]) == list(range(RECORDS))


def test_a_loader_has_a_length_and_takes_its_own_options(info: reader.DatasetInfo) -> None:
    options: Any = {"batch_size": 20, "features": ["filename"], "pin_memory": False, "threads": 2}
    for workers in (0, 2):
        batches = reader.torch.loader(info.url, "train", num_workers=workers, persistent_workers=workers > 0, **options)
        assert batches.persistent_workers == (workers > 0)
        assert len(batches) == len(batches.dataset) == len(seen(batches)) == 16


def test_batches_of_batches_are_refused(info: reader.DatasetInfo) -> None:
    for workers, options in ((0, {}), (0, {"batch_size": 8}), (1, {"batch_size": 4})):
        nested = torch.utils.data.DataLoader(dataset(info), num_workers=workers, **options)
        with pytest.raises(UsageError, match="yields batches: give its DataLoader batch_size=None, or use"):
            next(iter(nested))


def first(info: reader.DatasetInfo, transform: Any, **options: Any) -> Any:
    return next(iter(dataset(info, transform=transform, features=(), drop_last=True, **options)))[0]


class _CallsWithImage:
    """As torchvision's older transforms."""

    def __call__(self, img: Any) -> Any:
        return img.rotate(90, expand=True)


class _ForwardsInputs(torch.nn.Module):  # type: ignore[misc]
    """As torchvision's newer transforms."""

    def forward(self, *inputs: Any) -> Any:
        (image,) = inputs
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def test_transforms_of_every_kind_are_called_as_they_expect(info: reader.DatasetInfo) -> None:
    images = first(info, None)
    assert torch.equal(first(info, lambda image: image), images)
    assert torch.equal(first(info, np.asarray), images)
    assert torch.equal(first(info, torch.nn.Identity()), images)
    assert first(info, _CallsWithImage()).shape == (8, 3, 24, 16)
    floats = first(info, _ForwardsInputs())
    assert floats.dtype == torch.float32 and torch.equal(floats, images.float() / 255)
    assert torch.equal(first(info, lambda image, size=3: image), images)
    assert first(info, lambda image: image.convert("L")).shape == (8, 1, 16, 24)
    means, seeds = first(info, lambda image, seed: (torch.ones(3), seed % 1000))
    assert means.shape == (8, 3) and len(set(seeds.tolist())) == 8
    for ours in (reader.augment.flip_crop, reader.augment.random_resized_crop(then=reader.augment.flip)):
        options = {"image_size": (12, 20), "seed": 4}
        assert torch.equal(first(info, ours, **options), first(info, None, augment=ours, **options))


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (3, r"transform must be a function f\(image\) or f\(image, seed\) of a PIL image, got 3"),
        (lambda image, seed, more: image, r"<lambda> failed: TypeError: .* missing 1 required .*'more'"),
        (lambda: 0, r"<lambda> failed: TypeError"),
        (lambda image: 1 / 0, "<lambda> failed: ZeroDivisionError: division by zero"),
        (lambda image: None, "what transform returned makes no batch: default_collate: batch must contain tensors"),
        (lambda image, seed: torch.ones(seed % 7), "what transform returned makes no batch: stack expects"),
        (lambda image, seed: image.resize((5 + seed % 7, 5)), "what transform returned makes no batch: all input"),
    ],
)
def test_a_transform_of_the_wrong_shape_is_one_line(info: reader.DatasetInfo, transform: Any, message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}") as caught:
        first(info, transform)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": -1},
        {"parts": []},
        {"parts": "x"},
        {"parts": [[1, 1, 8, 0, 10**9]]},
        {"parts": [[10**9, 1, 8, 0, 1]]},
        {"worker": [5, 0]},
    ],
)
def test_an_impossible_state_is_one_line(info: reader.DatasetInfo, change: dict[str, Any]) -> None:
    one = dataset(info)
    before = one.state_dict()
    with pytest.raises(UsageError, match=r"^not a state of a ShardDataset: .*$"):
        one.load_state_dict({**before, **change})
    assert one.state_dict() == before  # nothing of it was taken over


def test_wrong_arguments_are_named_before_a_worker_starts(info: reader.DatasetInfo) -> None:
    for options, message in (
        ({"threads": -1}, "threads must be at least 1, got -1"),
        ({"threads": "2"}, "threads must be a whole number, got '2'"),
        ({"rank": 2, "world_size": 2}, "rank must be at most 1, got 2"),
    ):
        with pytest.raises(UsageError, match=message):
            dataset(info, **options)
    for epoch in (-1, 2.5, "a"):
        with pytest.raises(UsageError, match="epoch must be"):
            dataset(info).set_epoch(epoch)
    with pytest.raises(UsageError, match="made with another seed: 1, here it is 0"):
        dataset(info).load_state_dict(dataset(info, seed=1).state_dict())
    with pytest.raises(UsageError, match=r"batch_size=302 with drop_last: 301 records for 1 readers .* fill no batch"):
        next(iter(dataset(info, batch_size=302, drop_last=True)))


def test_a_corrupt_record_is_raised_or_skipped_also_in_workers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged, where = flipped(tmp_path / "1.0.0", [70], 35)
    # PyTorch makes a RuntimeError of one that a worker raises, with its text.
    for workers, error in ((0, CorruptRecordError), (2, RuntimeError)):
        with pytest.raises(error, match=where):
            list(loader(dataset(damaged), workers))
        assert len(flat(seen(loader(dataset(damaged, on_error="skip"), workers)))) == 70
        assert len(flat(seen(loader(dataset(damaged, on_error="skip", shuffle=False), workers)))) == 69
    one = dataset(damaged, on_error="skip")
    with caplog.at_level("WARNING", "reader"):
        assert len(list(one)) == 9 and reader.skipped(one) == 1
    assert "skipped 1 corrupt record" in caplog.text


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_forked_workers_of_a_bucket_are_told_of_forkserver(gcs: servers.Gcs, tmp_path: Path, context: str) -> None:
    bucket = gcs.new_bucket()
    gcs.put_folder(bucket, "photos/1.0.0", Path(make_dataset(tmp_path / "1.0.0", {"train": [40]})))
    program = f"""
import reader
if __name__ == "__main__":
    options = dict(num_workers=1, multiprocessing_context="{context}")
    try:
        loader = reader.torch.loader("gs://{bucket}/photos/1.0.0", "train", batch_size=8, **options)
        print(sum(len(labels) for _, labels in loader))
    except Exception as error:
        print(str(error).splitlines()[-1])
"""
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, "-W", "ignore", str(tmp_path / "program.py")]
    lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60).stdout.splitlines()
    if context == "forkserver":
        assert lines == ["40"]
    else:
        assert len(lines) == 1 and 'multiprocessing_context="forkserver"' in lines[0]
