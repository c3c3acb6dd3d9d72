"""The documents: links lead somewhere, things have one name, and the page on Dataflow says what is."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

import reader
from beam_pipeline import __version__
from beam_pipeline.config import Config
from beam_pipeline.pipeline import elements, graph
from beam_pipeline.schema.job import Run
from tests.make import ROOT, parsed
from tests.pipeline.test_graph import Steps
from tools.engines import cluster, portable

FOLDERS = (".", "docs", "docs/howto", "docs/decisions", "deploy", "examples", "benchmarks", ".github")
PAGES = sorted(page for folder in FOLDERS for page in ROOT.glob(f"{folder}/*.md"))


def anchors(page: Path) -> set[str]:
    """What a link's part behind # may be: the headings, in lower case with dashes, as code hosts write them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(ROOT).as_posix() for page in PAGES])
def test_every_link_to_another_page_leads_to_a_file_and_a_heading(page: Path) -> None:
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target
    labels = set(re.findall(r"^\[([^\]]+)\]: https://\S+$", text, re.MULTILINE))
    assert set(re.findall(r"\]\[([^\]]+)\]", text)) == labels


@pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(ROOT).as_posix() for page in PAGES])
def test_a_page_s_lines_are_short(page: Path) -> None:
    """But for tables, pictures, lists of links and what can't be broken."""
    lines = [
        line
        for line in page.read_text().splitlines()
        if not re.match(r" *(\||<|\[[\w-]+\]: |'|\S+$|`text ←|`.*· commit|`make setup EXTRAS)", line)
    ]
    assert [line for line in lines if len(line) > 120] == []


def test_every_page_is_in_the_site_s_menu() -> None:
    menu = {*re.findall(r"[\w./-]+\.(?:md|ipynb)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)}
    pages = [page for page in ROOT.glob("docs/**/*.*") if page.suffix in (".md", ".ipynb")]
    names = {page.relative_to(ROOT).as_posix() for page in pages if not re.match(r"\d", page.name)}
    assert names <= menu, names - menu
    made = {f"reference/{name}.md" for name in ("python", "command", "configuration", "errors")} | {"index.md"}
    assert [name for name in menu - made if not (ROOT / name).exists()] == []


def test_documents_call_everything_by_the_one_name_and_the_version_stands_in_the_code() -> None:
    names = "|".join(sorted(reader.__all__, key=len, reverse=True))
    for page in [*ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/*.md")]:
        text = page.read_text()
        assert not re.search(
            r"python -m (reader|beam_pipeline)\b(?!\.sample_data)|^import reader$", text, re.MULTILINE
        ), page
        assert not re.search(rf"(?<![\w/.])reader\.({names})\b(?!\.py)", text), page
    for file in [*ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/*.*"), ROOT / "README.md", ROOT / "pyproject.toml"]:
        assert not re.search(rf"imageshards\W{{0,3}}{re.escape(__version__)}", file.read_text()), file
    assert f"## {__version__} (unreleased)" in (ROOT / "CHANGELOG.md").read_text()


def test_the_guide_for_contributors_names_every_target_of_the_makefile() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    targets = re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(targets) > 8
    assert [one for one in targets if one != "help" and f"make {one}" not in guide] == []


# --- docs/howto/dataflow.md, dataflow-problems.md, clusters.md


DATAFLOW = "".join(
    (ROOT / f"docs/howto/{name}.md").read_text() for name in ("dataflow", "dataflow-problems", "clusters")
)
SHOWN = [
    line.partition("imageshards write ")[2]
    for block in re.findall(r"```sh\n(.*?)```", DATAFLOW, re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith("imageshards write ")
]


def _section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", DATAFLOW, re.DOTALL | re.MULTILINE)
    assert found, title
    return found[1]


def test_the_document_s_commands_are_read_and_there_is_one_for_each_engine() -> None:
    for arguments in SHOWN:
        config, options = parsed(shlex.split(arguments, comments=True))
        assert config.output.startswith("gs://") and options, arguments
    assert sum("DataflowRunner" in one for one in SHOWN) >= 1
    assert sum("PortableRunner" in one for one in SHOWN) >= 1


def test_the_table_of_steps_is_the_graph_of_the_job() -> None:
    pipeline, steps = beam.Pipeline(options=PipelineOptions([])), Steps()
    graph.build(pipeline, Config(input="in", output="out", name="photos"), Run())
    pipeline.visit(steps)
    assert re.findall(r"^\| `(\w+)` \|", _section("Reading the job's page"), re.MULTILINE) == steps.top


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
    (shown,) = re.findall(r"```yaml\n(.*?)```", DATAFLOW, re.DOTALL)
    keys = re.findall(r"^([\w.-]+):", shown, re.MULTILINE)
    assert len(keys) > 3
    assert [key for key in keys if f"\n{key}: " not in cluster.CLUSTER] == []
