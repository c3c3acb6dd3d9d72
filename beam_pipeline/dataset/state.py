"""What an unpublished job keeps in `ROOT/NAME/_state/VERSION/`: claim, plan, and a sidecar for each finished shard.

The folder is deleted once the version is published.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from typing import IO, Any

from beam_pipeline import schema, storage
from beam_pipeline.config import Config
from beam_pipeline.dataset.claim import CLAIM_FILE, Claim, SupersededError
from beam_pipeline.errors import NotPublishedError, StorageError
from beam_pipeline.schema import ShardName
from beam_pipeline.schema.job import Plan, as_run, read_document
from beam_pipeline.schema.manifest import Content, PlannedSplit, parse_manifest
from beam_pipeline.storage import ListedFile, join
from beam_pipeline.storage.local import temporary_file

PLAN_FILE = "plan.json"
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


class JobState:
    """The state folder of one version.

    Args:
        config: of the job.
        run: whose claim this job is under, as `version.prepare` returned it; "" for its own.

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
        return any(self._store.stat(join(self.url, file)) for file in (PLAN_FILE, CLAIM_FILE))

    def planned(self) -> Plan | None:
        """The plan of the job that began to write the version; None if there is none that can be read."""
        try:
            return read_document(self._store.read(join(self.url, PLAN_FILE)), Plan)
        except FileNotFoundError:
            return None

    def has_planned(self, plan: str) -> bool:
        """Whether the plan with this hash is there."""
        planned = self.planned()
        return planned is not None and planned.sha256 == plan

    def has_manifest(self) -> bool:
        """Whether there is a manifest, valid or not."""
        return self._store.stat(self._manifest_url) is not None

    def has_leftovers(self) -> bool:
        """Whether a job left anything behind, even an empty folder or a lock."""
        if not self._is_local:
            return next(self._store.files(self.url), None) is not None
        of_version = {f"{self._config.version}/", f"{self._config.version}.lock"}
        names = self._store.names(self._config.states_url)
        return bool(of_version & {*names}) or (not names and os.path.isdir(self._config.states_url))

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
            holder = self.claim.holder()
            may_write = is_published if holder is None else holder.run == self._run
        if not may_write:
            what = "another job has taken over this version; this one stops and publishes nothing"
            raise SupersededError(f"{self._config.dataset_url}: {what}")

    def has_published(self, plan: Plan) -> bool:
        """Whether this plan is published: by an earlier attempt, or by a job that shared the claim."""
        manifest = self.manifest()
        is_plan = manifest is not None and Plan.published(manifest, plan.inputs).sha256 == plan.sha256
        # Etags and mtimes of the images are not in the manifest: without run.json it may be that of other images.
        return is_plan and as_run(read_run(self._config)).inputs == plan.inputs

    def manifest(self) -> Content | None:
        """The published manifest; None if there is no valid one."""
        return published_manifest(self._config.dataset_url, self._config.io_deadline)

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
                if self.has_manifest():
                    raise SupersededError.published(self._config.dataset_url) from None
                raise
            if is_written:
                return
            seen = self._store.stat(url)
            check()

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
            # Before plan.json is written, the manifest of another plan is deleted.
            is_done = CLAIM_FILE in files and holder and self.has_planned(holder.plan) and self.has_manifest()
            if not is_over and not is_done:
                return
        plan = {path: files[path] for path in (PLAN_FILE,) if path in files}
        # The plan last: a claim without it is one of a job that has not begun.
        for paths in (files.keys() - plan.keys(), plan.keys()):
            self.delete_all({join(self.url, path): files[path] for path in paths})
        self._store.delete_temporaries(self._config.dataset_url)
        folders = [folder for folder, *_ in os.walk(self.url, topdown=False)] if self._is_local else []
        for folder in (*folders, self._config.states_url):
            self._store.delete_empty_folders(folder, self._config.output)


def published_manifest(version_url: str, deadline_s: float) -> Content | None:
    """The manifest of a version; None if it isn't published, or only by a newer release."""
    url = join(version_url, schema.MANIFEST_FILE)
    try:
        return parse_manifest(storage.open_storage(url, deadline_s).read(url), url)[1]
    except (FileNotFoundError, NotPublishedError):
        return None


def read_run(config: Config) -> dict[str, Any]:
    """Content of run.json, which `as_run` types; empty if it can't be read: the version is valid without it."""
    url = storage.join(config.dataset_url, schema.RUN_FILE)
    try:
        run = json.loads(storage.open_storage(url, config.first_contact_s).read(url))
    except (OSError, ValueError, RecursionError, StorageError):
        return {}
    return run if isinstance(run, dict) else {}


def shard_names(config: Config, splits: Mapping[str, PlannedSplit]) -> list[ShardName]:
    """Every planned shard, in order of split and number."""
    return [
        ShardName(config.name, name, index, split.shards)
        for name, split in sorted(splits.items())
        for index in range(split.shards)
    ]
