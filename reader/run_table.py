"""`RunTable`: which run of which shard holds a record, for the records that a split string selects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RunTable:
    """The runs that hold a selection of records, in file order: arrays int64 [runs], an entry a run.

    Attributes:
        files: full paths of the shards.
        file: number of the shard in `files`.
        offset, bytes: where the run lies in it.
        records: records in the run on disk.
        file_record: number in the shard of its first record.
        skip: records at its beginning that aren't selected.
        first: int64 [runs + 1], the number in the selection of the first selected record; the last entry is the total.
        indexes: full path of each shard's text index, "" where it has none.
    """

    files: tuple[str, ...]
    file: Integers
    offset: Integers
    bytes: Integers
    records: Integers
    file_record: Integers
    skip: Integers
    first: Integers
    indexes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Records in the selection."""
        return int(self.first[-1])

    def locate(self, number: int) -> tuple[str, int]:
        """The file that holds record `number` of the selection, and the record's number in that file."""
        run = int(np.searchsorted(self.first, number, "right")) - 1
        within = number - int(self.first[run]) + int(self.skip[run])
        return self.files[int(self.file[run])], int(self.file_record[run]) + within

    @classmethod
    def select(
        cls,
        files: Sequence[str],
        rows: npt.NDArray[np.void],
        start: int,
        stop: int,
        indexes: Sequence[str] | None = None,
    ) -> RunTable:
        """Records [start, stop) of one split.

        Args:
            files: full paths of the split's shards, in order.
            rows: the split's run index, an array of `schema.RUN_DTYPE`.
            indexes: full paths of the shards' text indexes; None where there are none.
        """
        records = rows["records"].astype(np.int64)
        file = rows["shard"].astype(np.int64)
        ends = np.cumsum(records)
        begins = ends - records
        is_new_file = np.concatenate(([True], file[1:] != file[:-1]))[: len(file)]
        file_begin = np.maximum.accumulate(np.where(is_new_file, begins, 0))
        skip = np.maximum(start - begins, 0)
        selected = np.minimum(ends, stop) - np.maximum(begins, start)
        kept = selected > 0
        return cls(
            tuple(files),
            file[kept],
            rows["offset"].astype(np.int64)[kept],
            rows["bytes"].astype(np.int64)[kept],
            records[kept],
            (begins - file_begin)[kept],
            skip[kept],
            np.concatenate(([0], np.cumsum(selected[kept]))),
            tuple(indexes or [""] * len(files)),
        )

    @classmethod
    def concatenate(cls, tables: Sequence[RunTable]) -> RunTable:
        """One table behind the other: `train+validation`."""
        if len(tables) == 1:
            return tables[0]
        files_before = np.cumsum([0, *(len(table.files) for table in tables)])
        records_before = np.cumsum([0, *(table.total for table in tables)])

        def joined(name: str, before: Integers | None = None) -> Integers:
            arrays: list[Integers] = [getattr(table, name) for table in tables]
            return np.concatenate([array + (0 if before is None else before[i]) for i, array in enumerate(arrays)])

        return cls(
            files=tuple(file for table in tables for file in table.files),
            indexes=tuple(index for table in tables for index in table.indexes),
            file=joined("file", files_before),
            offset=joined("offset"),
            bytes=joined("bytes"),
            records=joined("records"),
            file_record=joined("file_record"),
            skip=joined("skip"),
            first=np.concatenate(
                [*(table.first[:-1] + records_before[i] for i, table in enumerate(tables)), records_before[-1:]]
            ),
        )
