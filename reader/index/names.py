"""Class names of foreign files: from a labels file, from the records, or the ids themselves."""

from __future__ import annotations

from collections.abc import Sequence

from beam_pipeline.errors import StorageError, UsageError
from reader.index.scan import Scan
from reader.patterns import PathLike
from reader.storage import normalize, open_storage

_MAX_CLASSES = 1_000_000


def read_names(labels_file: str) -> list[str]:
    """The lines of a labels file, without empty ones at its end."""
    try:
        text = open_storage(labels_file).read(normalize(labels_file)).decode("utf-8-sig")
    except (StorageError, UnicodeDecodeError) as error:
        why = error.reason if isinstance(error, StorageError) else "no UTF-8"
        raise UsageError(f"--labels_file {labels_file}: {why}; give a text file, one class a line") from None
    names = [line.strip() for line in text.rstrip().splitlines()]
    first: dict[str, int] = {}
    for number, name in enumerate(names, 1):
        if not name:
            raise UsageError(f"--labels_file {labels_file}: line {number} is empty; the line's number is the class id")
        if first.setdefault(name, number) != number:
            lines = f"{first[name]} and {number}"
            raise UsageError(f"--labels_file {labels_file}: class {name!r} stands in lines {lines}; write each once")
    return names


def class_names(scans: Sequence[Scan], given: list[str] | None, labels_file: PathLike | None) -> list[str]:
    """A name for each id from 0 to the highest."""
    count = 1 + max(max(one.classes, default=0) for one in scans)
    if given is not None:
        if len(given) < count:
            raise UsageError(
                f"--labels_file {labels_file}: {len(given)} names, and class id {count - 1} is in the records"
            )
        return given
    if count > _MAX_CLASSES:
        raise UsageError(
            f"{scans[0].file} and others: class id {count - 1} is no place in a list; give another --class_key"
        )
    found: dict[int, set[str]] = {}
    for one in scans:
        for number, names in one.names.items():
            found.setdefault(number, set()).update(names)
    texts = [next(iter(names)) for names in found.values() if len(names) == 1]
    if len(set(texts)) < len(found) or any(
        not text or text != text.strip() or len(text.splitlines()) > 1 for text in texts
    ):
        return [str(number) for number in range(count)]  # the feature doesn't hold class names
    return [next(iter(found.get(number, {str(number)}))) for number in range(count)]
