"""Python streams of records as `tf.data` datasets, by number: any element comes again by opening the stream there.

Not `Dataset.from_generator`: its kernel fixes glibc's mmap threshold at 128 kB for the whole process (mallopt in
`ApplyPython311MemoryPatch`, TensorFlow 2.21 on Python 3.11), so that every decoded image is mapped, faulted in and
unmapped: 400 µs of CPU an image instead of 270 at 224×224.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import tensorflow as tf

from reader.stream import Block

Dataset = Any  # tf.data.Dataset: TensorFlow ships no types
Tensor = Any
S = TypeVar("S")

# Records that cross from Python into TensorFlow in one call, and are parsed in one: a call for each batch of 64 costs
# 9 µs a record more, 1,024 save nothing more.
_BLOCK_RECORDS = 512

# Streams that wait to be read on, in the whole process, each with up to two windows in memory. TensorFlow keeps the
# Python functions of a dataset for ever, so what an abandoned iterator left can only be bounded; a stream that was
# dropped is opened again where it was when its iterator goes on.
_OPEN_STREAMS = 8

_NOT_BEGUN = -1


class _OpenStreams(Generic[S]):
    """The streams of one dataset's iterators by the number of the next element: tf.data tells us of no iterator's end.

    Args:
        open_at: the stream from an element on.
    """

    _serial_numbers = itertools.count()
    _waiting: ClassVar[OrderedDict[tuple[int, int], Any]] = OrderedDict()
    _lock = threading.Lock()

    def __init__(self, open_at: Callable[[int], S]) -> None:
        self._open_at = open_at
        self._serial = next(self._serial_numbers)

    def at(self, number: int) -> S:
        """The stream whose next element is `number`; nobody else has it until `leave`."""
        with self._lock:
            stream: S | None = self._waiting.pop((self._serial, number), None)
        return self._open_at(number) if stream is None else stream

    def leave(self, number: int, stream: S) -> None:
        """Keep a stream whose next element is `number`."""
        with self._lock:
            self._waiting[self._serial, number] = stream
            while len(self._waiting) > _OPEN_STREAMS:
                self._waiting.popitem(last=False)


class Stream(Protocol):
    """What hands out records in order."""

    def take(self, count: int) -> Block:
        """The next `count` records."""


class BatchStream:
    """The batches of an endless stream, `steps` of them in each iteration of `dataset()`.

    An iteration begins after the last one whose final batch was noted by `note_end`. That number is the only state: any
    step's batch can be had again by opening the stream there.

    Args:
        open_at: the records from a step (from 0) on.
        batch_size: records in a batch.
        steps: batches of one iteration.
    """

    def __init__(self, open_at: Callable[[int], Stream], batch_size: int, steps: int) -> None:
        self._streams = _OpenStreams(open_at)
        self._batch_size = batch_size
        self._steps = steps
        self._finished_steps = 0

    def dataset(self, parse: Callable[[Tensor], tuple[Tensor, ...]]) -> Dataset:
        """A dataset of batches (step int64 [b], seeds int32 [b, 2], weights float32 [b], *parsed).

        Args:
            parse: string [n] → the parsed tensors [n, …].
        """
        block_batches = max(1, _BLOCK_RECORDS // self._batch_size)
        types = [tf.int64, tf.string, tf.int64, tf.int32, tf.float32]

        def block(first: Tensor, i: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            count = tf.minimum(self._steps - i, block_batches)
            first, records, step, seeds, weights = tf.numpy_function(self._take, [first, i, count], types)
            shaped = [
                tf.ensure_shape(step, [None]),
                tf.ensure_shape(seeds, [None, 2]),
                tf.ensure_shape(weights, [None]),
            ]
            return tf.ensure_shape(first, []), (*shaped, *parse(tf.ensure_shape(records, [None])))

        # A scan, since each iteration has to remember where it began.
        blocks = tf.data.Dataset.range(0, self._steps, block_batches).scan(np.int64(_NOT_BEGUN), block)
        return blocks.prefetch(1).rebatch(self._batch_size, drop_remainder=True)

    def note_end(self, step: Tensor, *batch: Tensor) -> tuple[Tensor, ...]:
        """Pass a batch on; if it is the last of its iteration, the next iteration begins behind it."""
        next_step = step[0] + 1
        is_last = next_step % self._steps == 0
        noted = tf.cond(is_last, lambda: tf.numpy_function(self._note, [next_step], tf.int64), lambda: next_step)
        with tf.control_dependencies([noted]):
            return tuple(map(tf.identity, batch))

    def _note(self, finished_steps: Any) -> Any:
        self._finished_steps = int(finished_steps)
        return finished_steps

    def _take(self, first: Any, i: Any, batches: Any) -> tuple[Any, ...]:
        """`batches` batches of the iteration that began at step `first`, from its step `i` on."""
        first = self._finished_steps if first == _NOT_BEGUN else int(first)
        step, next_step = first + int(i), first + int(i) + int(batches)
        stream = self._streams.at(step)
        block = stream.take((next_step - step) * self._batch_size)
        self._streams.leave(next_step, stream)
        steps = np.repeat(np.arange(step, next_step), self._batch_size)
        return np.int64(first), np.array(block.records, object), steps, block.seeds, block.weights


def record_blocks(open_blocks: Callable[[], Iterator[list[bytes]]]) -> Dataset:
    """A dataset of string [n] for each block of records that an iterator yields; no block may be empty."""
    streams = _OpenStreams(lambda number: itertools.islice(open_blocks(), number, None))

    def take(number: Any) -> Any:
        blocks = streams.at(int(number))
        records = next(blocks, [])
        if records:
            streams.leave(int(number) + 1, blocks)
        return np.array(records, object)

    def block(number: Tensor) -> Tensor:
        return tf.ensure_shape(tf.numpy_function(take, [number], tf.string), [None])

    return tf.data.Dataset.counter().map(block).take_while(lambda records: tf.size(records) > 0)
