"""The batches of an iteration in Python: its first and its last, and what a damaged record kept from being decoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from beam_pipeline.errors import ImageShardsError
from reader.blocks import StepBlocks

Tensor = Any  # TensorFlow ships no types

BEGIN = -(1 << 62)  # due before an iteration's first batch: never equal to what arrives, a step, its complement or END
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
    """Notes where an iteration begins and ends, and fills what is missing before a batch.

    Args:
        blocks: where the records come from.
        graph: what is done with them.
    """

    def __init__(self, blocks: StepBlocks, graph: Graph) -> None:
        self._blocks = blocks
        self._graph = graph

    def fill(self, due: Any, step: Any, *batch: Any) -> tuple[Any, ...]:
        """What is handed out when step `due` should come next, and the batch of `step` arrives.

        Not called after the iteration's last step was handed out.

        Args:
            due: number of a step, or `BEGIN`.
            step: number of a step, its complement (`~step`) where that is the iteration's last, or `END`.
            batch: what was made of the records, [b, …] each; [0, …] with `END`.

        Returns:
            The step that is due next, and the rows that are handed out, [n, …] for each of `batch`.

        Raises:
            ImageShardsError: why step `due` can't be made.
        """
        due, step, steps = int(due), int(step), self._blocks.steps
        is_end = step == END
        step = step if step >= 0 else ~step
        if due == BEGIN:
            due = self._blocks.next_begin if is_end else step - step % steps
        begin = due - due % steps
        arrives = begin + steps if is_end else step
        made = self._make_again(due, arrives)
        due += len(made)
        if due == arrives and not is_end:  # else an error follows, and what arrived is made again behind it
            made.append(batch)
            due += 1
        if due == begin + steps:
            self._blocks.finish(begin)
        return np.int64(due), *(made[0] if len(made) == 1 else map(np.concatenate, zip(*made, strict=True)))

    def _make_again(self, step: int, stop: int) -> list[Sequence[Any]]:
        """Steps [step, stop) again, with another record where one is damaged; TensorFlow runs eagerly.

        Raises: the error of step `step`; the steps before a later one with an error are made.
        """
        made: list[Sequence[Any]] = []
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
        return made
