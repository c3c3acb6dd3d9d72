"""`--exclude`: images that a list leaves out. `checked` reads it before the job; `kept`, in every listing, acts on it.

`schema.exclude` says what its lines and groups mean. Workers read it by its URL, and hold 9 bytes for each path.
"""

from __future__ import annotations

import codecs
import dataclasses
import functools
import hashlib
import json
import threading
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from beam_pipeline import storage
from beam_pipeline.config import Config, wrong
from beam_pipeline.errors import ImageShardsError, UsageError
from beam_pipeline.inputs.references import ImageRef
from beam_pipeline.schema.exclude import ListedImage
from beam_pipeline.schema.job import Excluded
from beam_pipeline.schema.table import name_hash, order_key
from beam_pipeline.text import nearest, plural

if TYPE_CHECKING:
    from beam_pipeline.inputs.folders import ListingSummary

_OPEN, _NO_GROUP = -1, 0
_FORM = 'write {"path": "cat/1.jpg"} in one line, with "reason", "group" and "keep" (true or false) if it has them'


class _List(NamedTuple):
    """The list as a process holds it: its SHA-256, its paths' order keys, sorted, and which of them are left out."""

    sha256: str
    keys: memoryview
    are_out: memoryview


def checked(config: Config) -> Config:
    """For the launcher: the configuration with the list's SHA-256, by which workers know that they read the same one.

    Raises:
        UsageError: no such file, a malformed line, or a group without a decision.
    """
    if not config.exclude or config.exclude_sha256:
        return config
    soon = dataclasses.replace(config, io_deadline=config.first_contact_s)
    return dataclasses.replace(config, exclude_sha256=_read(soon).sha256)


def kept(config: Config, refs: Iterable[ImageRef], summary: ListingSummary) -> Iterator[ImageRef]:
    """The images that the list doesn't leave out, streamed; `summary` counts the others, whose classes stay."""
    if not config.exclude:
        yield from refs
        return
    listed = _of_process(config)
    for ref in refs:
        at = bisect_left(listed.keys, ref.order_key)  # a hash of the path's NFC form
        is_on_list = at < len(listed.keys) and listed.keys[at] == ref.order_key
        if is_on_list:
            summary.on_list.append(ref.order_key)
        if is_on_list and listed.are_out[at]:
            summary.excluded += 1
            summary.class_counts[ref.label] += 0
        else:
            yield ref


def outcome(config: Config, summary: ListingSummary) -> Excluded | UnsetType:
    """What run.json says of the list, by the summary of all images: also which of its paths match none."""
    if not config.exclude:
        return UNSET
    unmatched = np.setdiff1d(_of_process(config).keys, np.array(summary.on_list))
    few = unmatched[:3].tolist()
    paths = sorted({line.path for key, _, line in _lines(config) if key in few}) if few else ()
    # What follows the ? of a web address may be a secret.
    url = config.exclude.partition("?")[0] if storage.scheme_of(config.exclude) == "http" else config.exclude
    return Excluded(url, config.exclude_sha256, summary.excluded, len(unmatched), tuple(paths))


_held: dict[tuple[str, str, int], _List] = {}  # one at a time
_one_reads = threading.Lock()  # of a process's threads


def _of_process(config: Config) -> _List:
    key = config.exclude_sha256, config.input, config.seed
    with _one_reads, suppress(UsageError):
        if key not in _held:
            _held.clear()
            _held[key] = _read(config)
        if _held[key].sha256 == config.exclude_sha256:
            return _held[key]
    what = f"a worker doesn't find the list that the command read (SHA-256 {config.exclude_sha256[:12]}…)"
    fix = "put it back where every worker can read it, and run the same command again"
    raise ImageShardsError(f"--exclude {config.exclude!r}: {what}: {fix}")


def _read(config: Config) -> _List:
    """The list with its groups decided."""
    digest, keys, groups, keeps = hashlib.sha256(), array("Q"), array("Q"), array("b")
    for key, group, line in _lines(config, digest.update):
        keys.append(key)
        groups.append(group)
        keeps.append(_OPEN if line.keep is None else line.keep)
    keep, group_of = np.array(keeps), np.array(groups)
    unique, first, number = np.unique(group_of, return_index=True, return_inverse=True)
    has_kept, is_decided = (np.bincount(number, some) > 0 for some in (keep == 1, keep != _OPEN))
    if len(undecided := np.sort(first[~is_decided & (unique != _NO_GROUP)])):
        few = group_of[undecided[:3]].tolist()
        names = ", ".join(map(repr, dict.fromkeys(line.group for _, group, line in _lines(config) if group in few)))
        what = f"{plural(len(undecided), 'group')} without a decision, such as {names}: in each"
        raise wrong("--exclude", config.exclude, f'{what} set "keep": true on the line that stays, false on the others')
    are_out = (keep == 0) | (keep == _OPEN) & ((group_of == _NO_GROUP) | has_kept[number])
    paths, number = np.unique(np.array(keys), return_inverse=True)
    # Of several lines of a path one with "keep": true decides.
    has_out, stays = (np.bincount(number, some) > 0 for some in (are_out, keep == 1))
    return _List(digest.hexdigest(), paths.data, (has_out & ~stays).data)


def _lines(config: Config, update: Callable[[bytes], object] = len) -> Iterator[tuple[int, int, ListedImage]]:
    """Hash of path, hash of group, and the line itself, of those that aren't blank; `update` gets the file's bytes."""
    below = f"{config.input.rstrip('/')}/"
    try:
        with storage.open_storage(config.exclude, config.io_deadline).open(config.exclude) as file:
            for number, data in enumerate(file, 1):
                update(data)
                text = (data.removeprefix(codecs.BOM_UTF8) if number == 1 else data).rstrip(b"\r\n")
                if not text.strip():
                    continue
                try:
                    line = _parsed(text, config.exclude.lower().endswith(".jsonl"))
                    path = line.path.removeprefix("./").removeprefix(below)
                    hashes = order_key(path, config.seed), name_hash(line.group) if line.group else _NO_GROUP
                except ValueError as error:
                    raise wrong("--exclude", config.exclude, f"line {number}: {error}") from None
                yield *hashes, line
    except FileNotFoundError:
        fix = "no such file; give a text file, one path per line, or JSONL"
        raise wrong("--exclude", config.exclude, fix) from None


def _parsed(text: bytes, is_json: bool) -> ListedImage:
    shown = repr(text[:100].decode("utf-8", "replace"))
    if not is_json and text.startswith(b'{"'):
        raise ValueError(f"{shown} is JSON, not a path: let the name of the list end in .jsonl")
    line = _of_json(text) if is_json else ListedImage(text.decode("utf-8", "surrogateescape"))
    if line is None:
        raise ValueError(f"{shown} can't be read: {_FORM}")
    if not line.path or "\0" in line.path:
        raise ValueError(f"{shown}: no file can have this path: correct it, or remove the line")
    return line


def _of_json(text: bytes) -> ListedImage | None:
    """A line of JSON; None if it holds anything else, or a key that may be one of ours misspelled."""
    try:
        document = json.loads(text)
        line = msgspec.convert(document, ListedImage)
    except (ValueError, RecursionError):
        return None
    return None if any(map(_is_misspelled, document)) else line


@functools.lru_cache(maxsize=100)
def _is_misspelled(key: str) -> bool:
    """Whether a key is nearly one of ours; those of other tools may be there, too."""
    ours = ListedImage.__struct_fields__
    return key not in ours and bool(nearest(key.strip().lower(), ours, 0.75))
