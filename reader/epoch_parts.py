"""How one epoch's records are dealt to ranks and their workers, batch by batch, also after a change of either.

Pure integers, no framework. A *consumer* is one worker of one rank; a *part* of an epoch is what a fixed set of
consumers trained of it. Batches of one part are equally many for all consumers, and steps for all ranks, but where
there are fewer records than batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from beam_pipeline.errors import UsageError
from reader.order import eval_share
from reader.position import MAX_HOSTS, Phase, share_before


@dataclass(frozen=True, slots=True)
class Part:
    """One set of consumers.

    Attributes:
        ranks, workers: consumers are ranks × workers; number rank × workers + worker.
        batch_size: the most records of a batch.
        drop_last: only full batches.
        steps: batches that each rank trained; its workers take turns, from worker 0 on.
    """

    ranks: int
    workers: int
    batch_size: int
    drop_last: bool
    steps: int = 0

    @property
    def consumers(self) -> int:
        """How many there are."""
        return self.ranks * self.workers

    def batches(self, worker: int) -> int:
        """How many of the trained batches of a rank its worker `worker` made."""
        return self.steps // self.workers + (worker < self.steps % self.workers)


@dataclass(frozen=True, slots=True)
class ReadPhase(Phase):
    """A phase whose consumers have read unequally: `by_host[i]` records by consumer i."""

    by_host: tuple[int, ...] = ()

    def read_by(self, host: int) -> int:
        """Records of this epoch that consumer `host` has read in this phase."""
        return self.by_host[host]

    @property
    def read(self) -> int:
        """Records of this epoch that all have read in this phase."""
        return sum(self.by_host)


@dataclass(frozen=True, slots=True)
class EpochParts:
    """The parts of one epoch so far; the last one goes on.

    Attributes:
        records: in an epoch.
        is_shuffled: False where consumers read in file order (evaluation): only one part then.
        parts: at least one.
    """

    records: int
    is_shuffled: bool
    parts: tuple[Part, ...]

    def then(self, part: Part) -> EpochParts:
        """Go on with other consumers (or the same: then nothing changes).

        Raises:
            UsageError: other consumers in file order.
        """
        if replace(part, steps=self.parts[-1].steps) == self.parts[-1]:
            return self
        if not self.is_shuffled and self.parts[-1].steps:
            raise UsageError("with shuffle=False a state is for the same ranks, workers and batch_size only")
        before = self.parts if self.parts[-1].steps else self.parts[:-1]
        return replace(self, parts=(*before, part))

    def sizes(self, consumer: int) -> list[int]:
        """Records in each batch of a consumer in the last part, from its beginning; the last may be 0: no batch."""
        return self._sizes(self._unread(), self.parts[-1], consumer)

    def steps(self, rank: int) -> int:
        """Batches of a rank in the whole last part."""
        workers = self.parts[-1].workers
        return sum(size > 0 for worker in range(workers) for size in self.sizes(rank * workers + worker))

    def phases(self, window_runs: int) -> tuple[ReadPhase, ...]:
        """The parts as what `reader.order` takes."""
        phases: list[ReadPhase] = []
        unread = self.records
        for part in self.parts:
            read = tuple(
                sum(self._sizes(unread, part, consumer)[: part.batches(consumer % part.workers)])
                for consumer in range(part.consumers)
            )
            phases.append(ReadPhase(part.consumers, window_runs, by_host=read))
            unread -= sum(read)
        return tuple(phases)

    def _unread(self) -> int:
        """Records that were unread when the last part began."""
        return self.records - sum(phase.read for phase in self.phases(1)[:-1])

    def _batches(self, unread: int, part: Part) -> int:
        """Batches of each consumer in a whole part."""
        if part.drop_last:
            return unread // part.consumers // part.batch_size
        most = -(-unread // part.consumers)
        return -(-most // part.batch_size)

    def _sizes(self, unread: int, part: Part, consumer: int) -> list[int]:
        count = self._batches(unread, part)
        if part.drop_last:
            return [part.batch_size] * count
        share = self._share(unread, part.consumers, consumer)
        # Larger ones first: what has no record comes last, so that the first n sizes are those of n batches.
        return [share // count + (i < share % count) for i in range(count)]

    def _share(self, unread: int, consumers: int, consumer: int) -> int:
        if self.is_shuffled:
            return share_before(unread, consumers, consumer + 1) - share_before(unread, consumers, consumer)
        start, stop = eval_share(unread, consumers, consumer)
        return stop - start


def parts_from_lists(lists: Sequence[Sequence[int]], records: int) -> tuple[Part, ...]:
    """Parts from lists of their fields. Raises TypeError or ValueError if no training of an epoch gave them."""
    parts = tuple(
        Part(int(ranks), int(workers), int(batch_size), bool(drop_last), int(steps))
        for ranks, workers, batch_size, drop_last, steps in lists
    )
    if not parts or min(min(part.ranks, part.workers, part.batch_size, part.steps + 1) for part in parts) < 1:
        raise ValueError
    if max(part.consumers for part in parts) > MAX_HOSTS or max(part.steps for part in parts) > records:
        raise ValueError
    return parts
