"""What the reader does, seen from outside: the same functions record it and test it.

A *case* is what is asked, as JSON holds it; the result of an `observe_…` function is what was seen, as JSON holds it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

import reader

Case = Mapping[str, Any]
Seen = dict[str, Any]
_SHOWN_NAMES = 8


def open_split(info: reader.DatasetInfo, work: str, split: str, **options: Any) -> Any:
    """Batches to `train` or to `eval`, with file names; a host as JSON has it."""
    options = {"features": ["filename"], **options, "host": tuple(options.get("host", (0, 1)))}
    return getattr(reader, f"{work}_batches")(info, split, **options)


def names_of(batch: Any) -> list[str]:
    """The file names of a batch."""
    return [bytes(name).decode() for name in batch[0]["filename"]]


def summary(batches: Iterable[Any]) -> Seen:
    """File names, labels and weights of batches: how many, the first names, and a hash of all.

    What fills up a batch, with weight 0, may be any image: `-` stands for it.
    """
    lines: list[str] = []
    first: list[str] = []
    for batch in batches:
        labels = np.asarray(batch[1])
        values = [label.tolist() for label in labels] if labels.ndim > 1 else labels.tolist()
        items = [f"{name}:{label}" for name, label in zip(names_of(batch), values, strict=True)]
        if len(batch) > 2:
            weights = np.asarray(batch[2]).tolist()
            items = [f"{item}:{weight}" if weight else "-" for item, weight in zip(items, weights, strict=True)]
        first += items[: _SHOWN_NAMES - len(first)]
        lines.append(" ".join(items))
    return {"batches": len(lines), "first": first, "sha256": _sha256("\n".join(lines))}


def observe_train(info: reader.DatasetInfo, case: Case) -> Seen:
    """The first `steps` batches of one host, over as many iterations as it takes."""
    batches = open_split(info, "train", case["split"], **case["options"])
    endless = itertools.chain.from_iterable(itertools.repeat(batches))
    return {"len": len(batches), **summary(itertools.islice(endless, case["steps"]))}


def observe_iterations(info: reader.DatasetInfo, case: Case) -> list[Seen]:
    """One iteration after the other: so many batches of it and no more, or all for None."""
    batches = open_split(info, "train", case["split"], **case["options"])
    return [summary(itertools.islice(batches, count)) for count in case["iterations"]]


def observe_eval(info: reader.DatasetInfo, case: Case) -> list[Seen]:
    """All that each host evaluates."""
    hosts = ((host, case["hosts"]) for host in range(case["hosts"]))
    some = [open_split(info, "eval", case["split"], **{**case["options"], "host": host}) for host in hosts]
    return [{"len": len(batches), **summary(batches)} for batches in some]


def position_of(info: reader.DatasetInfo, case: Case) -> reader.Position:
    """The position that the case's moves lead to, each saved and loaded on the way."""
    begin = dict(case["begin"])
    host = (0, begin.pop("hosts"))
    position = reader.train_batches(info, case["split"], host=host, **begin).start
    for name, value in case["moves"]:
        position = position.after(value) if name == "after" else position.on(**value)
        position = reader.Position.from_json(position.to_json())
    return position


def observe_position(info: reader.DatasetInfo, case: Case, position: reader.Position) -> list[Seen]:
    """What each host reads from a position on, for each of the case's ways to go on."""
    seen = []
    for way in case["ways"]:
        for host in range(way["hosts"]):
            options = {key: value for key, value in way.items() if key not in ("hosts", "steps", "window_runs")}
            begin, hosts = position, way["hosts"]
            if way["window_runs"] != 16:
                begin = begin.on(hosts=hosts, **{key: way[key] for key in ("global_batch_size", "window_runs")})
            options |= {"host": (host, hosts), "seed": case["begin"]["seed"], "position": begin}
            seen.append(observe_train(info, {**case, "options": options, "steps": way["steps"]}))
    return seen


def state_of(info: reader.DatasetInfo, case: Case) -> str:
    """The state that iterators save after a case's runs, each resumed from the one before; the same on all hosts.

    Of each iteration of a run so many batches are read; null reads to its end.
    """
    saved: str | None = None
    for run in case["runs"]:
        states = set()
        for host in range(run["hosts"]):
            batches = _of_host(info, case, run, host)
            iterator = iter(batches)
            if saved is not None:
                iterator.set_state(saved)
            for number, count in enumerate(run["iterations"]):
                iterator = iter(batches) if number else iterator
                for _ in itertools.islice(iterator, count):
                    pass
            states.add(iterator.get_state().decode())
        (saved,) = states
    assert saved is not None
    return saved


def observe_state(info: reader.DatasetInfo, case: Case, state: str) -> list[list[Seen]]:
    """What each host reads from a state on, for each of the case's ways: the rest of an iteration, and the next one."""
    seen = []
    for way in case["ways"]:
        for host in range(way["hosts"]):
            batches = _of_host(info, case, way, host)
            iterator = iter(batches)
            iterator.set_state(state)
            seen.append([summary(iterator), summary(batches)])
    return seen


def _of_host(info: reader.DatasetInfo, case: Case, run: Case, host: int) -> Any:
    options = {**run.get("options", {}), "global_batch_size": run["global_batch_size"], "host": (host, run["hosts"])}
    return open_split(info, case["work"], case["split"], **options)


def write_seed(image: Any, seed: int) -> Any:
    """An augment that shows its seed: the first 8 bytes of the image are the seed's, little endian."""
    image = image.copy()
    image.reshape(-1)[:8] = np.frombuffer(int(seed).to_bytes(8, "little"), np.uint8)
    return image


def observe_seeds(info: reader.DatasetInfo, case: Case) -> list[Seen]:
    """The seed that each record is augmented with, epoch by epoch, whatever the order; of some, and a hash of all."""
    epochs = _augmented(info, case, write_seed, lambda image: int.from_bytes(image.tobytes()[:8], "little"))
    return [
        {
            "records": len(seeds),
            "some": dict(sorted(seeds.items())[:: len(seeds) // _SHOWN_NAMES]),
            "sha256": _sha256(json.dumps(seeds, sort_keys=True)),
        }
        for seeds in epochs
    ]


def observe_augment(info: reader.DatasetInfo, case: Case) -> list[Seen]:
    """What a named augment makes of each record, epoch by epoch; every record's image is the same one."""
    augment = getattr(reader.augment, case["augment"])
    epochs = _augmented(info, case, augment, lambda image: _sha256(image.tobytes())[:16])
    return [
        {
            "pictures": dict(sorted(Counter(pictures.values()).items())),
            "first": dict(sorted(pictures.items())[:_SHOWN_NAMES]),
            "sha256": _sha256(json.dumps(pictures, sort_keys=True)),
        }
        for pictures in epochs
    ]


def _augmented(info: reader.DatasetInfo, case: Case, augment: Any, look: Any) -> list[dict[str, Any]]:
    """File name → what `look` sees in its augmented image, for each epoch of all hosts together."""
    epochs: list[dict[str, Any]] = [{} for _ in range(case["epochs"])]
    for host in range(case["hosts"]):
        options = {**case["options"], "host": (host, case["hosts"]), "augment": augment}
        batches = open_split(info, "train", case["split"], **options)
        for epoch in epochs:
            for batch in batches:
                for name, image in zip(names_of(batch), np.asarray(batch[0]["image"]), strict=True):
                    assert name not in epoch
                    epoch[name] = look(image)
    return epochs


def _sha256(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


# Kind of a case → what is seen of it; the other kinds are of what is saved on the way.
SEEN: dict[str, Callable[[reader.DatasetInfo, Any], Any]] = {
    "train": observe_train,
    "iterations": observe_iterations,
    "eval": observe_eval,
    "seeds": observe_seeds,
    "augments": observe_augment,
}
