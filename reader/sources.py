"""Python streams of records as `tf.data` datasets, by number: any element comes again by opening the stream there.

Not `Dataset.from_generator`: its kernel fixes glibc's mmap threshold at 128 kB for the whole process (mallopt in
`ApplyPython311MemoryPatch`, TensorFlow 2.21 on Python 3.11), so that every decoded image is mapped, faulted in and
unmapped: 400 µs of CPU an image instead of 270 at 224×224.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import tensorflow as tf

from beam_pipeline.errors import ImageShardsError
from reader.damage import Block, Decodes, Mender
from reader.open_streams import OpenStreams
from reader.skips import Skips

Dataset = Any  # tf.data.Dataset: TensorFlow ships no types
Tensor = Any

# Records that cross from Python into TensorFlow in one call, and are parsed in one: a call for each batch of 64 costs
# 9 µs a record more, 1,024 save nothing more.
_BLOCK_RECORDS = 512

# Blocks whose records are kept in the whole process, in case one of their batches doesn't decode: those between reading
# and handing out of one dataset, 7 MB each at 224×224. One that was dropped is read again.
_KEPT_BLOCKS = 3

_NOT_BEGUN = -1
_END = 1 << 62  # the "step" behind an iteration's last

# Our functions are written in TensorFlow's operations; AutoGraph takes 0.1 s to find nothing to rewrite in them.
as_it_is = tf.autograph.experimental.do_not_convert


class Stream(Protocol):
    """What hands out records in order, and what is done where one is damaged."""

    mender: Mender

    def find(self, count: int) -> Block:
        """The next `count` records, errors in their places."""


class Graph(Protocol):
    """What TensorFlow does with records: all of it stateless, so that it can be done again."""

    def parse(self, records: Tensor) -> tuple[Tensor, ...]:
        """Serialized records string [n] → the parsed tensors [n, …]; an error where one doesn't parse."""

    def prepare(self, seeds: Tensor, weights: Tensor, *parsed: Tensor) -> tuple[Tensor, ...]:
        """Parsed tensors [n, …] → what the trainer gets, [n, …]; an error where a record doesn't decode."""

    def fault(self, record: bytes) -> str | None:
        """Why one serialized record doesn't decode, or None."""


class BatchStream:
    """The batches of an endless stream, `steps` of them in each iteration of `dataset()`.

    An iteration begins after the last one whose final batch was handed out. That number is the only state: any step's
    batch can be had again by opening the stream there.

    A damaged record travels as an empty one, which doesn't parse or decode: its batch is left out by `ignore_errors`.
    Behind that, where batches are handed out in order, the gap is noticed, and Python makes these batches again: it
    raises the error that names the record, or takes another record in its place. That costs whole batches nothing; a
    try in TensorFlow itself (a dataset of one element) would cost each 0.8 ms.

    Args:
        open_at: the records from a step (from 0) on.
        batch_size: records in a batch.
        steps: batches of one iteration.
        is_endless: whether the next iteration goes on, or begins anew.
        skips: where skipped records are counted; None to raise.
    """

    _kept: ClassVar[OrderedDict[tuple[int, int, int], tuple[Mender, Block]]] = OrderedDict()
    _lock = threading.Lock()

    def __init__(
        self, open_at: Callable[[int], Stream], batch_size: int, steps: int, is_endless: bool, skips: Skips | None
    ) -> None:
        self._streams = OpenStreams(open_at)
        self._open_at = open_at
        self._batch_size = batch_size
        self._steps = steps
        self._is_endless = is_endless
        self._skips = skips
        self._finished_steps = 0
        self._failure: ImageShardsError | None = None
        self._specs: Sequence[Any] = ()  # of the tensors handed out

    def dataset(self, graph: Graph, prefetched_batches: int) -> Dataset:
        """A dataset of what `graph.prepare` makes of each batch."""
        block_batches = max(1, _BLOCK_RECORDS // self._batch_size)

        def block(first: Tensor, i: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            types = [tf.int64, tf.int64, tf.int32, tf.float32, tf.string]
            first, steps, seeds, weights, records = tf.numpy_function(self._take, [first, i, block_batches], types)
            columns = (
                tf.ensure_shape(steps, [None]),
                tf.ensure_shape(seeds, [None, 2]),
                tf.ensure_shape(weights, [None]),
            )
            return tf.ensure_shape(first, []), (*columns, *graph.parse(tf.ensure_shape(records, [None])))

        def prepare(steps: Tensor, seeds: Tensor, weights: Tensor, *parsed: Tensor) -> tuple[Tensor, ...]:
            return steps[0], *graph.prepare(seeds, weights, *parsed)

        # A scan, since each iteration has to remember where it began. (Every operation in these functions is optimized
        # anew for each iterator: 0.2 ms.)
        blocks = tf.data.Dataset.range(0, self._steps, block_batches).scan(np.int64(_NOT_BEGUN), as_it_is(block))
        batches = blocks.prefetch(1).rebatch(self._batch_size, drop_remainder=True)
        prepared = batches.map(as_it_is(prepare), num_parallel_calls=tf.data.AUTOTUNE).ignore_errors()
        return self._without_gaps(prepared.prefetch(prefetched_batches), graph)

    def _without_gaps(self, prepared: Dataset, graph: Graph) -> Dataset:
        """`prepared` with the missing batches, noting when the last one is handed out."""
        self._specs = prepared.element_spec[1:]
        end = tuple(tf.zeros([0, *spec.shape[1:]], spec.dtype) for spec in self._specs)
        # Twice, since what closes a gap is lost where only a part of the gap can be filled before an error.
        ends = tf.data.Dataset.from_tensors((np.int64(_END), *end)).repeat(2)

        def fill(expected: Tensor, element: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
            """`expected` counts the batches handed out in this iteration."""
            step, batch = element[0], element[1:]

            def gap_or_last() -> tuple[Tensor, ...]:
                types = [tf.int64, tf.int64, *(tensor.dtype for tensor in batch)]
                following, kept, *made = tf.numpy_function(
                    functools.partial(self._fill, graph), [expected, step], types
                )
                shaped = [tf.ensure_shape(new, [None, *old.shape[1:]]) for new, old in zip(made, batch, strict=True)]
                whole = [tf.concat((new, old[:kept]), 0) for new, old in zip(shaped, batch, strict=True)]
                return tf.ensure_shape(following, []), *whole

            is_next = (step % self._steps == expected) & (expected < self._steps - 1) & (step < _END)
            following, *whole = tf.cond(is_next, lambda: (expected + 1, *batch), gap_or_last)
            return following, tuple(whole)

        filled = prepared.concatenate(ends).scan(np.int64(0), as_it_is(fill))
        # The end itself is asked for where batches before it are missing, and never handed out.
        return filled.rebatch(self._batch_size, drop_remainder=True).take(self._steps)

    def _fill(self, graph: Graph, expected: Any, step: Any) -> tuple[Any, ...]:
        """What is to be handed out when batch `expected` of an iteration is due and step `step` (or `_END`) arrives.

        Returns:
            The batch that is due next, how many rows of the one that arrived are handed out, and what comes before it.
        """
        begin = self._finished_steps if step == _END else int(step) - int(step) % self._steps
        stop = self._steps if step == _END else int(step) - begin
        made = self._make_again(graph, begin + int(expected), begin + stop)
        following = int(expected) + len(made[0]) // self._batch_size
        kept = 0
        if following == stop and step != _END:  # else an error follows, and what arrived is made again behind it
            following, kept = following + 1, self._batch_size
        if following == self._steps:
            self._note(begin + self._steps)
        return np.int64(following), np.int64(kept), *made

    def _note(self, finished_steps: int) -> None:
        """The last batch of an iteration is handed out."""
        if self._is_endless:
            self._finished_steps = finished_steps
        if self._skips is not None:
            self._skips.report()

    def _take(self, first: Any, i: Any, batches: Any) -> tuple[Any, ...]:
        """`batches` batches of the iteration that began at step `first`, from its step `i` on. Never raises.

        An error here would end the iteration before the batches on their way were handed out.
        """
        if first == _NOT_BEGUN:
            first, self._failure = self._finished_steps, None  # the storage may be in order again
        step, next_step = int(first) + int(i), int(first) + min(int(i) + int(batches), self._steps)
        block = self._find(step, next_step)
        steps = np.repeat(np.arange(step, next_step), self._batch_size)
        return np.int64(first), steps, block.seeds, block.weights, np.array(block.records, object)

    def _find(self, step: int, next_step: int) -> Block:
        count = (next_step - step) * self._batch_size
        try:
            if self._failure is not None:
                raise self._failure
            stream = self._streams.at(step)
            block = stream.find(count)
            if self._skips is not None:
                block = stream.mender.mend(block)
            self._streams.leave(next_step, stream)
        except ImageShardsError as error:
            self._failure = error
            return _failed(count)
        with self._lock:
            self._kept[id(self), step, next_step] = stream.mender, block
            while len(self._kept) > _KEPT_BLOCKS:
                self._kept.popitem(last=False)
        return block

    def _make_again(self, graph: Graph, step: int, stop: int) -> list[Any]:
        """Steps [step, stop) again, with another record where one is damaged; TensorFlow runs eagerly.

        Raises: the error of step `step`; the steps before a later one with an error are made.
        """
        made: list[list[Any]] = []
        for number in range(step, stop):
            try:
                block = self._again(number, graph.fault)
                columns = tf.constant(block.seeds), tf.constant(block.weights), *graph.parse(tf.constant(block.records))
                made.append([tensor.numpy() for tensor in graph.prepare(*columns)])
            except (ImageShardsError, tf.errors.OpError):
                if not made:
                    raise
                break
        if not made:
            return [np.zeros([0, *spec.shape[1:]], spec.dtype.as_numpy_dtype) for spec in self._specs]
        return [np.concatenate(column) for column in zip(*made, strict=True)]

    def _again(self, step: int, fault: Decodes) -> Block:
        with self._lock:
            kept = [
                (mender, block.slice((step - first) * self._batch_size, (step + 1 - first) * self._batch_size))
                for (owner, first, last), (mender, block) in self._kept.items()
                if owner == id(self) and first <= step < last
            ]
        if kept:
            mender, block = kept[-1]
        else:
            if self._failure is not None:
                raise self._failure
            stream = self._open_at(step)
            mender, block = stream.mender, stream.find(self._batch_size)
        return mender.mend(mender.check(block, fault), fault)


def _failed(count: int) -> Block:
    """Records that don't decode."""
    nothing = np.zeros(count, np.int64)
    return Block([b""] * count, nothing, nothing, np.zeros((count, 2), np.int32), np.ones(count, np.float32), {})


def record_blocks(open_blocks: Callable[[], Iterator[list[bytes]]]) -> Dataset:
    """A dataset of string [n] for each block of records that an iterator yields; no block may be empty."""
    streams = OpenStreams(lambda number: itertools.islice(open_blocks(), number, None))

    def take(number: Any) -> Any:
        blocks = streams.at(int(number))
        records = next(blocks, [])
        if records:
            streams.leave(int(number) + 1, blocks)
        return np.array(records, object)

    def block(number: Tensor) -> Tensor:
        return tf.ensure_shape(tf.numpy_function(take, [number], tf.string), [None])

    return tf.data.Dataset.counter().map(block).take_while(lambda records: tf.size(records) > 0)
