"""A trainer for each adapter, as the docs write it: start from a checkpoint, read some steps, save.

What these trainings learn is what they are trained on: a row [segment, record number, …] a step. The rows are saved and
restored with the reader's state, as weights are. Keras' trainer is in `keras_trainer`.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

import reader
from reader import order

RECORDS = 559
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
    start: int = 0  # step of the position that the training begins at
    evaluated: int = 0  # steps of an evaluation that are made before the checkpoint

    def batches(self, host: Any = None, **order: Any) -> Any:
        """What the training script builds whenever it starts."""
        options = {"global_batch_size": self.batch, "features": ["number"], **(order or ORDER)}
        batches = reader.train_batches(self.url, "train", host=host, **options)
        if order or not self.start:
            return batches
        return reader.train_batches(self.url, "train", host=host, **options, position=batches.position_at(self.start))

    def evals(self, host: Any) -> Any:
        """What it evaluates on."""
        options: dict[str, Any] = {"global_batch_size": self.batch, "features": ["number"]}
        return reader.eval_batches(self.url, "train", host=host, **options)


class Trainer:
    """A trainer whose hosts read in turn in this process, if they have none of their own.

    Args:
        job: what to read.
        rows: what was trained before, from the checkpoint.
        state: what `save` returned then; None at the beginning.
    """

    replicas = 1  # that take a batch each in a step, on each host

    def __init__(self, job: Job, rows: Rows, state: Any) -> None:
        self.job, self.rows = job, [*rows]
        training, self._evaluation = state or ([None], None)
        hosts = range(job.hosts) if job.host is None else [job.host]
        if self._evaluation is not None:
            self._evaluate(hosts, self._evaluation)
        # A state is the same for all hosts, and good for any number of them.
        self._streams = [self.open(host, training[host % len(training)]) for host in hosts]

    def open(self, host: int, saved: Any) -> Stream:
        """Begin to read one host's part, after what was saved."""
        raise NotImplementedError

    def open_evaluation(self, host: int, saved: Any) -> Stream | None:
        """The same of an evaluation; None if the adapter has no state."""
        return None

    def read(self, steps: int) -> None:
        for _ in range(steps):
            parts = [numbers_of(next(stream)) for stream, _ in self._streams for _ in range(self.replicas)]
            self.rows.append([self.job.segment, *itertools.chain(*parts)])

    def save(self) -> Any:
        hosts = range(self.job.hosts) if self.job.host is None else [self.job.host]
        if self.job.evaluated:
            self._evaluate(hosts, None)
        return [[save(self.job.start + len(self.rows)) for _, save in self._streams], self._evaluation]

    def _evaluate(self, hosts: Sequence[int], saved: Any) -> None:
        """Make some steps of an evaluation; or all that are left of one, which then has read each record once."""
        place, self._evaluation = [self.job.batch, self.job.hosts], None
        if saved is not None and saved["place"] != place:
            return  # its state is for the same hosts and batches
        opened = [self.open_evaluation(host, saved and saved["states"][n]) for n, host in enumerate(hosts)]
        if None in opened:
            return
        limit = None if saved else self.job.evaluated * self.replicas
        loops = [itertools.islice(loop, limit) for loop, _ in filter(None, opened)]
        read = [[number for batch in loop for number in numbers_of(batch)] for loop in loops]
        if saved is None:
            states = [save(self.job.evaluated) for _, save in filter(None, opened)]
            self._evaluation = {"place": place, "states": states, "read": read}
            return
        for host, (before, after) in zip(hosts, zip(saved["read"], read, strict=True), strict=True):
            begin, end = order.eval_share(RECORDS, self.job.hosts, host)
            assert before and [*before, *after] == list(range(begin, end)), f"{self.job} evaluated {before} {after}"


class NumpyPosition(Trainer):
    """`position_at` the loop's own step; a resume gives the position and nothing else."""

    def open(self, host: int, saved: Any) -> Stream:
        batches = self.resumed((host, self.job.hosts), saved)
        return batches.repeat(), lambda step: batches.position_at(np.int64(step)).to_json()

    def resumed(self, host: Any, saved: Any, **order: Any) -> Any:
        begin = {"position": reader.Position.from_json(saved), **order} if saved else {}
        batches = self.job.batches(host, **begin)
        assert batches.start.step == self.job.start + len(self.rows)
        return batches


class TfData(NumpyPosition):
    """`as_tf` with `position_at` a variable, behind a pipeline that reads ahead; the script gives its seed again."""

    def open(self, host: int, saved: Any) -> Stream:
        import tensorflow as tf

        batches = self.resumed(self.context(host), saved, **ORDER)
        counter = tf.Variable(0, dtype=tf.int64)
        stream = iter(reader.as_tf(batches.at(batches.start, rest=False)).repeat().prefetch(3))
        return stream, lambda step: batches.position_at(counter.assign(step)).to_json()

    def context(self, host: int) -> Any:
        import tensorflow as tf

        return tf.distribute.InputContext(self.job.hosts, host, self.job.hosts * self.replicas)


class TfReplicas(TfData):
    """Two replicas on each host."""

    replicas = 2


class NumpyState(Trainer):
    """The state of an iterator, bytes as for Grain and Orbax or a dictionary; of one iteration or of an endless one."""

    def open(self, host: int, saved: Any) -> Stream:
        iterations = self.adapted(self.job.batches(self.share(host)))
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

    def open_evaluation(self, host: int, saved: Any) -> Stream | None:
        iterator = iter(self.adapted(self.job.evals(self.share(host))))
        if saved:
            iterator.load_state_dict(saved)
        return iterator, lambda step: iterator.state_dict()

    def share(self, host: int) -> Any:
        return host, self.job.hosts

    def adapted(self, batches: Any) -> Any:
        return batches


class NumpyReplicas(NumpyState):
    """The same with an InputContext of two replicas on each host."""

    replicas = 2

    def share(self, host: int) -> Any:
        hosts = self.job.hosts
        counts = {"num_input_pipelines": hosts, "num_replicas_in_sync": 2 * hosts}
        return types.SimpleNamespace(input_pipeline_id=host, **counts)


class Jax(NumpyState):
    """`as_jax`: a process for each host; two batches are on the devices ahead."""

    def open(self, host: int, saved: Any) -> Stream:
        import jax

        if self.job.hosts > 1 and not jax.distributed.is_initialized():
            jax.distributed.initialize(self.job.address, self.job.hosts, host)
        return super().open(host, saved)

    def share(self, host: int) -> Any:
        return "auto"

    def adapted(self, batches: Any) -> Any:
        import jax

        return reader.as_jax(batches, jax.make_mesh((jax.device_count(),), ("data",)))


class Torch(Trainer):
    """A `DataLoader` over `as_torch`; its dataset makes the state from the trained step."""

    workers = 0

    def open(self, host: int, saved: Any) -> Stream:
        loader, save = self.loader(self.job.batches((host, self.job.hosts)), saved)
        return forever(loader), save

    def open_evaluation(self, host: int, saved: Any) -> Stream | None:
        loader, save = self.loader(self.job.evals((host, self.job.hosts)), saved)
        return iter(loader), save

    def loader(self, batches: Any, saved: Any) -> Any:
        from torch.utils.data import DataLoader

        dataset = reader.as_torch(batches)
        if saved:
            dataset.load_state_dict(saved)
        more = {"num_workers": self.workers, "persistent_workers": self.workers > 0}
        return DataLoader(dataset, batch_size=None, **more), dataset.state_dict


class TorchWorkers(Torch):
    """The same with as many workers as the training was stopped before, and one."""

    @property
    def workers(self) -> int:  # type: ignore[override]
        return self.job.segment % 3 + 1


def forever(iterations: Iterable[Any]) -> Iterator[Any]:
    """Iteration after iteration."""
    while True:
        yield from iterations


def numbers_of(batch: Any) -> list[int]:
    """The record numbers of a batch, or of this process's part of it, whose labels must be theirs; not of padding."""
    inputs, labels, *weights = batch
    numbers, classes = _local(inputs["number"]), _local(labels)
    assert classes == [number % 3 for number in numbers] and len(_local(inputs["image"])) == len(numbers)
    counted = _local(weights[0]) if weights else [1] * len(numbers)
    return [number for number, weight in zip(numbers, counted, strict=True) if weight]


def _local(array: Any) -> list[Any]:
    shards = getattr(array, "addressable_shards", None)  # of a global array of JAX
    parts = [array] if shards is None else [shard.data for shard in shards]
    return list(itertools.chain.from_iterable(np.asarray(part).tolist() for part in parts))
