"""Builds the documents as a site, `python -m tools.site`: stages the pages, generates the reference, runs MkDocs.

The pages keep their places below build/pages, so that every link works here, on a code host and on the site. A broken
link fails. The reference is made of docstrings, parsers and flags: nothing in it is written by hand.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from beam_pipeline.config import FLAGS
from beam_pipeline.names import SHELVES
from beam_pipeline.schema import RejectReason
from reader.training.backend import import_tensorflow_quietly

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "build" / "pages"
# What is staged as it is: documents, what they show, and what they link to.
_STAGED = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", "benchmarks", "deploy", "docs", "examples")
_SKIPPED = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")


def stage() -> None:
    """Copy the pages to build/pages, README as its first, and add the reference."""
    shutil.rmtree(PAGES, ignore_errors=True)
    PAGES.mkdir(parents=True)
    shutil.copy(ROOT / "README.md", PAGES / "index.md")
    for name in _STAGED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, PAGES / name, ignore=_SKIPPED)
        else:
            shutil.copy(source, PAGES / name)
    (PAGES / "site.css").write_text(".md-typeset td:first-child code { white-space: nowrap }\n")
    (PAGES / "reference").mkdir()
    for name, lines in (
        ("python", _python()),
        ("command", _command()),
        ("configuration", _configuration()),
        ("errors", _errors()),
    ):
        (PAGES / "reference" / f"{name}.md").write_text("\n".join(lines) + "\n")


def _python() -> Iterator[str]:
    """Every public name, by the shelf that it is imported from."""
    yield "# Python\n"
    yield "Importing `imageshards` loads no framework; each name loads what it needs when it is first used.\n"
    for shelf, names in SHELVES.items():
        yield f"## `{shelf}`\n"
        for name, home in names.items():
            module, member = (f"reader.{name}", "") if home == "reader" else (home, name)
            if (home, name) == ("beam_pipeline.cli.run", "write"):
                member = "run"
            if not _is_defined(module, member):
                yield f"### {name}\n\n{inspect.getdoc(getattr(importlib.import_module(module), member))}\n"
                continue
            yield f"::: {module}{'.' * bool(member)}{member}\n    options:\n      heading_level: 3"
            if member == "run":
                yield "      heading: write"
            if member == "Config":  # its fields are the page on configuration
                yield "      members: false"
            yield ""


def _is_defined(module: str, member: str) -> bool:
    """Whether the text of a module defines the name: mkdocstrings reads it without importing it."""
    text = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text()
    return not member or bool(re.search(rf"^(?:class|def) {member}\b", text, re.MULTILINE))


def _command() -> Iterator[str]:
    """What `--help` of every verb prints."""
    overview = _help()
    yield "# The command\n"
    yield f"```\n{overview}```\n"
    for verb in re.findall(r"^  (\w+) +[A-Z]", overview.partition("commands:")[2], re.MULTILINE):
        yield f"## `imageshards {verb}`\n"
        yield f"```\n{_help(verb)}```\n"


def _help(*verb: str) -> str:
    from imageshards import main

    printed = io.StringIO()
    os.environ["COLUMNS"] = "100"
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*verb, "--help"])
    return printed.getvalue()


def _configuration() -> Iterator[str]:
    """A row for each flag of `imageshards write`, which is a field of `imageshards.Config`."""
    yield "# Configuration\n"
    yield "Each flag of `imageshards write` is an argument of `imageshards.Config`. Beam's own options are passed on.\n"
    for group in dict.fromkeys(flag.group for flag in FLAGS.values()):
        yield f"## {group.capitalize()}\n"
        yield "| flag | values | meaning |\n|---|---|---|"
        for name, flag in FLAGS.items():
            if flag.group == group:
                values = "\\|".join(map(str, flag.values)) if isinstance(flag.values, tuple) else flag.metavar or ""
                is_told = flag.default in (None, "", False) or "(default" in flag.help
                default = "" if is_told else f" (default: `{flag.default}`)"
                yield f"| `{name}` | {values.replace('|', '| ')} | {flag.help}{default} |".replace("<", "&lt;")
        yield ""


def _errors() -> Iterator[str]:
    """The classes of errors and the reasons of rejects."""
    yield "# Errors\n"
    yield "A failing command ends with one line on stderr and an [exit code](../docs/format.md#exit-codes).\n"
    yield "::: beam_pipeline.errors\n    options:\n      heading_level: 2\n      show_root_heading: false\n"
    yield "## Reasons of rejects\n"
    yield "[What each means](../docs/format.md#why-an-image-is-rejected): "
    yield ", ".join(f"`{reason.value}`" for reason in RejectReason) + "."


def main() -> None:
    """Build the site into build/site; exits with MkDocs' code."""
    if importlib.util.find_spec("mkdocs") is None:
        sys.exit("error: there is no MkDocs: make setup EXTRAS=pipeline,reader,tensorflow,train,test,docs")
    import_tensorflow_quietly()  # some docstrings are made as reader.tensorflow is loaded
    stage()
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", ROOT / "mkdocs.yml"]
    code = subprocess.run(command, cwd=ROOT).returncode
    print(f"the site is {ROOT / 'build' / 'site' / 'index.html'}" if code == 0 else "the site has faults: see above")
    sys.exit(code)


if __name__ == "__main__":
    main()
