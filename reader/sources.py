"""Python streams of records as `tf.data` datasets, by number: any element comes again by opening the stream there.

The life of a batch of 64, eight of which are a block:

    range(0, steps, 8)        places in the iteration at which a block begins
    scan: take, parse         Python reads the block's 512 records (`blocks`), TensorFlow parses them in one call. A
                              damaged record travels as an empty one, which doesn't parse or decode
    rebatch(64)               64 rows of one step: step, seed, weight, parsed features
    map: prepare              decoded, many batches at once; `ignore_errors` leaves out one that doesn't decode
    concatenate: END          behind the last step, so that a gap before it is noticed too
    scan: fill                the batch that is due is handed on; where a later one arrives, Python makes the missing
                              ones again (`gaps`): it raises the error that names the record, or takes another record
    rebatch(64), take(steps)  batches again, also where several filled a gap; END is never handed out

Whole batches pay one comparison for that; a try in TensorFlow itself (a dataset of one element) would cost each 0.8 ms.

Not `Dataset.from_generator`: its kernel fixes glibc's mmap threshold at 128 kB for the whole process (mallopt in
`ApplyPython311MemoryPatch`, TensorFlow 2.21 on Python 3.11), so that every decoded image is mapped, faulted in and
unmapped: 400 µs of CPU an image instead of 270 at 224×224.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from reader.blocks import StepBlocks
from reader.gaps import END, GapFiller, Graph
from reader.open_streams import OpenStreams

Dataset = Any  # tf.data.Dataset: TensorFlow ships no types
Tensor = Any

# Records that cross from Python into TensorFlow in one call, and are parsed in one: a call for each batch of 64 costs
# 9 µs a record more, 1,024 save nothing more.
_BLOCK_RECORDS = 512

# Our functions are written in TensorFlow's operations; AutoGraph takes 0.1 s to find nothing to rewrite in them.
as_it_is = tf.autograph.experimental.do_not_convert


def batch_dataset(blocks: StepBlocks, graph: Graph, prefetched_batches: int) -> Dataset:
    """A dataset of what `graph.prepare` makes of each batch: tuples of tensors [b, …]."""
    dataset = _without_gaps(_prepared(blocks, graph).prefetch(prefetched_batches), blocks, graph)
    blocks.streams.serve(dataset)
    return dataset


def _prepared(blocks: StepBlocks, graph: Graph) -> Dataset:
    """(step, what is made of it) of the batches that decode, in order."""
    block_batches = max(1, _BLOCK_RECORDS // blocks.batch_size)

    def take(begin: Any, place: Any) -> tuple[Any, ...]:
        step, stop, block = blocks.take(int(begin), int(place), block_batches)
        steps = np.repeat(np.arange(step, stop), blocks.batch_size)
        return np.int64(step - int(place)), steps, block.seeds, block.weights, np.array(block.records, object)

    def block(begin: Tensor, place: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        types = [tf.int64, tf.int64, tf.int32, tf.float32, tf.string]
        begin, steps, seeds, weights, records = tf.numpy_function(take, [begin, place], types)
        columns = (
            tf.ensure_shape(steps, [None]),
            tf.ensure_shape(seeds, [None, 2]),
            tf.ensure_shape(weights, [None]),
        )
        return tf.ensure_shape(begin, []), (*columns, *graph.parse(tf.ensure_shape(records, [None])))

    def prepare(steps: Tensor, seeds: Tensor, weights: Tensor, *parsed: Tensor) -> tuple[Tensor, ...]:
        return steps[0], *graph.prepare(seeds, weights, *parsed)

    # A scan, since each iteration has to remember where it began. (Every operation in these functions is optimized
    # anew for each iterator: 0.2 ms.)
    read = tf.data.Dataset.range(0, blocks.steps, block_batches).scan(np.int64(-1), as_it_is(block))
    batches = read.prefetch(1).rebatch(blocks.batch_size, drop_remainder=True)
    return batches.map(as_it_is(prepare), num_parallel_calls=tf.data.AUTOTUNE).ignore_errors()


def _without_gaps(prepared: Dataset, blocks: StepBlocks, graph: Graph) -> Dataset:
    """`prepared` without the steps, with the missing batches; it notes when the last one is handed out."""
    specs = prepared.element_spec[1:]
    filler = GapFiller(blocks, graph, specs)
    end = tuple(tf.zeros([0, *spec.shape[1:]], spec.dtype) for spec in specs)
    # Twice, since what closes a gap is lost where only a part of the gap can be filled before an error.
    ends = tf.data.Dataset.from_tensors((np.int64(END), *end)).repeat(2)

    def fill(due: Tensor, element: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`due` counts the batches handed out in this iteration."""
        step, batch = element[0], element[1:]

        def gap_or_last() -> tuple[Tensor, ...]:
            types = [tf.int64, tf.int64, *(tensor.dtype for tensor in batch)]
            following, kept, *made = tf.numpy_function(filler.fill, [due, step], types)
            shaped = [tf.ensure_shape(new, [None, *old.shape[1:]]) for new, old in zip(made, batch, strict=True)]
            whole = [tf.concat((new, old[:kept]), 0) for new, old in zip(shaped, batch, strict=True)]
            return tf.ensure_shape(following, []), *whole

        is_next = (step % blocks.steps == due) & (due < blocks.steps - 1) & (step < END)
        following, *whole = tf.cond(is_next, lambda: (due + 1, *batch), gap_or_last)
        return following, tuple(whole)

    filled = prepared.concatenate(ends).scan(np.int64(0), as_it_is(fill))
    return filled.rebatch(blocks.batch_size, drop_remainder=True).take(blocks.steps)


# Where a stream of blocks goes on: a few integers, whatever they mean to it.
Place = tuple[int, ...]


def record_blocks(open_at: Callable[[Place], Iterator[tuple[list[bytes], Place]]], beginning: Place) -> Dataset:
    """A dataset of string [n] for each block of records.

    Args:
        open_at: the blocks from a place on, each with the place behind it; none is empty.
        beginning: where an iteration begins.
    """
    streams = OpenStreams(open_at)

    def take(place: Any) -> tuple[Any, Any]:
        here = tuple(place.tolist())
        blocks = streams.at(here)
        records, following = next(blocks, ([], here))
        if records:
            streams.leave(following, blocks)
        return np.array(following, np.int64), np.array(records, object)

    def block(place: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        following, records = tf.numpy_function(take, [place], [tf.int64, tf.string])
        return tf.ensure_shape(following, [len(beginning)]), tf.ensure_shape(records, [None])

    counter = tf.data.Dataset.counter().scan(np.array(beginning, np.int64), as_it_is(block))
    dataset = counter.take_while(lambda records: tf.size(records) > 0)
    streams.serve(dataset)
    return dataset
