"""Who may import whom (docs/architecture.md); importing is cheap; neither it nor a job changes the caller's process."""

from __future__ import annotations

import ast
import importlib
import inspect
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from tests.images.kinds import every_kind
from tests.make import ROOT, class_folders, done

# Packages of the write side: each imports only from rows before its own, or from itself.
ROWS = [{"text"}, {"machine"}, {"errors"}, {"schema"}, {"storage"}, {"images"}, {"config"}, {"archives"}, {"inputs"},
        {"conversion"}, {"planning"}, {"dataset"}, {"pipeline"}, {"transforms"}, {"cli"}]  # fmt: skip
APART = {"__init__", "__main__", "names", "sample_data"}
WITH_BEAM = {"pipeline/*", "transforms.py", "cli/job.py"}  # all others know nothing of Beam


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
WRITE_FILES = sorted((ROOT / "beam_pipeline").rglob("*.py"))
FRAMEWORKS = {"tensorflow", "tensorflow_datasets", "keras", "jax", "torch"}


def test_modules_have_their_place_and_import_downwards_only() -> None:
    assert set(WRITE_SIDE) <= set.union(*ROWS, APART), "a new module: say in ROWS where it stands"
    for number, row in enumerate(ROWS):
        for name in row:
            allowed = set.union(*ROWS[: number + 1])
            for path in WRITE_SIDE[name]:
                assert ours(imported(path)) <= allowed, path


def test_the_write_side_never_imports_the_reader_or_a_framework_and_beam_in_the_pipeline_and_the_cli_s_job_only() -> (
    None
):
    for path in WRITE_FILES:
        assert not roots(imported(path)) & {"reader", *FRAMEWORKS}, path
        relative = path.relative_to(ROOT / "beam_pipeline")
        if not any(relative.match(pattern) for pattern in WITH_BEAM):
            # The command line asks Beam which flags it has, once it has met one that isn't ours.
            at_top = relative.parts[0] != "cli"
            assert "apache_beam" not in roots(imported(path, lazily_too=at_top)), path


def test_pure_modules_know_no_storage() -> None:
    for name in ("schema/__init__.py", "schema/example.py", "schema/tfds.py", "planning/plan.py"):
        names = imported(ROOT / "beam_pipeline" / name)
        assert not roots(names) & {"os", "pathlib", "PIL"}, name
        assert "storage" not in ours(names), name


def test_one_module_says_which_name_was_meant() -> None:
    paths = [path for package in ("beam_pipeline", "reader", "imageshards") for path in (ROOT / package).rglob("*.py")]
    found = {path.relative_to(ROOT).as_posix() for path in paths if "difflib" in roots(imported(path))}
    assert found == {"beam_pipeline/text.py"}


def test_the_reader_takes_only_what_both_sides_share_of_the_write_side() -> None:
    for path in (ROOT / "reader").rglob("*.py"):
        names = {name for name in imported(path) if name.startswith("beam_pipeline")}
        taken = {".".join(name.split(".")[:2]) for name in names} - {"beam_pipeline", "beam_pipeline.__version__"}
        packages = ("names", "machine", "schema", "errors", "text", "storage", "images")
        assert taken <= {f"beam_pipeline.{name}" for name in packages}, path
        assert "apache_beam" not in roots(imported(path))


def test_main_is_trivial() -> None:
    tree = ast.parse((ROOT / "beam_pipeline" / "__main__.py").read_text())
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda)]


def test_no_job_saves_the_main_session() -> None:
    named = [line for path in WRITE_FILES for line in path.read_text().splitlines() if "save_main_session" in line]
    assert len(named) == 1, named  # Beam would, on Dataflow: it is told not to
    assert "SetupOptions).save_main_session = False" in named[0]


def printed(code: str, *arguments: object) -> str:
    """The last line that a fresh Python prints."""
    return done(sys.executable, "-c", code, *arguments, cwd=ROOT, timeout=120).stdout.splitlines()[-1]


def loaded_after(code: str) -> set[str]:
    """Top-level names of sys.modules of a fresh Python after `code`."""
    return set(printed(f"import sys\n{code}\nprint(*{{name.partition('.')[0] for name in sys.modules}})").split())


HEAVY = {"apache_beam", "gcsfs", "fsspec", *FRAMEWORKS}


def test_importing_both_packages_loads_neither_tensorflow_nor_beam() -> None:
    found = loaded_after("import beam_pipeline, reader, reader.tools.index\nbeam_pipeline.Config")
    assert {"beam_pipeline", "reader"} <= found
    assert not found & HEAVY


def test_help_and_mistakes_are_answered_without_beam() -> None:
    given = ["--input", "no/such/folder", "--output", "no/such/output", "--name", "photos"]
    more = [["--help"], ["--version"], ["--name", "Bad"], ["--image_sise", "64"], ["extra"], ["--seed", "x"], []]
    program = f"""
from beam_pipeline.cli.main import main
for more in {more}:
    try: main({given} + more)
    except SystemExit: pass
"""
    found = loaded_after(program)
    assert "beam_pipeline" in found
    assert not found & HEAVY


def test_importing_all_that_a_worker_unpickles_loads_no_tensorflow() -> None:
    found = loaded_after("import beam_pipeline.cli.job, beam_pipeline.dataset.writer, beam_pipeline.dataset.compare")
    assert "apache_beam" in found
    assert not found & {"reader", *FRAMEWORKS}


# --- global state of libraries, in a process of its own


def state() -> dict[str, Any]:
    """Global state of libraries that a job could change, by what it is."""
    import pillow_heif
    from apache_beam.runners.worker.statesampler import StateSampler
    from PIL import AvifImagePlugin, Image, ImageFile, PngImagePlugin

    Image.init()  # all of Pillow's own formats, whoever uses them first
    modules = (Image, ImageFile, PngImagePlugin, AvifImagePlugin, pillow_heif.options)
    loggers = {name: logging.getLogger(name) for name in ("", "PIL", "apache_beam", "beam_pipeline", "google")}
    settings = {
        f"{module.__name__}.{name}": value
        for module in modules
        for name, value in vars(module).items()
        if name.isupper() or inspect.isroutine(value) or inspect.isclass(value)
    }
    return {
        **settings,
        "formats of Pillow": (dict(Image.OPEN), dict(Image.SAVE), dict(Image.EXTENSION), list(Image.ID)),
        **{f"logger {name!r}": (one.level, one.disabled, list(one.handlers)) for name, one in loggers.items()},
        "Pillow's warnings": [one for one in warnings.filters if "PIL" in str(one)],
        "Beam's StateSampler": StateSampler.__init__.__defaults__,
        "environment": dict(os.environ),
        "working directory": os.getcwd(),
        "standard streams": (sys.stdin, sys.stdout, sys.stderr),
    }


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


OF_THIS_FILE = "import sys; from tests import test_import_rules as this; this."


def test_importing_changes_nothing() -> None:
    assert printed(f"{OF_THIS_FILE}import_everything()") == "{}"


def test_a_job_in_process_changes_nothing_of_the_caller(tmp_path: Path) -> None:
    folder = class_folders(tmp_path / "images", {"a": 4}) / "kinds"
    folder.mkdir()
    for kind, data in every_kind().items():
        (folder / f"{kind}.{kind.split('_')[0]}").write_bytes(data)
    assert printed(f"{OF_THIS_FILE}run_a_job(sys.argv[1])", tmp_path) == "{}"
