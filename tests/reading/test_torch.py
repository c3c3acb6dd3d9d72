"""`reader.as_torch`: transforms, `DataLoader`s and what is refused. Resuming: test_resume; bytes: test_doors."""

from __future__ import annotations

import itertools
import pickle
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
from tests.reading.shards import flipped, make_dataset, numbers_in
from tests.reading.without import run_together

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'imageshards[torch]'")

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # more workers than cores

RECORDS, BATCH = 301, 8
STEPS = RECORDS // BATCH  # 37, and 5 records that open the next iteration


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> reader.DatasetInfo:
    counts = {"train": [130, 100, 71], "validation": [40, 11]}
    return reader.load_info(make_dataset(tmp_path_factory.mktemp("torch") / "1.0.0", counts))


def dataset(info: Any, transform: Any = None, **options: Any) -> Any:
    options = {"global_batch_size": BATCH, "features": ["filename"], **options}
    return reader.as_torch(reader.train_batches(info, "train", **options), transform)


def loader(one: Any, workers: int, is_persistent: bool = True, **options: Any) -> Any:
    options |= {"persistent_workers": True} if workers and is_persistent else {}
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


@pytest.mark.parametrize(
    ("workers", "context"), [(2, "fork"), (3, "fork"), pytest.param(1, "spawn", marks=pytest.mark.soak)]
)
def test_any_number_of_workers_makes_the_batches_in_their_order_loop_after_loop(
    info: reader.DatasetInfo, workers: int, context: str
) -> None:
    read = loader(dataset(info), workers, multiprocessing_context=context)
    assert len(read) == len(read.dataset) == STEPS
    assert seen(read) + seen(read) + seen(read) == of_numpy(info, 3 * STEPS)


def test_a_loop_that_was_left_early_begins_again_but_with_workers_the_next_one_follows(
    info: reader.DatasetInfo,
) -> None:
    stream = of_numpy(info, 2 * STEPS)
    for workers, begin in ((0, 0), (3, STEPS)):
        read = loader(dataset(info), workers)
        for stop in (1, STEPS - 1) if not workers else (STEPS - 1,):  # workers have read to the end, or not
            begun = iter(read)
            assert seen(itertools.islice(begun, stop)) == stream[:stop]
            del begun
        assert seen(read) == stream[begin : begin + STEPS]
    peeked = loader(dataset(info), 2)
    next(iter(peeked))
    assert seen(peeked) == stream[STEPS:]


def test_workers_that_would_read_a_loop_again_are_refused(info: reader.DatasetInfo) -> None:
    one = dataset(info)
    assert len(seen(loader(one, 2, is_persistent=False))) == STEPS
    again = r"a DataLoader's workers have read this dataset, and only they know how far: give the DataLoader persist"
    for workers in (2, 1):
        with pytest.raises(UsageError, match=again):
            seen(loader(one, workers))
    for other in (one, pickle.loads(pickle.dumps(one))):
        with pytest.raises(UsageError, match=again):
            iter(other)
    with pytest.raises(UsageError, match=r"know how far: load the state into a new imageshards\.as_torch\(batches\)$"):
        one.load_state_dict(one.state_dict(3))
    copied = pickle.loads(pickle.dumps(dataset(info)))  # whose memory is shared, too
    seen(loader(copied, 1, is_persistent=False))
    with pytest.raises(UsageError, match=again):
        iter(copied)
    fresh = dataset(info)
    assert seen(fresh) + seen(loader(fresh, 2)) == of_numpy(info, 2 * STEPS)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_evaluation_is_read_again_by_new_workers_but_its_rest_by_one_loop(
    info: reader.DatasetInfo, workers: int
) -> None:
    def evaluation() -> Any:
        return reader.as_torch(reader.eval_batches(info, "train", global_batch_size=40, host=(1, 2), pad=False))

    one, resumed = evaluation(), evaluation()
    for _ in range(2):
        assert [len(labels) for _, labels, _ in loader(one, workers, is_persistent=False)] == [19] * 6 + [18] * 2
    resumed.load_state_dict(resumed.state_dict(3))
    assert len(list(loader(resumed, workers, is_persistent=False))) == 8 - 3
    if workers:
        with pytest.raises(UsageError, match="persistent_workers=True"):
            list(loader(resumed, workers))


def test_a_state_needs_the_trained_step(info: reader.DatasetInfo) -> None:
    one = dataset(info)
    assert seen(one)
    state = one.state_dict(torch.tensor(STEPS + 5))
    assert (state["step"], state["position"]["step"]) == (5, STEPS + 5)
    with pytest.raises(UsageError, match=r"^give state_dict\(step\) the step that is trained, .* torchdata's Stateful"):
        one.state_dict()
    stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")
    with pytest.raises(UsageError, match=r"^give state_dict\(step\) the step"):
        stateful_dataloader.StatefulDataLoader(one, batch_size=None).state_dict()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("labels", ["int", "one_hot"])
def test_batches_of_batches_are_one_line(info: reader.DatasetInfo, labels: str, workers: int) -> None:
    for batches in (
        reader.train_batches(info, "train", global_batch_size=8, labels=labels),  # type: ignore[arg-type]
        reader.eval_batches(info, "train", global_batch_size=8, labels=labels),  # type: ignore[arg-type]
    ):
        for size in (1, 8):
            with pytest.raises(UsageError, match="the DataLoader makes batches of batches: give it batch_size=None"):
                next(iter(torch.utils.data.DataLoader(reader.as_torch(batches), batch_size=size, num_workers=workers)))


def test_a_batch_survives_what_frameworks_map_over_it(info: reader.DatasetInfo) -> None:
    """As Lightning, accelerate and PyTorch do: `type(batch)(*map(function, batch))`, of whatever a function returns."""
    for batch in (
        next(iter(loader(dataset(info), 0))),
        next(iter(reader.as_torch(reader.eval_batches(info, "train", global_batch_size=8)))),
    ):
        for function in (lambda one: one, lambda one: None, lambda one: type(one), lambda one: "shape"):
            assert len(type(batch)(*map(function, batch))) == len(batch)
        assert len(type(batch)(*(labels for labels in [batch[1]] * len(batch)))) == len(batch._fields)
        assert type(batch).__bases__ == (tuple,) and batch._asdict()["labels"] is batch.labels
        copied = pickle.loads(pickle.dumps(batch))
        assert type(copied) is type(batch) and torch.equal(copied.labels, batch.labels)


@pytest.mark.soak
def test_ranks_of_torch_distributed_are_found(info: reader.DatasetInfo, tmp_path: Path) -> None:
    program = """
import sys, torch, reader
rank = int(sys.argv[2])
torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[3], rank=rank, world_size=2)
batches = reader.train_batches(sys.argv[1], "train", global_batch_size=16, host="auto")
print(batches.host, batches.hosts)
torch.distributed.destroy_process_group()
"""
    done = run_together(["-c", program, info.url, rank, tmp_path / "store"] for rank in range(2))
    assert [said for said, _ in done] == ["0 2\n", "1 2\n"]


def test_a_transform_is_of_every_record_also_of_those_that_the_loop_before_has_read_ahead(
    info: reader.DatasetInfo,
) -> None:
    batches = reader.train_batches(info, "train", global_batch_size=8)
    assert len(list(batches)) == len(batches) and sum(info.splits["train"].class_counts) % 8  # its last window goes on
    transformed = reader.as_torch(batches, transform=lambda image: np.zeros((1, 1, 1), np.uint8))
    assert {tuple(images.shape[1:]) for images, _ in transformed} == {(1, 1, 1)}


def first(info: reader.DatasetInfo, transform: Any, **options: Any) -> Any:
    return next(iter(dataset(info, transform, features=(), **options)))[0]


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
    two_views = first(info, lambda image: torch.stack([_ForwardsInputs()(image)] * 2))
    assert two_views.shape == (8, 2, 3, 16, 24)
    flipped_first = {"augment": reader.augment.flip_crop, "seed": 4}
    assert torch.equal(first(info, np.asarray, **flipped_first), first(info, None, **flipped_first))


def test_transforms_run_in_workers_and_after_pickling_and_resuming(info: reader.DatasetInfo) -> None:
    one = dataset(info, _ForwardsInputs(), seed=3)
    resumed = dataset(info, _ForwardsInputs(), seed=3)
    resumed.load_state_dict(dataset(info, seed=3).state_dict(5))
    for skipped, other in ((0, pickle.loads(pickle.dumps(one))), (5, resumed), (0, loader(one, 2))):
        wanted = itertools.islice(dataset(info, _ForwardsInputs(), seed=3), skipped, None)
        for ours, theirs in zip(other, wanted, strict=True):
            assert ours[0]["filename"] == theirs[0]["filename"]
            assert torch.equal(ours[0]["image"], theirs[0]["image"]) and torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (3, r"transform must be a function f\(image\) or f\(image, seed\) of a PIL image, got 3"),
        (lambda image, seed, more: image, r"<lambda> failed: TypeError: .* missing 1 required .*'more'"),
        (lambda: 0, r"<lambda> failed: TypeError"),
        (lambda image: 1 / 0, "<lambda> failed: ZeroDivisionError: division by zero"),
        (reader.augment.flip, r"augment\.flip works on arrays: give it to train_batches, augment="),
        (
            reader.augment.random_resized_crop(),
            r"augment\.random_resized_crop\(…\) works on arrays: give it to train_b",
        ),
        (lambda image: None, "can't collate what transform returned: default_collate: batch must contain tensors"),
        (lambda image, seed: torch.ones(seed % 7), "can't collate what transform returned: stack expects"),
        (lambda image, seed: image.resize((5 + seed % 7, 5)), "can't collate what transform returned: all input"),
    ],
)
def test_a_transform_of_the_wrong_shape_is_one_line(info: reader.DatasetInfo, transform: Any, message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}") as caught:
        first(info, transform)
    assert "\n" not in str(caught.value)


def test_a_corrupt_record_is_raised_or_skipped_also_in_workers(tmp_path: Path) -> None:
    corrupt, where = flipped(tmp_path / "1.0.0", [70], 35)
    # PyTorch makes a RuntimeError of one that a worker raises, with its text.
    for workers, error in ((0, CorruptRecordError), (2, RuntimeError)):
        with pytest.raises(error, match=where):
            list(loader(dataset(corrupt), workers))
        skipping = dataset(corrupt, on_error="skip")
        assert seen(loader(skipping, workers)) == seen(dataset(corrupt, on_error="skip"))


@pytest.mark.soak
@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_forked_workers_of_a_bucket_are_told_of_forkserver(gcs: servers.Gcs, tmp_path: Path, context: str) -> None:
    bucket = gcs.new_bucket()
    gcs.put_folder(bucket, "photos/1.0.0", Path(make_dataset(tmp_path / "1.0.0", {"train": [40]})))
    program = f"""
import reader
from torch.utils.data import DataLoader
if __name__ == "__main__":
    try:
        batches = reader.train_batches("gs://{bucket}/photos/1.0.0", "train", global_batch_size=8)
        options = dict(num_workers=1, multiprocessing_context="{context}")
        print(sum(len(labels) for _, labels in DataLoader(reader.as_torch(batches), batch_size=None, **options)))
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
