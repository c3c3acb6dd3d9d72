"""`train_batches` and `eval_batches`: a dataset's batches as NumPy arrays, without a framework.

    batches = imageshards.train_batches("gs://bucket/datasets/flowers/1.0.0", "train", global_batch_size=1024)
    for images, labels in batches:
        ...

`imageshards.as_tf`, `imageshards.as_jax` and `imageshards.as_torch` hand out the same batches.
"""

from __future__ import annotations

import copy
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt

from beam_pipeline.errors import ImageShardsError, UsageError
from beam_pipeline.schema.manifest import FOREIGN_KEY
from reader import order
from reader.augment import Augment
from reader.balance import Balance, Weights, weigh
from reader.buffers import BufferPool
from reader.cache import open_cache
from reader.engine import Batch, Cursor, Engine, Source
from reader.features import note_boxes, pick_features, stacked, warn_once
from reader.hosts import AutoHost, Host, batch_size_of, integer, process_of_several, share_of_host
from reader.info import DatasetInfo, as_info
from reader.machine import cpu_count
from reader.pixels import ImageDecoder
from reader.position import WINDOW_RUNS, Phase, Position
from reader.rows import RecordRows
from reader.runs import RunReader, SelectedTable
from reader.select import Classes, Selection, Where, select
from reader.skips import Skips
from reader.stream import BatchIterator, Element, State

_LOG = logging.getLogger("reader")

Info = DatasetInfo | str | os.PathLike[str]
ImageSize = int | tuple[int, int] | None
Labels = Literal["int", "one_hot"]
OnError = Literal["raise", "skip"]
Cache = str | os.PathLike[str] | None


class _Opened:
    """What it takes to read: the run index, storage clients, buffers, and what an iteration read for the next one."""

    def __init__(self, source: Source, pool: BufferPool, balance: Balance | None) -> None:
        self.source, self.pool, self.balance = source, pool, balance
        # Where the next iteration begins, and what was read for it.
        self.rest: tuple[Position, Cursor] | tuple[None, None] = None, None


class Batches:
    """What `train_batches` and `eval_batches` have in common.

    Args:
        arguments: of the builder.
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

    _is_training: ClassVar[bool]
    _build: ClassVar[Callable[..., Batches]]

    def __init__(self, arguments: Mapping[str, Any], start: Position) -> None:
        info, labels, on_error = arguments["info"], arguments["labels"], arguments["on_error"]
        if labels not in ("int", "one_hot"):
            raise UsageError(f"labels must be int or one_hot, got {labels!r}")
        if on_error not in ("raise", "skip"):
            raise UsageError(f"on_error must be raise or skip, got {on_error!r}")
        self.start = self._beginning = start
        self._arguments = arguments
        self.given_host: Host = arguments["host"]
        self.host, self.hosts, self._replicas = share_of_host(self.given_host)
        self.batch_size = batch_size_of(start.global_batch_size, self.hosts, self._replicas)
        self.steps = self._steps_of(start.global_batch_size)
        self.features = pick_features(info, arguments["features"] or ())
        selection: Selection | None = arguments["where"]
        self.classes = info.classes if selection is None else selection.classes
        self.one_hot_classes = len(self.classes) if labels == "one_hot" else None
        decode = ImageDecoder(
            info.image,
            arguments["image_size"],
            arguments["resize_mode"],
            arguments.get("augment"),
            is_foreign=FOREIGN_KEY in info.manifest,
        )
        self.shape = decode.shape
        is_stored = info.image.min_size == info.image.max_size == self.shape[:2]
        self._moves_pixels = not is_stored or arguments.get("augment") is not None
        self._rows = RecordRows(info, decode, self.features, None if selection is None else selection.labels)
        self._convert: Callable[[RecordRows], RecordRows] | None = None
        self._skips = Skips() if on_error == "skip" else None
        self._next = [State(start, 0)]  # where the next loop begins; shared with a copy that is `light`
        self._opened: _Opened | None = self._open()
        self._opened_elsewhere: Callable[[], _Opened | None] = lambda: None  # of the batches that this is `light` of

    def __repr__(self) -> str:
        info, split = self._arguments["info"], self._arguments["split"]
        host = f", host {self.host} of {self.hosts}" if self.hosts > 1 else ""
        images = f"{self.batch_size} images {'x'.join(map(str, self.shape))}"
        more = "".join(f", {name}" for name in self.features)
        return f"{type(self).__name__}({info.name} {info.version} {split}{host}: {len(self)} batches of {images}{more})"

    def __len__(self) -> int:
        """Batches of one iteration."""
        return self.steps * self._replicas

    def __iter__(self) -> BatchIterator:
        return BatchIterator(self)

    def __copy__(self) -> Self:
        new = object.__new__(type(self))
        vars(new).update(vars(self))
        return new

    def __reduce__(self) -> Any:  # another process opens the dataset itself
        arguments = {**self._arguments, **({"position": self.start} if self._is_training else {})}
        return _rebuilt, (type(self)._build, arguments, {"_next": self._next, "_convert": self._convert})

    @property
    def skipped(self) -> int:
        """How many corrupt records `on_error="skip"` has left out so far, each counted once."""
        return 0 if self._skips is None else self._skips.count

    def light(self) -> Self:
        """The same with arguments and integers only, for a function that is never freed: opens what it reads."""
        light = copy.copy(self)
        if self._opened is not None:
            light._opened, light._opened_elsewhere = None, weakref.ref(self._opened)
        return light

    def read_as(self, host: tuple[int, int]) -> None:
        """Read this host's part from here on."""
        self._arguments, self.given_host, (self.host, self.hosts) = {**self._arguments, "host": host}, host, host
        size, (before, step) = self.start.global_batch_size, (self.next_loop.position, self.next_loop.step)
        self.batch_size = batch_size_of(size, self.hosts)
        self.start = self.start.on(global_batch_size=size, hosts=self.hosts)
        self._next = [State(before.on(global_batch_size=size, hosts=self.hosts), step)]
        if self._opened is not None:
            self._opened.rest = None, None

    def at(self, position: Position, rest: bool = True) -> Self:
        """The same batches from another position on: files that are open stay open, nothing is checked again.

        Args:
            position: where the first loop begins.
            rest: the first loop is the rest of the iteration that the position is in, counted in batches of the size
                that it was made with; False for a full one, as all that follow.

        Raises:
            UsageError: it is another dataset's position, or of another seed than was given.
            ValueError: the batch can't be divided by the hosts.
        """
        moved = copy.copy(self)
        moved._resume(position, None if rest else 0)
        return moved

    def restore(self, state: State) -> None:
        """Resume from a state: the next loop is the rest of the interrupted one.

        Raises:
            UsageError, ValueError: it was saved by other batches.
        """
        self._resume(state.position, state.step)

    def _resume(self, position: Position, step: int | None) -> None:
        """Begin the next loop at a step of an iteration; None for the one that the position counts to."""
        start, steps = self._continued(position), self._steps_of(position.global_batch_size)
        step = position.batches_read % steps if step is None else step
        if step > steps:
            raise UsageError(f"not a state of batches: step {step} of an iteration of {steps}")
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

    def sizes(self, step: int, turn: tuple[int, int] = (0, 1)) -> list[int]:
        """Records of each batch that `read` yields."""
        sizes = self._sizes()[step * self._replicas :]
        return [size for size in sizes[turn[0] :: turn[1]] if size]

    def read(self, begin: State, turn: tuple[int, int] = (0, 1), threads: int | None = None) -> Iterator[Element]:
        """Batches of a loop.

        Args:
            begin: where it begins.
            turn: (index, count): only every count-th of them, from number index on.
            threads: that decode; None for one a core.
        """
        opened = self._opened or self._opened_elsewhere() or self._open()
        sizes, (index, count) = self.sizes(begin.step, turn), turn
        (position, cursor), opened.rest = opened.rest, (None, None)
        if cursor is None or count > 1 or position != begin.position:
            windows = self._windows(opened, begin)
            if count > 1:
                windows = order.turn(windows, self.sizes(begin.step), index, count)
            cursor = Cursor(windows)
        more: dict[str, Any] = {"seed": self.start.seed, "for_training": self._is_training}
        with Engine(
            opened.source, self._rows, cursor, sizes, threads=threads or cpu_count(), pool=opened.pool, **more
        ) as engine:
            for number in range(1, len(sizes) + 1):
                batch = engine.next_batch()
                if number == len(sizes):
                    if count == 1 and self._is_training:
                        opened.rest = self.loop_after(begin).position, engine.cursor()
                    opened.source.report()
                yield self._arrays(batch)

    def with_rows(self, convert: Callable[[RecordRows], RecordRows]) -> Self:
        """The same with other rows, made of these."""
        batches = copy.copy(self)
        batches._convert, batches._rows = convert, convert(self._rows)
        return batches

    def _open(self) -> _Opened:
        info, split, cache, where = (self._arguments[name] for name in ("info", "split", "cache", "where"))
        weights = self._arguments.get("balance")
        source = open_source(info, split, self._skips, cache, where, with_labels=weights is not None)
        table = source.reader.table
        balance = Balance(weights, table, self.classes) if weights and isinstance(table, SelectedTable) else None
        return _Opened(source, BufferPool(), balance)

    def _continued(self, position: Position) -> Position:
        """A position, continued by these hosts and batches."""
        if not isinstance(position, Position):
            raise UsageError(
                "position must be an imageshards.Position, such as batches.position_at(trained_steps), "
                f"got {position!r}"
            )
        for name, meaning in (("source", _differing(self.start, position)), ("records", "number of records")):
            ours, given = getattr(self.start, name), getattr(position, name)
            if ours != given:
                raise UsageError(f"the position was made with another {meaning}: {given!r}, here it is {ours!r}")
        for name in ("seed", "window_runs"):
            given, used = self._arguments.get(name), getattr(position, name)
            if given is not None and used not in (given, getattr(self._beginning, name)):  # windows may be cut
                raise UsageError(f"the position was made with another {name}: {used}, here it is {given}")
        return position.on(global_batch_size=self.start.global_batch_size, hosts=self.hosts)

    def _sizes(self) -> list[int]:
        """Records of each batch of an iteration."""
        return [self.batch_size] * len(self)

    def _arrays(self, batch: Batch) -> Element:
        """Images (a dict of them and the features, if any are wanted) and labels."""
        labels: npt.NDArray[Any] = batch.labels
        if self.one_hot_classes is not None:
            labels = np.zeros((len(batch.labels), self.one_hot_classes), np.float32)
            labels[np.arange(len(batch.labels)), batch.labels] = 1
        if not self.features:
            return batch.images, labels
        columns = zip(*batch.features, strict=True)
        values = {
            name: stacked(column, feature)
            for (name, feature), column in zip(self.features.items(), columns, strict=True)
        }
        if self._moves_pixels:
            note_boxes(self.features, values)
        return {"image": batch.images, **values}, labels

    def state_at(self, step: Any) -> State:
        """The state after a step that the trainer counted."""
        raise NotImplementedError

    def _steps_of(self, global_batch_size: int) -> int:
        """Steps of an iteration in batches of this size."""
        raise NotImplementedError

    def _position(self, state: State, steps: int) -> Position:
        """Of the next record, so many steps after a state."""
        raise NotImplementedError

    def _windows(self, opened: _Opened, begin: State) -> Iterator[order.Window]:
        """The records of a loop, in order."""
        raise NotImplementedError


def _differing(ours: Position, given: Position) -> str:
    """What two positions' sources differ in, in words."""
    (split, *_), (other_split, *_) = (position.source.split(" balance ") for position in (ours, given))
    if split == other_split:
        return "balance"
    is_dataset = split.partition(" ")[0] != other_split.partition(" ")[0]
    return "dataset or split" if is_dataset else "selection (classes, where)"


def _rebuilt(build: Callable[..., Batches], arguments: Mapping[str, Any], state: Mapping[str, Any]) -> Batches:
    """Batches in another process."""
    batches = build(**arguments)
    vars(batches).update(state)
    return batches if batches._convert is None else batches.with_rows(batches._convert)


class TrainBatches(Batches):
    """What `train_batches` returns: each iteration continues where the last one ended."""

    _is_training = True

    def position_at(self, step: Any) -> Position:
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

    def _position(self, state: State, steps: int) -> Position:
        return state.position.after(steps)

    def _windows(self, opened: _Opened, begin: State) -> Iterator[order.Window]:
        table = opened.source.reader.table
        epochs = order.each_once(table.first, table.mean_run)
        if opened.balance is not None:
            epochs = partial(opened.balance.draws, self.start.seed)
        return order.train_windows(epochs, begin.position, self.host)


class EvalBatches(Batches):
    """What `eval_batches` returns: each iteration is the same."""

    _is_training = False

    @property
    def is_padded(self) -> bool:
        """Whether all batches are full."""
        return bool(self._arguments["pad"])

    def state_at(self, step: Any) -> State:
        """The state after a step of the evaluation, or of one evaluation after the other."""
        return State(self.start, integer("step", step, 0) % self.steps)

    def _continued(self, position: Position) -> Position:
        super()._continued(position)
        if position != self.start:
            raise UsageError("the state of an evaluation is for the same hosts and batch size only")
        return position

    def _steps_of(self, global_batch_size: int) -> int:
        return -(-self.start.records // global_batch_size)

    def _position(self, state: State, steps: int) -> Position:
        return state.position

    def _sizes(self) -> list[int]:
        if self.is_padded:
            return super()._sizes()
        start, stop = order.eval_share(self.start.records, self.hosts, self.host)
        return [(stop - start) // len(self) + (number < (stop - start) % len(self)) for number in range(len(self))]

    def _windows(self, opened: _Opened, begin: State) -> Iterator[order.Window]:
        table = opened.source.reader.table
        start, stop = order.eval_share(self.start.records, self.hosts, self.host)
        sizes = self._sizes()
        first = min(start + sum(sizes[: begin.step * self._replicas]), stop)
        padding = sum(sizes[begin.step * self._replicas :]) - (stop - first)
        window_runs = order.each_once(table.first, table.mean_run)(0).window_runs(0, WINDOW_RUNS)
        return order.eval_windows(table.first, first, stop, padding, window_runs)

    def _arrays(self, batch: Batch) -> Element:
        return *super()._arrays(batch), batch.weights


def train_batches(
    info: Info,
    split: str,
    *,
    global_batch_size: int,
    image_size: ImageSize = None,
    resize_mode: str = "crop",
    seed: int | None = None,
    position: Position | None = None,
    host: Host = None,
    augment: Augment | None = None,
    labels: Labels = "int",
    features: Sequence[str] | None = None,
    classes: Classes = None,
    where: Where = None,
    balance: Literal["classes"] | Mapping[str, float] | Weights | None = None,
    epoch_records: int | None = None,
    window_runs: int | None = None,
    cache: Cache = None,
    on_error: OnError = "raise",
) -> TrainBatches:
    """An endless, globally shuffled stream of batches (images, labels), an epoch's worth in each iteration.

    One iteration is `len(batches)` batches, after a resume the rest of them; the next one continues where the last one
    that was read to its end stopped, so no record is dropped between epochs. Leaving an iteration early moves nothing.

    Args:
        info: from `load_info`, or the dataset's URL.
        split: TFDS split string, such as `train`, `train[:10%]`, `train+validation`.
        global_batch_size: records that all hosts together read in a step.
        image_size: side or (height, width) in pixels; None for the stored size.
        resize_mode: `crop`, `stretch` or `pad`, if `image_size` isn't the stored size.
        seed: of the order and of augmentation; None for the position's, or 0.
        position: where to resume: `batches.position_at(trained_steps)`, saved with the weights. The first loop is then
            the rest of the iteration. It brings its seed and window_runs; if they are given as well they must agree.
        host: which part of the records is read here: (index, count); "auto" for this process's, as torch.distributed,
            jax.distributed, torchrun or TF_CONFIG tells, then the mesh of `as_jax`; or the `tf.distribute.InputContext`
            of `distribute_datasets_from_function`, whose replicas then take a batch each; None for all.
        augment: `f(image, seed)`, of `imageshards.augment` or your own.
        labels: `int` or `one_hot`.
        features: names of further features that are wanted: a manifest's columns, or `filename`, `label`, `size`.
        classes: only records of these classes: a list of names, or a dict of names → new names, which merges those with
            the same one. Class ids then follow from the sorted new names: `batches.classes`.
        where: only the records that this function wants: `f(columns)` → bool [n], called once a shard with the columns
            of its record table by name, NumPy arrays of n values (docs/format.md): `lambda columns:
            columns["source_width"] >= 200`.
        balance: `classes` for as many records of each class in every epoch, or a dict of class → weight for shares in
            this ratio: an epoch has exactly these counts, and over any epochs the records of a class are read equally
            often, but for one.
        epoch_records: records in a balanced epoch; None for as many as are selected.
        window_runs: runs of 64 records that are shuffled together; larger values mix better but use more memory; None
            for the position's, or 16.
        cache: None, `memory` or a local folder: keeps undecoded what was read from remote storage.
        on_error: `raise`, or `skip` corrupt records: another record of the split takes the row of each; they are
            counted (`batches.skipped`) and logged at the end of an iteration.

    Returns:
        Batches of uint8 [b, height, width, channels] and int64 [b] (or float32 [b, classes]), b = global_batch_size /
        hosts. With `features`, the first is a dict of `image` and the features: [b] each, [b, n] if all records have n
        values; arrays of objects [b] for bytes and for lists of any length.

    Raises:
        ValueError: the batch can't be divided by the hosts or replicas.
        UsageError: the position is of another dataset or seed, no such split, class or column, nothing is selected,
            mixed stored sizes without `image_size`, or an argument's value is invalid.
        ImageShardsError: a shard is missing or has another size than the manifest says; or the dataset has no record
            tables to select by.
        CorruptRecordError: while iterating, after all batches before it: names file, record and byte offset.
    """
    arguments = _resolved(locals())
    batches = TrainBatches(arguments, _beginning(arguments))
    if global_batch_size > batches.start.records:
        _LOG.warning(
            "global_batch_size=%d is larger than split %r (%d records): records repeat within a batch",
            *(global_batch_size, split, batches.start.records),
        )
    return batches if position is None else batches.at(position)


def eval_batches(
    info: Info,
    split: str,
    *,
    global_batch_size: int,
    image_size: ImageSize = None,
    resize_mode: str = "crop",
    host: Host = None,
    labels: Labels = "int",
    features: Sequence[str] | None = None,
    classes: Classes = None,
    where: Where = None,
    pad: bool = True,
    cache: Cache = None,
    on_error: OnError = "raise",
) -> EvalBatches:
    """Every record exactly once, in file order, as batches (images, labels, weights).

    All batches are full and every host has as many; padding has weight 0, as has the row of a skipped record. Give
    metrics to Keras as `weighted_metrics=[…]`: plain `metrics` count the padding.

    Args: as `train_batches`, and
        pad: False for batches of nearly equal size without padding, as many on each host unless there are fewer
            records than hosts.

    Returns:
        Images and labels as of `train_batches`, and float32 [b] weights; ceil(records / global_batch_size) batches (for
        each replica of an InputContext).

    Raises: as `train_batches`.
    """
    arguments = _resolved(locals())
    return EvalBatches(arguments, _beginning(arguments))


TrainBatches._build, EvalBatches._build = train_batches, eval_batches


def _resolved(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a builder, with what another process could not find out again."""
    host = arguments["host"]
    if host == "auto":
        host = AutoHost(*process_of_several())
    if host is None and (several := process_of_several()[1]) > 1:
        warn_once("no host= is given, so each of %d processes reads every record: give host='auto'", several)
    info, split = as_info(arguments["info"]), arguments["split"]
    balance, epoch_records = arguments.get("balance"), arguments.get("epoch_records")
    where = select(info, split, arguments["classes"], arguments["where"], or_all=balance is not None)
    resolved = {**arguments, "info": info, "host": host, "classes": None, "where": where}
    if "balance" in arguments:
        resolved |= {"balance": weigh(where, balance, epoch_records), "epoch_records": None}
    return resolved


def _beginning(arguments: Mapping[str, Any]) -> Position:
    """Where the first epoch begins."""
    info, split = arguments["info"], arguments["split"]
    seed, window_runs = arguments.get("seed"), arguments.get("window_runs")
    _, hosts, replicas = share_of_host(arguments["host"])
    batch = integer("global_batch_size", arguments["global_batch_size"])
    batch_size_of(batch, hosts, replicas)
    runs = WINDOW_RUNS if window_runs is None else integer("window_runs", window_runs)
    phase = Phase(hosts, info.capped_window_runs(split, runs))
    seed = 0 if seed is None else integer("seed", seed)
    source, records = info.source(split), info.records(split)
    selection, weights = arguments["where"], arguments.get("balance")
    if selection is not None:
        source, records = f"{source} selection {selection.digest}", selection.size
    if weights is not None:
        source, records = f"{source} balance {weights.digest}", weights.records
    return Position(source, records, seed, batch, 0, (phase,), step=0)


def open_source(
    info: DatasetInfo,
    split: str,
    skips: Skips | None = None,
    cache: Cache = None,
    selection: Selection | None = None,
    with_labels: bool = False,
) -> Source:
    """Find the records of a split string and check that their files are there, with the sizes of the manifest.

    Raises:
        UsageError: no such split, or no such cache.
        ImageShardsError: a shard is missing or has another size, unless records are skipped; or it is
            compressed.
    """
    table = info.run_table(split) if selection is None else selection.table(info, split, with_labels)
    wrong = info.wrong_sizes(split)
    if wrong and skips is None:
        more = f" (and {len(wrong) - 1} more shards)" if len(wrong) > 1 else ""
        raise ImageShardsError(f"{wrong[0]}{more}: run the job again with --repair, or read with on_error='skip'")
    for line in wrong:
        _LOG.warning("%s: the records that it lacks are skipped", line)
    return Source(RunReader(table, open_cache(info, table, cache)), skips)
