"""A trainer for each adapter, as the docs write it: start from a checkpoint, read some steps, save.

What these trainings learn is what they are trained on: a row [segment, record number, …] a step. The rows are saved and
restored with the reader's state, as weights are. Keras' trainer is in `keras_trainer`.
"""

from __future__ import annotations

import base64
import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

import reader

ORDER: dict[str, Any] = {"seed": 7, "window_runs": 3}  # not the defaults: three windows an epoch
Rows = list[list[int]]
Stream = tuple[Iterator[Any], Callable[[int], Any]]  # batches without end; the global step → what is saved


class Job(NamedTuple):
    """What one builder reads: from a checkpoint to the next, and on until it is killed."""

    adapter: str
    url: str
    folder: str  # for checkpoints that the adapter writes
    segment: int  # how often the training was stopped before
    batch: int  # of all hosts
    hosts: int
    steps: int | None  # until its checkpoint; None for Keras' last, which ends by itself
    lost: int = 0  # steps that are trained after that checkpoint
    is_killed: bool = False  # its process ends with it, by SIGKILL
    host: int | None = None  # which one this process is, if each has its own
    address: str = ""  # of JAX's coordinator

    def batches(self, host: Any = None, **order: Any) -> Any:
        """What the training script builds whenever it starts."""
        options = {"global_batch_size": self.batch, "features": ["number"], **(order or ORDER)}
        return reader.train_batches(self.url, "train", host=host, **options)


class Trainer:
    """A trainer whose hosts read in turn in this process, if they have none of their own.

    Args:
        job: what to read.
        rows: what was trained before, from the checkpoint.
        state: what `save` returned then; None at the beginning.
    """

    def __init__(self, job: Job, rows: Rows, state: Any) -> None:
        self.job, self.rows, states = job, [*rows], state or [None]
        hosts = range(job.hosts) if job.host is None else [job.host]
        # A state is the same for all hosts, and good for any number of them.
        self._streams = [self.open(host, states[host % len(states)]) for host in hosts]

    def open(self, host: int, saved: Any) -> Stream:
        """Begin to read one host's part, after what was saved."""
        raise NotImplementedError

    def read(self, steps: int) -> None:
        for _ in range(steps):
            parts = [numbers_of(next(stream)) for stream, _ in self._streams]
            self.rows.append([self.job.segment, *itertools.chain(*parts)])

    def save(self) -> Any:
        return [save(len(self.rows)) for _, save in self._streams]


class NumpyPosition(Trainer):
    """`position_at` the loop's own step; a resume gives the position and nothing else."""

    def open(self, host: int, saved: Any) -> Stream:
        batches = self.resumed((host, self.job.hosts), saved)
        return batches.repeat(), lambda step: batches.position_at(np.int64(step)).to_json()

    def resumed(self, host: Any, saved: Any, **order: Any) -> Any:
        begin = {"position": reader.Position.from_json(saved), **order} if saved else ORDER
        batches = self.job.batches(host, **begin)
        assert batches.start.step == len(self.rows)
        return batches


class TfData(NumpyPosition):
    """`as_tf` with `position_at` a variable, behind a pipeline that reads ahead; the script gives its seed again."""

    def open(self, host: int, saved: Any) -> Stream:
        import tensorflow as tf

        batches = self.resumed(tf.distribute.InputContext(self.job.hosts, host, self.job.hosts), saved, **ORDER)
        counter = tf.Variable(0, dtype=tf.int64)
        stream = iter(reader.as_tf(batches).repeat().prefetch(3))
        return stream, lambda step: batches.position_at(counter.assign(step)).to_json()


class NumpyState(Trainer):
    """The state of an iterator, bytes as for Grain and Orbax or a dictionary; of one iteration or of an endless one."""

    def open(self, host: int, saved: Any) -> Stream:
        iterations = self.iterations(host)
        current = iterations.repeat() if self.job.segment % 2 else iter(iterations)
        if isinstance(saved, dict):
            current.load_state_dict(saved)
        elif saved:
            current.set_state(saved.encode())

        def stream() -> Iterator[Any]:
            nonlocal current
            while True:
                yield from current
                current = iter(iterations)

        return stream(), lambda step: current.state_dict() if step % 2 else current.get_state().decode()

    def iterations(self, host: int) -> Any:
        return self.job.batches((host, self.job.hosts))


class Jax(NumpyState):
    """`as_jax`: a process for each host; two batches are on the devices ahead."""

    def iterations(self, host: int) -> Any:
        import jax

        if self.job.hosts > 1:
            jax.distributed.initialize(self.job.address, self.job.hosts, host)
        return reader.as_jax(self.job.batches("auto"), jax.make_mesh((jax.device_count(),), ("data",)))


class Torch(Trainer):
    """A `DataLoader` over `as_torch`; its dataset makes the state from the trained step."""

    workers = 0

    def open(self, host: int, saved: Any) -> Stream:
        from torch.utils.data import DataLoader

        dataset = reader.as_torch(self.job.batches((host, self.job.hosts)))
        if saved:
            dataset.load_state_dict(saved)
        return forever(DataLoader(dataset, batch_size=None, num_workers=self.workers)), dataset.state_dict


class TorchWorkers(Torch):
    """The same with two workers, which change nothing."""

    workers = 2


class Ranks(Trainer):
    """`ShardDataset` of each rank; the loop numbers epochs, some of them from 0 after a resume."""

    def open(self, host: int, saved: Any) -> Stream:
        ranks = {"rank": host, "world_size": self.job.hosts, "batch_size": self.job.batch // self.job.hosts}
        dataset = reader.torch.ShardDataset(self.job.url, "train", features=["number"], **ranks, **ORDER)
        if saved:
            dataset.load_state_dict(saved)

        def stream() -> Iterator[Any]:
            for epoch in itertools.count(dataset.iteration if self.job.segment % 2 else 0):
                dataset.set_epoch(epoch)
                yield from dataset

        return stream(), dataset.state_dict


class Stateful(Trainer):
    """torchdata's `StatefulDataLoader`, which counts by itself."""

    workers = 0

    def open(self, host: int, saved: Any) -> Stream:
        from torchdata.stateful_dataloader import StatefulDataLoader

        dataset = reader.as_torch(self.job.batches((host, self.job.hosts)))
        loader = StatefulDataLoader(dataset, batch_size=None, num_workers=self.workers)
        place = [self.job.batch, self.job.hosts]
        if (
            saved and self.workers and saved["place"] != place
        ):  # what workers saved is for the same ranks and batch size
            dataset.load_state_dict(saved["dataset"])
        elif saved:
            loader.load_state_dict(pickle.loads(base64.b64decode(saved["loader"])))

        def save(step: int) -> Any:
            state = base64.b64encode(pickle.dumps(loader.state_dict())).decode()
            return {"loader": state, "dataset": dataset.state_dict(step), "place": place}

        return forever(loader), save


class StatefulWorkers(Stateful):
    """The same, which asks two workers."""

    workers = 2


def forever(iterations: Iterable[Any]) -> Iterator[Any]:
    """Iteration after iteration."""
    while True:
        yield from iterations


def numbers_of(batch: Any) -> list[int]:
    """The record numbers of a batch, or of this process's part of it, whose labels must be theirs."""
    inputs, labels = batch
    numbers, classes = _local(inputs["number"]), _local(labels)
    assert classes == [number % 3 for number in numbers] and len(_local(inputs["image"])) == len(numbers)
    return numbers


def _local(array: Any) -> list[Any]:
    shards = getattr(array, "addressable_shards", None)  # of a global array of JAX
    parts = [array] if shards is None else [shard.data for shard in shards]
    return list(itertools.chain.from_iterable(np.asarray(part).tolist() for part in parts))
