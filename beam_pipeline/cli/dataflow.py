"""Defaults of a Dataflow job: its name, label and options, and how its shards spread over workers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

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
_MOST_WORKERS = 32
_LEFT_OUT = (None, "", "default")
_MOST_THREADS = 12  # of a worker process: what Dataflow starts by default
# Of a worker process: there is one for each core. The second uses a core whose own process has no shard.
DECODE_THREADS = 2
_SHARED_CORE = frozenset({"e2-micro", "e2-small", "e2-medium"})
_REPOSITORY = Path(beam_pipeline.__file__).parent.parent
_REMOTE_INPUT = "Dataflow's workers can't read local files; copy them to gs://BUCKET/…"
_REMOTE_OUTPUT = "Dataflow's workers can't write there; use gs://BUCKET/…"


def job_name(config: Config) -> str:
    """The default: Dataflow runs one job of a name at a time, so it follows from what the job writes."""
    return re.sub(r"[^a-z0-9]", "-", f"imageshards-{config.name}-{config.version}")


def label(config: Config) -> str:
    """A hash of what the job does and where it writes: the same command finds its running job by it."""
    flags = {name: value for name, value in config.fingerprint().items() if name not in ("labels", "columns")}
    others = (
        "input",
        "manifest",
        "labels_file",
        "dataset_url",
        "plan_only",
        "repair",
        "overwrite",
        "restart",
        "compares",
    )
    return sha256(canonical_json(flags | {name: getattr(config, name) for name in others}))[:32]


class Spread(NamedTuple):
    """How many workers a job has at most, and how many shards each of their processes writes at a time."""

    workers: int
    threads: int


def spread(shards: int, cores: int, most_workers: int, threads: int | None = None) -> Spread:
    """Choose the fewest threads that start all shards at once, then the fewest workers.

    A worker runs a process for each core, and Dataflow fills one worker before the next: with more slots than shards
    some are idle. No worker gets more than its share, rounded up to its cores: ⌈shards / workers⌉ + cores - 1.
    With more than `_MOST_THREADS` a process, shards take turns.

    Args:
        shards, cores, most_workers: at least 1; cores of each worker.
        threads: of each process, if they are given.
    """
    threads = threads or min(_quotient(shards, cores * most_workers), _MOST_THREADS)
    return Spread(min(_quotient(shards, cores * threads), most_workers), threads)


def _quotient(dividend: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-dividend // divisor)


def cores_of(machine_type: str) -> int | None:
    """vCPUs of a machine type, such as e2-standard-4 or n2-custom-6-3072; None if the name doesn't contain them."""
    if machine_type in _SHARED_CORE:
        return 2
    found = re.fullmatch(r"(?:\w+-)?[a-z]+-(\d+)(?:-[a-z\d]+)*", machine_type)
    return int(found[1]) if found else None


def shards_asked_for(config: Config) -> int | None:
    """Shards of all splits by `--num_shards`; None if the plan will decide how many there are."""
    wanted, splits = config.num_shards, config.known_splits
    if isinstance(wanted, dict):
        return sum(wanted.values()) if splits and set(splits) <= wanted.keys() else None
    return wanted * len(splits) if wanted and splits else None


def check(config: Config, given: Mapping[str, Any]) -> None:
    """Check that the command sets what has no default, and uses no local paths.

    Args:
        given: Beam's options by name.

    Raises:
        UsageError: names the flag and the fix.
    """
    for flag, fix in (
        ("project", "name the project to run and bill the job in"),
        ("region", "name the region of the buckets, such as europe-west4"),
    ):
        if not given[flag]:
            raise UsageError(f"--{flag} is missing: {fix}")
    if not re.fullmatch(r"[a-z]+(-[a-z]+)+\d+", given["region"]):
        raise wrong("--region", given["region"], "name a region, without a zone, such as europe-west4")
    for flag in ("num_workers", "max_num_workers", "number_of_worker_harness_threads", "disk_size_gb"):
        if given[flag] is not None and given[flag] < 1:
            raise wrong(f"--{flag}", given[flag], "give a whole number from 1")
    for flag in ("setup_file", "requirements_file"):
        if given[flag] and not Path(given[flag]).is_file():
            raise wrong(f"--{flag}", given[flag], "there is no such file")
    if given["dry_run"] not in (False, "True"):  # Beam takes any text for true
        raise wrong("--dry_run", given["dry_run"], "write --dry_run=True, or leave it out")
    for flag in ("streaming", "update"):
        if given[flag]:
            raise UsageError(f"--{flag} is for streaming jobs: leave it out")
    for one in given["labels"] or ():  # KEY=VALUE or JSON
        if re.search(rf'^{LABEL} *=|"{LABEL}" *:', one):
            raise wrong("--labels", one, f"{LABEL} is the label by which a command finds its job; choose another one")
    for flag in ("input", "manifest"):
        if (url := getattr(config, flag)) and storage.is_local(url):
            raise wrong(f"--{flag}", url, _REMOTE_INPUT)
    if storage.is_local(config.output):
        raise wrong("--output", config.output, _REMOTE_OUTPUT)
    if not config.output.startswith("gs://") and not given["temp_location"]:
        raise UsageError("--temp_location is missing: set it to a gs:// folder for Dataflow's temporary files")
    for flag in ("temp_location", "staging_location"):
        if (url := given[flag]) and not url.startswith("gs://"):
            raise wrong(f"--{flag}", url, _REMOTE_OUTPUT)
        if url and not storage.bucket_and_name(url)[1]:  # Beam would make a bucket
            raise wrong(f"--{flag}", url, "name a folder in the bucket, such as gs://BUCKET/temp")


def defaults(config: Config, given: Mapping[str, Any]) -> dict[str, Any]:
    """Values for the options that a command leaves out, Beam's and ours.

    Args:
        given: Beam's options by name.

    Raises:
        UsageError: there is neither an image for the workers nor a checkout to install there.
    """
    folder = f"gs://{storage.bucket_and_name(config.output)[0]}/_dataflow"
    machine_type = given["machine_type"] or _MACHINE_TYPE
    workers, threads = given["max_num_workers"] or _MOST_WORKERS, given["number_of_worker_harness_threads"]
    cores, shards = cores_of(machine_type), shards_asked_for(config)
    if cores and shards:
        most = given["max_num_workers"] or max(_MOST_WORKERS, _quotient(shards, cores * _MOST_THREADS))
        workers, threads = spread(shards, cores, most, threads)
    workers = max(workers, given["num_workers"] or 1)
    values = {
        "job_name": job_name(config),
        "temp_location": f"{folder}/temp",
        "staging_location": given["temp_location"] or f"{folder}/staging",
        "machine_type": machine_type,
        "disk_size_gb": _DISK_GB,
        "autoscaling_algorithm": "THROUGHPUT_BASED",
        "max_num_workers": workers,
        "number_of_worker_harness_threads": threads or 1,
        **_code(given),
    }
    left_out = {name: value for name, value in values.items() if given[name] in _LEFT_OUT}
    if not config.decode_threads:
        left_out["decode_threads"] = DECODE_THREADS
    if workers < (given["max_num_workers"] or 0):  # more of them would be idle
        left_out["max_num_workers"] = workers
    return left_out


def _code(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the workers run: an image, or this package and its requirements."""
    if given["sdk_container_image"]:
        return {"sdk_location": "container"}
    if given["setup_file"] or given["requirements_file"]:
        return {}
    setup, extra = _REPOSITORY / "setup.py", "-heic" if "pillow_heif" in codec_versions() else ""
    requirements = _REPOSITORY / "deploy" / f"requirements-worker{extra}.txt"
    if not (setup.is_file() and requirements.is_file()):
        raise UsageError(
            "--sdk_container_image is missing: without an image, workers install this package from its checkout, and "
            f"{setup.parent} is none (no setup.py and deploy/); build an image from a checkout, or pip install -e there"
        )
    # The workers fetch the packages, not this machine.
    return {"setup_file": str(setup), "requirements_file": str(requirements), "requirements_cache": "skip"}


def defaults_text(config: Config, given: Mapping[str, Any], filled: Mapping[str, Any]) -> str:
    """What is printed before a job is submitted: the defaults as flags, and how many shards are written at a time.

    Args:
        given: Beam's options by name.
        filled: `defaults` of them.
    """
    options = {**given, **filled}
    machine, workers, threads = (
        options[name] for name in ("machine_type", "max_num_workers", "number_of_worker_harness_threads")
    )
    cores, shards = cores_of(machine), shards_asked_for(config)
    fleet = f"up to {plural(workers, 'worker')}"
    if cores:
        fleet += f" of {plural(cores, 'core')}, {plural(workers * cores * threads, 'shard')} at a time"
        fleet += f"; the job has {plural(shards, 'shard')}" if shards else "; set --num_shards to size the fleet"
    elif "number_of_worker_harness_threads" in filled:
        fleet += f"; the cores of {machine!r} aren't known here: set --number_of_worker_harness_threads"
    lines = [
        f"Dataflow job {options['job_name']} in project {options['project']}, region {options['region']}; defaults:"
    ]
    for name, value in filled.items():
        lowered = "" if given.get(name) in _LEFT_OUT else f" (not {given[name]}: the others would be idle)"
        lines.append(f"  --{name}={value}{lowered}")
    return "\n".join([*lines, f"  {fleet}"])
