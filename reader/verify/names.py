"""File names that several records of a dataset have: found by 8 bytes a record, then read to be sure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from beam_pipeline import schema
from beam_pipeline.errors import CorruptRecordError
from reader.example import parse_example
from reader.info import DatasetInfo
from reader.scanning import scan_file
from reader.verify.faults import Fault

_MAX_FAULTS = 100


def repeated_names(info: DatasetInfo, names: Sequence[tuple[str, npt.NDArray[np.uint64]]]) -> list[Fault]:
    """A fault for each record whose file name an earlier record has, at most 100.

    Args:
        info: of the dataset.
        names: (shard, hashes of the file names of its right records) in order of the dataset.
    """
    repeated = _repeated([hashes for _, hashes in names])
    if not len(repeated):
        return []
    first: dict[bytes, str] = {}
    faults: list[Fault] = []
    for file, hashes in names:
        if not np.isin(hashes, repeated).any():
            continue
        wanted = set(np.flatnonzero(np.isin(hashes, repeated)).tolist())
        for number, offset, filename in _file_names(info, file, wanted):
            where = f"{file} record {number} at byte {offset}"
            if filename not in first:
                first[filename] = where
                continue
            shown = filename.decode("utf-8", "backslashreplace")
            faults.append(Fault(info.path(file), number, offset, f"filename {shown!r} is also in {first[filename]}"))
            if len(faults) == _MAX_FAULTS:
                return faults
    return faults


def _repeated(hashes: list[npt.NDArray[np.uint64]]) -> npt.NDArray[np.uint64]:
    """Hashes that occur more than once, sorted."""
    if not hashes:
        return np.empty(0, np.uint64)
    everything = np.concatenate(hashes)
    everything.sort()
    return np.unique(everything[1:][everything[1:] == everything[:-1]])


def _file_names(info: DatasetInfo, file: str, wanted: set[int]) -> list[tuple[int, int, bytes]]:
    """(number, offset, file name) of some of a shard's records, told by their place among its right ones."""
    found, right = [], 0
    for number, frame in enumerate(scan_file(info.storage, info.path(file))):
        if isinstance(frame.record, CorruptRecordError):
            continue
        if right in wanted:
            try:
                value = parse_example(frame.record).get(schema.FILENAME_KEY, [])
            except ValueError:
                value = []
            if isinstance(value, list) and value:  # one that lacks it is a fault already
                found.append((number, frame.offset, value[0]))
        right += 1
    return found
