"""The checks before a job is submitted, one line each; the first that fails ends the command."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from beam_pipeline import storage
from beam_pipeline.cli.service import Service, ServiceError, credentials
from beam_pipeline.cli.watch import find
from beam_pipeline.config import Config, wrong
from beam_pipeline.conversion.versions import versions
from beam_pipeline.dataset.state import JobState
from beam_pipeline.errors import ImageShardsError, StorageError, UsageError
from beam_pipeline.inputs.manifest_rows import row_refs
from beam_pipeline.schema import canonical_json
from beam_pipeline.storage.causes import MissingFileError
from beam_pipeline.storage.gs import GoogleStorage

# A bucket's multi-region → how regions in it begin.
_CONTINENTS = {"us": "us-", "eu": "europe-", "asia": "asia-"}
# A bucket's predefined pair of regions, https://cloud.google.com/storage/docs/locations
_PAIRS = {
    "asia1": ("asia-northeast1", "asia-northeast2"),
    "eur4": ("europe-north1", "europe-west4"),
    "eur5": ("europe-west1", "europe-west2"),
    "eur7": ("europe-west2", "europe-west3"),
    "eur8": ("europe-west3", "europe-west6"),
    "nam4": ("us-central1", "us-east1"),
}
_LOOKED_AT = 1000  # of an input's files, for HEIC
_HEIC = (".heic", ".heif")
_PIN = re.compile(r"^(pillow(?:[-_.]+heif)?) *== *([^\s;]+)", re.MULTILINE | re.IGNORECASE)


def check_cloud(config: Config, options: Mapping[str, Any]) -> Iterator[str]:
    """Credentials, buckets, what the workers run, and the Dataflow API; needs nothing of the input.

    Args:
        options: Beam's by name, with the defaults.

    Raises:
        UsageError: no such bucket, or workers with other versions than this launcher's.
        StorageError: a bucket can't be written to.
        ImageShardsError: no credentials, or the API refuses.
    """
    try:
        yield _credentials(options)
        yield from _buckets(config, options)
        yield from _code(options)
        if not options["template_location"]:  # another account may run the template
            yield _api(config, options)
    except ServiceError as error:
        raise ImageShardsError(f"{error}; nothing was started") from error


def check_dataset(config: Config) -> Iterator[str]:
    """What the checks of input and output, which come before, have found.

    Raises:
        UsageError: the input holds HEIC images, which can't be decoded here, or the output an unfinished job of others.
    """
    yield f"ok: input {config.input or config.manifest} has images"
    yield _heic(config)
    yield f"ok: output {config.dataset_url} {_found(config)}"


def _found(config: Config) -> str:
    """What a job meets in its output; that no other program's files are there has been checked."""
    state = JobState(config)
    if config.overwrite or config.restart:
        return "starts over; existing files will be deleted"
    if not state.exists():
        return "is free"
    planned, wanted = state.planned().get("configuration", {}), json.loads(canonical_json(config.fingerprint()))
    others = sorted(f"--{name}" for name in wanted if planned and planned.get(name) != wanted[name])
    if others and not storage.is_local(config.output):
        what = f"{config.dataset_url} has an unfinished job with other flags ({', '.join(others)})"
        raise wrong("--output", config.output, f"{what}: give the same, or --restart discards what it has written")
    if others:
        return "has an unfinished job with other flags: it starts over; existing files will be deleted"
    return "has an unfinished job; it will be resumed"


def _credentials(options: Mapping[str, Any]) -> str:
    if options["no_auth"]:
        return "warning: no credentials are used (--no_auth)"
    found, project = credentials(options["project"], options["impersonate_service_account"] or "", fetch=True)
    account = getattr(found, "service_account_email", None) or "a user"
    return f"ok: credentials of {account}, project {project or 'unknown'}; the job runs in project {options['project']}"


def _api(config: Config, options: Mapping[str, Any]) -> str:
    name = options["job_name"]
    try:
        job = find(Service(options), config, name)
    except ServiceError as error:
        if error.is_fleeting:  # a submission waits for it
            return f"warning: {error}"
        raise
    found = f"job {name} is already running: {job.id}" if job else f"no job {name} runs"
    return f"ok: the Dataflow API answers; {found}"


def _buckets(config: Config, options: Mapping[str, Any]) -> Iterator[str]:
    places = {flag: options[flag] or "" for flag in ("temp_location", "staging_location", "template_location")}
    written = {"output": config.state_url} | {flag: url for flag, url in places.items() if url.startswith("gs://")}
    # Elsewhere, the first look at the input tells.
    read = {flag: url for flag in ("input", "manifest") if (url := getattr(config, flag)).startswith("gs://")}
    seen = set()
    for flag, url in {**written, **read}.items():
        bucket = f"{url.partition('://')[0]}://{storage.bucket_and_name(url)[0]}"
        if bucket not in seen:
            seen.add(bucket)
            yield _bucket(config, f"--{flag}", url, bucket, flag in written, options["region"])


def _bucket(config: Config, flag: str, url: str, bucket: str, is_written: bool, region: str) -> str:
    """Look where a bucket is, and write and delete an empty object if the job will write there."""
    store = storage.open_storage(url, config.first_contact_s)
    regions: Collection[str] | None = (region,)
    try:
        if isinstance(store, GoogleStorage):
            regions = store.regions(url)
        if is_written:
            probe = storage.join(url, f"preflight-{config.run_id}")
            store.write(probe, b"")
            store.delete(probe)
    except MissingFileError:
        raise wrong(flag, bucket, f"there is no such bucket; make it in region {region}, or correct the name") from None
    except StorageError as error:
        fix = error.fix or "check the URL and the network"
        raise StorageError(f"{flag} {error.reason}", f"{fix}; nothing was started") from error
    if regions is None:
        found = "can be written to, but its region " if is_written else ""
        return f"warning: bucket {bucket} {found}can't be looked at: this account lacks storage.buckets.get"
    found = f"bucket {bucket} {'can be written to' if is_written else 'is there'}"
    if not any(_contains(one, region) for one in regions):
        place = " and ".join(sorted(regions))
        return f"warning: {found}, but is in {place} and the job in {region}: traffic between them costs and is slow"
    return f"ok: {found}" + (f", in {' and '.join(sorted(regions))}" if isinstance(store, GoogleStorage) else "")


def _contains(location: str, region: str) -> bool:
    if continent := _CONTINENTS.get(location):
        return region.startswith(continent)
    return region in _PAIRS.get(location, (location,))


def _code(options: Mapping[str, Any]) -> Iterator[str]:
    """Which versions the workers will have, as far as it is known here."""
    here, image, file = versions(), options["sdk_container_image"], options["requirements_file"]
    needs = f"Python {sys.version_info.major}.{sys.version_info.minor}, Beam {version('apache-beam')}"
    needs += "".join(f", {name} {here[name]}" for name in ("imageshards", "pillow", "pillow_heif") if name in here)
    text = Path(file).read_text(encoding="utf-8") if file and Path(file).is_file() else ""
    pins = {re.sub(r"[-.]+", "_", name).lower(): pin for name, pin in _PIN.findall(text)}
    for name in ("pillow", "pillow_heif") if pins else ():
        if pins.get(name) != here.get(name):
            what = f"it has {name} {pins.get(name, 'missing')}, this launcher {here.get(name, 'none')}"
            raise wrong("--requirements_file", file, f"{what}; install constraints.txt's here: make setup")
    installed = " and ".join(Path(one).name for one in (options["setup_file"], file) if one)
    code = f"image {image}" if image else f"workers install {installed}"
    yield f"ok: {code}; a worker stops the job unless it has {needs}"
    if options["use_public_ips"] is False and not image:
        yield "warning: --no_use_public_ips: without --sdk_container_image workers need Cloud NAT to install packages"


def _heic(config: Config) -> str:
    """Whether photos of phones can be decoded, if there are any among the first files."""
    if "pillow_heif" in versions():
        return "ok: HEIC images can be decoded"
    if config.layout == "manifest":
        paths = (ref.path for ref in row_refs(config))
    else:
        files = storage.open_storage(config.input, config.first_contact_s).files(config.input)
        paths = (file.path for file in files)
    first = next((path for path in islice(paths, _LOOKED_AT) if path.lower().endswith(_HEIC)), None)
    if first is not None and config.extensions & {"heic", "heif"}:
        fix = "pip install '.[heic]' here, or leave heic and heif out of --extensions"
        raise UsageError(
            f"--input {config.input!r}: {first!r} is HEIC, which can't be decoded without pillow-heif; {fix}"
        )
    return (
        f"ok: no HEIC image among the first {_LOOKED_AT:,} files (a later one would be rejected: no pillow-heif here)"
    )
