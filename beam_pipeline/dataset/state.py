"""What an unpublished job keeps in `ROOT/NAME/_state/VERSION/`: claim, plan, and a sidecar for each finished shard.

A shard is finished if its sidecar carries this plan's hash and the sizes and CRCs of the shard and its index. A plan
that differs in any byte invalidates all of it. The folder is deleted once the version is published.
"""

from __future__ import annotations

import json
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import IO, Any

from beam_pipeline import schema, storage
from beam_pipeline.config import Config
from beam_pipeline.conversion.decoder import Attempts
from beam_pipeline.dataset import published
from beam_pipeline.dataset.claim import CLAIM_FILE, Claim
from beam_pipeline.errors import ImageShardsError, NotPublishedError, StorageError
from beam_pipeline.planning.plan import JobPlan
from beam_pipeline.schema import ShardName, canonical_json, is_ours
from beam_pipeline.schema.manifest import open_manifest, seal_manifest
from beam_pipeline.storage import ListedFile, Storage, join
from beam_pipeline.storage.causes import explained

_PLAN_FILE = "plan.json"
# A job that begins from nothing doesn't delete these: an image that killed decoders will do so again.
_KEPT = (CLAIM_FILE, "inflight/rejected/")
_DELETES_IN_FLIGHT = 32


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """The results of calls that wait for storage but not for each other; the first error, once all have ended."""
    pool = ThreadPoolExecutor(len(calls))
    try:
        done = [pool.submit(call) for call in calls]
        wait(done)
    finally:
        pool.shutdown(wait=False)  # Ctrl-C needn't wait for requests that are tried again
    return [one.result() for one in done]


class JobState:
    """The state folder of one version.

    Attributes:
        claim: the right to write the version and this folder.
        attempts: markers of what is being decoded.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
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

    def planned(self) -> dict[str, Any]:
        """The plan of the job that began to write the version; empty if there is none that can be read."""
        with suppress(ValueError):
            if isinstance(plan := json.loads(self._read(_PLAN_FILE) or b"{}"), dict):
                return plan
        return {}

    def has_leftovers(self) -> bool:
        """Whether anything is here, if only a folder; here or in the folder of all states, of a local output."""
        if self._is_local:
            return os.path.isdir(self._config.states_url)
        return next(self._store.files(self.url), None) is not None

    # --- the claim and the plan

    def prepare(self, plan: JobPlan) -> JobPlan:
        """Take the claim, and make the output ready for this plan's shards; a second call changes nothing.

        Finished shards of the same plan stay. Otherwise everything that a job has written goes, with `--overwrite` all
        files that are there, and the manifest goes first: a dataset that is half deleted must not look published.

        Returns:
            The plan with the claim that it is under.

        Raises:
            ImageShardsError: another job is writing the version, or has published another plan since this one began.
        """
        config, data, replaces = self._config, canonical_json(plan.document()), False
        if self._is_local:
            self.check(plan)
        while True:
            run, is_replaced = self.claim.take(plan.sha256, replaces)
            claimed = replace(plan, claim=run)
            # In this order: jobs that share the claim write shards only after plan.json, so that what is listed before
            # it is there is old; and one that publishes deletes it only after it wrote the manifest.
            old = self._old_files()
            planned = self._read(_PLAN_FILE)
            is_published = self._store.stat(self._manifest_url) is not None
            if is_published and not config.overwrite:
                if self.published_manifest(plan) is not None:
                    self.claim.give_up()
                    return claimed
                if not config.repair or self._manifest() is not None:  # else it can't be read: write it again
                    self.claim.give_up()
                    raise self.published_meanwhile()
            if not is_published and not is_replaced and planned == data:
                return claimed
            # The claim of a job that has published.
            replaces = is_published and planned == data and run != config.run_id
            # One that shared it has, just now.
            if replaces or (old and not self._is_local and self.claim.writer() is None):
                continue
            if old or self._is_local:  # where --overwrite deletes the user's files, too, which are not listed
                self.check(claimed)
                self._delete(old)
            if self._store.write(join(self.url, _PLAN_FILE), data, None if self._is_local else ""):
                return claimed

    def _old_files(self) -> dict[str, str]:
        """URL → generation of what has to go if this job begins from nothing."""
        config, version = self._config, self._config.dataset_url

        def of_version() -> dict[str, str]:
            if self._is_local:  # under a lock nothing changes; the user's folders are not looked into
                return dict.fromkeys(own_files(self._store, version, config.name), "")
            files = self._store.files(version)
            return {one.path: one.generation for one in files if config.overwrite or is_ours(one.path, config.name)}

        written, noted = at_once(of_version, self.files)
        old = {join(version, path): generation for path, generation in written.items()}
        old |= {join(self.url, path): noted[path] for path in noted if not path.startswith(_KEPT)}
        return old

    def _delete(self, old: dict[str, str]) -> None:
        version, plan_url = self._config.dataset_url, join(self.url, _PLAN_FILE)
        if self._is_local:
            self.write(_PLAN_FILE, b"{}\n")  # half deleted, the version is still known as ours
            old.pop(plan_url, None)
        # The plan before shards: without it none of an earlier job counts as finished, however far this comes.
        for url in (*(join(version, f) for f in (schema.MANIFEST_FILE, schema.DATASET_INFO_FILE)), plan_url):
            if url in old:
                self._store.delete(url, old.pop(url))
        self.delete_all(old)
        if self._is_local:
            if self._config.overwrite:
                self._store.delete_tree(version)
            self._store.delete_empty_folders(join(version, schema.INDEX_FOLDER))

    def delete_all(self, files: dict[str, str]) -> None:
        """Delete each URL if it still is that generation."""
        with ThreadPoolExecutor(_DELETES_IN_FLIGHT) as pool:
            list(pool.map(self._store.delete, files.keys(), files.values()))

    def check(self, plan: JobPlan, repaired: str = "", is_published: bool = False) -> None:
        """Raises ImageShardsError if this job may no longer write.

        Args:
            plan: of this job, as `prepare` returned it.
            repaired: `self_sha256` of the manifest that a repair follows. In an object store that is its claim: two
                repairs write the same bytes.
            is_published: whether the manifest is written; then another job of this plan may have deleted the claim.
        """
        if repaired and not self._is_local:
            manifest = self._manifest()
            may_write = manifest is not None and manifest["self_sha256"] == repaired
        elif (writer := self.claim.writer()) is None:
            may_write = is_published
        else:
            may_write = writer.run == (plan.claim or self._config.run_id)
        if not may_write:
            raise ImageShardsError(
                f"{self._config.dataset_url}: another job has taken over this version; "
                "this one stops and publishes nothing"
            )

    def published_meanwhile(self) -> ImageShardsError:
        """The error of a job that finds a manifest."""
        text = "was published by another job while this one was running; run the command again"
        return ImageShardsError(f"{self._config.dataset_url} {text}")

    def published_manifest(self, plan: JobPlan, after: Exception | None = None) -> dict[str, Any] | None:
        """The manifest, if this plan is published: by an earlier attempt, or by another job of the same plan.

        Args:
            plan: of this job.
            after: the error that ended this attempt; the state may be gone because the plan is published.
        """
        if isinstance(after, StorageError) and not isinstance(after, FileNotFoundError):
            return None
        manifest = self._manifest()
        if manifest is None or published.plan_of(manifest, plan.inputs, plan.dropped).sha256 != plan.sha256:
            return None
        # Etags and mtimes of the images are not in the manifest: without run.json it may be that of other images.
        return manifest if published.run_facts(self._config).get("inputs") == plan.inputs else None

    def _manifest(self) -> dict[str, Any] | None:
        try:
            return open_manifest(self._store.read(self._manifest_url), self._manifest_url)
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
            generation = None if self._is_local else seen.generation if seen else ""
            if isinstance(content, bytes):
                is_written = self._store.write(url, content, generation)
            else:
                is_written = self._store.publish(content, url, generation)
            if is_written:
                return
            seen = self._store.stat(url)
            check()

    # --- finished shards

    def sidecar_url(self, name: ShardName) -> str:
        """Of the file that says that a shard is finished: its object and index are there."""
        return join(self.url, f"shards/{name.short}.json")

    def sidecar(self, name: ShardName) -> dict[str, Any] | None:
        """What a finished shard's sidecar says; None if there is none, or after a power cut only a part of one."""
        data = self._read(f"shards/{name.short}.json") or b""
        try:
            sidecar: dict[str, Any] = json.loads(data)
            return sidecar if seal_manifest(sidecar) == data else None
        except (ValueError, AttributeError):  # no JSON, no object
            return None

    def difference(
        self, name: ShardName, sidecar: dict[str, Any], found: Callable[[str], ListedFile | None], reads: bool
    ) -> str | None:
        """Which file of a finished shard doesn't match its sidecar.

        Args:
            name, sidecar: of the shard.
            found: what the store says of a file of the version.
            reads: whether to read a shard whose CRC the store doesn't tell, even if it has the etag or mtime that its
                writer recorded. Its index, which is small, is always read then.
        """
        for kind, file, expected in (
            ("shard", name.file, sidecar),
            ("index", name.index_file, sidecar["index"]),
            ("record table", name.table_file, sidecar["table"]),
        ):
            if expected is None:
                continue  # a compressed shard has no index, one of an older version no table
            listed, url = found(file), join(self._config.dataset_url, file)
            unchanged = not reads and listed is not None and bool(listed.etag) and listed.etag == expected.get("etag")
            reads_shard: storage.Reads = "never" if unchanged else "if unknown"
            if not storage.is_intact(self._store, url, listed, expected["bytes"], expected["crc32c"], reads_shard):
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
        """Every file of the state → its generation."""
        return {file.path: file.generation for file in self._store.files(self.url)}

    @contextmanager
    def temporary_file(self) -> Iterator[IO[bytes]]:
        """A file to be published, which a kill leaves only in the state: elsewhere it has no name."""
        if not self._is_local:
            folder = tempfile.gettempdir()
            with _explained(folder), tempfile.TemporaryFile(buffering=1 << 20) as file:
                yield file
            return
        folder = join(self.url, "tmp")  # the same disk: publishing is a rename
        os.makedirs(folder, exist_ok=True)
        path = join(folder, f"{uuid.uuid4().hex}.tmp")
        try:
            with _explained(path), open(path, "xb", buffering=1 << 20) as file:
                yield file
        finally:
            with suppress(FileNotFoundError):
                os.unlink(path)

    def clear(self, files: dict[str, str] | None = None) -> None:
        """Delete the state of a version that is published, and a remote claim; not that of a job which overwrites it.

        Args:
            files: as `files` gave it before the claim was looked at and was found to be that of the published plan.
        """
        if self._is_local:
            writer = self.claim.writer()
            if writer and writer.run == self._config.run_id:
                self._store.delete_temporaries(self._config.dataset_url)
                self._store.delete_tree(self.url, keep=(CLAIM_FILE,))  # which the launcher deletes
            return
        if files is None:
            files = self.files()  # before the claim is looked at
            if (writer := self.claim.writer()) and not (CLAIM_FILE in files and self._is_published(writer.plan)):
                return
        plan = {path: files[path] for path in (_PLAN_FILE,) if path in files}
        # The plan last: a claim without it is one of a job that has not begun.
        for some in (files.keys() - plan.keys(), plan.keys()):
            self.delete_all({join(self.url, path): files[path] for path in some})

    def _is_published(self, claimed_plan: str) -> bool:
        """Whether the manifest is one of this plan: before plan.json is written, that of another is deleted."""
        plan = self._read(_PLAN_FILE) or b""
        return claimed_plan == schema.sha256(plan) and self._store.stat(self._manifest_url) is not None

    def save_plan_only(self, plan: JobPlan) -> None:
        """Leave a plan for the launcher that waits for it, outside the state: a job may be running."""
        self._store.write(self._plan_only_url, canonical_json({**plan.document(), "expected": plan.expected}))

    def take_plan_only(self) -> dict[str, Any]:
        """The plan that `--plan_only` left, which is deleted."""
        document = json.loads(self._store.read(self._plan_only_url))
        self._store.delete(self._plan_only_url)
        states = self._config.states_url  # the output itself is the user's
        self._store.delete_empty_folders(self.url, states, os.path.dirname(states))
        return dict(document)

    @property
    def _plan_only_url(self) -> str:
        """The same for the same command: on a cluster one may start the job and another take its plan."""
        config = self._config
        command = canonical_json([config.fingerprint(), config.input, config.manifest])
        return join(config.states_url, f"plan-{schema.sha256(command)[:16]}.json")


@contextmanager
def _explained(path: str) -> Iterator[None]:
    """Errors of the file that is open there, such as a full disk, as one line."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename not in (None, path):
            raise  # of another file
        raise explained(path, error) from error


def own_files(store: Storage, version_url: str, dataset: str) -> list[str]:
    """Every file of the version that a job writes; the user's folders are not looked into."""
    indexes = store.names(join(version_url, schema.INDEX_FOLDER))
    names = (*store.names(version_url), *(f"{schema.INDEX_FOLDER}/{name}" for name in indexes))
    return [name for name in names if is_ours(name, dataset)]
