"""What docs/dataflow.md says of commands, steps and counters is what there is."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.pipeline import PipelineVisitor

from beam_pipeline.cli.main import parse
from beam_pipeline.config import Config
from beam_pipeline.pipeline import elements, graph
from tools.engines import cluster, portable

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs/dataflow.md").read_text()
SHOWN = [
    line.partition("imageshards write ")[2]
    for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith("imageshards write ")
]


def _section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE)
    assert found, title
    return found[1]


@pytest.mark.parametrize("arguments", SHOWN)
def test_a_command_of_the_document_is_read(arguments: str) -> None:
    config, options = parse(shlex.split(arguments, comments=True))
    assert config.output.startswith("gs://") and options


def test_the_document_shows_a_command_for_each_engine() -> None:
    assert sum("DataflowRunner" in one for one in SHOWN) >= 2
    assert sum("PortableRunner" in one for one in SHOWN) >= 1


class _Steps(PipelineVisitor):
    """Labels of the steps at the top, in order."""

    def __init__(self) -> None:
        self.top: list[str] = []

    def enter_composite_transform(self, node) -> None:
        self.visit_transform(node)

    def visit_transform(self, node) -> None:
        if node.full_label and "/" not in node.full_label:
            self.top.append(node.full_label)


def test_the_table_of_steps_is_the_graph_of_the_job() -> None:
    pipeline = beam.Pipeline(options=PipelineOptions([]))
    graph.build(pipeline, Config(input="in", output="out", name="photos", duplicates="report"), {})
    steps = _Steps()
    pipeline.visit(steps)
    described = re.findall(r"^\| `(\w+)` \|", _section("Reading the job's page"), re.MULTILINE)
    assert described == steps.top


def test_the_counters_that_are_explained_are_counted() -> None:
    explained = set(re.findall(r"`([a-z]+(?:-[a-z]+)+)`", _section("Reading the job's page")))
    assert len(explained) > 3
    assert explained - {value for value in vars(elements).values() if isinstance(value, str)} == set()


def test_the_messages_that_are_explained_are_in_the_code() -> None:
    cells = re.findall(r"^\| `([^|]*)` \|", _section("When it fails").partition("| Dataflow says |")[0], re.MULTILINE)
    code = "".join(path.read_text() for path in (ROOT / "beam_pipeline").rglob("*.py"))
    text = re.sub(r"\{[^{}\n]*\}", "{}", re.sub(r'"\n\s*f?"', "", code))  # f-strings of several lines are one
    parts = [part.removesuffix(" 403") for cell in cells for part in cell.split("…")]
    assert len(cells) > 5
    assert [part for part in parts if part not in text] == []


@pytest.mark.parametrize(("engine", "only"), [("Flink", ["--parallelism=8"]), ("Spark", [])])
def test_a_recipe_has_the_flags_that_make_engines_uses(engine: str, only: list[str]) -> None:
    (command,) = (one for one in SHOWN if one in _section(f"Your own {engine} cluster").replace("\\\n", " "))
    given = [flag for flag in shlex.split(command) if "=" in flag]  # the dataset's own have their values behind a space
    used = portable.job_flags(8099, 50000, tasks=8, processes_each=4)
    assert given == [flag for flag in used if not flag.startswith("--parallelism") or flag in only]


def test_the_recipe_for_flink_configures_what_the_cluster_of_make_engines_does() -> None:
    (shown,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    keys = re.findall(r"^([\w.-]+):", shown, re.MULTILINE)
    assert len(keys) > 3
    assert [key for key in keys if f"\n{key}: " not in cluster.CLUSTER] == []
