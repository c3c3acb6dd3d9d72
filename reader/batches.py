"""`train_batches` and `eval_batches`: a dataset's batches as NumPy arrays, without a framework.

    batches = imageshards.train_batches("gs://bucket/datasets/flowers/1.0.0", "train", global_batch_size=1024)
    for images, labels in batches:
        ...

`imageshards.as_tf`, `imageshards.as_jax` and `imageshards.as_torch` hand out the same batches.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, ParamSpec, TypeVar

from beam_pipeline.errors import UsageError
from beam_pipeline.text import meant
from reader.augment import Augment
from reader.balance import Weights, parse_balance
from reader.cache import Cache
from reader.features import warn_once
from reader.hosts import AutoHost, Host, batch_size_of, integer, process_of_several, share_of_host
from reader.info import DatasetInfo, load_info
from reader.position import WINDOW_RUNS, Phase, Position
from reader.rows import NOT_PADDED, Part
from reader.select import Classes, Where, select
from reader.stream import EvalBatches, TrainBatches

_LOG = logging.getLogger("reader")

Dataset = DatasetInfo | str | os.PathLike[str]
ImageSize = int | tuple[int, int] | None
Labels = Literal["int", "one_hot"]
OnError = Literal["raise", "skip"]

# Arguments of other libraries' readers → what to give here.
_ELSEWHERE = {
    "batch_size": "give global_batch_size=, the records that all hosts together read in a step",
    "shuffle": "train_batches always shuffles, eval_batches reads in file order",
}
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def names_arguments(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The function, whose error for an argument that it hasn't is a `UsageError` that says what was meant."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        for name in kwargs:
            if name not in known:
                elsewhere = _ELSEWHERE if "global_batch_size" in known else {}
                raise UsageError(f"there is no argument {name}=: {elsewhere.get(name) or meant(name, known)}")
        return function(*args, **kwargs)

    return call


@names_arguments
def train_batches(
    dataset: Dataset,
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
        dataset: what `load_info` returned, or the URL.
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
    batches = TrainBatches(*_resolved(locals()))
    if global_batch_size > batches.start.records:
        _LOG.warning(
            "global_batch_size=%d is larger than split %r (%d records): records repeat within a batch",
            *(global_batch_size, split, batches.start.records),
        )
    return batches if position is None else batches.at(position)


@names_arguments
def eval_batches(
    dataset: Dataset,
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
        pad: False for batches of nearly equal size without padding, as many on each host unless one has fewer records
            than there are steps.

    Returns:
        Images and labels as of `train_batches`, and float32 [b] weights; ceil(records / global_batch_size) batches (for
        each replica of an InputContext).

    Raises: as `train_batches`.
    """
    return EvalBatches(*_resolved(locals()))


TrainBatches._build, EvalBatches._build = train_batches, eval_batches


def _resolved(arguments: dict[str, Any]) -> tuple[dict[str, Any], list[Part], Position]:
    """The arguments of a builder, with what another process could not find out again; what is read; from where."""
    info, split, balance = load_info(arguments["dataset"]), arguments["split"], arguments.get("balance")
    where = select(info, split, arguments["classes"], arguments["where"], or_all=balance is not None)
    part = Part(info, split, where, parse_balance(where, balance, arguments.get("epoch_records")))
    host, batch, hosts = resolve_host(arguments["host"], arguments["global_batch_size"])
    resolved = {**arguments, "dataset": info, "host": host, "classes": None, "where": where}
    if "balance" in arguments:
        resolved |= {"balance": part.balance, "epoch_records": None}
    window_runs, seed = arguments.get("window_runs"), arguments.get("seed")
    runs = WINDOW_RUNS if window_runs is None else integer("window_runs", window_runs)
    phase = Phase(hosts, info.capped_window_runs(split, runs))
    seed = 0 if seed is None else integer("seed", seed)
    source = part.source + ("" if arguments.get("pad", True) else NOT_PADDED)
    return resolved, [part], Position(source, part.records, seed, batch, 0, (phase,), step=0)


def resolve_host(host: Host, global_batch_size: Any) -> tuple[Host, int, int]:
    """The host as another process can't find it out, the batch size, and how many hosts there are."""
    if host == "auto":
        host = AutoHost(*process_of_several())
    if host is None and (several := process_of_several()[1]) > 1:
        warn_once("no host= is given, so each of %d processes reads every record: give host='auto'", several)
    _, hosts, replicas = share_of_host(host)
    batch = integer("global_batch_size", global_batch_size)
    batch_size_of(batch, hosts, replicas)
    return host, batch, hosts
