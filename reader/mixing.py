"""`mix`: batches of several datasets, whose shares are exact at every row and through every resume.

batches = imageshards.mix({"gs://bucket/photos/1.0.0": 3, "gs://bucket/drawings/1.0.0": 1}, global_batch_size=1024)
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from beam_pipeline.errors import UsageError
from beam_pipeline.text import first_few, meant
from reader.augment import Augment
from reader.balance import exact_weights
from reader.batches import Dataset, ImageSize, Labels, OnError, names_arguments, resolve_host
from reader.cache import Cache
from reader.engine import RowNumbers
from reader.features import warn_once
from reader.hosts import Host, integer
from reader.info import load_info
from reader.position import WINDOW_RUNS, MixPosition, MixSource, RowPhase
from reader.rows import Part
from reader.select import select
from reader.shares import MAX_PERIOD, begins
from reader.stream import State, TrainBatches

_OF_SOURCE = ("dataset", "split", "classes", "where")
_BATCHES_AT_ONCE = 32  # whose rows are dealt

# A dataset, (dataset, split), or a dict of `dataset` and what of it is read: `split`, `classes`, `where`.
MixedSource: TypeAlias = Dataset | tuple[Dataset, str] | Mapping[str, Any]


@names_arguments
def mix(
    sources: Mapping[Any, float] | Iterable[tuple[MixedSource, float]],
    split: str = "train",
    *,
    global_batch_size: int,
    image_size: ImageSize = None,
    resize_mode: str = "crop",
    seed: int | None = None,
    position: MixPosition | None = None,
    host: Host = None,
    augment: Augment | None = None,
    labels: Labels = "int",
    features: Sequence[str] | None = None,
    epoch_records: int | None = None,
    cache: Cache = None,
    on_error: OnError = "raise",
) -> TrainBatches:
    """An endless stream of batches of several datasets, in exact shares; otherwise as `train_batches`.

    Which source a row is from follows from its number by the weights alone: of the first m rows that a host reads, and
    of any 1,000, each source has its proportion within 2 and 3 rows. Each source is read as `train_batches` reads it
    alone, epoch after epoch at its own pace. A position brings all of them back, and the order of their rows.

    One iteration lasts until every source was read once: the largest records · sum(weights) / weight, rounded up to
    batches.

    Args:
        sources: source → weight, as a dict or a list of pairs. A source is a dataset, as of `load_info`; or (dataset,
            split string); or, in a list, a dict of `dataset` and any of `split`, `classes` and `where`, as of
            `train_batches`. Weights are integers or decimals above 0, taken exactly as they are written.
        split: of the sources that don't name one.
        global_batch_size, image_size, resize_mode, seed, host, augment, labels, cache, on_error: as of `train_batches`.
        position: where to resume, as of `train_batches`; the sources and weights must be the same.
        features: names of features that all sources have, of one type.
        epoch_records: records of an iteration; None for each source at least once.

    Returns:
        Batches as of `train_batches`. If the sources have other classes, theirs are joined by name, and class ids
        follow from the sorted names: `batches.classes`.

    Raises:
        UsageError: no source, a weight that isn't above 0, sources whose images or features differ; the position is of
            other sources or weights; and what `train_batches` raises, as other errors are.
    """
    arguments = dict(locals())
    given, weights = _parse_sources(sources, split)
    parts = [Part(info, split, select(info, split, classes, where)) for info, split, classes, where in given]
    now, batch, hosts = resolve_host(host, global_batch_size)
    once = max(-(-part.records * sum(weights) // weight) for part, weight in zip(parts, weights, strict=True))
    records = once if epoch_records is None else integer("epoch_records", epoch_records, 1)
    starts = tuple(
        MixSource(
            *(part.source, weight, part.records, 0),
            (RowPhase(hosts, part.info.capped_window_runs(part.split, WINDOW_RUNS), 0, 0),),
        )
        for part, weight in zip(parts, weights, strict=True)
    )
    start = MixPosition(starts, records, 0 if seed is None else integer("seed", seed), batch, 0, 0)
    read = [
        ({"dataset": info, "split": split, "where": where}, weight)
        for (info, split, where, _), weight in zip(parts, weights, strict=True)
    ]
    arguments |= {"sources": read, "host": now, "epoch_records": records}
    batches = MixBatches(arguments, parts, start)
    _note_classes(parts, batches.classes)
    return batches if position is None else batches.at(position)


def _parse_sources(sources: Any, split: str) -> tuple[list[tuple[Any, str, Any, Any]], tuple[int, ...]]:
    """(info, split, classes, where) of each source, and the weights as the smallest integers."""
    try:
        pairs = [(source, weight) for source, weight in (sources.items() if isinstance(sources, Mapping) else sources)]
    except (TypeError, ValueError):
        pairs = []
    if not pairs:
        raise UsageError(
            f"sources must be a dict of dataset → weight, or a list of (source, weight), got {reprlib.repr(sources)}"
        )
    found, named = [], dict[str, Any]()
    for source, weight in pairs:
        given = source
        if isinstance(source, tuple) and len(source) == 2:
            given = {"dataset": source[0], "split": source[1]}
        elif not isinstance(source, Mapping):
            given = {"dataset": source}
        for name in given:
            if name not in _OF_SOURCE:
                raise UsageError(f"a source has no {name!r}: {meant(str(name), _OF_SOURCE)}")
        one = {"split": split, "classes": None, "where": None, "dataset": None, **given}
        found.append((load_info(one["dataset"]), one["split"], one["classes"], one["where"]))
        named[f"{len(named) + 1}, {found[-1][0].url}"] = weight
    weights = exact_weights("the weight of source", named)
    weights = tuple(weight // math.gcd(*weights) for weight in weights)
    if sum(weights) > MAX_PERIOD:
        raise UsageError(
            f"the weights {list(named.values())} have too many digits: as integers, their sum is above {MAX_PERIOD:,}"
        )
    return found, weights


def _note_classes(parts: Sequence[Part], classes: Sequence[str]) -> None:
    """Say which classes not all sources have."""
    if any(part.classes != tuple(classes) for part in parts):
        missing = [(part, sorted({*classes}.difference(part.classes))) for part in parts]
        said = "; ".join(f"{part} has no {first_few(names)}" for part, names in missing if names)
        warn_once("the sources' classes are joined by name, %d in all%s", len(classes), f": {said}" if said else "")


class MixBatches(TrainBatches):
    """What `mix` returns."""

    start: MixPosition

    def _name(self) -> str:
        weights = (one.weight for one in self.start.sources)
        return "mix of " + ", ".join(f"{weight} × {part}" for weight, part in zip(weights, self._parts, strict=True))

    def _steps_of(self, global_batch_size: int) -> int:
        return -(-self.start.records // global_batch_size)

    def _deal(self, begin: State, turn: tuple[int, int]) -> tuple[list[list[int]], Iterator[Sequence[RowNumbers]]]:
        # The row of the weights' rule that this host reads first, then where each batch ends.
        first = int(begins(self.start.rule, self.hosts)[self.host]) + cast(MixPosition, begin.position).row
        ends = first + self.batch_size * np.arange(len(self.sizes(begin.step)) + 1)
        by_part = [np.diff(self.start.rule.count(part, ends)).tolist() for part in range(len(self._parts))]
        return by_part, self._rows_by_part(ends[turn[0] : -1 : turn[1], None])

    def _rows_by_part(self, first: npt.NDArray[np.int64]) -> Iterator[Sequence[RowNumbers]]:
        """For each batch the rows of each part; `first`: int64 [batches, 1], the rule's number of its first row."""
        for at in range(0, len(first), _BATCHES_AT_ONCE):
            rows = first[at : at + _BATCHES_AT_ONCE] + np.arange(self.batch_size)
            for sources in self.start.rule.sources(rows.ravel()).reshape(rows.shape):
                yield [np.flatnonzero(sources == part).tolist() for part in range(len(self._parts))]


MixBatches._build = mix
