"""`Position`: how far a training job has read, as a few integers; and how hosts share a step's records.

    position = batches.position_at(trained_steps)                              # what `train_batches` returned
    text = position.to_json()                                                  # into the checkpoint
    position = Position.from_json(text)                                        # for train_batches, also on other hosts

It counts *trained* steps, never what an iterator handed out: input pipelines read ahead.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, Self, TypeAlias

from msgspec import Meta, Struct, json
from msgspec.structs import astuple, replace

from beam_pipeline.errors import UsageError
from beam_pipeline.text import one_line
from reader.hosts import batch_size_of, integer
from reader.shares import MAX_PERIOD, Dealing, Rule, rule_of

_SHOWN_CHARACTERS = 80

# Runs of 64 records that are read and shuffled together: a batch of 64 then mixes all of them (15.7 of 16 on average),
# and two windows of 224×224 JPEGs are 32 MB.
WINDOW_RUNS = 16

# Far above any machine; a number above them in a saved position is a mistake.
MAX_HOSTS = 1 << 20
MAX_WINDOW_RUNS = (1 << 31) - 1


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

    def cuts(self, dealt: int, records: int) -> Sequence[int]:
        """How `records`, dealt after `dealt` others of this phase, are cut into the hosts' shares: hosts + 1 bounds."""
        begin, hosts = self.offset + dealt, self.hosts
        return [share_before(begin + records, hosts, h) - share_before(begin, hosts, h) for h in range(hosts + 1)]


class _Steps:
    """What the positions of a dataset and of a mix have in common."""

    __slots__ = ()

    global_batch_size: int
    step: int

    @property
    def parts(self) -> Sequence[Any]:
        """Each of its sources by itself."""
        raise NotImplementedError

    @property
    def records_read(self) -> int:
        """Records that were read since the run first began."""
        return sum(part.epoch * part.records + part.read for part in self.parts)

    @property
    def batches_read(self) -> int:
        """Batches of this size that the records read so far fill: exactly `step` unless the size has changed."""
        return self.records_read // self.global_batch_size

    def at(self, step: Any) -> Self:
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

    def after(self, steps: Any) -> Self:
        """The position `steps` trained steps after this one. `at` takes the global step, which training counts anyway.

        Raises:
            UsageError: `steps` is negative or no integer.
        """
        raise NotImplementedError

    def to_json(self) -> str:
        """One line of JSON, under 10 kB (some 25 bytes for each change of the hosts within the current epoch)."""
        return json.encode(self).decode()


class Position(_Steps, Struct, frozen=True, tag_field="format", tag=1, forbid_unknown_fields=True):
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
    def parts(self) -> list[Position]:
        return [self]

    @property
    def window_runs(self) -> int:
        """Runs in a shuffle window from here on."""
        return self.phases[-1].window_runs

    @property
    def read(self) -> int:
        """Records of the epoch that were read."""
        return sum(phase.read for phase in self.phases)

    def after(self, steps: Any) -> Position:
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

    @classmethod
    def from_json(cls, text: str) -> AnyPosition:
        """The position that `to_json` wrote, also of a mix.

        Raises:
            UsageError: it is something else, or no training was there.
        """
        try:
            position: AnyPosition = _decoder.decode(text)
            batch_size_of(position.global_batch_size, position.hosts)
            for part in position.parts:
                if part.read >= part.records:
                    raise UsageError(f"{part.read} records read of an epoch of {part.records}")
        except (ValueError, TypeError, RecursionError) as error:
            shown = repr(text[:_SHOWN_CHARACTERS]) if isinstance(text, str) else reprlib.repr(text)
            raise UsageError(f"not an imageshards.Position: {shown}: {one_line(error)}") from None
        return position


class RowPhase(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A phase of one source of a mix: of all rows those with the numbers [begin, end), see `shares.Dealing`."""

    hosts: Annotated[int, Meta(ge=1, le=MAX_HOSTS)]
    window_runs: Annotated[int, Meta(ge=1, le=MAX_WINDOW_RUNS)]
    begin: Annotated[int, Meta(ge=0)]
    end: Annotated[int, Meta(ge=0)]


class MixSource(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How far one source of a mix has been trained on; as a `Position`."""

    source: str
    weight: Annotated[int, Meta(ge=1, le=MAX_PERIOD)]
    records: Annotated[int, Meta(ge=1)]
    epoch: Annotated[int, Meta(ge=0)]
    phases: Annotated[tuple[RowPhase, ...], Meta(min_length=1)]


class Part(NamedTuple):
    """A source of a mix as `order` reads it: what it takes of a `Position`."""

    records: int
    seed: int
    epoch: int
    phases: tuple[Dealing, ...]

    @property
    def read(self) -> int:
        """Records of the epoch that were read."""
        return sum(phase.read for phase in self.phases)


class MixPosition(_Steps, Struct, frozen=True, tag_field="format", tag=2, forbid_unknown_fields=True):
    """How far the stream that `mix` reads has been trained on.

    Attributes:
        sources: what was read of each.
        records: in an iteration.
        seed, global_batch_size, step: as of a `Position`.
        row: rows that each host has read since the run first began, from which follows whose the next ones are.
    """

    sources: Annotated[tuple[MixSource, ...], Meta(min_length=1)]
    records: Annotated[int, Meta(ge=1)]
    seed: int
    global_batch_size: Annotated[int, Meta(ge=1)]
    row: Annotated[int, Meta(ge=0)]
    step: Annotated[int, Meta(ge=0)]

    def __post_init__(self) -> None:
        integer("the sum of all weights", sum(one.weight for one in self.sources), 1, MAX_PERIOD)
        if {(one.phases[-1].hosts, one.phases[-1].end) for one in self.sources} != {
            (self.hosts, self.row * self.hosts)
        }:
            raise ValueError("its sources aren't read to one row")

    @property
    def hosts(self) -> int:
        """How many hosts read."""
        return self.sources[0].phases[-1].hosts

    @property
    def source(self) -> str:
        """Names the sources and their weights."""
        return ", ".join(f"{one.source} × {one.weight}" for one in self.sources)

    @property
    def rule(self) -> Rule:
        """Whose each row is."""
        return rule_of(tuple(one.weight for one in self.sources))

    @property
    def parts(self) -> list[Part]:
        return [
            Part(one.records, self.seed, one.epoch, tuple(Dealing(self.rule, at, *astuple(p)) for p in one.phases))
            for at, one in enumerate(self.sources)
        ]

    def after(self, steps: Any) -> MixPosition:
        hosts, steps = self.hosts, integer("steps", steps, 0)
        row, sources = self.row + steps * (self.global_batch_size // hosts), list[MixSource]()
        for one, part in zip(self.sources, self.parts, strict=True):
            last = replace(one.phases[-1], end=row * hosts)
            more = Dealing(self.rule, len(sources), *astuple(last))
            left = one.records - sum(phase.read for phase in part.phases[:-1])  # when the last phase began
            if (read := more.read) < left:
                sources.append(replace(one, phases=(*one.phases[:-1], last)))
                continue
            epochs, _ = divmod(read - left, one.records)
            last = replace(last, begin=more.row_after(left + epochs * one.records))
            sources.append(replace(one, epoch=one.epoch + 1 + epochs, phases=(last,)))
        return replace(self, sources=tuple(sources), row=row, step=self.step + steps)

    def on(self, *, global_batch_size: int, hosts: int) -> MixPosition:
        """As `Position.on`; each source keeps its window."""
        global_batch_size, hosts = integer("global_batch_size", global_batch_size), integer("hosts", hosts, 1)
        batch_size_of(global_batch_size, hosts)
        row, sources = self.row * hosts, []
        for one, part in zip(self.sources, self.parts, strict=True):
            if hosts != self.hosts:
                phases = (phase for phase, dealing in zip(one.phases, part.phases, strict=True) if dealing.read)
                one = replace(one, phases=(*phases, RowPhase(hosts, one.phases[-1].window_runs, row, row)))
            sources.append(one)
        return replace(self, sources=tuple(sources), global_batch_size=global_batch_size)


AnyPosition: TypeAlias = Position | MixPosition
_decoder = json.Decoder(AnyPosition)  # built by the import: see `schema.manifest.build_types`
