"""`--out`: a folder, or URL, whose files are written in one step each; and whether a run may resume in it."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any, NotRequired, TypedDict

from msgspec import Struct, convert

from beam_pipeline import storage
from beam_pipeline.errors import UsageError
from reader.machine import lock_folder

RUN_FILE, METRICS_FILE, LABELS_FILE = "run.json", "metrics.jsonl", "classes.txt"
MODEL_FILE, LAST_MODEL_FILE = "model.keras", "last.keras"
CURVES_FILE = "curves.png"


class Line(TypedDict):
    """An epoch in metrics.jsonl: some values are known with validation only, or if a step of it was timed."""

    epoch: int
    phase: str
    step: int
    loss: float
    accuracy: float
    val_loss: NotRequired[float]
    val_accuracy: NotRequired[float]
    images_per_s: NotRequired[float]
    wait_share: NotRequired[float]


class _Run(Struct):
    """What is read of run.json; the last two are of a finished run."""

    configuration: dict[str, Any]
    finished: bool
    devices: str
    best_epoch: int
    verdict: str


def usable(given: str) -> str:
    """`--out` as a URL. Raises UsageError if it can't be one of a folder."""
    url = storage.normalize(given)
    why = storage.why_unusable(url) if given else "it is empty"
    if why := why or ("it is a file; choose a folder" if os.path.isfile(url) else ""):
        raise UsageError(f"--out {given!r}: {why}")
    return url


class OutFolder:
    """The folder of one run; all names are relative to it.

    Args:
        url: folder or URL.
        is_written: by this process; else `write` and `delete` do nothing.

    Raises:
        UsageError: it can't be one, or another process trains there, which is known of local folders only.
    """

    def __init__(self, url: str, is_written: bool = True) -> None:
        self.as_given, self.url = url, usable(url)
        self._store, self._is_written = storage.open_storage(self.url), is_written
        self._lock, self._is_new = -1, not os.path.isdir(self.url)
        if storage.is_local(self.url) and is_written:
            try:
                self._lock = lock_folder(self.url)
            except BlockingIOError:
                raise UsageError(f"--out {url!r}: another process is training there; choose another") from None

    def close(self) -> None:
        """Let others train here; a new local folder that nothing was written to is deleted."""
        if self._lock >= 0:
            if self._is_new:
                with suppress(OSError):
                    os.rmdir(self.url)
            os.close(self._lock)
            self._lock = -1

    def read(self, name: str) -> bytes | None:
        """A file, or None."""
        with suppress(FileNotFoundError):
            return self._store.read(storage.join(self.url, name))
        return None

    def write(self, name: str, data: bytes) -> None:
        """Write, or replace, a file."""
        if self._is_written:
            self._store.write(storage.join(self.url, name), data)

    # --- what a run knows of itself

    def run(self) -> dict[str, Any] | None:
        """run.json, or None if no run has begun here.

        Raises:
            UsageError: the folder holds something else.
        """
        data = self.read(RUN_FILE)
        if data is None:
            if others := [name for name in self._store.names(self.url) if not name.startswith(".")]:
                raise UsageError(f"--out {self.as_given!r}: it holds {others[0]}, not a run; choose a new folder")
            return None
        try:
            run = json.loads(data)
            convert(run, _Run)
        except (ValueError, RecursionError):
            raise self._not_ours(RUN_FILE) from None
        self._store.delete_temporaries(self.url)  # of a process that was killed
        return dict(run)

    def write_run(self, document: dict[str, Any]) -> None:
        """Replace run.json."""
        self.write(RUN_FILE, (json.dumps(document, indent=1) + "\n").encode())

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl. Raises UsageError as `run`."""
        try:
            lines = [json.loads(line) for line in (self.read(METRICS_FILE) or b"").splitlines()]
            convert(lines, list[Line])
        except (ValueError, RecursionError):
            raise self._not_ours(METRICS_FILE) from None
        return lines

    def _not_ours(self, name: str) -> UsageError:
        return UsageError(f"--out {self.as_given!r}: its {name} was not written by train; choose a new folder")

    def write_metrics(self, lines: list[dict[str, Any]]) -> None:
        """Replace metrics.jsonl."""
        self.write(METRICS_FILE, "".join(f"{json.dumps(line)}\n" for line in lines).encode())


def open_out(
    given: str | None, name: str, configuration: dict[str, Any], is_written: bool = True
) -> tuple[OutFolder, dict[str, Any] | None]:
    """The folder to train into, without `given` `runs/NAME`; and the run.json of a run that resumes, or has finished.

    Raises:
        UsageError: it holds something else, or a run of another configuration.
    """
    out = OutFolder(os.path.join("runs", name) if given is None else given, is_written)
    try:
        run = out.run()
        if run is not None and run["configuration"] != configuration:
            raise UsageError(f"--out {out.as_given!r}: {_difference(run, configuration)}; choose another --out")
        return out, run
    except BaseException:
        out.close()
        raise


def _difference(run: dict[str, Any], now: dict[str, Any]) -> str:
    then = run["configuration"]
    names = [name for name in now if then.get(name) != now[name]]
    if "dataset" in names:
        return f"it was trained on another dataset, {run['dataset']['url']}"  # or on another version
    name = names[0] if names else next(iter(then.keys() - now.keys()))
    return f"it was trained with --{name} {then.get(name)}, now it is {now.get(name)}"
