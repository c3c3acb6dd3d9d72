"""`Position`: how far a training job has read, as a few integers; and how hosts share a step's records.

    position = batches.position_at(trained_steps)                              # what `train_batches` returned
    text = position.to_json()                                                  # into the checkpoint
    position = Position.from_json(text)                                        # for train_batches, also on other hosts

It counts *trained* steps, never what an iterator handed out: input pipelines read ahead.
"""

from __future__ import annotations

import operator
import os
import reprlib
import sys
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeAlias

from msgspec import Meta, Struct, json
from msgspec.structs import replace

from beam_pipeline.errors import UsageError
from beam_pipeline.text import one_line

_SHOWN_CHARACTERS = 80

# Runs of 64 records that are read and shuffled together: a batch of 64 then mixes all of them (15.7 of 16 on average),
# and two windows of 224×224 JPEGs are 32 MB.
WINDOW_RUNS = 16

# Far above any machine; a number above them in a saved position is a mistake.
MAX_HOSTS = 1 << 20
MAX_WINDOW_RUNS = (1 << 31) - 1


class InputContext(Protocol):
    """What is read of a `tf.distribute.InputContext`: no TensorFlow here."""

    input_pipeline_id: int
    num_input_pipelines: int
    num_replicas_in_sync: int


class AutoHost(NamedTuple):
    """What `host="auto"` stood for when batches were built: a mesh may know better."""

    process: int
    processes: int


# (index, count), "auto" or a tf.distribute.InputContext; None for one host
Host: TypeAlias = tuple[int, int] | Literal["auto"] | InputContext | None


def integer(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """An integer of any kind as an int: NumPy's, a tensor, a variable such as Keras' `optimizer.iterations`.

    Raises:
        UsageError: it is something else, or out of bounds.
    """
    try:
        number = int(value)
        is_integer = bool(number == value)
    except (TypeError, ValueError, OverflowError):
        is_integer = False
    if not is_integer:
        raise UsageError(f"{name} must be a whole number, got {reprlib.repr(value)}")
    if least is not None and number < least:
        raise UsageError(f"{name} must be at least {least}, got {number}")
    if most is not None and number > most:
        raise UsageError(f"{name} must be at most {most}, got {number}")
    return number


def share_before(records: int, hosts: int, host: int) -> int:
    """How many of records 0 … `records` - 1, dealt one by one in turn, go to the hosts before `host`."""
    return records // hosts * host + min(records % hosts, host)


class Phase(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a fixed set of hosts has read of one epoch.

    Attributes:
        hosts: how many hosts share the records that were unread when the phase began.
        window_runs: runs in a shuffle window.
        offset: hosts below it get one record fewer of this epoch: they took the remainder of earlier epochs.
        taken: records that each host has read in this phase (hosts below `offset`: one fewer).
    """

    hosts: int
    window_runs: int
    offset: int = 0
    taken: int = 0

    def __post_init__(self) -> None:
        integer("hosts", self.hosts, 1, MAX_HOSTS)
        integer("window_runs", self.window_runs, 1, MAX_WINDOW_RUNS)
        integer("offset", self.offset, 0, self.hosts - 1)
        integer("taken", self.taken, 1 if self.offset else 0)

    def read_by(self, host: int) -> int:
        """Records of this epoch that `host` has read in this phase."""
        return self.taken - (host < self.offset)

    @property
    def read(self) -> int:
        """Records of this epoch that all hosts together have read in this phase."""
        return self.hosts * self.taken - self.offset


class Position(Struct, frozen=True, tag_field="format", tag=1, forbid_unknown_fields=True):
    """How far the endless stream of epochs that `train_batches` reads has been trained on.

    Attributes:
        source: names the dataset and the split, so that a position isn't used with another one.
        records: records in an epoch.
        seed: seed of the order and of augmentation.
        global_batch_size: records that all hosts together read in a step.
        epoch: the first epoch that isn't read to its end.
        phases: what was read of that epoch, in order; the last one goes on. More than one only after a change of the
            number of hosts (or of window_runs) in the middle of this epoch.
        step: the global step: steps trained since the run first began, through every resume.
    """

    source: str
    records: Annotated[int, Meta(ge=1)]
    seed: int
    global_batch_size: Annotated[int, Meta(ge=1)]
    epoch: Annotated[int, Meta(ge=0)]
    phases: Annotated[tuple[Phase, ...], Meta(min_length=1)]
    step: Annotated[int, Meta(ge=0)]

    @property
    def hosts(self) -> int:
        """How many hosts read."""
        return self.phases[-1].hosts

    @property
    def window_runs(self) -> int:
        """Runs in a shuffle window from here on."""
        return self.phases[-1].window_runs

    @property
    def records_read(self) -> int:
        """Records that were read since the run first began."""
        return self.epoch * self.records + sum(phase.read for phase in self.phases)

    @property
    def batches_read(self) -> int:
        """Batches of this size that the records read so far fill: exactly `step` unless the size has changed."""
        return self.records_read // self.global_batch_size

    def at(self, step: Any) -> Position:
        """The position at a global step: an int, `optimizer.iterations`, a NumPy or JAX scalar, a variable.

        Raises:
            UsageError: `step` is no integer, or below this position's own.
        """
        steps = integer("step", step) - self.step
        if steps < 0:
            raise UsageError(
                f"step {self.step + steps} is before step {self.step}, where this position is: give the global step, "
                "counted from the beginning of the run through every resume"
            )
        return self.after(steps)

    def after(self, steps: Any) -> Position:
        """The position `steps` trained steps after this one. `at` takes the global step, which training counts anyway.

        Raises:
            UsageError: `steps` is negative or no integer.
        """
        last, steps = self.phases[-1], integer("steps", steps, 0)
        taken = last.taken + steps * (self.global_batch_size // last.hosts)
        left = self.records - sum(phase.read for phase in self.phases[:-1])  # of the epoch, when the last phase began
        epoch_end = last.offset + left
        if taken * last.hosts < epoch_end:
            return replace(self, phases=(*self.phases[:-1], replace(last, taken=taken)), step=self.step + steps)
        # Hosts differ by one record at most, so all have ended an epoch before one is two records into the next.
        more = (taken * last.hosts - epoch_end) // self.records
        dealt = epoch_end + more * self.records
        phase = replace(last, offset=dealt % last.hosts, taken=taken - dealt // last.hosts)
        return replace(self, epoch=self.epoch + 1 + more, phases=(phase,), step=self.step + steps)

    def on(self, *, global_batch_size: int, hosts: int, window_runs: int | None = None) -> Position:
        """This position, continued by `hosts` hosts: they share what is unread of the epoch before the next one begins.

        Args:
            global_batch_size: records that all hosts together read in a step from now on.
            hosts: how many hosts read together from now on.
            window_runs: runs in a shuffle window from now on; None for as many as before.

        Raises:
            ValueError: the batch can't be divided by the hosts (`batch_size_of` says how), or a number is below 1.
        """
        window_runs = self.window_runs if window_runs is None else integer("window_runs", window_runs)
        global_batch_size, now = (
            integer("global_batch_size", global_batch_size),
            Phase(integer("hosts", hosts), window_runs),
        )
        batch_size_of(global_batch_size, now.hosts)
        phases = tuple(phase for phase in self.phases if phase.read)
        if not phases or (phases[-1].hosts, phases[-1].window_runs) != (now.hosts, now.window_runs):
            phases = (*phases, now)
        return replace(self, global_batch_size=global_batch_size, phases=phases)

    def to_json(self) -> str:
        """One line of JSON, under 10 kB (some 25 bytes for each change of the hosts within the current epoch)."""
        return json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Position:
        """The position that `to_json` wrote. Raises UsageError if it is something else, or no training was there."""
        try:
            position = _decoder.decode(text)
            read = sum(phase.read for phase in position.phases)
            if read >= position.records:
                raise UsageError(f"{read} records read of an epoch of {position.records}")
            batch_size_of(position.global_batch_size, position.phases[-1].hosts)
        except (ValueError, TypeError, RecursionError) as error:
            shown = repr(text[:_SHOWN_CHARACTERS]) if isinstance(text, str) else reprlib.repr(text)
            raise UsageError(f"not an imageshards.Position: {shown}: {one_line(error)}") from None
        return position


_decoder = json.Decoder(Position)  # built by the import: see `schema.manifest.build_types`


def share_of_host(host: Host) -> tuple[int, int, int]:
    """(index, count) of the host that reads, and how many replicas there take a batch each.

    Raises:
        UsageError: `host` is no `Host`, or 0 <= index < count doesn't hold; or the processes aren't known for sure.
    """
    if host is None:
        return 0, 1, 1
    if host == "auto":
        return *process_of_several(), 1
    given: Any = host
    if hasattr(given, "input_pipeline_id"):
        replicas = max(1, given.num_replicas_in_sync // given.num_input_pipelines)
        return given.input_pipeline_id, given.num_input_pipelines, replicas
    try:
        index, count = map(operator.index, given)
    except (TypeError, ValueError):
        index, count = 0, 0
    if not 0 <= index < count:
        raise UsageError(f"host must be (index, count) with 0 <= index < count, or 'auto', got {reprlib.repr(host)}")
    return index, count, 1


def process_of_several() -> tuple[int, int]:
    """(rank, size) of torch.distributed or jax.distributed, if one is imported and initialized; else of torchrun or
    TF_CONFIG, in the environment; else (0, 1).

    Raises:
        UsageError: both are initialized, with other numbers; or TF_CONFIG is invalid.
    """
    found = {}
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        found["torch.distributed"] = torch.distributed.get_rank(), torch.distributed.get_world_size()
    # Asked first: `process_count` starts JAX' backend, which must come after `jax.distributed.initialize`.
    if jax is not None and jax.distributed.is_initialized():
        found["jax.distributed"] = jax.process_index(), jax.process_count()
    if len({*found.values()}) > 1:
        numbers = " and ".join(f"process {index} of {count} ({name})" for name, (index, count) in found.items())
        raise UsageError(f"this is {numbers}: give host=(index, count)")
    if found:
        return next(iter(found.values()))
    rank, size = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    told = (int(rank), int(size)) if rank.isdecimal() and size.isdecimal() else tensorflow_worker()
    return told if 0 <= told[0] < told[1] else (0, 1)


def tensorflow_worker() -> tuple[int, int]:
    """(index, count) of this worker in TF_CONFIG, index -1 if it is none of them. Raises UsageError."""
    try:
        config = json.decode(os.environ.get("TF_CONFIG") or "{}")
        cluster, task = config.get("cluster", {}), config.get("task", {})
        workers = [(job, at) for job in ("chief", "master", "worker") for at in range(len(cluster.get(job, ())))]
        this = task.get("type"), int(task.get("index", 0))
    except (ValueError, AttributeError, TypeError):
        raise UsageError("TF_CONFIG is not a JSON object with a cluster: correct or unset it") from None
    return workers.index(this) if this in workers else -1, len(workers)


def batch_size_of(global_batch_size: int, hosts: int, replicas: int = 1) -> int:
    """Records in one batch of one of `hosts` hosts, on each of which `replicas` replicas take a batch in a step.

    Raises:
        ValueError: not divisible; names both and the nearest batch sizes that fit.
    """
    global_batch_size = integer("global_batch_size", global_batch_size, 1)
    shares = integer("hosts", hosts, 1) * replicas
    if global_batch_size % shares:
        below = global_batch_size // shares * shares
        fits = f"{below} or {below + shares}" if below else f"{shares}"
        raise ValueError(
            f"global_batch_size={global_batch_size} can't be divided by {shares} "
            f"{'hosts' if replicas == 1 else 'replicas'}; the nearest that fit: {fits}"
        )
    return global_batch_size // shares
