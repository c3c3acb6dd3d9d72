"""The four files of one shard: the sidecar comes last and says what the job did, and what the others must be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from beam_pipeline import storage
from beam_pipeline.config import Config
from beam_pipeline.dataset.state import run_concurrently
from beam_pipeline.schema import ShardName
from beam_pipeline.schema.job import Sidecar, read_document
from beam_pipeline.schema.manifest import FileSize, seal_manifest
from beam_pipeline.storage import ListedFile, etag_text, join


class ShardFiles:
    """The files of one shard of a job.

    Attributes:
        name: of the shard.
        shard, index, table, sidecar: their URLs.
        seen: URL → what was there before the claim was checked last.
    """

    def __init__(self, config: Config, name: ShardName) -> None:
        self._store = storage.open_storage(config.output, config.io_deadline)
        self.name = name
        files = (name.file, name.index_file, name.table_file)
        self.shard, self.index, self.table = (join(config.dataset_url, file) for file in files)
        self.sidecar = join(config.state_url, f"shards/{name.short}.json")
        self.seen: Mapping[str, ListedFile | None] = {}

    def look(self, check: Callable[[], None]) -> Sidecar | None:
        """See what is there, and check the claim meanwhile; returns what `read_sidecar` does."""
        urls = (self.shard, self.index, self.table, self.sidecar)
        looks = (partial(self._store.stat, url) for url in urls)
        sidecar: Sidecar | None
        sidecar, _, *seen = run_concurrently(self.read_sidecar, check, *looks)
        self.seen = dict(zip(urls, seen, strict=True))
        return sidecar

    def read_sidecar(self) -> Sidecar | None:
        """What a finished shard's sidecar says; None if there is none, or after a power cut only a part of one."""
        try:
            data = self._store.read(self.sidecar)
        except FileNotFoundError:
            return None
        sidecar = read_document(data, Sidecar)
        return sidecar if sidecar and seal_manifest(sidecar) == data else None

    def difference(self, sidecar: Sidecar, reads: bool) -> str | None:
        """Which of the files that were seen doesn't match the sidecar.

        Args:
            sidecar: of the shard.
            reads: whether to read a shard whose CRC the store doesn't tell, even if it has the etag or mtime that its
                writer recorded. Its index, which is small, is always read then.
        """
        name, shard = self.name, sidecar.shard
        for kind, file, url, expected, etag in (
            ("shard", name.file, self.shard, FileSize(shard.bytes, shard.crc32c), sidecar.etag),
            ("index", name.index_file, self.index, sidecar.index, ""),
            ("record table", name.table_file, self.table, shard.table, ""),
        ):
            if expected is None:
                continue  # a compressed shard has no index
            seen = self.seen.get(url)
            unchanged = not reads and seen is not None and bool(etag) and etag_text(seen.etag) == etag
            reads_shard: storage.Reads = "never" if unchanged else "if unknown"
            if not storage.is_intact(self._store, url, seen, expected.bytes, expected.crc32c, reads_shard):
                return f"{kind} {file}"
        return None


def finished_shards(config: Config) -> int:
    """How many shards have a sidecar."""
    names = storage.open_storage(config.output, config.io_deadline).names(join(config.state_url, "shards"))
    return sum(name.endswith(".json") for name in names)
