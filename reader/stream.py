"""`TrainBatches` and `EvalBatches`: streams of batches, and loops over them whose state can be saved and restored."""

from __future__ import annotations

import copy
import reprlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from msgspec import Meta, Struct, json

from beam_pipeline.errors import UsageError
from beam_pipeline.machine import cpu_count
from beam_pipeline.text import one_line
from reader import order
from reader.buffers import BufferPool
from reader.engine import Engine, RowNumbers
from reader.feeds import Cursor, Feed, Feeds, Source
from reader.hosts import Host, batch_size_of, integer, share_of_host
from reader.position import WINDOW_RUNS, AnyPosition, Position
from reader.rows import Content, Part, RecordRows, check_same

Element = tuple[Any, ...]  # of a batch: inputs, labels, and in evaluation weights


class State(Struct, frozen=True, forbid_unknown_fields=True):
    """Where a loop over batches stands, which is all that a resume takes.

    Attributes:
        position: of the next record.
        step: how many steps of the loop's iteration are read.
    """

    position: AnyPosition
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
        self._handed_out = self._size = 0  # batches, of this loop
        self._is_exhausted = False

    def __next__(self) -> Element:
        while self._begin is None or self._handed_out == self._size:
            self._is_exhausted = self._begin is not None and not self._is_endless
            if self._is_exhausted:
                raise StopIteration
            begin = self._begin = self._batches.next_loop
            self._handed_out, self._size = 0, len(self._batches.sizes(begin.step))
            self._elements = self._adapt(self._batches.read(begin))
            if not self._size:  # a state saved after the last batch of an iteration
                self._batches.end(begin)
        element = next(self._elements)  # after an error this is StopIteration
        self._handed_out += 1
        if self._handed_out == self._size:
            self.close()
            self._batches.end(self._begin)
        return element

    def close(self) -> None:
        """End the threads that read ahead; dropping the iterator does it too."""
        self._elements = iter(())

    def get_state(self) -> bytes:
        """The state as JSON, under 10 kB: after the batch that was handed out last."""
        return self._state().to_json()

    def set_state(self, state: bytes | str | Mapping[str, Any]) -> None:
        """Go on after the state: this iterator with the rest of its iteration, the batches with what follows it.

        Raises:
            UsageError, ValueError: it is no state, or another dataset's or seed's.
        """
        self._batches.restore(State.parse(state))
        self.close()
        self._begin = None

    def start_prefetch(self) -> None:
        """Grain's checkpoint handler calls this after `set_state`; reading ahead begins with the first batch."""

    def state_dict(self) -> dict[str, Any]:
        """As `get_state`, as a dictionary."""
        return self._state().to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `set_state`, from a dictionary."""
        self.set_state(state)

    def _state(self) -> State:
        if self._begin is None:
            return self._batches.next_loop
        if self._is_exhausted:
            return self._batches.loop_after(self._begin)
        return self._batches.state(self._begin, self._handed_out)


class _Opened:
    """Open datasets: run indexes, storage clients, buffers, and what an iteration read for the next one."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources, self.pool = sources, BufferPool()
        # Where a host's next iteration begins → what was read for it. `pop` gives it to one of several threads.
        self.rest: dict[tuple[int, AnyPosition], list[Cursor]] = {}


class _Loops:
    """Where loops over batches stand, as numbers: nothing is open here.

    Each iteration is as many steps; one that is resumed begins at a step within it. Here each is the same, as in
    evaluation; those of training go on where the last one ended.
    """

    _is_training: ClassVar[bool] = False

    def __init__(self, arguments: Mapping[str, Any], start: AnyPosition) -> None:
        self.start = self._beginning = start
        self._arguments = arguments
        self.given_host: Host = arguments["host"]
        self.host, self.hosts, self._replicas = share_of_host(self.given_host)
        self.batch_size = batch_size_of(start.global_batch_size, self.hosts, self._replicas)
        self.steps = self._steps_of(start.global_batch_size)
        self._next = [State(start, 0)]  # where the next loop begins; shared with a copy that is `light`

    def __len__(self) -> int:
        """Batches of one iteration."""
        return self.steps * self._replicas

    def __copy__(self) -> Self:
        new = object.__new__(type(self))
        vars(new).update(vars(self))
        return new

    def read_as(self, host: tuple[int, int]) -> None:
        """Read this host's part from here on."""
        self._arguments, self.given_host, (self.host, self.hosts) = {**self._arguments, "host": host}, host, host
        size, (before, step) = self.start.global_batch_size, (self.next_loop.position, self.next_loop.step)
        self.batch_size = batch_size_of(size, self.hosts)
        self.start = self.start.on(global_batch_size=size, hosts=self.hosts)
        self._next = [State(before.on(global_batch_size=size, hosts=self.hosts), step)]

    def at(self, position: AnyPosition, rest: bool = True) -> Self:
        """The same batches from another position on: files that are open stay open, nothing is checked again.

        Args:
            position: where the first loop begins.
            rest: the first loop is the rest of the iteration that the position is in, counted in batches of the size
                that it was made with; False for a full one, as all that follow.

        Raises:
            UsageError: it is another dataset's position, or of another seed than was given.
            ValueError: the batch can't be divided by the hosts.
        """
        check_same(self.start, position)
        moved, steps = copy.copy(self), self._steps_of(position.global_batch_size)
        moved.restore(State(position, position.batches_read % steps if rest else 0))
        return moved

    def restore(self, state: State) -> None:
        """Resume from a state: the next loop is the rest of the interrupted one.

        Raises:
            UsageError, ValueError: it was saved by other batches.
        """
        position, step = state.position, state.step
        check_same(self.start, position)
        for name in ("seed", "window_runs"):
            given, used = self._arguments.get(name), getattr(position, name, None)
            if given is not None and used not in (given, getattr(self._beginning, name)):  # windows may be cut
                raise UsageError(f"the position was made with another {name}: {used}, here it is {given}")
        if not self._is_training and position != self.start:
            raise UsageError("the state of an evaluation is for the same hosts and batch size only")
        start: Any = position.on(global_batch_size=self.start.global_batch_size, hosts=self.hosts)
        steps = self._steps_of(position.global_batch_size)
        if step > steps or (step and self._is_training and not position.records_read):  # the latter is an evaluation's
            read = f"of which {position.records_read} records are read"
            raise UsageError(f"not a state of batches: step {step} of an iteration of {steps}, {read}")
        # With another batch size an iteration has other steps: the same share of them is read, all if all were.
        share = -(-step * self.steps // steps)
        self.start, self._next = start, [State(start, share if step == steps else min(share, self.steps - 1))]

    @property
    def next_loop(self) -> State:
        """Where the next loop begins."""
        return self._next[0]

    def check_full(self) -> None:
        """Raise UsageError if the next loop is the rest of an iteration, for a framework that fixes its length."""
        if step := self.next_loop.step:
            raise UsageError(
                f"the batches begin at step {step} of an iteration of {self.steps}, but tf.data and Keras need full "
                "ones: give batches.at(position, rest=False), which begin at the same record"
            )

    def loop_after(self, begin: State) -> State:
        """Where the loop begins that follows one from here."""
        return State(self._position(begin, self.steps - begin.step), 0)

    def end(self, begin: State) -> None:
        """The last batch of the loop from here was handed out: the next one reads on behind it."""
        if self.next_loop is begin:  # else another iterator has ended it, or a state was restored
            self._next[0] = self.loop_after(begin)

    def state(self, begin: State, batches: int) -> State:
        """The state so many batches after another one."""
        steps, odd = divmod(batches, self._replicas)
        if odd:
            raise UsageError(f"{odd} of {self._replicas} replicas have their batch of this step: save between steps")
        return State(self._position(begin, steps), begin.step + steps)

    def sizes(self, step: int) -> list[int]:
        """Records of each batch of a loop that begins at a step of an iteration."""
        return [size for size in self._sizes()[step * self._replicas :] if size]

    def _sizes(self) -> list[int]:
        """Records of each batch of an iteration."""
        return [self.batch_size] * (self.steps * self._replicas)

    def state_at(self, step: Any) -> State:
        """The state after a step that the trainer counted: of one iteration, or of one after the other."""
        return State(self.start, integer("step", step, 0) % self.steps)

    def _steps_of(self, global_batch_size: int) -> int:
        """Steps of an iteration in batches of this size."""
        return -(-self.start.records // global_batch_size)

    def _position(self, state: State, steps: int) -> AnyPosition:
        """Of the next record, so many steps after a state."""
        return state.position


class Batches(_Loops):
    """What `train_batches` and `eval_batches` have in common.

    Args:
        arguments: of the builder.
        parts: what is read.
        start: where the first iteration begins.

    Attributes:
        start: `Position` where the first iteration begins.
        classes: names of the classes; a label is an index into it.
        steps: of one iteration; a batch each, or one for each replica of an InputContext.
        batch_size: records of a batch.
        given_host: `host=`, but an `AutoHost` for "auto".
        host, hosts: number of the host that reads here, and how many read together.
        shape: (height, width, channels) of an image.
        features: those that are read in addition to image and class, by name.
        one_hot_classes: how many, if labels are one-hot; else None.
    """

    _build: ClassVar[Callable[..., Batches]]

    def __init__(self, arguments: Mapping[str, Any], parts: Sequence[Part], start: AnyPosition) -> None:
        super().__init__(arguments, start)
        self._parts, self._content = parts, (content := Content(parts, arguments))
        self.classes, self.features, self.shape = content.classes, content.features, content.shape
        self.one_hot_classes, self._rows = content.one_hot_classes, content.rows
        self._convert: Callable[[RecordRows], RecordRows] | None = None
        opened = _Opened(content.open())
        self._opened: Callable[[], _Opened | None] = lambda: opened

    def __repr__(self) -> str:
        host = f", host {self.host} of {self.hosts}" if self.hosts > 1 else ""
        images = f"{self.batch_size} images {'x'.join(map(str, self.shape))}"
        more = "".join(f", {name}" for name in self.features)
        return f"{type(self).__name__}({self._name()}{host}: {len(self)} batches of {images}{more})"

    @staticmethod
    def check_given(given: object, function: str) -> None:
        """Raise UsageError if a function was given something else than batches."""
        if not isinstance(given, Batches):
            raise UsageError(
                f"imageshards.{function}({type(given).__name__}): give what train_batches or eval_batches returned"
            )

    def __iter__(self) -> BatchIterator:
        return BatchIterator(self)

    def __reduce__(self) -> Any:  # another process opens the dataset itself
        arguments = {**self._arguments, **({"position": self.start} if self._is_training else {})}
        return _rebuilt, (type(self)._build, arguments, {"_next": self._next, "_convert": self._convert})

    @property
    def skipped(self) -> int:
        """How many corrupt records `on_error="skip"` has left out so far, each counted once."""
        return sum(skips.count for skips in self._content.skips if skips is not None)

    def light(self) -> Self:
        """A copy without open files, safe to capture in a function that is never freed: it opens what it reads."""
        light = copy.copy(self)
        if (opened := self._opened()) is not None:
            light._opened = weakref.ref(opened)
        return light

    def with_rows(self, convert: Callable[[RecordRows], RecordRows]) -> Self:
        """The same with other rows, made of these."""
        batches = copy.copy(self)
        batches._convert, batches._rows = convert, [convert(rows) for rows in self._rows]
        return batches

    def read(self, begin: State, turn: tuple[int, int] = (0, 1), threads: int | None = None) -> Iterator[Element]:
        """Batches of a loop.

        Args:
            begin: where it begins.
            turn: (index, count): only every count-th of them, from number index on.
            threads: that decode; None for one a core.
        """
        opened, (index, count) = self._opened() or _Opened(self._content.open()), turn
        cursors = opened.rest.pop((self.host, begin.position), None) if count == 1 else None
        opened.rest.clear()
        sizes, (by_part, rows) = self.sizes(begin.step)[index::count], self._deal(begin, turn)
        if cursors is None:
            windows = self._windows(opened.sources, begin)
            if count > 1:
                windows = [order.turn(*one, index, count) for one in zip(windows, by_part, strict=True)]
            cursors = [Cursor(one) for one in windows]
        counts = [sum(sizes[index::count]) for sizes in by_part]
        of_parts = zip(opened.sources, self._rows, cursors, counts, strict=True)
        feeds = Feeds([Feed(*one, one[-1] / max(1, sum(counts)), self.start.seed) for one in of_parts])
        with Engine(feeds, sizes, rows, threads=threads or cpu_count(), pool=opened.pool) as engine:
            for number in range(1, len(sizes) + 1):
                batch = engine.next_batch()
                if number == len(sizes):
                    if count == 1 and self._is_training:
                        opened.rest = {(self.host, self.loop_after(begin).position): feeds.cursors()}
                    for skips in filter(None, self._content.skips):
                        skips.report()
                weights = () if self._is_training else (batch.weights,)
                yield *self._content.arrays(batch), *weights

    def _name(self) -> str:
        """What is read, in words."""
        return str(self._parts[0])

    def _deal(self, begin: State, turn: tuple[int, int]) -> tuple[list[list[int]], Iterator[Sequence[RowNumbers]]]:
        """Of each part, how many records of it each batch of a loop has; for each that `read` yields, their rows."""
        sizes = self.sizes(begin.step)
        return [sizes], ([range(size)] for size in sizes[turn[0] :: turn[1]])

    def _windows(self, sources: Sequence[Source], begin: State) -> list[Iterator[order.Window]]:
        """The records of a loop by part, in order."""
        raise NotImplementedError


def _rebuilt(build: Callable[..., Batches], arguments: Mapping[str, Any], state: Mapping[str, Any]) -> Batches:
    """Batches in another process."""
    batches = build(**arguments)
    vars(batches).update(state)
    return batches if batches._convert is None else batches.with_rows(batches._convert)


class TrainBatches(Batches):
    """What `train_batches` returns: each iteration continues where the last one ended."""

    _is_training = True

    def position_at(self, step: Any) -> Any:
        """The position after a global step: what a checkpoint keeps besides the weights.

        Args:
            step: steps trained since the run first began, through every resume: an int, Keras'
                `optimizer.iterations`, a NumPy or JAX scalar. Iterations that were left early don't count.

        Raises:
            UsageError: it is no integer, or below `start.step`.
        """
        return self.start.at(step)

    def state_at(self, step: Any) -> State:
        """The state after a global step. Raises UsageError as `position_at`."""
        position, (before, read) = self.position_at(step), (self.next_loop.position.step, self.next_loop.step)
        return State(position, (read + position.step - before) % self.steps)

    def repeat(self) -> BatchIterator:
        """Iteration after iteration, without end."""
        return BatchIterator(self, is_endless=True)

    def _steps_of(self, global_batch_size: int) -> int:
        return max(1, self.start.records // global_batch_size)

    def _position(self, state: State, steps: int) -> AnyPosition:
        return state.position.after(steps)

    def _windows(self, sources: Sequence[Source], begin: State) -> list[Iterator[order.Window]]:
        both: Any = zip(sources, begin.position.parts, strict=True)
        return [order.train_windows(source.epochs(part.seed), part, self.host) for source, part in both]


class EvalBatches(Batches):
    """What `eval_batches` returns: each iteration is the same."""

    def __len__(self) -> int:
        return len(self.sizes(0))  # without padding a host may have fewer records than steps

    @property
    def is_padded(self) -> bool:
        """Whether all batches are full."""
        return bool(self._arguments["pad"])

    def _sizes(self) -> list[int]:
        if self.is_padded:
            return super()._sizes()
        start, stop = order.eval_share(self.start.records, self.hosts, self.host)
        size, more = divmod(stop - start, count := self.steps * self._replicas)
        return [size + 1] * more + [size] * (count - more)

    def _windows(self, sources: Sequence[Source], begin: State) -> list[Iterator[order.Window]]:
        (source,) = sources
        start, stop = order.eval_share(self.start.records, self.hosts, self.host)
        sizes = self._sizes()
        first = min(start + sum(sizes[: begin.step * self._replicas]), stop)
        padding = sum(sizes[begin.step * self._replicas :]) - (stop - first)
        window_runs = source.epochs(self.start.seed)(0).window_runs(0, WINDOW_RUNS)
        return [order.eval_windows(source.reader.table.first, first, stop, padding, window_runs)]
