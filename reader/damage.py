"""What happens where a record is damaged: an error that names it, or another record in its place.

A skipped record's place is taken by another record of the split, which follows from (seed, epoch, number): no batch
gets smaller, every other record stays in its place, and hosts, positions and resumes are the same as without damage. In
evaluation the place gets weight 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from beam_pipeline.errors import CorruptRecordError, ImageShardsError
from reader import order
from reader.run_table import Integers
from reader.runs import RunReader
from reader.skips import Skips

# Draws of a run for one that is damaged. With half of a split gone, one in 65,000 of them all fail.
_DRAWS = 16

Decodes = Callable[[bytes], str | None]


class Block(NamedTuple):
    """Records that follow each other for one host.

    Attributes:
        records: serialized records, in order; b"" where there is an error.
        numbers: int64 [n], their numbers in the split string's selection; -1 for padding.
        epochs: int64 [n], the pass over the records that each belongs to.
        seeds: int32 [n, 2], a stateless seed for each record's augmentation.
        weights: float32 [n], 1 for a record and 0 for padding.
        errors: place → what is wrong with the record there.
    """

    records: list[bytes]
    numbers: Integers
    epochs: Integers
    seeds: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    errors: dict[int, ImageShardsError]

    def slice(self, begin: int, end: int) -> Block:
        """Places [begin, end)."""
        return Block(
            self.records[begin:end],
            self.numbers[begin:end],
            self.epochs[begin:end],
            self.seeds[begin:end],
            self.weights[begin:end],
            {place - begin: error for place, error in self.errors.items() if begin <= place < end},
        )


class Mender:
    """Raises, or replaces, what is damaged in a block.

    Args:
        reader: of the records.
        seed: of the order.
        skips: where what is skipped is counted; None to raise.
        for_training: whether another record takes the place of a skipped one, or nothing does (weight 0).
    """

    def __init__(self, reader: RunReader, seed: int, skips: Skips | None, for_training: bool) -> None:
        self._reader = reader
        self._seed = seed
        self._skips = skips
        self._for_training = for_training

    def mend(self, block: Block, decodes: Decodes | None = None) -> Block:
        """The block without errors; what takes a place passes `decodes`, where given.

        Raises:
            CorruptRecordError: the first error, unless damage is skipped.
            StorageError: a file can't be read; never skipped.
        """
        if not block.errors:
            return block
        places = sorted(block.errors)
        for place in places:
            error = block.errors[place]
            if self._skips is None or not isinstance(error, CorruptRecordError):
                raise error from None
            if block.numbers[place] >= 0:
                self._skips.add(int(block.numbers[place]), error)
        records, weights = list(block.records), block.weights.copy()
        for place, record in zip(places, self._substitutes(block, places, decodes), strict=True):
            records[place] = record
            weights[place] *= self._for_training
        return block._replace(records=records, weights=weights, errors={})

    def check(self, block: Block, decodes: Decodes) -> Block:
        """The block with an error for each record that `decodes` finds a fault with."""
        errors = dict(block.errors)
        for place, record in enumerate(block.records):
            fault = None if place in errors else decodes(record)
            if fault is None:
                continue
            errors[place] = error = self._name(int(block.numbers[place]), fault)
            if self._skips is not None and block.numbers[place] >= 0:
                self._skips.undecodable[int(block.numbers[place])] = error
        records = [b"" if place in errors else record for place, record in enumerate(block.records)]
        return block._replace(records=records, errors=errors)

    def _name(self, number: int, fault: str) -> CorruptRecordError:
        """The error of a record whose CRC is right; padding is a copy of a record that has its own place elsewhere."""
        table = self._reader.table
        if number < 0:
            return CorruptRecordError(table.files[0], -1, 0, f"what pads the last batch is damaged: {fault}")
        file, file_record = table.locate(number)
        return CorruptRecordError(file, file_record, self._reader.offset(number), fault)

    def _substitutes(self, block: Block, places: list[int], decodes: Decodes | None) -> list[bytes]:
        """A right record for each of these places."""
        found: dict[int, bytes] = {}
        first = self._reader.table.first
        for draw in range(_DRAWS):
            missing = [place for place in places if place not in found]
            if not missing:
                break
            candidates = np.array(
                [
                    order.substitute(first, self._seed, int(block.epochs[place]), int(block.numbers[place]), draw)
                    for place in missing
                ]
            )
            for place, number, record in zip(missing, candidates, self._reader.find(candidates), strict=True):
                is_known = self._skips is not None and int(number) in self._skips.undecodable
                if isinstance(record, bytes) and not is_known and (decodes is None or decodes(record) is None):
                    found[place] = record
        if len(found) < len(places):
            file = self._reader.table.files[0]
            raise ImageShardsError(
                f"{file}: {_DRAWS} records drawn for a damaged one's place are damaged too; run the job with --repair"
            )
        return [found[place] for place in places]
