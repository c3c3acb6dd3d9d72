"""The versions that decide a dataset's bytes: a worker must have the launcher's.

Beam itself compares its own version and Python's.
"""

from __future__ import annotations

import functools
from pathlib import Path

import beam_pipeline
from beam_pipeline.config import Config
from beam_pipeline.errors import OTHER_IMAGE, ImageShardsError
from beam_pipeline.images import codec_versions
from beam_pipeline.schema import canonical_json, sha256
from beam_pipeline.text import plural


@functools.cache
def versions() -> dict[str, str]:
    """This package's version, with a hash of its modules, and those of the image libraries."""
    folder = Path(beam_pipeline.__file__).parent
    modules = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
    hashes = canonical_json({name: sha256(path.read_bytes()) for name, path in modules.items()})
    return {**codec_versions(), "imageshards": f"{beam_pipeline.__version__} ({sha256(hashes)[:8]})"}


def check_versions(config: Config) -> None:
    """Check that this worker writes the bytes that the launcher's versions would.

    Raises:
        ImageShardsError: it has another version of something; names it.
    """
    if config.context.launcher is None:  # this process is the launcher's, or a child of it
        return
    here, there = versions(), config.context.launcher
    different = [name for name in {**there, **here} if here.get(name) != there.get(name)]
    if different:
        name, more = different[0], len(different) - 1
        ours = f"{name} {here[name]}" if name in here else f"no {name}"
        others = f" ({plural(more, 'other version')} differ{'s' * (more == 1)})" if more else ""
        raise ImageShardsError(f"the worker has {ours}, the launcher {there.get(name, 'none')}{others}: {OTHER_IMAGE}")
