"""What a job on Dataflow is given beyond its command: a name and a label."""

from __future__ import annotations

import re

from beam_pipeline.config import Config
from beam_pipeline.schema import canonical_json, sha256

_SHARED_CORE = {"micro": 2, "small": 2, "medium": 2}
LABEL = "imageshards"


def job_name(config: Config) -> str:
    """Dataflow runs one job of a name at a time: it is of what the job writes."""
    return re.sub(r"[^a-z0-9]", "-", f"imageshards-{config.name}-{config.version}")


def label(config: Config) -> str:
    """A hash of what the job does and where it writes: the same command finds its running job by it."""
    flags = ("input", "manifest", "labels_file", "dataset_url", "plan_only", "repair", "overwrite", "restart")
    return sha256(canonical_json({**config.fingerprint(), **{flag: getattr(config, flag) for flag in flags}}))[:32]


def cores_of(machine_type: str) -> int | None:
    """vCPUs of a machine type of Compute Engine, such as e2-standard-4; None if its name doesn't say."""
    parts = machine_type.partition("-")[2] if not machine_type.startswith("custom-") else machine_type
    if parts in _SHARED_CORE:
        return _SHARED_CORE[parts]
    found = re.match(r"[a-z]+-(\d+)(-|$)", parts)
    return int(found[1]) if found else None
