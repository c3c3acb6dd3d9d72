"""Images and datasets to measure on: a folder that the caller names, or drawn ones, repeated by hard links."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import beam_pipeline
from beam_pipeline.listing import why_skipped
from beam_pipeline.sample_data import main as draw


def images(given: Path | None, scratch: Path, count: int) -> Path:
    """A folder of class folders with `count` images: those of `given`, or 300 drawn ones, again and again.

    Args:
        given: folder of class folders, or None.
        scratch: an empty folder on the same disk, if links are to be links.
        count: how many files the result holds.
    """
    if given is None:
        given = scratch / "drawn"
        assert draw([str(given), "--images=300", "--broken=0"]) == 0
    target = scratch / "images"
    files = sorted(path for path in given.rglob("*") if path.is_file() and why_skipped(path.name) is None)
    for number in range(count):
        path = files[number % len(files)]
        link = target / path.parent.name / f"{number // len(files):04d}_{path.name}"
        link.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, link)
        except OSError:
            shutil.copyfile(path, link)
    return target


def dataset(source: Path, scratch: Path) -> str:
    """A published dataset of a folder of images, with default flags."""
    manifest = beam_pipeline.run(
        beam_pipeline.Config(input=str(source), output=str(scratch / "datasets"), name="bench")
    )
    assert manifest is not None
    return manifest.url
