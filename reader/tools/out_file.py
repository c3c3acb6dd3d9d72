"""Shared by the tools: a file that a user asked for, `--out`."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from beam_pipeline import storage
from beam_pipeline.errors import UsageError
from beam_pipeline.storage.causes import translating_os_errors


@contextmanager
def published_file(out: str) -> Iterator[IO[bytes]]:
    """A new file, which gets its name when it is complete. Raises UsageError if it can't be written."""
    url = storage.normalize(out)
    if why := storage.why_unusable(url, is_file=True) or "http:// can't be written to" * (
        storage.scheme_of(url) == "http"
    ):
        raise UsageError(f"--out {out!r}: {why}")
    store = storage.open_storage(url)
    with tempfile.TemporaryDirectory() as scratch:
        # A name of its own: what the user may have next to it stays.
        part = Path(os.path.dirname(url) if storage.is_local(url) else scratch, f"{uuid.uuid4().hex}.tmp")
        try:
            if storage.is_local(url) and os.path.isdir(url):
                raise IsADirectoryError(None, "it is a folder")
            part.parent.mkdir(parents=True, exist_ok=True)
            part.touch()
        except OSError as error:
            raise UsageError(f"--out {out!r}: {error.strerror}; name a file that can be written") from None
        try:
            with part.open("w+b") as file, translating_os_errors(str(part), of_others=False):
                yield file
                store.publish(file, url)
        finally:
            part.unlink(missing_ok=True)
