"""What an unpublished job keeps in `ROOT/NAME/_state/VERSION/`: claim, plan, and a sidecar for each finished shard.

A plan that differs in any byte invalidates all of it. The folder is deleted once the version is published.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from enum import Enum
from typing import IO, Any

from beam_pipeline import schema, storage
from beam_pipeline.config import Config
from beam_pipeline.dataset.claim import CLAIM_FILE, Claim, SupersededError
from beam_pipeline.dataset.compare import read_run
from beam_pipeline.errors import NotPublishedError
from beam_pipeline.schema import ShardName, is_ours
from beam_pipeline.schema.job import Plan, as_run, document_bytes, read_document
from beam_pipeline.schema.manifest import Content, PlannedSplit, parse_manifest
from beam_pipeline.storage import ListedFile, Storage, join
from beam_pipeline.storage.local import temporary_file

_PLAN_FILE = "plan.json"
# They survive a fresh start: an image that killed decoders will do so again.
_KEPT = (CLAIM_FILE, "inflight/rejected/")
_TEMPORARY = "tmp/"
_DELETES_IN_FLIGHT = 32


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
    """

    def __init__(self, config: Config, run: str = "") -> None:
        self._config = config
        self._run = run or config.context.id
        self._store = storage.open_storage(config.output, config.io_deadline)
        self._is_local = storage.is_local(config.output)
        self._manifest_url = join(config.dataset_url, schema.MANIFEST_FILE)
        self.url = config.state_url
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
        data, replaces = document_bytes(plan), False
        while True:
            self._run, is_replaced = self.claim.acquire(plan.sha256, replaces)
            # In this order: jobs that share the claim write shards only after plan.json, so that what is listed before
            # it is there is old; and one that publishes deletes it only after it wrote the manifest.
            old = self._old_files()
            is_begun = self._read(_PLAN_FILE) == data
            is_published = self._store.stat(self._manifest_url) is not None
            if is_published and not self._config.overwrite and self._is_done(plan):
                break
            if is_begun and not is_published and not is_replaced:
                break
            # The holder has published this plan: take its claim over.
            replaces = is_published and is_begun and self._run != self._config.context.id
            # Or it has, just now, and its claim is gone: acquire one of our own.
            is_gone = bool(old) and self.claim.holder() is None
            if not replaces and not is_gone and self._begin(old, data):
                break
        return self._run

    def _is_done(self, plan: Plan) -> bool:
        """Whether a job of this plan has published, or the manifest can't be read and is to be repaired: then False.

        Raises:
            SupersededError: a job of another plan has published.
        """
        is_ours = self.outcome(plan) is Outcome.PUBLISHED
        if not is_ours and self._config.repair and self.manifest() is None:
            return False
        self.claim.discard()
        if not is_ours:
            raise SupersededError.published(self._config.dataset_url)
        return True

    def _begin(self, old: dict[str, str], plan: bytes) -> bool:
        """Delete what another plan left, and write plan.json; returns whether this plan is there now."""
        if old or self._config.overwrite:  # which deletes the user's files, too
            self.check()
            self._delete(old)
        return self._store.write(join(self.url, _PLAN_FILE), plan, "")

    def _old_files(self) -> dict[str, str]:
        """URL → generation of what has to go if this job begins from nothing."""
        config, version = self._config, self._config.dataset_url

        def of_version() -> dict[str, str]:
            if self._is_local:  # the user's folders are not looked into
                names = own_files(self._store, version, config.name)
                found = {name: self._store.stat(join(version, name)) for name in names}
                return {name: file.generation for name, file in found.items() if file}
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
                delete_users_files(self._store, version, self._config.name)
            self._store.delete_empty_folders(join(version, schema.INDEX_FOLDER))

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
        is_plan = manifest and Plan.published(manifest, plan.inputs).sha256 == plan.sha256
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

    def temporary_file(self) -> AbstractContextManager[IO[bytes]]:
        """A file to be published, which a kill leaves only in the state: elsewhere it has no name."""
        return temporary_file(join(self.url, _TEMPORARY) if self._is_local else None)

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


def own_files(store: Storage, version_url: str, dataset: str) -> list[str]:
    """Every file of the version that a job writes; the user's folders are not looked into."""
    indexes = store.names(join(version_url, schema.INDEX_FOLDER))
    names = (*store.names(version_url), *(f"{schema.INDEX_FOLDER}/{name}" for name in indexes))
    return [name for name in names if is_ours(name, dataset)]


def delete_users_files(store: Storage, version_url: str, dataset: str) -> None:
    """For `--overwrite` on a disk: delete what no job writes; links are deleted, not followed."""
    index = f"{schema.INDEX_FOLDER}/"
    for folder in ("", index):
        for name in (folder + name for name in store.names(join(version_url, folder))):
            url = join(version_url, name.rstrip("/"))
            if not is_ours(name, dataset) and (name != index or os.path.islink(url)):
                store.delete_tree(url)


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
