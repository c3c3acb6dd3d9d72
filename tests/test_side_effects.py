"""A job in the caller's process leaves Pillow, logging, Beam and the environment as they were."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

from tests.images.kinds import every_kind
from tests.make import ROOT, class_folders


def state() -> dict[str, Any]:
    """Global state of libraries that a job could change, by what it is."""
    import pillow_heif
    from apache_beam.runners.worker.statesampler import StateSampler
    from PIL import AvifImagePlugin, Image, ImageFile, PngImagePlugin

    Image.init()  # all of Pillow's own formats, whoever uses them first
    modules = (Image, ImageFile, PngImagePlugin, AvifImagePlugin, pillow_heif.options)
    loggers = {name: logging.getLogger(name) for name in ("", "PIL", "apache_beam", "beam_pipeline", "google")}
    return {
        **{f"{module.__name__}.{name}": value for module in modules for name, value in _settings(module)},
        "formats of Pillow": (dict(Image.OPEN), dict(Image.SAVE), dict(Image.EXTENSION), list(Image.ID)),
        **{f"logger {name!r}": (one.level, one.disabled, list(one.handlers)) for name, one in loggers.items()},
        "Pillow's warnings": [one for one in warnings.filters if "PIL" in str(one)],
        "Beam's StateSampler": StateSampler.__init__.__defaults__,
        "environment": dict(os.environ),
        "working directory": os.getcwd(),
        "standard streams": (sys.stdin, sys.stdout, sys.stderr),
    }


def _settings(module: Any) -> list[tuple[str, Any]]:
    """Constants, functions and classes of a module."""
    return [
        (name, value)
        for name, value in vars(module).items()
        if name.isupper() or inspect.isroutine(value) or inspect.isclass(value)
    ]


def print_changes(before: dict[str, Any]) -> None:
    print({name: (before[name], now) for name, now in state().items() if before[name] != now})


def import_everything() -> None:
    before = state()
    for module in ("cli.job", "cli.main", "dataset.compare"):
        importlib.import_module(f"beam_pipeline.{module}")
    for module in ("imageshards", "reader", "reader.commands"):
        importlib.import_module(module)
    print_changes(before)


def run_a_job(folder: str) -> None:
    before = state()
    import beam_pipeline

    places = {"input": f"{folder}/images", "output": f"{folder}/out", "name": "all"}
    manifest = beam_pipeline.run(beam_pipeline.Config(**places, image_size=24, optimize=True, num_shards=2))
    assert manifest is not None
    assert manifest.records == manifest.images > 50
    print_changes(before)


def printed(call: str, *arguments: object) -> str:
    """The last line that a function of this module prints in a process of its own."""
    code = f"import sys; from tests import test_side_effects; test_side_effects.{call}(*sys.argv[1:])"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_importing_changes_nothing() -> None:
    assert printed("import_everything") == "{}"


def test_a_job_in_process_changes_nothing_of_the_caller(tmp_path: Path) -> None:
    folder = class_folders(tmp_path / "images", {"a": 4}) / "kinds"
    folder.mkdir()
    for kind, data in every_kind().items():
        (folder / f"{kind}.{kind.split('_')[0]}").write_bytes(data)
    assert printed("run_a_job", tmp_path) == "{}"
