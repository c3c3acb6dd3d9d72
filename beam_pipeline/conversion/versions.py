"""Versions that decide a dataset's bytes: a cluster's workers must have the launcher's."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from contextlib import suppress
from pathlib import Path

import beam_pipeline
from beam_pipeline import schema
from beam_pipeline.config import Config
from beam_pipeline.errors import ImageShardsError, some
from beam_pipeline.images import codec_versions

_FIX = "build the workers' image with deploy/Dockerfile from the launcher's checkout, with its Python and extras"


@functools.cache
def versions() -> dict[str, str]:
    """Python, Beam, the image libraries and this package itself, with a hash of its modules."""
    found = {"Python": "{}.{}".format(*sys.version_info)}
    with suppress(importlib.metadata.PackageNotFoundError):
        found["Beam"] = importlib.metadata.version("apache-beam")
    folder = Path(beam_pipeline.__file__).parent
    modules = sorted((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*.py"))
    hashes = "".join(f"{name} {schema.sha256(path.read_bytes())}\n" for name, path in modules)
    found["imageshards"] = f"{beam_pipeline.__version__} ({schema.sha256(hashes.encode())[:8]})"
    return found | codec_versions()


def check_versions(config: Config) -> None:
    """Check that this worker would write what the launcher's versions would.

    Raises:
        ImageShardsError: it would write other bytes; names what differs.
    """
    if config.launcher is None:  # this process, or a child of it
        return
    launcher, here = config.launcher, versions()
    different = [name for name in {**launcher, **here} if launcher.get(name) != here.get(name)]
    if different:
        pairs = [f"{name} {here.get(name, 'missing')}, the launcher {launcher.get(name, 'none')}" for name in different]
        raise ImageShardsError(f"the worker has {some(pairs)}: {_FIX}")
