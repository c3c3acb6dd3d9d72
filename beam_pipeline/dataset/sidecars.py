"""The sidecar of each finished shard, in the state of a version: what the job did, and what its files must be."""

from __future__ import annotations

from collections.abc import Callable

from beam_pipeline import storage
from beam_pipeline.config import Config
from beam_pipeline.schema import ShardName
from beam_pipeline.schema.job import Sidecar, read_document
from beam_pipeline.schema.manifest import FileSize, seal_manifest
from beam_pipeline.storage import ListedFile, etag_text, join


class Sidecars:
    """The sidecars of a job.

    A shard is finished if its sidecar carries the plan's hash and the sizes and CRCs of the shard and its index.
    """

    def __init__(self, config: Config) -> None:
        self._version_url = config.dataset_url
        self._url = join(config.state_url, "shards")
        self._store = storage.open_storage(config.output, config.io_deadline)

    def url(self, name: ShardName) -> str:
        """Where the sidecar of a shard is, or will be."""
        return join(self._url, f"{name.short}.json")

    def read(self, name: ShardName) -> Sidecar | None:
        """What a finished shard's sidecar says; None if there is none, or after a power cut only a part of one."""
        try:
            data = self._store.read(self.url(name))
        except FileNotFoundError:
            return None
        sidecar = read_document(data, Sidecar)
        return sidecar if sidecar and seal_manifest(sidecar) == data else None

    def difference(
        self, name: ShardName, sidecar: Sidecar, find: Callable[[str], ListedFile | None], reads: bool
    ) -> str | None:
        """Which file of a finished shard doesn't match its sidecar.

        Args:
            name, sidecar: of the shard.
            find: looks up what the store says of a file of the version.
            reads: whether to read a shard whose CRC the store doesn't tell, even if it has the etag or mtime that its
                writer recorded. Its index, which is small, is always read then.
        """
        shard = sidecar.shard
        for kind, file, expected, etag in (
            ("shard", name.file, FileSize(shard.bytes, shard.crc32c), sidecar.etag),
            ("index", name.index_file, sidecar.index, ""),
            ("record table", name.table_file, shard.table, ""),
        ):
            if expected is None:
                continue  # a compressed shard has no index
            listed, url = find(file), join(self._version_url, file)
            unchanged = not reads and listed is not None and bool(etag) and etag_text(listed.etag) == etag
            reads_shard: storage.Reads = "never" if unchanged else "if unknown"
            if not storage.is_intact(self._store, url, listed, expected.bytes, expected.crc32c, reads_shard):
                return f"{kind} {file}"
        return None
