"""Who may import whom (docs/architecture.md), and that `import beam_pipeline` and `import reader` stay cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.make import ROOT

# Rooms of the write side: each imports only from rows above its own, or from itself.
ROWS = [
    {"errors"},
    {"schema", "storage"},
    {"images"},
    {"config"},
    {"inputs"},
    {"conversion"},
    {"planning"},
    {"dataset"},
    {"pipeline"},
    {"cli"},
]
APART = {"__init__", "__main__", "sample_data"}
WITH_BEAM = {"pipeline/*", "cli/job.py"}  # all others know nothing of Beam


def modules(package: str) -> dict[str, list[Path]]:
    """Module name (of the first level) → its files."""
    found: dict[str, list[Path]] = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        relative = path.relative_to(ROOT / package)
        found.setdefault(relative.parts[0].removesuffix(".py"), []).append(path)
    return found


def imported(path: Path, lazily_too: bool = True) -> set[str]:
    """Dotted names of everything a file imports; at its top level only unless `lazily_too`."""
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree)) if lazily_too else top_level(tree)
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return found


def top_level(tree: ast.Module) -> list[ast.AST]:
    """What runs when a module is imported: not functions, not `if TYPE_CHECKING`."""
    found: list[ast.AST] = []
    pending: list[ast.AST] = [tree]
    while pending:
        for node in ast.iter_child_nodes(pending.pop()):
            typing_only = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not typing_only:
                found.append(node)
                pending.append(node)
    return found


def roots(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def ours(names: set[str], package: str = "beam_pipeline") -> set[str]:
    """First-level modules of a package among dotted names."""
    levels = {name.split(".")[1] for name in names if name.startswith(f"{package}.")}
    return levels & set(modules(package))


WRITE_SIDE = modules("beam_pipeline")


def test_every_module_has_its_place() -> None:
    assert set(WRITE_SIDE) <= set.union(*ROWS, APART), "a new module: say in ROWS where it stands"


@pytest.mark.parametrize("name", sorted(set(WRITE_SIDE) - APART))
def test_modules_import_downwards_only(name: str) -> None:
    row = next(number for number, names in enumerate(ROWS) if name in names)
    allowed = set.union(*ROWS[: row + 1], {name})
    for path in WRITE_SIDE[name]:
        assert ours(imported(path)) <= allowed, path


def test_there_is_no_circle_of_imports() -> None:
    graph = {
        name: set().union(*(ours(imported(path, lazily_too=False)) for path in paths)) - {name, "__init__"}
        for name, paths in WRITE_SIDE.items()
        if name != "__init__"
    }
    while graph:
        free = {name for name, needed in graph.items() if not needed & set(graph)}
        assert free, f"a circle among {sorted(graph)}"
        graph = {name: needed for name, needed in graph.items() if name not in free}


@pytest.mark.parametrize("name", sorted(WRITE_SIDE))
def test_the_write_side_never_imports_the_reader_or_tensorflow(name: str) -> None:
    for path in WRITE_SIDE[name]:
        assert not roots(imported(path)) & {"reader", "tensorflow", "tensorflow_datasets", "keras", "jax", "torch"}, (
            path
        )


@pytest.mark.parametrize("path", sorted((ROOT / "beam_pipeline").rglob("*.py")), ids=lambda path: path.stem)
def test_only_the_pipeline_and_the_cli_s_job_import_beam(path: Path) -> None:
    relative = path.relative_to(ROOT / "beam_pipeline")
    if not any(relative.match(pattern) for pattern in WITH_BEAM):
        # The command line asks Beam which flags it has, once it has met one that isn't ours.
        at_top = relative.parts[0] != "cli"
        assert "apache_beam" not in roots(imported(path, lazily_too=at_top)), path


@pytest.mark.parametrize("name", ["schema/__init__.py", "schema/example.py", "schema/tfds.py", "planning/cuts.py"])
def test_pure_modules_know_no_storage(name: str) -> None:
    names = imported(ROOT / "beam_pipeline" / name)
    assert not roots(names) & {"os", "pathlib", "PIL"}
    assert "storage" not in ours(names)


@pytest.mark.parametrize("path", sorted((ROOT / "reader").rglob("*.py")), ids=lambda path: path.stem)
def test_the_reader_takes_schema_errors_and_storage_of_the_write_side_and_nothing_else(path: Path) -> None:
    names = {name for name in imported(path) if name.startswith("beam_pipeline")}
    assert ours(names) <= {"schema", "errors", "storage"}, path
    taken = {".".join(name.split(".")[:2]) for name in names} - {"beam_pipeline", "beam_pipeline.__version__"}
    assert taken <= {"beam_pipeline.schema", "beam_pipeline.errors", "beam_pipeline.storage"}, path
    assert "apache_beam" not in roots(imported(path))


def test_main_is_trivial() -> None:
    tree = ast.parse((ROOT / "beam_pipeline" / "__main__.py").read_text())
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda)]


def test_no_job_saves_the_main_session() -> None:
    lines = [line for path in (ROOT / "beam_pipeline").rglob("*.py") for line in path.read_text().splitlines()]
    named = [line for line in lines if "save_main_session" in line]
    assert len(named) == 1, named  # Beam would, on Dataflow: it is told not to
    assert "SetupOptions).save_main_session = False" in named[0]


def loaded_after(code: str) -> set[str]:
    """Top-level names of sys.modules of a fresh Python after `code`."""
    program = f"import sys\n{code}\nprint('\\n'.join({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


HEAVY = {"tensorflow", "apache_beam", "keras", "tensorflow_datasets", "jax", "torch", "gcsfs", "fsspec"}


def test_importing_both_packages_loads_neither_tensorflow_nor_beam() -> None:
    found = loaded_after("import beam_pipeline, reader\nbeam_pipeline.Config")
    assert {"beam_pipeline", "reader"} <= found
    assert not found & HEAVY


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["--name", "Bad"], ["--image_sise", "64"], ["extra"], ["--seed", "x"], []],
    ids=" ".join,
)
def test_help_and_mistakes_are_answered_without_beam(arguments: list[str]) -> None:
    given = ["--input", "no/such/folder", "--output", "no/such/output", "--name", "photos", *arguments]
    found = loaded_after(f"from beam_pipeline.cli.main import main\ntry: main({given})\nexcept SystemExit: pass")
    assert "beam_pipeline" in found
    assert not found & HEAVY


def test_importing_all_that_a_worker_unpickles_loads_no_tensorflow() -> None:
    found = loaded_after("import beam_pipeline.cli.job, beam_pipeline.dataset.writer, beam_pipeline.dataset.published")
    assert "apache_beam" in found
    assert not found & {"tensorflow", "tensorflow_datasets", "keras", "reader", "jax", "torch"}
