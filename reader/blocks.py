"""A stream's batches by the number of their step: what tf.data asks Python for, in blocks, and one by one again."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import ClassVar, Protocol

import numpy as np

from beam_pipeline.errors import ImageShardsError
from reader.damage import Block, Decodes, Mender
from reader.open_streams import OpenStreams
from reader.skips import Skips


class Stream(Protocol):
    """What hands out records in order, and what is done where one is damaged."""

    mender: Mender

    def find(self, count: int) -> Block:
        """The next `count` records, errors in their places."""


class StepBlocks:
    """The batches of an endless stream, `steps` of them in each iteration of a dataset.

    A batch that doesn't decode is wanted again. Where damage is skipped, blocks are kept for that until their batches
    are handed out: 512 records of 224×224 are 7 MB, a batch of 4,096, which is a block, 55 MB. With `raise`, or where
    a block was dropped, its window is read again.

    A step's number counts batches through all iterations. An iteration begins after the last one whose final batch was
    handed out: that number is the only state, since any step's batch can be had by opening the stream there.

    Args:
        open_at: the records from a step (from 0) on.
        batch_size: records in a batch.
        steps: batches of one iteration.
        is_endless: whether the next iteration goes on, or begins anew.
        skips: where skipped records are counted; None to raise.
    """

    _serial_numbers = itertools.count()
    # Of all datasets of the process, since TensorFlow never lets go of one.
    _kept: ClassVar[OrderedDict[tuple[int, int, int], tuple[Mender, Block]]] = OrderedDict()
    _lock = threading.Lock()

    def __init__(
        self, open_at: Callable[[int], Stream], batch_size: int, steps: int, is_endless: bool, skips: Skips | None
    ) -> None:
        self.batch_size = batch_size
        self.steps = steps
        self.streams = OpenStreams(open_at)
        self.next_begin = 0
        self._open_at = open_at
        self._is_endless = is_endless
        self._skips = skips
        self._serial = next(self._serial_numbers)
        self._failure: tuple[int, ImageShardsError] | None = None  # and the first step that it kept from being read

    def take(self, begin: int, place: int, batches: int, kept: int) -> tuple[int, int, Block]:
        """Up to `batches` batches of an iteration. Never raises where records can't be read: see `again`.

        An error here would end the iteration before the batches on their way were handed out.

        Args:
            begin: the iteration's first step, -1 where it begins now.
            place: number of the first batch in the iteration.
            kept: blocks, this one too, that are kept where damage is skipped.

        Returns:
            The first step, the one behind the last, and their records.
        """
        if place == 0:
            self._failure = None  # the storage may be in order again
        begin = self.next_begin if begin < 0 else begin
        step, stop = begin + place, begin + min(place + batches, self.steps)
        count = (stop - step) * self.batch_size
        try:
            if self._failure is not None:
                raise self._failure[1]
            stream = self.streams.at(step)
            block = stream.find(count)
            if self._skips is not None:
                block = stream.mender.mend(block)
                self._keep(step, stop, stream.mender, block, kept)
            self.streams.leave(stop, stream)
        except ImageShardsError as error:
            self._failure = self._failure or (step, error)
            return step, stop, _empty_records(count)
        return step, stop, block

    def again(self, step: int, fault: Decodes) -> Block:
        """One step's records, all of them right.

        Args:
            fault: says of a record why it doesn't decode, or None.

        Raises:
            CorruptRecordError: names file, record and offset of the first wrong record, unless damage is skipped.
            StorageError: a file can't be read.
        """
        mender, block = self._kept_batch(step) or self._read_batch(step)
        return mender.mend(mender.check(block, fault), fault)

    def finish(self, begin: int) -> None:
        """The last batch of the iteration that began at step `begin` is handed out."""
        if self._is_endless:
            self.next_begin = begin + self.steps
        if self._skips is not None:
            self._skips.report()

    def _keep(self, step: int, stop: int, mender: Mender, block: Block, kept: int) -> None:
        with self._lock:
            self._kept[self._serial, step, stop] = mender, block
            self._kept.move_to_end((self._serial, step, stop))
            while len(self._kept) > kept:
                self._kept.popitem(last=False)

    def _kept_batch(self, step: int) -> tuple[Mender, Block] | None:
        with self._lock:
            for (serial, first, stop), (mender, block) in self._kept.items():
                if serial == self._serial and first <= step < stop:
                    row = (step - first) * self.batch_size
                    return mender, block.slice(row, row + self.batch_size)
        return None

    def _read_batch(self, step: int) -> tuple[Mender, Block]:
        if self._failure is not None and step >= self._failure[0]:
            raise self._failure[1]
        stream = self._open_at(step)
        return stream.mender, stream.find(self.batch_size)


def _empty_records(count: int) -> Block:
    """Records that don't decode."""
    nothing = np.zeros(count, np.int64)
    return Block([b""] * count, nothing, nothing, np.zeros((count, 2), np.int32), np.ones(count, np.float32), {})
