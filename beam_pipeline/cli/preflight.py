"""The checks before a job is submitted: one line each, and the first failure ends the command."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from beam_pipeline import storage
from beam_pipeline.cli.service import Service, ServiceError, credentials
from beam_pipeline.cli.watch import find_running_job
from beam_pipeline.config import Config, wrong
from beam_pipeline.conversion.versions import versions
from beam_pipeline.dataset.state import JobState
from beam_pipeline.errors import ImageShardsError, MissingFileError, StorageError
from beam_pipeline.storage.gs import GoogleStorage

# A bucket's location → the prefix of its regions: https://cloud.google.com/storage/docs/locations
_CONTINENTS = {"us": "us-", "nam": "us-", "eu": "europe-", "eur": "europe-", "asia": "asia-"}
_PIN = re.compile(r"^(pillow(?:[-_.]+heif)?) *== *([^\s;]+)", re.MULTILINE | re.IGNORECASE)


def check_cloud(config: Config, options: Mapping[str, Any]) -> Iterator[str]:
    """Check credentials, buckets, the workers' versions and the Dataflow API; reads no input.

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
        yield from _worker_versions(options)
        if not options["template_location"]:  # another account may run the template
            yield _api(config, options)
    except ServiceError as error:
        raise ImageShardsError(f"{error}; nothing was started") from error


def check_dataset(config: Config) -> Iterator[str]:
    """The result of the earlier checks of input and output.

    Raises:
        UsageError: the output has an unfinished job with other flags.
    """
    yield f"ok: input {config.input or config.manifest} has images"
    yield f"ok: output {config.dataset_url} {_output_state(config)}"


def _output_state(config: Config) -> str:
    """The state of the output, which holds no other program's files."""
    state = JobState(config)
    if config.overwrite or config.restart:
        return "starts over: its existing files will be deleted"
    if not state.exists():
        return "is empty"
    plan, flags = state.planned(), config.fingerprint()
    then = plan.configuration if plan else flags
    changed = sorted(f"--{name}" for name in flags.keys() | then.keys() if then.get(name) != flags.get(name))
    if changed and not storage.is_local(config.output):
        what = f"{config.dataset_url} has an unfinished job with other flags ({', '.join(changed)})"
        raise wrong("--output", config.output, f"{what}: use the same flags, or discard its shards with --restart")
    if changed:
        return "has an unfinished job with other flags: its files will be deleted"
    return "has an unfinished job; it will be resumed"


def _credentials(options: Mapping[str, Any]) -> str:
    if options["no_auth"]:
        return "warning: no credentials are used (--no_auth)"
    account, project = credentials(options["project"], options["impersonate_service_account"] or "", fetch=True)
    email = getattr(account, "service_account_email", None) or "a user"
    return f"ok: credentials of {email} (project {project or 'unknown'}), for a job in project {options['project']}"


def _api(config: Config, options: Mapping[str, Any]) -> str:
    name = options["job_name"]
    job = find_running_job(Service(options), config, name)
    state = f"job {name} is already running: {job.id}" if job else f"no job named {name} is running"
    return f"ok: the Dataflow API answers; {state}"


def _buckets(config: Config, options: Mapping[str, Any]) -> Iterator[str]:
    beams = {flag: options[flag] or "" for flag in ("temp_location", "staging_location", "template_location")}
    written = {"output": config.state_url} | {flag: url for flag, url in beams.items() if url.startswith("gs://")}
    # Inputs in other stores are checked by their listing.
    inputs = {flag: getattr(config, flag) for flag in ("input", "manifest", "exclude")}
    read = {flag: url for flag, url in inputs.items() if url.startswith("gs://")}
    seen = set()
    for flag, url in {**written, **read}.items():
        bucket = f"{url.partition('://')[0]}://{storage.bucket_and_name(url)[0]}"
        if bucket not in seen:
            seen.add(bucket)
            yield _bucket(config, options, f"--{flag}", url, bucket, flag in written)


def _bucket(config: Config, options: Mapping[str, Any], flag: str, url: str, bucket: str, is_written: bool) -> str:
    """Check a bucket's region and, if the job will write there, write and delete an empty object."""
    store, region = storage.open_storage(url, config.first_contact_s), options["region"]
    regions: Collection[str] | None = (region,)
    try:
        if isinstance(store, GoogleStorage):
            regions = store.regions(url)
        if is_written:
            probe = storage.join(url, f"preflight-{config.context.id}")
            store.write(probe, b"")
            store.delete(probe)
    except MissingFileError:
        fix = f"there is no such bucket; create it in region {region}, or correct the name"
        raise wrong(flag, bucket, fix) from None
    except StorageError as error:
        fix = error.fix or "check the URL and the network"
        raise StorageError(f"{flag} {error.reason}", f"{fix}; nothing was started") from error
    state = f"bucket {bucket} {'is writable' if is_written else 'exists'}"
    if regions is None:
        if options["staging_location"].startswith(f"{bucket}/"):  # Beam reads a bucket's metadata before it uploads
            fix = f"give this account roles/storage.legacyBucketReader on {bucket}; nothing was started"
            raise StorageError(f"{bucket} can't be staged to without storage.buckets.get", fix)
        return f"warning: {state}, but its region is unknown: this account lacks storage.buckets.get"
    where = " and ".join(sorted(regions))
    if not any(_contains(location, region) for location in regions):
        return f"warning: {state}, but is in {where} and the job in {region}: traffic between them is slow and billed"
    return f"ok: {state}, in {where}" if isinstance(store, GoogleStorage) else f"ok: {state}"


def _contains(location: str, region: str) -> bool:
    continent = _CONTINENTS.get(location.rstrip("0123456789"))  # a multi-region: eu, or eur4
    return region.startswith(continent) if continent else region == location


def _worker_versions(options: Mapping[str, Any]) -> Iterator[str]:
    """Check the versions that workers will have, as far as the launcher can see."""
    here, image, file = versions(), options["sdk_container_image"], options["requirements_file"]
    needs = f"Python {sys.version_info.major}.{sys.version_info.minor}, Beam {version('apache-beam')}"
    needs += "".join(f", {name} {here[name]}" for name in ("imageshards", "pillow", "pillow_heif") if name in here)
    text = Path(file).read_text(encoding="utf-8", errors="replace") if file else ""
    pins = {re.sub(r"[-.]+", "_", name).lower(): pin for name, pin in _PIN.findall(text)}
    for name in ("pillow", "pillow_heif") if pins else ():
        if pins.get(name) != here.get(name):
            what = f"it has {name} {pins.get(name, 'missing')}, this launcher {here.get(name, 'none')}"
            raise wrong("--requirements_file", file, f"{what}; install its version here, or change it to this one")
    installed = " and ".join(Path(path).name for path in (options["setup_file"], file) if path)
    code = f"image {image}, not checked here" if image else f"workers install {installed}"
    yield f"ok: {code}; a worker stops the job unless it has {needs}"
    if options["use_public_ips"] is False and not image:
        yield "warning: --no_use_public_ips: without --sdk_container_image workers need Cloud NAT to install packages"
