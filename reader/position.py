"""`Position`: how far a training job has read, as a few integers; and how hosts share a step's records.

    position = info.position("train", global_batch_size=1024, hosts=4, seed=0)      # the beginning
    text = position.after(trained_steps).to_json()                                  # into the checkpoint
    position = Position.from_json(text).on(global_batch_size=512, hosts=2)          # continue, also on other hosts

It counts *trained* steps, never what an iterator handed out: input pipelines read ahead.
"""

from __future__ import annotations

import json
import operator
import reprlib
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec

from beam_pipeline.errors import UsageError

_FORMAT = 1
_SHOWN_CHARACTERS = 80

# Runs of 64 records that are read and shuffled together: a batch of 64 then mixes all of them (15.7 of 16 on average),
# and two windows of 224×224 JPEGs are 32 MB.
WINDOW_RUNS = 16

# Far above any machine; a number above them in a saved position is a mistake.
MAX_HOSTS = 1 << 20
MAX_WINDOW_RUNS = (1 << 31) - 1

Host: TypeAlias = Any  # tf.distribute.InputContext, (index, count), or None for one host


def whole(name: str, value: Any) -> int:
    """An integer of any kind as an int: NumPy's, a tensor, a variable such as Keras' `optimizer.iterations`.

    Raises:
        UsageError: it is something else.
    """
    try:
        number = int(value)
        if number == value:
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    raise UsageError(f"{name}={reprlib.repr(value)}: a whole number")


def share_before(records: int, hosts: int, host: int) -> int:
    """How many of records 0 … `records` - 1, dealt one by one in turn, go to the hosts before `host`."""
    return records // hosts * host + min(records % hosts, host)


@dataclass(frozen=True, slots=True)
class Phase:
    """What a fixed set of hosts has read of one epoch.

    Attributes:
        hosts: how many hosts share the records that were unread when the phase began.
        window_runs: runs in a shuffle window.
        lead: hosts 0 … lead - 1 read one record less of this epoch, since they had the odd records of earlier ones.
        taken: records that each host has read, the one less not counted.
    """

    hosts: int
    window_runs: int
    lead: int = 0
    taken: int = 0

    def __post_init__(self) -> None:
        for name, value, most in (
            ("hosts", self.hosts, MAX_HOSTS),
            ("window_runs", self.window_runs, MAX_WINDOW_RUNS),
        ):
            if value < 1:
                raise UsageError(f"{name}={value}: at least 1")
            if value > most:
                raise UsageError(f"{name}={value}: at most {most}")

    def read_by(self, host: int) -> int:
        """Records of this epoch that `host` has read in this phase."""
        return self.taken - (host < self.lead)

    @property
    def read(self) -> int:
        """Records of this epoch that all hosts together have read in this phase."""
        return self.hosts * self.taken - self.lead


@dataclass(frozen=True, slots=True)
class Position:
    """How far the endless stream of epochs that the train builders read has been trained on.

    Attributes:
        source: names the dataset and the split, so that a position isn't used with another one.
        records: records in an epoch.
        seed: seed of the order and of augmentation.
        global_batch_size: records that all hosts together read in a step.
        epoch: the first epoch that isn't read to its end.
        phases: what was read of that epoch, in order; the last one goes on. More than one only after a change of the
            number of hosts (or of window_runs) in the middle of this epoch.
    """

    source: str
    records: int
    seed: int
    global_batch_size: int
    epoch: int
    phases: tuple[Phase, ...]

    @property
    def hosts(self) -> int:
        """How many hosts read."""
        return self.phases[-1].hosts

    @property
    def window_runs(self) -> int:
        """Runs in a shuffle window from here on."""
        return self.phases[-1].window_runs

    @property
    def host_batch_size(self) -> int:
        """Records that one host reads in a step."""
        return self.global_batch_size // self.hosts

    def after(self, steps: Any) -> Position:
        """The position `steps` trained steps later; `steps` may be an array or a variable, such as a step counter.

        Raises:
            ValueError: `steps` is negative or no whole number.
        """
        steps = whole("steps", steps)
        if steps < 0:
            raise ValueError(f"steps={steps}: a position only moves forward")
        last = self.phases[-1]
        taken = last.taken + steps * self.host_batch_size
        left = self.records - sum(phase.read for phase in self.phases[:-1])  # of the epoch, when the last phase began
        epoch_end = last.lead + left
        if taken * last.hosts < epoch_end:
            return replace(self, phases=(*self.phases[:-1], replace(last, taken=taken)))
        # Hosts differ by one record at most, so all have ended an epoch before one is two records into the next.
        more = (taken * last.hosts - epoch_end) // self.records
        dealt = epoch_end + more * self.records
        phase = replace(last, lead=dealt % last.hosts, taken=taken - dealt // last.hosts)
        return replace(self, epoch=self.epoch + 1 + more, phases=(phase,))

    def on(self, *, global_batch_size: int, hosts: int, window_runs: int | None = None) -> Position:
        """This position, continued by `hosts` hosts: they share what is unread of the epoch before the next one begins.

        Args:
            global_batch_size: records that all hosts together read in a step from now on.
            hosts: how many hosts read together from now on.
            window_runs: runs in a shuffle window from now on; None for as many as before.

        Raises:
            ValueError: the batch can't be divided by the hosts (`host_batch_size` says how), or a number is below 1.
        """
        global_batch_size, hosts = whole("global_batch_size", global_batch_size), whole("hosts", hosts)
        window_runs = self.window_runs if window_runs is None else whole("window_runs", window_runs)
        host_batch_size(global_batch_size, hosts)
        before = tuple(phase for phase in self.phases if phase.read)
        now = Phase(hosts, window_runs)
        if not before or (before[-1].hosts, before[-1].window_runs) != (hosts, window_runs):
            before = (*before, now)
        return replace(self, global_batch_size=global_batch_size, phases=before)

    def to_json(self) -> str:
        """One line of JSON, under 10 kB (some 25 bytes for each change of the hosts within the current epoch)."""
        phases = [[phase.hosts, phase.window_runs, phase.lead, phase.taken] for phase in self.phases]
        value = {"format": _FORMAT, "source": self.source, "records": self.records, "seed": self.seed}
        value |= {"global_batch_size": self.global_batch_size, "epoch": self.epoch}
        return json.dumps({**value, "phases": phases}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Position:
        """The position that `to_json` wrote.

        Raises:
            UsageError: it is something else, or no training could have got there.
        """
        try:
            saved = msgspec.json.decode(text, type=_Saved)
            phases = tuple(Phase(*phase) for phase in saved.phases)
        except (ValueError, TypeError, RecursionError) as error:
            raise _not_a_position(text, error) from None
        wrong = _impossible(saved, phases)
        if wrong:
            raise _not_a_position(text, wrong)
        return cls(saved.source, saved.records, saved.seed, saved.global_batch_size, saved.epoch, phases)


_Count = Annotated[int, msgspec.Meta(ge=0)]
_Positive = Annotated[int, msgspec.Meta(ge=1)]


class _SavedPhase(NamedTuple):
    hosts: _Positive
    window_runs: _Positive
    lead: _Count
    taken: _Count


class _Saved(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON form of a position."""

    format: Annotated[int, msgspec.Meta(ge=_FORMAT, le=_FORMAT)]
    source: str
    records: _Positive
    seed: int
    global_batch_size: _Positive
    epoch: _Count
    phases: Annotated[list[_SavedPhase], msgspec.Meta(min_length=1)]


def _impossible(saved: _Saved, phases: tuple[Phase, ...]) -> str:
    """Why no training can have reached these numbers, "" if one can."""
    for number, phase in enumerate(phases):
        if phase.lead >= phase.hosts:
            return f"lead {phase.lead} of {phase.hosts} hosts in phase {number}"
        if phase.read < 0:
            return f"lead {phase.lead}, but nothing taken in phase {number}"
    read = sum(phase.read for phase in phases)
    if read >= saved.records:
        return f"{read} records read of an epoch of {saved.records}"
    if saved.global_batch_size % phases[-1].hosts:
        return f"global_batch_size {saved.global_batch_size} can't be divided by {phases[-1].hosts} hosts"
    return ""


def _not_a_position(text: Any, why: Any) -> UsageError:
    shown = f"{text[:_SHOWN_CHARACTERS]!r}" if isinstance(text, str) else reprlib.repr(text)
    return UsageError(f"not a reader.Position: {shown}: {' '.join(str(why).split())}")


def host_batch_size(global_batch_size: int, hosts: int) -> int:
    """The records of a step that one of `hosts` hosts reads.

    Raises:
        ValueError: not divisible; names both and the nearest batch sizes that fit.
    """
    hosts, global_batch_size = whole("hosts", hosts), whole("global_batch_size", global_batch_size)
    if hosts < 1:
        raise ValueError(f"hosts={hosts}: at least 1")
    if global_batch_size < 1:
        raise ValueError(f"global_batch_size={global_batch_size}: at least 1")
    if global_batch_size % hosts:
        below = global_batch_size // hosts * hosts
        fits = f"{below} or {below + hosts}" if below else f"{hosts}"
        raise ValueError(
            f"global_batch_size={global_batch_size} can't be divided by {hosts} hosts; the nearest that fit: {fits}"
        )
    return global_batch_size // hosts


def share_of_host(host: Host) -> tuple[int, int, int]:
    """(index, count) of the host that reads, and how many replicas there take a batch each.

    Raises:
        UsageError: `host` is neither an InputContext nor (index, count) with 0 <= index < count.
    """
    if host is None:
        return 0, 1, 1
    if hasattr(host, "input_pipeline_id"):  # tf.distribute.InputContext, known by its attributes: no TensorFlow here
        replicas = max(1, host.num_replicas_in_sync // host.num_input_pipelines)
        return host.input_pipeline_id, host.num_input_pipelines, replicas
    try:
        index, count = map(operator.index, host)
    except (TypeError, ValueError):
        index, count = 0, 0
    if not 0 <= index < count:
        raise UsageError(f"host={reprlib.repr(host)}: (index, count) with 0 <= index < count")
    return index, count, 1


def batch_size_of(global_batch_size: int, hosts: int, replicas: int) -> int:
    """Records in one batch of one host.

    Raises:
        ValueError: the hosts and their replicas can't share the records of a step evenly.
    """
    size = host_batch_size(global_batch_size, hosts)
    if size % replicas:
        raise ValueError(
            f"global_batch_size={global_batch_size} can't be divided by {hosts * replicas} replicas: "
            "make it a multiple of that"
        )
    return size // replicas
