"""What an unpublished job keeps in `ROOT/NAME/_state/VERSION/`: claim, plan, and a sidecar for each finished shard.

A shard is finished if its sidecar carries this plan's hash and the sizes and CRCs of the shard and its index. A plan
that differs in any byte invalidates all of it. The folder is deleted once the version is published.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from enum import Enum
from typing import IO, Any, TypeVar

from beam_pipeline import schema, storage
from beam_pipeline.config import Config
from beam_pipeline.conversion.decoder import Attempts
from beam_pipeline.dataset.claim import CLAIM_FILE, Claim, SupersededError
from beam_pipeline.dataset.compare import read_run
from beam_pipeline.errors import ImageShardsError, NotPublishedError
from beam_pipeline.schema import ShardName, canonical_json, is_ours
from beam_pipeline.schema.job import ComparedInputs, Plan, PlannedJob, Sidecar, as_run, document_bytes, read_document
from beam_pipeline.schema.manifest import Content, FileSize, PlannedSplit, parse_manifest, seal_manifest
from beam_pipeline.storage import ListedFile, Storage, join
from beam_pipeline.storage.causes import translating_os_errors
from beam_pipeline.storage.local import making_folder

_PLAN_FILE = "plan.json"
# They survive a fresh start: an image that killed decoders will do so again.
_KEPT = (CLAIM_FILE, "inflight/rejected/")
_TEMPORARY = "tmp/"
_DELETES_IN_FLIGHT = 32
Answer = TypeVar("Answer", PlannedJob, ComparedInputs)


def run_concurrently(*calls: Callable[[], Any]) -> list[Any]:
    """The results of calls that wait for storage but not for each other; the first error, once all have ended."""
    pool = ThreadPoolExecutor(len(calls))
    try:
        futures = [pool.submit(call) for call in calls]
        wait(futures)
    finally:
        pool.shutdown(wait=False)  # Ctrl-C needn't wait for requests that are tried again
    return [future.result() for future in futures]


class Outcome(Enum):
    """Whose a version is, as a job finds it."""

    MINE = "this job holds the claim"
    PUBLISHED = "this job's plan is published: by an earlier attempt, or by a job that it shared the claim with"
    LOST = "another job has taken over the version, or has published something else"


class JobState:
    """The state folder of one version.

    Args:
        config: of the job.
        run: whose claim this job is under, as `prepare` returned it; "" for its own.

    Attributes:
        claim: the right to write the version and this folder.
        attempts: markers of what is being decoded.
    """

    def __init__(self, config: Config, run: str = "") -> None:
        self._config = config
        self._run = run or config.run_id
        self._store = storage.open_storage(config.output, config.io_deadline)
        self._is_local = storage.is_local(config.output)
        self._manifest_url = join(config.dataset_url, schema.MANIFEST_FILE)
        self.url = config.state_url
        self.attempts = Attempts(config)
        self.claim = Claim(config)

    def exists(self) -> bool:
        """Whether a job began to write the version, so that its files may be continued or deleted.

        `--plan_only` leaves neither file, nor does a job that failed before it had a plan.
        """
        return any(self._store.stat(join(self.url, file)) for file in (_PLAN_FILE, CLAIM_FILE))

    def planned(self) -> Plan | None:
        """The plan of the job that began to write the version; None if there is none that can be read."""
        return read_document(self._read(_PLAN_FILE) or b"", Plan)

    def has_leftovers(self) -> bool:
        """Whether a job left anything behind, if only a folder or a lock."""
        if not self._is_local:
            return next(self._store.files(self.url), None) is not None
        of_version = {f"{self._config.version}/", f"{self._config.version}.lock"}
        names = self._store.names(self._config.states_url)
        return bool(of_version & {*names}) or (not names and os.path.isdir(self._config.states_url))

    # --- the claim and the plan

    def prepare(self, plan: Plan) -> str:
        """Acquire the claim, and make the output ready for this plan's shards; a second call changes nothing.

        Finished shards of the same plan stay. Otherwise everything that a job has written goes, with `--overwrite` all
        files that are there, and the manifest goes first: a dataset that is half deleted must not look published.

        Returns:
            The run whose claim this job is under: its own, or that of another job of the same plan.

        Raises:
            ImageShardsError: another job is writing the version, or has published another plan since this one began.
        """
        config, data, replaces = self._config, document_bytes(plan), False
        while True:
            self._run, is_replaced = self.claim.acquire(plan.sha256, replaces)
            # In this order: jobs that share the claim write shards only after plan.json, so that what is listed before
            # it is there is old; and one that publishes deletes it only after it wrote the manifest.
            old = self._old_files()
            planned = self._read(_PLAN_FILE)
            is_published = self._store.stat(self._manifest_url) is not None
            if is_published and not config.overwrite:
                is_ours = self.outcome(plan) is Outcome.PUBLISHED
                if is_ours or not config.repair or self.manifest() is not None:  # else it can't be read: write it again
                    self.claim.discard()
                    if is_ours:
                        return self._run
                    raise SupersededError.published(config.dataset_url)
            if not is_published and not is_replaced and planned == data:
                return self._run
            # The claim of a job that has published.
            replaces = is_published and planned == data and self._run != config.run_id
            # One that shared it has, just now.
            if replaces or (old and self.claim.holder() is None):
                continue
            if old or config.overwrite:  # which deletes the user's files, too
                self.check()
                self._delete(old)
            if self._store.write(join(self.url, _PLAN_FILE), data, ""):
                return self._run

    def _old_files(self) -> dict[str, str]:
        """URL → generation of what has to go if this job begins from nothing."""
        config, version = self._config, self._config.dataset_url

        def of_version() -> dict[str, str]:
            if self._is_local:  # the user's folders are not looked into
                stats = {
                    file: self._store.stat(join(version, file)) for file in own_files(self._store, version, config.name)
                }
                return {file: found.generation for file, found in stats.items() if found}
            files = self._store.files(version)
            return {file.path: file.generation for file in files if config.overwrite or is_ours(file.path, config.name)}

        of_dataset, of_state = run_concurrently(of_version, self.files)
        old = {join(version, path): generation for path, generation in of_dataset.items()}
        old |= {join(self.url, path): of_state[path] for path in of_state if not path.startswith(_KEPT)}
        return old

    def _delete(self, old: dict[str, str]) -> None:
        version, plan_url = self._config.dataset_url, join(self.url, _PLAN_FILE)
        # The plan before shards: without it none of an earlier job counts as finished, however far this comes.
        for url in (*(join(version, f) for f in (schema.MANIFEST_FILE, schema.DATASET_INFO_FILE)), plan_url):
            if url in old:
                self._store.delete(url, old.pop(url))
        self.delete_all(old)
        if self._is_local:
            if self._config.overwrite:
                self._delete_users_files()
            self._store.delete_empty_folders(join(version, schema.INDEX_FOLDER))

    def _delete_users_files(self) -> None:
        """For `--overwrite` on a disk; links are deleted, not followed."""
        version, index = self._config.dataset_url, f"{schema.INDEX_FOLDER}/"
        for folder in ("", index):
            for name in self._store.names(join(version, folder)):
                is_link = os.path.islink(join(version, name.rstrip("/")))
                if not is_ours(folder + name, self._config.name) and (folder + name != index or is_link):
                    self._store.delete_tree(join(version, (folder + name).rstrip("/")))

    def delete_all(self, files: dict[str, str]) -> None:
        """Delete each URL if it still is that generation."""
        with ThreadPoolExecutor(_DELETES_IN_FLIGHT) as pool:
            list(pool.map(self._store.delete, files.keys(), files.values()))

    def check(self, repaired: str = "", is_published: bool = False) -> None:
        """Check that this job may still write.

        Args:
            repaired: `self_sha256` of the manifest that a repair follows, its claim: two of these write the same.
            is_published: whether the manifest is written; then another job of this plan may have deleted the claim.

        Raises:
            SupersededError: it may not.
        """
        if repaired:
            manifest = self.manifest()
            may_write = manifest is not None and manifest.self_sha256 == repaired
        else:
            may_write = self.claim.verify(self._run) or (is_published and self.claim.holder() is None)
        if not may_write:
            raise SupersededError.taken_over(self._config.dataset_url)

    def outcome(self, plan: Plan) -> Outcome:
        """Whose the version is; for a job whose claim is gone, or that meets a manifest."""
        manifest = self.manifest()
        is_plan = manifest and Plan.published(manifest, plan.inputs, plan.dropped).sha256 == plan.sha256
        # Etags and mtimes of the images are not in the manifest: without run.json it may be that of other images.
        if is_plan and as_run(read_run(self._config)).inputs == plan.inputs:
            return Outcome.PUBLISHED
        return Outcome.MINE if self.claim.verify(self._run) else Outcome.LOST

    def manifest(self) -> Content | None:
        """The published manifest; None if there is no valid one."""
        try:
            return parse_manifest(self._store.read(self._manifest_url), self._manifest_url)[1]
        except (FileNotFoundError, NotPublishedError):
            return None

    def put(self, url: str, content: bytes | IO[bytes], seen: ListedFile | None, check: Callable[[], None]) -> None:
        """Write a file over what was there before the claim was looked at: a job that has lost it replaces nothing.

        Args:
            url: of the version or the state.
            content: small, or a temporary file.
            seen: what was there before `check` was called last.
            check: raises ImageShardsError if this job may no longer write.
        """
        while True:
            generation = seen.generation if seen else ""
            try:
                if isinstance(content, bytes):
                    is_written = self._store.write(url, content, generation)
                else:
                    is_written = self._store.publish(content, url, generation)
            except FileNotFoundError:  # another job of this plan has published, and deletes the temporary files
                check()
                if self._store.stat(self._manifest_url) is not None:
                    raise SupersededError.published(self._config.dataset_url) from None
                raise
            if is_written:
                return
            seen = self._store.stat(url)
            check()

    # --- finished shards

    def sidecar_url(self, name: ShardName) -> str:
        """Of the file that says that a shard is finished: its object and index are there."""
        return join(self.url, f"shards/{name.short}.json")

    def sidecar(self, name: ShardName) -> Sidecar | None:
        """What a finished shard's sidecar says; None if there is none, or after a power cut only a part of one."""
        data = self._read(f"shards/{name.short}.json") or b""
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
                continue  # a compressed shard has no index, one of an older version no table
            listed, url = find(file), join(self._config.dataset_url, file)
            unchanged = not reads and listed is not None and bool(etag) and listed.etag == etag
            reads_shard: storage.Reads = "never" if unchanged else "if unknown"
            if not storage.is_intact(self._store, url, listed, expected.bytes, expected.crc32c, reads_shard):
                return f"{kind} {file}"
        return None

    # --- files

    def write(self, file: str, data: bytes) -> None:
        """Write one of the state's files."""
        self._store.write(join(self.url, file), data)

    def _read(self, file: str) -> bytes | None:
        try:
            return self._store.read(join(self.url, file))
        except FileNotFoundError:
            return None

    def files(self) -> dict[str, str]:
        """Every file of the state → its generation; "" for a temporary one, whose name no other job gives."""
        with suppress(FileNotFoundError):  # a local folder, which another job of this plan has just cleared
            files = self._store.files(self.url)
            return {file.path: "" if file.path.startswith(_TEMPORARY) else file.generation for file in files}
        return {}

    @contextmanager
    def temporary_file(self) -> Iterator[IO[bytes]]:
        """A file to be published, which a kill leaves only in the state: elsewhere it has no name."""
        if not self._is_local:
            folder = tempfile.gettempdir()
            with translating_os_errors(folder, of_others=False), tempfile.TemporaryFile(buffering=1 << 20) as file:
                yield file
            return
        path = join(self.url, f"{_TEMPORARY}{uuid.uuid4().hex}.tmp")  # the same disk: publishing is a rename
        try:
            with (
                translating_os_errors(path, of_others=False),
                making_folder(path, lambda: open(path, "xb", buffering=1 << 20)) as file,
            ):
                yield file
        finally:
            with suppress(FileNotFoundError):
                os.unlink(path)

    def clear(self, files: dict[str, str] | None = None) -> None:
        """Delete the state of a version that is published, and its claim; not that of a job which overwrites it.

        Args:
            files: as `files` gave it before the claim was looked at and was found to be that of the published plan.
        """
        if files is None:
            files, holder = self.files(), self.claim.holder()  # in this order
            is_over = holder is None or self.claim.is_abandoned(holder)
            if not is_over and not (CLAIM_FILE in files and holder and self._is_published(holder.plan)):
                return
        plan = {path: files[path] for path in (_PLAN_FILE,) if path in files}
        # The plan last: a claim without it is one of a job that has not begun.
        for paths in (files.keys() - plan.keys(), plan.keys()):
            self.delete_all({join(self.url, path): files[path] for path in paths})
        self._store.delete_temporaries(self._config.dataset_url)
        self._delete_empty_folders()

    def _delete_empty_folders(self) -> None:
        states = self._config.states_url  # the output itself is the user's
        folders = (folder for folder, *_ in os.walk(self.url, topdown=False)) if self._is_local else ()
        self._store.delete_empty_folders(*folders, states, os.path.dirname(states))

    def _is_published(self, claimed_plan: str) -> bool:
        """Whether the manifest is one of this plan: before plan.json is written, that of another is deleted."""
        plan = self._read(_PLAN_FILE) or b""
        return claimed_plan == schema.sha256(plan) and self._store.stat(self._manifest_url) is not None

    # --- what a job answers to the launcher that waits for it

    def leave(self, answer: PlannedJob | ComparedInputs) -> None:
        """Leave an answer outside the state of the version: a job may be writing it."""
        self._store.write(self._answer_url(type(answer)), document_bytes(answer))

    def take(self, kind: type[Answer]) -> Answer:
        """The answer that the job left, which is deleted."""
        url = self._answer_url(kind)
        answer = read_document(self._store.read(url), kind)
        self._store.delete(url)
        self._delete_empty_folders()
        if answer is None:
            raise ImageShardsError(f"{url} isn't what the job left: run the same command again")
        return answer

    def _answer_url(self, kind: type[PlannedJob | ComparedInputs]) -> str:
        """The same for the same command: on a cluster one may start the job and another take its answer."""
        config, name = self._config, "plan" if kind is PlannedJob else "comparison"
        command = canonical_json([config.fingerprint(), config.input, config.manifest])
        return join(config.states_url, f"{name}-{schema.sha256(command)[:16]}.json")


def own_files(store: Storage, version_url: str, dataset: str) -> list[str]:
    """Every file of the version that a job writes; the user's folders are not looked into."""
    indexes = store.names(join(version_url, schema.INDEX_FOLDER))
    names = (*store.names(version_url), *(f"{schema.INDEX_FOLDER}/{name}" for name in indexes))
    return [name for name in names if is_ours(name, dataset)]


def shard_names(config: Config, splits: Mapping[str, PlannedSplit]) -> list[ShardName]:
    """Every planned shard, in order of split and number."""
    return [
        ShardName(config.name, name, index, split.shards)
        for name, split in sorted(splits.items())
        for index in range(split.shards)
    ]


def withdraw(config: Config, state: JobState, plan: Plan) -> None:
    """Delete shards that a job of this plan wrote after it lost the claim, if whoever has the version has no such ones.

    Shards of the same name are left to its publisher, who may have found them equal.
    """
    store, listed = storage.open_storage(config.output, config.io_deadline), dict[str, str]()
    with suppress(FileNotFoundError):  # a local folder that another job has deleted
        listed = {file.path: file.generation for file in store.files(config.dataset_url)}
    manifest, planned = state.manifest(), state.planned()  # after the listing: later files have other generations
    owners = [owner.splits for owner in (manifest and manifest.plan, planned) if owner]
    theirs = {name for owner in owners for name in shard_names(config, owner)}
    others = set(shard_names(config, plan.splits)) - theirs if owners else set()
    files = {file for name in others for file in (name.file, name.index_file, name.table_file)}
    state.delete_all({join(config.dataset_url, file): listed[file] for file in files & listed.keys()})
    if manifest:
        state.clear()
