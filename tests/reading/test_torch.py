"""`reader.as_torch` and `reader.torch`: NumPy's batches for ranks and workers, transforms, and what is refused."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reader
from beam_pipeline.errors import CorruptRecordError, UsageError
from tests import servers
from tests.make import ROOT
from tests.reading.shards import flipped, make_dataset, numbers_in

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'imageshards[torch]'")

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # more workers than cores

RECORDS, BATCH = 301, 8
STEPS = RECORDS // BATCH  # 37, and 5 records that open the next iteration
WORKERS: list[Any] = [(0, None, False), (2, "fork", False), (2, "fork", True), (3, "fork", False)]
WORKERS.append(pytest.param(1, "spawn", True, marks=pytest.mark.soak))


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> reader.DatasetInfo:
    counts = {"train": [130, 100, 71], "validation": [40, 11]}
    return reader.load_info(make_dataset(tmp_path_factory.mktemp("torch") / "1.0.0", counts))


def dataset(info: Any, **options: Any) -> Any:
    return reader.torch.ShardDataset(info, "train", **{"batch_size": BATCH, "features": ["filename"], **options})


def loader(one: Any, workers: int, **options: Any) -> Any:
    return torch.utils.data.DataLoader(one, batch_size=None, num_workers=workers, **options)


def of_numpy(info: Any, count: int, **options: Any) -> list[list[int]]:
    """The record numbers of so many batches of `train_batches`."""
    options = {"global_batch_size": BATCH, "features": ["filename"], **options}
    stream = reader.train_batches(info, "train", **options).repeat()
    return [numbers_in([batch]) for batch in itertools.islice(stream, count)]


def seen(batches: Iterable[Any]) -> list[list[int]]:
    """The record numbers of each batch; checks shapes and labels on the way."""
    found = []
    for inputs, labels in batches:
        found.append(numbers_in([(inputs,)]))
        assert labels.dtype == torch.int64 and labels.tolist() == [number % 3 for number in found[-1]]
        assert inputs["image"].dtype == torch.uint8 and inputs["image"].shape == (len(labels), 3, 16, 24)
        assert inputs["image"].is_contiguous(memory_format=torch.channels_last)
    return found


def flat(batches: Iterable[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


@pytest.mark.parametrize(("workers", "context", "persistent"), WORKERS)
def test_iterations_are_numpys_batch_for_batch_with_any_workers(
    info: reader.DatasetInfo, workers: int, context: str | None, persistent: bool
) -> None:
    options: dict[str, Any] = {"global_batch_size": BATCH, "features": ["filename"], "augment": reader.augment.flip}
    expected = reader.train_batches(info, "train", **options).repeat()
    batches = reader.as_torch(reader.train_batches(info, "train", **options))
    of_workers = {"multiprocessing_context": context, "persistent_workers": persistent}
    read = loader(batches, workers, **of_workers if workers else {})
    assert len(read) == len(batches) == STEPS
    for _ in range(3):
        count = 0
        for count, ((inputs, labels), (images, ids)) in enumerate(zip(read, expected), 1):  # noqa: B905
            assert inputs["filename"] == images["filename"].tolist()
            assert np.array_equal(labels.numpy(), ids) and labels.dtype == torch.int64
            assert np.array_equal(inputs["image"].permute(0, 2, 3, 1).numpy(), images["image"])
            if count == STEPS:
                break
        assert count == STEPS


@pytest.mark.parametrize("workers", [0, 2])
def test_the_remainder_of_a_pass_opens_the_next_iteration(info: reader.DatasetInfo, workers: int) -> None:
    batches = loader(dataset(info), workers)
    first, second = seen(batches), seen(batches)
    assert [len(batch) for batch in first + second] == [BATCH] * 2 * STEPS
    stream = flat(first + second)
    assert sorted(stream[:RECORDS]) == list(range(RECORDS)) and len(set(stream[RECORDS:])) == len(stream) - RECORDS
    assert first + second == of_numpy(info, 2 * STEPS)


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_train_on_each_record_once_a_pass_in_equally_many_steps(info: reader.DatasetInfo, workers: int) -> None:
    ranks = []
    for rank in range(3):
        batches = loader(dataset(info, rank=rank, world_size=3), workers)
        ranks.append(seen(batches) + seen(batches))
        assert ranks[-1] == of_numpy(info, 2 * len(batches), global_batch_size=3 * BATCH, host=(rank, 3))
    shares = [flat(batches)[: (RECORDS + 2 - rank) // 3] for rank, batches in enumerate(ranks)]
    assert sorted(flat(shares)) == list(range(RECORDS))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.soak)])
def test_evaluation_has_each_record_once_in_file_order_in_equally_many_steps(
    info: reader.DatasetInfo, workers: int
) -> None:
    ranks = [loader(dataset(info, shuffle=False, rank=rank, world_size=3), workers) for rank in range(3)]
    for _ in range(2):
        read = [seen(batches) for batches in ranks]
        assert {len(batches) for batches in (*read, *ranks)} == {-(-RECORDS // (3 * BATCH))}
        assert {len(batch) for batches in read for batch in batches} == {7, 8}
        assert flat(flat(batches) for batches in read) == list(range(RECORDS))
    few = {"batch_size": 4, "shuffle": False, "world_size": 9, "features": ["filename"]}  # fewer records than ranks
    read = [seen(loader(reader.torch.ShardDataset(info, "train[:7]", rank=r, **few), workers)) for r in range(9)]
    assert read == [*([[number]] for number in range(7)), [], []]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_evaluation_have_weights(info: reader.DatasetInfo, workers: int) -> None:
    options: dict[str, Any] = {"global_batch_size": 40, "host": (1, 2), "labels": "one_hot"}
    evals = reader.eval_batches(info, "train", **options)
    batches = loader(reader.as_torch(evals), workers)
    for _ in range(2):
        for ours, theirs in zip(batches, reader.eval_batches(info, "train", **options), strict=True):
            assert [tensor.dtype for tensor in ours] == [torch.uint8, torch.float32, torch.float32]
            images, labels, weights = (tensor.numpy() for tensor in ours)
            assert all(map(np.array_equal, (images.transpose(0, 2, 3, 1), labels, weights), theirs))
    assert weights.tolist() == [1] * 10 + [0] * 10


@pytest.mark.soak
def test_ranks_of_torch_distributed_are_found(info: reader.DatasetInfo, tmp_path: Path) -> None:
    program = """
import sys, torch, reader
rank = int(sys.argv[2])
torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[3], rank=rank, world_size=2)
names = {"features": ["filename"]}
loader = reader.torch.loader(sys.argv[1], "train", batch_size=8, num_workers=2, **names)
print(len(loader), *(name[-10:-4].decode() for inputs, _ in loader for name in inputs["filename"]))
batches = reader.train_batches(sys.argv[1], "train", global_batch_size=16, host="auto", **names)
batches = reader.as_torch(batches)
print(len(batches), *(name[-10:-4].decode() for inputs, _ in batches for name in inputs["filename"]))
torch.distributed.destroy_process_group()
"""
    command = [sys.executable, "-W", "ignore", "-c", program, info.url]
    processes = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for rank, process in enumerate(processes):
        lines = process.communicate(timeout=120)[0].splitlines()
        wanted = [18, *flat(of_numpy(info, 18, global_batch_size=16, host=(rank, 2)))]
        assert [[int(word) for word in line.split()] for line in lines] == [wanted] * 2


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iteration_that_is_left_early_begins_again(info: reader.DatasetInfo, workers: int) -> None:
    one = dataset(info)
    begun = iter(loader(one, workers))
    first = seen(itertools.islice(begun, 3))
    del begun
    assert first == of_numpy(info, 3) and seen(loader(one, workers)) == of_numpy(info, STEPS)


def test_loaders_with_other_workers_go_on_with_one_dataset(info: reader.DatasetInfo) -> None:
    one, stream = dataset(info), of_numpy(info, 5 * STEPS)
    read = [seen(loader(one, workers)) for workers in (2, 0, 3, 2, 0)]
    assert flat(read) == stream


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_workers_of_a_loader_that_was_left_early_count_for_nothing_in_the_next_one(
    info: reader.DatasetInfo, workers: int
) -> None:
    one = dataset(info, batch_size=50)  # 6 batches an iteration
    left = iter(loader(one, 4, prefetch_factor=1))  # each makes one, which is the last one of workers 2 and 3
    deadline = time.monotonic() + 60
    while one._of_workers[:4, 1].tolist() != [0, 0, 1, 1]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    del left
    stream = of_numpy(info, 12, global_batch_size=50)
    assert seen(loader(one, workers)) + seen(loader(one, 0)) == stream


def test_a_loader_has_a_length_and_takes_its_own_options(info: reader.DatasetInfo) -> None:
    options: Any = {"batch_size": 20, "features": ["filename"], "pin_memory": False, "threads": 2}
    for workers in (0, 2):
        batches = reader.torch.loader(info.url, "train", num_workers=workers, persistent_workers=workers > 0, **options)
        assert batches.persistent_workers == (workers > 0)
        assert len(batches) == len(batches.dataset) == len(seen(batches)) == 15


def test_a_pickled_dataset_goes_on_by_itself(info: reader.DatasetInfo) -> None:
    stream = of_numpy(info, 3 * STEPS, seed=5, window_runs=1)
    saved = dataset(info, seed=5, window_runs=1)
    seen(itertools.islice(saved, 30))
    for one in (dataset(info, seed=5), dataset(info, window_runs=1), dataset(info)):
        one.load_state_dict(saved.state_dict())
        assert seen(one) == stream[30:STEPS]
        other = pickle.loads(pickle.dumps(one))
        assert other.state_dict() == one.state_dict()
        assert seen(other) == stream[STEPS : 2 * STEPS]
        assert seen(one) + seen(one) == stream[STEPS:]  # which the copy hasn't moved


def first(info: reader.DatasetInfo, transform: Any, **options: Any) -> Any:
    return next(iter(dataset(info, transform=transform, features=(), **options)))[0]


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


def test_transforms_run_in_workers_and_after_pickling(info: reader.DatasetInfo) -> None:
    one = dataset(info, transform=_ForwardsInputs(), seed=3)
    for other in (loader(one, 2), pickle.loads(pickle.dumps(one))):
        for ours, theirs in zip(other, dataset(info, transform=_ForwardsInputs(), seed=3), strict=True):
            assert ours[0]["filename"] == theirs[0]["filename"]
            assert torch.equal(ours[0]["image"], theirs[0]["image"]) and torch.equal(ours[1], theirs[1])
        one.load_state_dict(dataset(info, seed=3).state_dict())


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


def test_wrong_arguments_are_named_before_a_worker_starts(info: reader.DatasetInfo) -> None:
    for options, message in (
        ({"threads": -1}, "threads must be at least 1, got -1"),
        ({"threads": "2"}, "threads must be a whole number, got '2'"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"rank": 2, "world_size": 2}, "rank must be at most 1, got 2"),
        ({"features": ["nothing"]}, "nothing"),
    ):
        with pytest.raises(UsageError, match=message):
            dataset(info, **options)
    for thing in (info, [1, 2], iter(reader.train_batches(info, "train", global_batch_size=8))):
        with pytest.raises(UsageError, match=rf"^imageshards.as_torch\({type(thing).__name__}\): give what train"):
            reader.as_torch(thing)
    with pytest.raises(TypeError, match="drop_last"):
        dataset(info, drop_last=True)


def test_a_corrupt_record_is_raised_or_skipped_also_in_workers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    corrupt, where = flipped(tmp_path / "1.0.0", [70], 35)
    # PyTorch makes a RuntimeError of one that a worker raises, with its text.
    for workers, error in ((0, CorruptRecordError), (2, RuntimeError)):
        with pytest.raises(error, match=where):
            list(loader(dataset(corrupt), workers))
        skipping = dataset(corrupt, on_error="skip")
        assert flat(seen(loader(skipping, workers))) == flat(seen(dataset(corrupt, on_error="skip")))
        read = flat(seen(loader(dataset(corrupt, on_error="skip", shuffle=False), workers)))
        assert read == [number for number in range(70) if number != 35]
    one = dataset(corrupt, on_error="skip", batch_size=10)
    with caplog.at_level("WARNING", "reader"):
        assert len(flat(seen(one))) == 70 and one.skipped == one.batches.skipped == 1
    assert "skipped 1 corrupt record" in caplog.text


@pytest.mark.soak
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
