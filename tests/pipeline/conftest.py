"""What tests of the job share: pictures of which one is rejected, and runners in this process and in others."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from tools.engines import pieces


@pytest.fixture(scope="module")
def folder(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`photos` with a broken image, so that rejects are compared too."""
    folder = Path(shutil.copytree(photos, tmp_path_factory.mktemp("input") / "in"))
    (folder / "bee" / "broken.jpg").write_bytes((photos / "bee" / "0000.jpg").read_bytes()[:300])
    return folder


@pytest.fixture(params=["FnApiRunner", pytest.param("PrismRunner", marks=pytest.mark.soak)])
def options(request: pytest.FixtureRequest) -> PipelineOptions:
    flags = [f"--runner={request.param}"]
    if request.param == "PrismRunner":
        found = list(pieces.cache_folder().glob("prism-*/prism"))
        if not found:
            pytest.skip("make engines installs Prism")
        # Beam keeps the server that another test of this process asked for without a binary.
        flags += [f"--prism_location={found[-1]}", "--experiments=disable_prism_server_singleton"]
    return PipelineOptions(flags)
