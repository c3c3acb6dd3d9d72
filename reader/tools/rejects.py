"""`rejects`: which images of a dataset got no record, grouped by why, in words."""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import re
from dataclasses import dataclass, field

from beam_pipeline import schema, storage
from beam_pipeline.errors import ImageShardsError, NotPublishedError
from beam_pipeline.schema import RejectReason
from reader.info import DatasetInfo, load_info

_SHOWN = 5
# `{what}` is a format, `{limit}` the limit that was passed; both from the detail.
_WORDS: dict[str, str] = {
    RejectReason.UNSUPPORTED: "unsupported {what}",
    RejectReason.TRUNCATED: "truncated {what}",
    RejectReason.DECODE_ERROR: "corrupt {what}",
    RejectReason.TOO_MANY_PIXELS: "too many pixels, {limit}",
    RejectReason.TOO_MANY_BYTES: "too many bytes, {limit}",
    RejectReason.OUT_OF_MEMORY: "out of memory",
    RejectReason.VANISHED: "gone before it was read",
    RejectReason.CHANGED: "changed after it was listed",
    RejectReason.DECODER_CRASH: "crash of the decoder",
    RejectReason.DECODER_TIMEOUT: "decoder too slow",
}
_SIZE = re.compile(r" of \d+x\d+ pixels$")
_FIRST_BYTES = re.compile(r"\d+ bytes, beginning ([0-9a-f]*)")


@dataclass
class RejectGroup:
    """Rejects of one kind.

    Attributes:
        what: what is wrong with them, in words: `empty file`, `truncated JPEG`.
        reason: as rejects.jsonl has it.
        count: how many.
        paths: the first few in order; none if the dataset is an index, which keeps no names.
    """

    what: str
    reason: str
    count: int = 0
    paths: list[str] = field(default_factory=list)


def rejects(dataset: DatasetInfo | str | os.PathLike[str]) -> list[RejectGroup]:
    """The rejected images of a dataset by what is wrong with them, largest group first.

    Args:
        dataset: what `load_info` returned, or the URL; also of a version whose job failed for its rejects.

    Raises:
        ImageShardsError: rejects.jsonl isn't the file that was published.
    """
    (info, path), groups = find_rejects(dataset), dict[str, RejectGroup]()
    if info and schema.REJECTS_FILE not in info.manifest["files"]:
        by_reason = info.manifest["rejects"]["by_reason"].items()
        groups = {reason: RejectGroup(reason.replace("_", " "), reason, count) for reason, count in by_reason}
    elif info is None or info.manifest["rejects"]["by_reason"]:
        digest = hashlib.sha256()
        try:
            with storage.open_storage(path).open(path) as lines:
                for line in lines:
                    digest.update(line)
                    one = json.loads(line)
                    what = in_words(one["reason"], one["detail"])
                    group = groups.setdefault(what, RejectGroup(what, one["reason"]))
                    group.count += 1
                    group.paths = sorted([*group.paths, one["path"]])[:_SHOWN]
            is_published = info is None or digest.hexdigest() == info.manifest["files"][schema.REJECTS_FILE]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            is_published = False
        if not is_published:
            raise ImageShardsError(f"{path} isn't the file that was published; run the job with --repair")
    return sorted(groups.values(), key=lambda group: (-group.count, group.what))


def find_rejects(dataset: DatasetInfo | str | os.PathLike[str]) -> tuple[DatasetInfo | None, str]:
    """A dataset and its rejects.jsonl; no dataset if a job failed for its rejects, which left the file in its state."""
    given = dataset.removesuffix(f"/{schema.REJECTS_FILE}") if isinstance(dataset, str) else dataset
    try:
        return (info := load_info(given)), info.path(schema.REJECTS_FILE)
    except NotPublishedError:
        folder = storage.normalize(os.fspath(given))  # type: ignore[arg-type]
        store, state, (parent, _, name) = storage.open_storage(folder), schema.STATE_FOLDER, folder.rpartition("/")
        unpublished = [f"{folder}/{state}/{one}" for one in schema.newest_first(store.names(f"{folder}/{state}"))]
        for place in (folder, f"{parent}/{state}/{name}", *unpublished):
            file = f"{place}/{schema.REJECTS_FILE}"
            if f"/{state}/" in file and store.stat(file):
                return None, file
        raise


def in_words(reason: str, detail: str) -> str:
    """A reject's reason and detail in words, without what differs from one image to the next."""
    if first := _FIRST_BYTES.match(detail):
        return _content(bytes.fromhex(first[1]))
    what, _, limit = detail.partition(", ")
    return _WORDS.get(reason, reason.replace("_", " ")).format(what=_SIZE.sub("", what), limit=limit)


def _content(first: bytes) -> str:
    """What a file that is no image is, by its first 8 bytes."""
    if not first.strip(b"\0"):
        return "only zeros" if first else "empty file"
    if first.lstrip().startswith(b"<"):
        return "web page or XML"
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(first)  # it may end inside a character
    except UnicodeDecodeError:
        return "another kind of file"
    return "text" if all(one.isprintable() or one.isspace() for one in text) else "another kind of file"
