"""Defaults of a Dataflow job: its name, label and options, and the number of its workers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import beam_pipeline
from beam_pipeline import storage
from beam_pipeline.config import Config, wrong
from beam_pipeline.errors import UsageError
from beam_pipeline.images import codec_versions
from beam_pipeline.schema import canonical_json, sha256
from beam_pipeline.text import plural

LABEL = "imageshards"
_MACHINE_TYPE = "e2-standard-4"
_DISK_GB = 50
_MAX_WORKERS = 32
_UNSET = (None, "", "default")
_MAX_THREADS = 12  # of a worker process: Dataflow's default
# Of a worker process, of which there is one per core. The second uses a core whose process has no shard.
DECODE_THREADS = 2
_SHARED_CORE = frozenset({"e2-micro", "e2-small", "e2-medium"})
_REPOSITORY = Path(beam_pipeline.__file__).parent.parent
_REMOTE_INPUT = "Dataflow's workers can't read local files; copy them to gs://BUCKET/…"
_REMOTE_OUTPUT = "Dataflow's workers can't write there; use gs://BUCKET/…"


def job_name(config: Config) -> str:
    """The default name, from the version that the job writes: Dataflow runs one job of a name at a time."""
    return re.sub(r"[^a-z0-9]", "-", f"imageshards-{config.name}-{config.version}")


def label(config: Config) -> str:
    """A hash of the job's flags, input and output, by which the same command finds its running job."""
    flags = {name: value for name, value in config.fingerprint().items() if name not in ("labels", "columns")}
    urls, actions = ("input", "manifest", "labels_file", "dataset_url"), ("plan_only", "repair", "overwrite", "restart")
    flags |= {name: getattr(config, name) for name in urls + actions} | {"compares": config.context.compares}
    return sha256(canonical_json(flags))[:32]


def fleet_size(shards: int, cores: int, most_workers: int, threads: int | None = None) -> tuple[int, int]:
    """The most workers, and the shards that each of their processes writes at a time, each in a thread.

    These are the fewest threads that start all shards at once, then the fewest workers.

    A worker runs one process per core, and Dataflow fills one worker before the next: with more slots than shards
    some workers are idle. No worker gets more than its share, rounded up to its cores: ⌈shards / workers⌉ + cores - 1.
    With more than `_MAX_THREADS` per process, shards take turns.

    Args:
        shards, cores, most_workers: at least 1; cores of each worker.
        threads: of each process, if the command says so.
    """
    threads = threads or min(_ceil_div(shards, cores * most_workers), _MAX_THREADS)
    return min(_ceil_div(shards, cores * threads), most_workers), threads


def _ceil_div(dividend: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-dividend // divisor)


def cores_of(machine_type: str) -> int | None:
    """vCPUs of a machine type, such as e2-standard-4 or n2-custom-6-3072; None if the name doesn't contain them."""
    if machine_type in _SHARED_CORE:
        return 2
    match = re.fullmatch(r"(?:\w+-)?[a-z]+-(\d+)(?:-[a-z\d]+)*", machine_type)
    return int(match[1]) if match else None


def shards_asked_for(config: Config) -> int | None:
    """Shards of all splits by `--num_shards`; None if the plan will decide their number."""
    asked, splits = config.num_shards, config.known_splits
    if isinstance(asked, dict):
        return sum(asked.values()) if splits and set(splits) <= asked.keys() else None
    return asked * len(splits) if asked and splits else None


def check_options(config: Config, options: Mapping[str, Any]) -> None:
    """Check that the command sets every option without a default, and names no local path.

    Args:
        options: Beam's by name.

    Raises:
        UsageError: names the flag and the fix.
    """
    for flag, fix in (
        ("project", "name the project to run and bill the job in"),
        ("region", "name the region of the buckets, such as europe-west4"),
    ):
        if not options[flag]:
            raise UsageError(f"--{flag} is missing: {fix}")
    if not re.fullmatch(r"[a-z]+(-[a-z]+)+\d+", options["region"]):
        raise wrong("--region", options["region"], "name a region, without a zone, such as europe-west4")
    for flag in ("num_workers", "max_num_workers", "number_of_worker_harness_threads", "disk_size_gb"):
        if options[flag] is not None and options[flag] < 1:
            raise wrong(f"--{flag}", options[flag], "give an integer from 1")
    for flag in ("setup_file", "requirements_file"):
        if options[flag] and not Path(options[flag]).is_file():
            raise wrong(f"--{flag}", options[flag], "there is no such file")
    if options["dry_run"] not in (False, "True"):  # Beam takes any text for true
        raise wrong("--dry_run", options["dry_run"], "write --dry_run=True, or leave it out")
    for flag in ("streaming", "update"):
        if options[flag]:
            raise UsageError(f"--{flag} is for streaming jobs: leave it out")
    for pair in options["labels"] or ():  # KEY=VALUE or JSON
        if re.search(rf'^{LABEL} *=|"{LABEL}" *:', pair):
            raise wrong("--labels", pair, f"{LABEL} is the label by which a command finds its job; choose another one")
    for flag in ("input", "manifest", "exclude"):
        if (url := getattr(config, flag)) and storage.is_local(url):
            raise wrong(f"--{flag}", url, _REMOTE_INPUT)
    if storage.is_local(config.output):
        raise wrong("--output", config.output, _REMOTE_OUTPUT)
    if not config.output.startswith("gs://") and not options["temp_location"]:
        raise UsageError("--temp_location is missing: set it to a gs:// folder for Dataflow's temporary files")
    for flag in ("temp_location", "staging_location"):
        if (url := options[flag]) and not url.startswith("gs://"):
            raise wrong(f"--{flag}", url, _REMOTE_OUTPUT)
        if url and not storage.bucket_and_name(url)[1]:  # Beam would create a bucket
            raise wrong(f"--{flag}", url, "name a folder in the bucket, such as gs://BUCKET/temp")


def defaults(config: Config, options: Mapping[str, Any]) -> dict[str, Any]:
    """Values of the options that a command leaves out, Beam's and ours.

    Args:
        options: Beam's by name.

    Raises:
        UsageError: there is neither an image for the workers nor a checkout to install there.
    """
    folder = f"gs://{storage.bucket_and_name(config.output)[0]}/_dataflow"
    machine_type = options["machine_type"] or _MACHINE_TYPE
    workers, threads = options["max_num_workers"] or _MAX_WORKERS, options["number_of_worker_harness_threads"]
    cores, shards = cores_of(machine_type), shards_asked_for(config)
    if cores and shards:
        most = options["max_num_workers"] or max(_MAX_WORKERS, _ceil_div(shards, cores * _MAX_THREADS))
        workers, threads = fleet_size(shards, cores, most, threads)
    workers = max(workers, options["num_workers"] or 1)
    values = {
        "job_name": job_name(config),
        "temp_location": f"{folder}/temp",
        "staging_location": options["temp_location"] or f"{folder}/staging",
        "machine_type": machine_type,
        "disk_size_gb": _DISK_GB,
        "autoscaling_algorithm": "THROUGHPUT_BASED",
        "max_num_workers": workers,
        "number_of_worker_harness_threads": threads or 1,
        **_worker_code(options),
    }
    unset = {name: value for name, value in values.items() if options[name] in _UNSET}
    if not config.decode_threads:
        unset["decode_threads"] = DECODE_THREADS
    if workers < (options["max_num_workers"] or 0):  # more would be idle
        unset["max_num_workers"] = workers
    return unset


def _worker_code(options: Mapping[str, Any]) -> dict[str, Any]:
    """How workers get this package: from an image, or with its requirements from a checkout."""
    if options["sdk_container_image"]:
        return {"sdk_location": "container"}
    if options["setup_file"] or options["requirements_file"]:
        return {}
    setup, extra = _REPOSITORY / "setup.py", "-heic" if "pillow_heif" in codec_versions() else ""
    requirements = _REPOSITORY / "deploy" / f"requirements-worker{extra}.txt"
    if not (setup.is_file() and requirements.is_file()):
        what = f"workers install this package from its checkout, and {setup.parent} isn't one (no setup.py, deploy/)"
        fix = "build an image from a checkout, or pip install -e there"
        raise UsageError(f"--sdk_container_image is missing: without an image, {what}: {fix}")
    # Workers download the packages, this machine doesn't.
    return {"setup_file": str(setup), "requirements_file": str(requirements), "requirements_cache": "skip"}


def defaults_text(config: Config, explicit: Mapping[str, Any], filled: Mapping[str, Any]) -> str:
    """The lines printed before a job is submitted: the defaults as flags, and how many shards are written at a time.

    Args:
        explicit: Beam's options by name, as the command sets them.
        filled: their `defaults`.
    """
    options = {**explicit, **filled}
    machine, workers = options["machine_type"], options["max_num_workers"]
    threads = options["number_of_worker_harness_threads"]
    cores, shards = cores_of(machine), shards_asked_for(config)
    fleet = f"up to {plural(workers, 'worker')}"
    if cores:
        fleet += f" of {plural(cores, 'core')}, {plural(workers * cores * threads, 'shard')} at a time"
        fleet += f"; the job has {plural(shards, 'shard')}" if shards else "; set --num_shards to size the fleet"
    elif "number_of_worker_harness_threads" in filled:
        fleet += f"; the cores of {machine!r} aren't known here: set --number_of_worker_harness_threads"
    where = f"project {options['project']}, region {options['region']}"
    lines = [f"Dataflow job {options['job_name']} in {where}; defaults:"]
    for name, value in filled.items():
        lowered = "" if explicit.get(name) in _UNSET else f" (not {explicit[name]}: the others would be idle)"
        lines.append(f"  --{name}={value}{lowered}")
    return "\n".join([*lines, f"  {fleet}"])
