"""Batches that a damaged record kept from being decoded: made again in Python, where they are due."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from beam_pipeline.errors import ImageShardsError
from reader.blocks import StepBlocks

Tensor = Any  # TensorFlow ships no types

END = 1 << 62  # the "step" behind an iteration's last


class Graph(Protocol):
    """What TensorFlow does with records: all of it stateless, so that it can be done again."""

    def parse(self, records: Tensor) -> tuple[Tensor, ...]:
        """Serialized records string [n] → the parsed tensors [n, …]; an error where one doesn't parse."""

    def prepare(self, seeds: Tensor, weights: Tensor, *parsed: Tensor) -> tuple[Tensor, ...]:
        """Parsed tensors [n, …] → what the trainer gets, [n, …]; an error where a record doesn't decode."""

    def fault(self, record: bytes) -> str | None:
        """Why one serialized record doesn't parse or decode, or None."""


class GapFiller:
    """Fills what is missing before a batch.

    Args:
        blocks: where the records come from.
        graph: what is done with them.
        specs: of the tensors handed out, [b, …] each.
    """

    def __init__(self, blocks: StepBlocks, graph: Graph, specs: Sequence[Any]) -> None:
        self._blocks = blocks
        self._graph = graph
        self._specs = specs

    def fill(self, due: Any, step: Any) -> tuple[Any, ...]:
        """What is handed out when batch number `due` of an iteration should come next, and `step` (or `END`) arrives.

        Returns:
            The number of the batch that is due next, how many rows of what arrived are handed out (all or none), and
            the rows that come before them, [n, …] for each of `specs`.

        Raises:
            ImageShardsError: why batch `due` can't be made.
        """
        due, step, steps = int(due), int(step), self._blocks.steps
        begin = self._blocks.next_begin if step == END else step - step % steps
        arrived = steps if step == END else step - begin
        made = self._make_again(begin + due, begin + arrived)
        due += len(made[0]) // self._blocks.batch_size
        kept = 0
        if due == arrived and step != END:  # else an error follows, and what arrived is made again behind it
            due, kept = due + 1, self._blocks.batch_size
        if due == steps:
            self._blocks.finish(begin)
        return np.int64(due), np.int64(kept), *made

    def _make_again(self, step: int, stop: int) -> list[Any]:
        """Steps [step, stop) again, with another record where one is damaged; TensorFlow runs eagerly.

        Raises: the error of step `step`; the steps before a later one with an error are made.
        """
        made: list[list[Any]] = []
        for number in range(step, stop):
            try:
                block = self._blocks.again(number, self._graph.fault)
                parsed = self._graph.parse(tf.constant(block.records))
                prepared = self._graph.prepare(tf.constant(block.seeds), tf.constant(block.weights), *parsed)
                made.append([tensor.numpy() for tensor in prepared])
            except (ImageShardsError, tf.errors.OpError):
                if not made:
                    raise
                break
        if not made:
            return [np.zeros([0, *spec.shape[1:]], spec.dtype.as_numpy_dtype) for spec in self._specs]
        return [np.concatenate(column) for column in zip(*made, strict=True)]
