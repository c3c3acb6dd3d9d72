"""Makes a version ready for a plan's shards, without what another plan left; a job that lost it deletes its own."""

from __future__ import annotations

import os
from contextlib import suppress

from beam_pipeline import schema, storage
from beam_pipeline.config import Config
from beam_pipeline.dataset.claim import CLAIM_FILE, Claim, SupersededError
from beam_pipeline.dataset.state import PLAN_FILE, JobState, run_concurrently, shard_names
from beam_pipeline.schema import is_ours
from beam_pipeline.schema.job import Plan, document_bytes
from beam_pipeline.storage import Storage, join
from beam_pipeline.storage.local import delete_tree

# They survive a fresh start: an image that killed decoders will do so again.
_KEPT = (CLAIM_FILE, "inflight/rejected/")


def prepare(config: Config, plan: Plan) -> str:
    """Acquire the claim, and make the output ready for this plan's shards; a second call changes nothing.

    Finished shards of the same plan stay. Otherwise everything that a job has written goes, with `--overwrite` all
    files that are there, and the manifest goes first: a dataset that is half deleted must not look published.

    Returns:
        The run whose claim this job is under: its own, or that of another job of the same plan.

    Raises:
        ImageShardsError: another job is writing the version, or has published another plan since this one began.
    """
    store = storage.open_storage(config.output, config.io_deadline)
    claim, replaces = Claim(config), False
    while True:
        run, is_replaced = claim.acquire(plan.sha256, replaces)
        state = JobState(config, run)
        # In this order: jobs that share the claim write shards only after plan.json, so that what is listed before it
        # is there is old; and one that publishes deletes it only after it wrote the manifest.
        old = _old_files(config, state)
        is_begun = state.has_planned(plan.sha256)
        is_published = state.has_manifest()
        if is_published and not config.overwrite:
            is_done = state.has_published(plan)
            if is_done or not config.repair or state.manifest():  # which repairs one that can't be read
                claim.discard()
                if not is_done:
                    raise SupersededError.published(config.dataset_url)
                return run
        if is_begun and not is_published and not is_replaced:
            return run
        # The holder has published this plan: take its claim over.
        replaces = is_published and is_begun and run != config.context.id
        # Or it has, just now, and its claim is deleted: acquire one of our own.
        if replaces or (old and claim.holder() is None):
            continue
        if old or config.overwrite:  # which deletes the user's files, too
            state.check()
            _delete(config, state, old)
        if store.write(join(state.url, PLAN_FILE), document_bytes(plan), ""):
            return run


def _old_files(config: Config, state: JobState) -> dict[str, str]:
    """URL → generation of what has to go if this job begins from nothing."""
    store, version = storage.open_storage(config.output, config.io_deadline), config.dataset_url

    def of_version() -> dict[str, str]:
        if storage.is_local(version):  # the user's folders are not looked into
            found = {name: store.stat(join(version, name)) for name in own_files(store, version, config.name)}
            return {name: file.generation for name, file in found.items() if file}
        files = store.files(version)
        return {file.path: file.generation for file in files if config.overwrite or is_ours(file.path, config.name)}

    of_dataset, of_state = run_concurrently(of_version, state.files)
    old = {join(version, path): generation for path, generation in of_dataset.items()}
    return old | {join(state.url, path): of_state[path] for path in of_state if not path.startswith(_KEPT)}


def _delete(config: Config, state: JobState, old: dict[str, str]) -> None:
    store, version = storage.open_storage(config.output, config.io_deadline), config.dataset_url
    published = (join(version, file) for file in (schema.MANIFEST_FILE, schema.DATASET_INFO_FILE))
    # The plan before shards: without it none of an earlier job counts as finished, however far this comes.
    for url in (*published, join(state.url, PLAN_FILE)):
        if url in old:
            store.delete(url, old.pop(url))
    state.delete_all(old)
    if storage.is_local(version):
        if config.overwrite:
            _delete_users_files(store, version, config.name)
        store.delete_empty_folders(join(version, schema.INDEX_FOLDER), version)


def own_files(store: Storage, version_url: str, dataset: str) -> list[str]:
    """Every file of the version that a job writes; the user's folders are not looked into."""
    indexes = store.names(join(version_url, schema.INDEX_FOLDER))
    names = (*store.names(version_url), *(f"{schema.INDEX_FOLDER}/{name}" for name in indexes))
    return [name for name in names if is_ours(name, dataset)]


def _delete_users_files(store: Storage, version_url: str, dataset: str) -> None:
    """For `--overwrite` on a disk: delete what no job writes; links are deleted, not followed."""
    index = f"{schema.INDEX_FOLDER}/"
    for folder in ("", index):
        for name in (folder + name for name in store.names(join(version_url, folder))):
            url = join(version_url, name.rstrip("/"))
            if not is_ours(name, dataset) and (name != index or os.path.islink(url)):
                delete_tree(url)


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
