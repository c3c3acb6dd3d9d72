"""Which files of a version's folder are ours: a job gives their names. Whatever else lies there is the user's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from beam_pipeline import schema
from beam_pipeline.schema import ShardName
from beam_pipeline.storage import Storage, join

_METADATA = frozenset(
    {
        schema.LABELS_FILE,
        schema.FEATURES_FILE,
        schema.REJECTS_FILE,
        schema.DUPLICATES_FILE,
        schema.RUN_FILE,
        schema.DATASET_INFO_FILE,
        schema.MANIFEST_FILE,
    }
)
_DELETES_IN_FLIGHT = 32


def is_ours(file: str, dataset: str) -> bool:
    """Whether a job gives a file this name.

    Args:
        file: its path in the version's folder.
        dataset: `--name`.
    """
    name = file.removeprefix(f"{schema.INDEX_FOLDER}/")
    if shard := ShardName.parse(name.removesuffix(".idx")):
        return shard.dataset == dataset and file in (shard.file, shard.index_file)
    split = name.removesuffix(".runs.npy")
    return file in _METADATA or (file == schema.runs_file(split) and bool(schema.NAME_PATTERN.fullmatch(split)))


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
