"""What an unpublished job keeps in `ROOT/NAME/_state/VERSION/`: owner, plan, and a sidecar for every finished shard.

A shard is finished when its sidecar is whole, carries this plan's hash and tells the sizes and CRCs of the shard, its
index and its reject lines as they are. A plan that differs in any byte voids all of it. Only the owner writes here. The
folder is gone once the version is published.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import IO, Any

from beam_pipeline import schema, storage
from beam_pipeline.config import Config
from beam_pipeline.conversion.attempts import Attempts
from beam_pipeline.dataset import scratch
from beam_pipeline.dataset.owner import OWNER_FILE, owner_of
from beam_pipeline.errors import ImageShardsError
from beam_pipeline.planning.plan import JobPlan
from beam_pipeline.schema import (
    DATASET_INFO_FILE,
    MANIFEST_FILE,
    STATE_FOLDER,
    ShardName,
    canonical_json,
    file_sums,
    is_ours,
)
from beam_pipeline.schema.manifest import seal_manifest
from beam_pipeline.storage import Storage, join

_PLAN_FILE = "plan.json"
_NO_PLAN = b"{}\n"


class JobState:
    """The state folder of one version.

    Attributes:
        owner: the right to write the version and this folder.
        attempts: markers of what is being decoded.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._store = storage.open_storage(config.output, config.io_deadline)
        self._dataset_url = config.dataset_url
        self._name_url = storage.join(config.output, config.name)
        self._folder = storage.join(self._name_url, STATE_FOLDER)
        self.url = config.state_url
        self.attempts = Attempts(config)
        self.owner = owner_of(self.url, config.dataset_url, config.identity, config.io_deadline)

    def exists(self) -> bool:
        """Whether a job began to write the version: what lies there is then its own, to go on with or to delete.

        `--plan_only` leaves neither file, nor does a job that ended before it had a plan.
        """
        return any(self._store.stat(storage.join(self.url, file)) for file in (_PLAN_FILE, OWNER_FILE))

    def has_leftovers(self) -> bool:
        """Whether anything is here, if only a folder."""
        if storage.is_local(self.url):
            # An empty folder of all states is left by a kill, too; with something in it, it is another version's.
            return os.path.isdir(self.url) or (os.path.isdir(self._folder) and not os.listdir(self._folder))
        return next(self._store.files(self.url), None) is not None

    def prepare(self, plan: JobPlan) -> None:
        """Take the right to write, and make the output ready for this plan's shards; a second call changes nothing.

        The plan that is there already: its finished shards stay. Any other: all of it goes, and what a published
        version of it left, the manifest first, so that a half-deleted dataset is never taken for a whole one. With
        `--overwrite` everything goes that lies there, else only what a job has written.

        Raises:
            ImageShardsError: another job is writing the version, or has published it since this one began.
        """
        self.owner.acquire(plan.sha256)
        manifest_url = storage.join(self._dataset_url, MANIFEST_FILE)
        anew = self._config.overwrite or self._config.repair
        if not anew and self._store.stat(manifest_url) is not None:
            self.owner.release()
            raise ImageShardsError(f"{self._dataset_url} was published by another job meanwhile; run the command again")
        with self.owner.refreshed():
            self._make_ready(plan)

    def _make_ready(self, plan: JobPlan) -> None:
        data = canonical_json(plan.document())
        resumes = self._read(_PLAN_FILE) == data
        if not resumes:
            self.write(_PLAN_FILE, _NO_PLAN)  # half deleted, the version is still known as ours
        for file in (MANIFEST_FILE, DATASET_INFO_FILE):
            with suppress(IsADirectoryError):  # nobody reads a folder as one
                self._store.delete(storage.join(self._dataset_url, file))
        if resumes:
            return
        if self._config.overwrite:
            self._store.delete_tree(self._dataset_url)
        else:
            delete_own_files(self._store, self._dataset_url, self._config.name)
        self._delete_files(keep=(OWNER_FILE, _PLAN_FILE))
        self.write(_PLAN_FILE, data)

    def save_sidecar(self, name: ShardName, sidecar: dict[str, Any], rejects: bytes) -> None:
        """Note that a shard is finished; its object and index are in place.

        Args:
            name: of the shard.
            sidecar: what is to be published of it.
            rejects: its reject lines.
        """
        beside = {}
        if rejects:
            self.write(_rejects_file(name), rejects)
            beside[_rejects_file(name)] = file_sums(rejects)
        self.write(_sidecar_file(name), seal_manifest({**sidecar, "beside": beside}))

    def sidecar(self, name: ShardName) -> dict[str, Any] | None:
        """What a finished shard's sidecar says; None where there is none, or one that isn't whole."""
        data = self._read(_sidecar_file(name)) or b""
        try:
            sidecar: dict[str, Any] = json.loads(data)
            return sidecar if seal_manifest(sidecar) == data else None
        except (ValueError, AttributeError):  # no JSON, no object
            return None

    def is_kept(self, sidecar: dict[str, Any]) -> bool:
        """Whether all that was saved with a sidecar is as it was: after a power cut it may be cut short, or gone."""
        return all(file_sums(self._read(file) or b"") == sums for file, sums in sidecar["beside"].items())

    def rejects(self, name: ShardName) -> bytes:
        """Reject lines of a finished shard."""
        return self._read(_rejects_file(name)) or b""

    def write(self, file: str, data: bytes) -> None:
        """Write one of the state's files."""
        self._store.write(storage.join(self.url, file), data)

    @contextmanager
    def temporary_file(self) -> Iterator[IO[bytes]]:
        """A file to be published: beside a local output, else on this machine's disk; gone at the end in any case."""
        if storage.is_local(self.url):
            folder = storage.join(self.url, "tmp")  # the same disk: publishing is a rename
            os.makedirs(folder, exist_ok=True)
            path = os.path.join(folder, f"{uuid.uuid4().hex}.tmp")
        else:
            scratch.delete_abandoned()
            path = scratch.new_path()
        try:
            with open(path, "xb", buffering=1 << 20) as file:
                yield file
        except OSError as error:
            if error.errno is None or error.filename not in (None, path):
                raise  # of another file
            raise storage.explained(path, error) from error
        finally:
            if os.path.exists(path):
                os.unlink(path)

    def clear(self) -> None:
        """Delete the state and give up the right to write: the version is published."""
        self._store.delete_temporaries(self._dataset_url)
        self._delete_files(keep=(OWNER_FILE,))
        self.owner.release()
        self._delete_empty_folders()

    def _delete_files(self, keep: Collection[str]) -> None:
        self._store.delete_tree(self.url, keep)

    def _delete_empty_folders(self) -> None:
        self._store.delete_empty_folders(self.url, self._folder, self._name_url)  # the output itself is the user's

    def save_plan_only(self, plan: JobPlan) -> None:
        """Leave a plan for the launcher that waits for it, beside the state: a job may be at work."""
        self._store.write(self._plan_only_url, canonical_json(plan.document()))

    def take_plan_only(self) -> dict[str, Any]:
        """The plan that `--plan_only` left, which is deleted."""
        document = json.loads(self._store.read(self._plan_only_url))
        self._store.delete(self._plan_only_url)
        self._delete_empty_folders()
        return dict(document)

    @property
    def _plan_only_url(self) -> str:
        return storage.join(self._folder, f"plan-{self._config.identity.token}.json")

    def _read(self, file: str) -> bytes | None:
        try:
            return self._store.read(storage.join(self.url, file))
        except FileNotFoundError:
            return None


def _sidecar_file(name: ShardName) -> str:
    return f"shards/{_short(name)}.json"


def _rejects_file(name: ShardName) -> str:
    return f"rejects/{_short(name)}.jsonl"


def _short(name: ShardName) -> str:
    return f"{name.split}-{name.index:05d}"


_DELETES_IN_FLIGHT = 32


def own_files(store: Storage, version_url: str, dataset: str) -> list[str]:
    """Every such file that is there; the user's folders are not looked into."""
    indexes = store.names(join(version_url, schema.INDEX_FOLDER))
    names = (*store.names(version_url), *(f"{schema.INDEX_FOLDER}/{name}" for name in indexes))
    return [name for name in names if is_ours(name, dataset)]


def delete_own_files(store: Storage, version_url: str, dataset: str) -> None:
    """Delete them, and the folder of indexes if nothing else is in it."""
    urls = [join(version_url, file) for file in own_files(store, version_url, dataset)]
    with ThreadPoolExecutor(_DELETES_IN_FLIGHT) as pool:
        for _ in pool.map(store.delete, urls):
            pass
    store.delete_empty_folders(join(version_url, schema.INDEX_FOLDER))
