"""Checks before there is a job: the input and what its flags name, the output apart from it, what is there already."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from beam_pipeline import schema, storage
from beam_pipeline.config import Config, wrong
from beam_pipeline.dataset.state import JobState, read_run
from beam_pipeline.dataset.version import own_files
from beam_pipeline.errors import NotPublishedError, OtherFormatError, StorageError, UsageError
from beam_pipeline.inputs import checks, exclude, folders, manifest_rows
from beam_pipeline.schema import INDEX_FOLDER, MANIFEST_FILE, REJECTS_FILE, ShardName
from beam_pipeline.schema.job import as_run
from beam_pipeline.schema.manifest import Content, Manifest, parse_manifest
from beam_pipeline.storage.local import making_folder
from beam_pipeline.text import one_line, plural


def resolve(config: Config, for_output: bool = True) -> Config:
    """Check the input and read the small files that the configuration names.

    Raises:
        UsageError: it is no `Config`; as `checks.check_input`, `check_places` and the readers of labels and manifests
            say.
    """
    if not isinstance(config, Config):
        raise UsageError(f"{config!r}: give an imageshards.Config")
    seconds = config.first_contact_s
    encoding = sys.getfilesystemencoding()
    if storage.is_local(config.input) and encoding != "utf-8":  # names would be others elsewhere
        raise wrong("--input", config.input, f"file names are read as {encoding} here; set PYTHONUTF8=1")
    config = exclude.checked(config)
    if config.labels_file:
        config = dataclasses.replace(config, labels=checks.read_labels(config.labels_file, seconds))
    if config.manifest:
        config = dataclasses.replace(config, header=manifest_rows.read_header(config.manifest, seconds))
    if for_output:
        check_places(config)
    checks.check_input(dataclasses.replace(config, io_deadline=seconds))
    return config


def read_manifest(config: Config) -> Manifest | None:
    """The manifest of the version, or None if none is published.

    Raises:
        NotPublishedError: there is an invalid one, and neither `--repair` nor `--overwrite` was asked for.
    """
    url = storage.join(config.dataset_url, MANIFEST_FILE)
    try:
        data = storage.open_storage(config.output, config.first_contact_s).read(url)
    except FileNotFoundError:
        return None
    try:
        return Manifest(config.dataset_url, parse_manifest(data, url)[0])
    except NotPublishedError as error:
        if config.overwrite or (config.repair and not isinstance(error, OtherFormatError)):
            return None  # all of it is rewritten, in place
        raise


def check_places(config: Config) -> None:
    """Check that the output won't be listed as input the next time, and no input is deleted with an old version.

    Raises:
        UsageError: one is inside the other, symbolic links followed.
    """
    version, state = config.dataset_url, config.states_url
    if config.layout != "manifest" and _is_in(version, config.input):
        raise UsageError(f"--output {config.output!r}: it is inside --input {config.input!r}; choose another folder")
    for flag in ("manifest", "labels_file", "exclude", "input"):
        url = getattr(config, flag)
        for folder in (version, state):
            if url and _is_in(url, folder):
                raise UsageError(f"--{flag} {url!r}: it is in {folder}, which belongs to the job; move it elsewhere")


def _is_in(url: str, folder: str) -> bool:
    """Whether a file or folder is `folder`, or anywhere inside it."""
    return f"{_real(url)}/".startswith(f"{_real(folder).rstrip('/')}/")


def _real(url: str) -> str:
    return os.path.realpath(url) if storage.is_local(url) else url


@contextmanager
def no_empty_folders(config: Config) -> Iterator[None]:
    """Finally delete the folders of a local output that are new and empty."""
    old = config.dataset_url
    while storage.is_local(old) and not os.path.exists(old):
        old = os.path.dirname(old)
    try:
        yield
    finally:
        if old != config.dataset_url:
            storage.open_storage(config.output).delete_empty_folders(config.dataset_url, old)


def check_unpublished(config: Config) -> None:
    """Check that the output can be written to, and that an unpublished version there is a job's, so may be replaced.

    Raises:
        UsageError: no such bucket, a folder that can't be made, or files that no job of ours left.
    """
    wrong_output = partial(wrong, "--output", config.output)
    try:
        if storage.is_local(config.output):
            making_folder(storage.join(config.dataset_url, MANIFEST_FILE), lambda: None)
        store = storage.open_storage(config.output, config.first_contact_s)
        first = next(store.files(config.dataset_url), None)
    except FileNotFoundError as error:
        raise wrong_output(f"no such bucket or folder ({one_line(error)})") from None
    except (NotADirectoryError, FileExistsError) as error:
        raise wrong_output(f"a part of {error.filename} is a file, not a folder") from None
    except (OSError, StorageError) as error:
        if not storage.is_local(config.output):
            raise
        raise wrong_output(f"can't be written: {one_line(error)}") from None
    if first is None or config.overwrite or JobState(config).exists():
        return
    if storage.is_local(config.output) and os.path.isdir(storage.join(config.dataset_url, MANIFEST_FILE)):
        raise wrong_output(f"{config.dataset_url}/{MANIFEST_FILE} is a folder; move it away")
    ours = own_files(store, config.dataset_url, config.name)
    if MANIFEST_FILE in ours and not config.repair:
        return  # another job has published it since it was looked for
    if not _was_published(ours):
        fix = "choose another --name or --version, or --overwrite deletes them"
        raise wrong_output(f"{config.dataset_url} holds files of another program ({first.path!r}); {fix}")
    if not config.repair:
        fix = "--repair rewrites them in place, or choose another --version"
        raise wrong_output(f"{config.dataset_url} has shards but no manifest.json: {fix}")


def _was_published(files: Collection[str]) -> bool:
    """Whether a job of ours wrote some of these files: TFDS names its shards and metadata as we do, but has no more."""
    indexes = any(file.startswith(f"{INDEX_FOLDER}/") and file.endswith(".idx") for file in files)
    return indexes or (REJECTS_FILE in files and any(map(ShardName.parse, files)))


# --- a published version that the command isn't the same as


def check_same(config: Config, manifest: Content) -> None:
    """Check that the version was made under this name, and with this configuration.

    Raises:
        UsageError: it wasn't.
    """
    # A renamed folder's files keep the old name: repair would write others next to them.
    for flag, wanted in (("name", config.name), ("version", config.version)):
        if getattr(manifest, flag) != wanted:
            what = f"{config.dataset_url} was published as {manifest.name}/{manifest.version}, and its files say so"
            raise wrong(f"--{flag}", wanted, f"{what}: give its folder that name again, or use --overwrite")
    ours, theirs = config.fingerprint(), manifest.configuration
    different = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    if different:
        name = different[0]
        others = len(different) - 1
        more = f" ({plural(others, 'more flag')} {'differs' if others == 1 else 'differ'})" if others else ""
        keeps_ids = different == ["labels"] and config.labels and not _moved_id(manifest.classes, config.labels)
        version = _next_version(config, 2 if different == ["exclude"] else 1 if keeps_ids else 0)
        flag = {"labels": "labels_file", "columns": "manifest"}.get(name, name)
        of_now, of_then = (_as_written(name, configuration.get(name)) for configuration in (ours, theirs))
        if name == "exclude":
            excluded = as_run(read_run(config)).excluded
            of_now, of_then = _as_list(config.exclude, ours), _as_list(excluded.list if excluded else "a list", theirs)
        what = f"--{flag} {of_now}: {config.dataset_url} is published with {of_then}{more}"
        raise UsageError(f"{what}; choose --version {version} or --overwrite")


def _next_version(config: Config, part: int) -> str:
    """A version that isn't there yet, higher in this part: 0 is MAJOR, 2 PATCH."""
    names: list[str] = []
    with suppress(StorageError):  # what is being told matters more
        names = storage.open_storage(config.output, config.first_contact_s).names(os.path.dirname(config.dataset_url))
    versions = schema.newest_first([*names, f"{config.version}/"])
    same = config.version.split(".")[:part]
    newest = next(numbers for version in versions if (numbers := version.split("."))[:part] == same)
    return ".".join([*same, str(int(newest[part]) + 1), *["0"] * (2 - part)])


def _moved_id(then: Sequence[str], now: Sequence[str]) -> tuple[str, str] | None:
    """The first class that was published whose id another class has now, and that one; None if new ones are last."""
    return next((pair for pair in zip(then, now, strict=False) if pair[0] != pair[1]), None)


def choices(config: Config, manifest: Content, labels: set[str]) -> str:
    """What to do with other inputs: MAJOR is raised if a class gets another id, else MINOR."""
    if config.layout != "manifest":  # a class folder without images is a class, too
        labels = labels | {folder.label for folder in folders.class_folders(config, folders.ListingSummary())}
    minor, moved = _next_version(config, 1), _moved_id(manifest.classes, config.labels or sorted(labels))
    if moved is None:
        return f"choose --version {minor} or --overwrite"
    major, labels_file = _next_version(config, 0), f"the lines of {schema.LABELS_FILE}, then the new classes"
    what = f"class {moved[1]!r} takes the id of {moved[0]!r}: choose --version {major} or --overwrite"
    return f"{what}, or keep the ids with --version {minor} and a --labels_file: {labels_file}"


def _as_list(url: str, configuration: Mapping[str, Any]) -> str:
    """The list of `--exclude` that a configuration has by its hash."""
    sha256 = configuration.get("exclude")
    return f"{url!r} (SHA-256 {str(sha256)[:12]}…)" if sha256 else "none"


def _as_written(name: str, value: Any) -> str:
    """A value of the configuration as a user gives it."""
    if name == "image_size":
        return "none" if value is None else "x".join(map(str, value if value[0] != value[1] else value[:1]))
    if name == "columns":
        return f"of columns {', '.join(column['name'] for column in value or ()) or 'none'}"
    return f"of {', '.join(value)}" if name == "labels" and value else repr(value)
