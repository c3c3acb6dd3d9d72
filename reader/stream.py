"""An iteration of batches as an object whose state can be saved and restored, the same for every framework."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct, json

from beam_pipeline.errors import UsageError
from beam_pipeline.text import one_line
from reader.position import Position

if TYPE_CHECKING:
    from reader.batches import Batches

Element = tuple[Any, ...]  # of a batch: inputs, labels, and in evaluation weights


class State(Struct, frozen=True, forbid_unknown_fields=True):
    """Where a loop over batches stands, which is all that a resume takes.

    Attributes:
        position: of the next record.
        step: how many steps of the loop's iteration are read.
    """

    position: Position
    step: Annotated[int, Meta(ge=0)]

    @classmethod
    def parse(cls, saved: bytes | str | Mapping[str, Any]) -> State:
        """A state that an iterator or a dataset saved. Raises UsageError if it is something else."""
        try:
            state = _decoder.decode(saved if isinstance(saved, bytes | str) else json.encode(saved))
            Position.from_json(state.position.to_json())  # which checks that training could have got there
        except (ValueError, TypeError, RecursionError) as error:
            raise UsageError(f"not a state of batches: {reprlib.repr(saved)}: {one_line(error)}") from None
        return state

    def to_json(self) -> bytes:
        """What `parse` reads, under 10 kB."""
        return json.encode(self)

    def to_dict(self) -> dict[str, Any]:
        """The same as a dictionary."""
        state: dict[str, Any] = json.decode(self.to_json())
        return state


_decoder = json.Decoder(State)  # built by the import: see `schema.manifest.build_types`


class BatchIterator(Iterator[Element]):
    """One iteration over `train_batches` or `eval_batches`, or what an adapter makes of it.

    `get_state` and `set_state` are the protocol of Grain and Orbax, `state_dict` and `load_state_dict` that of PyTorch.
    The state counts the batches that this iterator has handed out: what an adapter holds back isn't in it.

    Args:
        batches: what is read.
        adapt: an iterator of NumPy batches → an iterator of as many batches of a framework, in the same order.
        is_endless: go on with the next iteration instead of ending.
    """

    def __init__(
        self,
        batches: Batches,
        adapt: Callable[[Iterator[Element]], Iterator[Element]] = iter,
        *,
        is_endless: bool = False,
    ) -> None:
        self._batches, self._adapt, self._is_endless = batches, adapt, is_endless
        self._begin: State | None = None  # where this loop began
        self._elements: Iterator[Element] = iter(())
        self._handed_out = self._left = 0  # batches
        self._is_exhausted = False

    def __next__(self) -> Element:
        if self._begin is None:
            self._start()
        while not self._left:
            self._is_exhausted = not self._is_endless
            if self._is_exhausted:
                raise StopIteration
            self._start()
        element = next(self._elements)  # after an error this is StopIteration
        self._handed_out += 1
        self._left -= 1
        if not self._left:
            self._end()
        return element

    def close(self) -> None:
        """End the threads that read ahead; dropping the iterator does it too."""
        self._elements = iter(())

    def get_state(self) -> bytes:
        """The state as JSON, under 10 kB: after the batch that was handed out last."""
        return self._state().to_json()

    def set_state(self, state: bytes | str) -> None:
        """Go on after the state: this iterator with the rest of its iteration, the batches with what follows it.

        Raises:
            UsageError, ValueError: it is no state, or another dataset's or seed's.
        """
        self._restore(state)

    def start_prefetch(self) -> None:
        """Grain's checkpoint handler calls this after `set_state`; reading ahead begins with the first batch."""

    def state_dict(self) -> dict[str, Any]:
        """As `get_state`, as a dictionary."""
        return self._state().to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `set_state`, from a dictionary."""
        self._restore(state)

    def _state(self) -> State:
        if self._begin is None:
            return self._batches.next_loop
        if self._is_exhausted:
            return self._batches.loop_after(self._begin)
        return self._batches.state(self._begin, self._handed_out)

    def _restore(self, saved: bytes | str | Mapping[str, Any]) -> None:
        self._batches.restore(State.parse(saved))
        self.close()
        self._begin = None

    def _start(self) -> None:
        self._begin = self._batches.next_loop
        self._handed_out, self._is_exhausted = 0, False
        self._left = len(self._batches.sizes(self._begin.step))
        self._elements = self._adapt(self._batches.read(self._begin))
        if not self._left:  # a state saved after the last batch of an iteration
            self._end()

    def _end(self) -> None:
        self.close()
        if self._begin is not None:
            self._batches.end(self._begin)
