"""`--out`: a folder, or URL, whose files are written in one step each; and whether a training may go on in it."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

from beam_pipeline import storage
from beam_pipeline.errors import UsageError
from beam_pipeline.storage.causes import explained

RUN_FILE, METRICS_FILE, MODEL_FILE, LABELS_FILE = "run.json", "metrics.jsonl", "model.keras", "classes.txt"
CURVES_FILE, CONFUSION_FILE = "curves.png", "confusion.png"
_DEFAULT = "runs"
_TEMPORARY = ".tmp"  # in a local folder: the same disk, so that publishing is a rename


class OutFolder:
    """The folder of one training; all names are relative to it."""

    def __init__(self, url: str) -> None:
        if why := storage.why_unusable(storage.normalize(url)):
            raise UsageError(f"--out {url!r}: {why}")
        self.given = url
        self.url = storage.normalize(url)
        self._is_local = storage.is_local(self.url)
        if self._is_local and os.path.exists(self.url) and not os.path.isdir(self.url):
            raise UsageError(f"--out {url!r}: it is a file; choose a folder")
        self._store = storage.open_storage(self.url)

    def names(self, folder: str = "") -> list[str]:
        """What is directly in a folder, sorted, folders with a slash at the end."""
        found = self._store.names(storage.join(self.url, folder))
        return [name for name in found if name != f"{_TEMPORARY}/"]

    def read(self, name: str) -> bytes | None:
        """A file, or None."""
        try:
            return self._store.read(storage.join(self.url, name))
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Write a small file."""
        self._store.write(storage.join(self.url, name), data)

    def publish(self, name: str, write: Callable[[str], None]) -> None:
        """Write a large file: `write` is given a path, of a file with the same suffix."""
        with self._temporary_folder() as folder:
            path = os.path.join(folder, os.path.basename(name))
            try:
                write(path)
                file = open(path, "rb")  # noqa: SIM115
            except OSError as error:
                raise explained(storage.join(self.url, name) if self._is_local else path, error) from error
            with file:
                self._store.publish(file, storage.join(self.url, name))

    def delete(self, name: str) -> None:
        """Delete a file."""
        self._store.delete(storage.join(self.url, name))

    def delete_if_empty(self) -> None:
        """Delete a local folder that nothing was written to."""
        if self._is_local:
            with suppress(OSError):
                os.rmdir(self.url)

    @contextmanager
    def _temporary_folder(self) -> Iterator[str]:
        if not self._is_local:
            with tempfile.TemporaryDirectory(prefix="imageshards-train-") as folder:
                yield folder
            return
        folder = os.path.join(self.url, _TEMPORARY)
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise explained(folder, error) from error
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    # --- what a training knows of itself

    def run(self) -> dict[str, Any] | None:
        """run.json, or None if no training has begun here.

        Raises:
            UsageError: the folder holds something else.
        """
        data = self.read(RUN_FILE)
        if data is None:
            if others := self.names():
                raise UsageError(f"--out {self.given!r}: it holds {others[0]}, not a training; choose a new folder")
            return None
        try:
            run = json.loads(data)
            run["configuration"], run["finished"]
        except (ValueError, KeyError, TypeError):
            raise UsageError(
                f"--out {self.given!r}: its {RUN_FILE} is of something else; choose a new folder"
            ) from None
        return dict(run)

    def write_run(self, document: dict[str, Any]) -> None:
        """Replace run.json."""
        self.write(RUN_FILE, (json.dumps(document, indent=1) + "\n").encode())

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return [json.loads(line) for line in (self.read(METRICS_FILE) or b"").splitlines()]

    def write_metrics(self, lines: list[dict[str, Any]]) -> None:
        """Replace metrics.jsonl."""
        self.write(METRICS_FILE, "".join(f"{json.dumps(line)}\n" for line in lines).encode())


def open_out(given: str | None, name: str, configuration: dict[str, Any]) -> tuple[OutFolder, dict[str, Any] | None]:
    """The folder to train into, and the run.json of a training that goes on, or has finished, in it.

    Without `given` it is `runs/NAME-N`: the last one if its training has the same configuration and isn't finished,
    else a new one.

    Raises:
        UsageError: it holds something else, or a training of another configuration.
    """
    if given is not None:
        out = OutFolder(given)
        run = out.run()
        if run is not None and run["configuration"] != configuration:
            raise UsageError(
                f"--out {given!r}: {_difference(run['configuration'], configuration)}; choose another --out"
            )
        return out, run
    begun = {}
    if os.path.isdir(_DEFAULT):
        names = (re.fullmatch(rf"{name}-(\d+)", one) for one in os.listdir(_DEFAULT))
        begun = {int(found[1]): os.path.join(_DEFAULT, found[0]) for found in names if found}
    for number in sorted(begun, reverse=True):
        with suppress(UsageError):
            out = OutFolder(begun[number])
            run = out.run()
            if run is not None and run["configuration"] == configuration and not run["finished"]:
                return out, run
    for number in count(max(begun, default=0) + 1):
        folder = os.path.join(_DEFAULT, f"{name}-{number}")
        try:
            os.makedirs(folder)  # another training may begin at the same moment
        except FileExistsError:
            continue
        except OSError as error:
            raise explained(folder, error) from error
        return OutFolder(folder), None
    raise AssertionError  # `count` doesn't end


def _difference(then: dict[str, Any], now: dict[str, Any]) -> str:
    names = [name for name in now if then.get(name) != now[name]]
    if "dataset" in names:
        return "it was trained on another dataset"
    name = names[0] if names else next(iter(then.keys() - now.keys()))
    return f"it was trained with --{name} {then.get(name)}, now it is {now.get(name)}"
