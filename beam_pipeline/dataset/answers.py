"""What a job answers to the launcher that waits for it: a plan, or a comparison.

It is outside the state of the version, which another job may be writing.
"""

from __future__ import annotations

from typing import TypeVar

from beam_pipeline import schema, storage
from beam_pipeline.config import Config
from beam_pipeline.errors import ImageShardsError
from beam_pipeline.schema import canonical_json
from beam_pipeline.schema.job import ComparedInputs, PlannedJob, document_bytes, read_document

Answer = TypeVar("Answer", PlannedJob, ComparedInputs)


def leave(config: Config, answer: PlannedJob | ComparedInputs) -> None:
    """Leave an answer for the launcher."""
    storage.open_storage(config.output, config.io_deadline).write(_url(config, type(answer)), document_bytes(answer))


def take(config: Config, kind: type[Answer]) -> Answer:
    """The answer that the job left, which is deleted."""
    store, url = storage.open_storage(config.output, config.io_deadline), _url(config, kind)
    answer = read_document(store.read(url), kind)
    store.delete(url)
    store.delete_empty_folders(config.states_url, config.output)
    if answer is None:
        raise ImageShardsError(f"{url} is not the job's result: run the same command again")
    return answer


def _url(config: Config, kind: type[PlannedJob | ComparedInputs]) -> str:
    """The same for the same command: on a cluster one may start the job and another take its answer."""
    name = "plan" if kind is PlannedJob else "comparison"
    command = canonical_json([config.fingerprint(), config.input, config.manifest])
    return storage.join(config.states_url, f"{name}-{schema.sha256(command)[:16]}.json")
