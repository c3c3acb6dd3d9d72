"""The image for launcher and workers, and the Flex Template made of it: they say what the code says."""

from __future__ import annotations

import json
import re

import pytest
from google.cloud import dataflow

from beam_pipeline.config import FLAGS
from tests.dataflow.cloud import IMAGE, Cloud
from tests.make import ROOT, parsed
from tools import flex_template, image

METADATA = ROOT / "deploy" / "flex_template" / "metadata.json"


def test_the_template_s_metadata_is_made_from_the_flags() -> None:
    assert json.loads(METADATA.read_text()) == flex_template.metadata(), (
        "make it again: python -m tools.flex_template > deploy/flex_template/metadata.json"
    )


def test_the_template_s_metadata_is_of_the_api_s_form() -> None:
    template = dataflow.TemplateMetadata.from_json(METADATA.read_text(), ignore_unknown_fields=False)
    parameters = {parameter.name: parameter for parameter in template.parameters}
    required = ["sdk_container_image", "input", "output", "name"]
    assert [name for name in parameters if not parameters[name].is_optional] == required
    assert parameters["strict"].param_type == dataflow.ParameterType.BOOLEAN
    assert [option.value for option in parameters["channels"].enum_options] == ["1", "3"]
    assert all(parameter.label and parameter.help_text for parameter in parameters.values())


def test_every_default_of_the_template_is_a_value_that_the_command_takes() -> None:
    parameters = flex_template.metadata()["parameters"]
    given = [f"--{one['name']}={one['defaultValue']}" for one in parameters if "defaultValue" in one]
    required = ["--input=gs://in", "--output=gs://out", "--name=photos"]
    # --target_shard_bytes and the like have none: they exclude each other.
    assert parsed([*required, *given]) == parsed(required)
    switches = [name for name, flag in FLAGS.items() if flag.default is False]
    config, _ = parsed([*required, "--strict=true", "--optimize=false"])
    assert [name for name in switches if getattr(config, name)] == ["strict"]


def test_the_template_s_launcher_writes_a_job(cloud: Cloud) -> None:
    label = '--labels={"goog-dataflow-provided-template-type": "flex"}'
    job = cloud.submit("template-out", IMAGE, "--one_hot=true", "--strict=false", "--job_name=of-the-template", label)
    assert job["name"] == "of-the-template"
    assert job["labels"]["goog-dataflow-provided-template-type"] == "flex"
    assert len(job["labels"]["imageshards"]) == 32


@pytest.mark.parametrize(("build", "base"), [({}, "3.11"), ({"PYTHON": "3.13"}, "3.13")])
def test_the_image_s_python_is_an_argument_and_its_beam_the_pinned_one(build: dict[str, str], base: str) -> None:
    (beam,) = re.findall(r"^apache-beam==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    steps = list(image.steps(build))
    stages = [rest for kind, rest in steps if kind == "FROM"]
    assert stages == [f"python:{base}-bookworm AS build", f"apache/beam_python{base}_sdk:{beam}"]
    assert ("ENV", "FLEX_TEMPLATE_PYTHON_PY_FILE=/opt/imageshards/template/main.py") in steps


def test_all_that_the_image_copies_is_sent_to_the_builder() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    sent = [line.removeprefix("!") for line in lines if line.startswith("!")]
    copied = [
        source
        for instruction, rest in image.steps({})
        if instruction == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    ]
    assert copied
    assert not [source for source in copied if not any(source == one or source.startswith(f"{one}/") for one in sent)]


def test_cloud_build_passes_every_argument_of_the_image() -> None:
    build = (ROOT / "deploy" / "cloudbuild.yaml").read_text()
    arguments = re.findall(r"^ARG (\w+)=(\S*)$", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE)
    assert re.findall(r"--build-arg=(\w+)=\$\{_\w+\}", build) == [name for name, _ in arguments]
    assert re.findall(r'^  _(\w+): "?([\w.]*)"?$', build, re.MULTILINE) == arguments
