"""One name: the command `imageshards` hands each verb to its side, and `import imageshards` has both sides' names."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import beam_pipeline
import imageshards
import imageshards.beam
import imageshards.tools
import reader
from beam_pipeline.errors import UsageError
from beam_pipeline.images.resize import described
from tests import make
from tests.reading.shards import make_dataset
from tests.reading.without import run_without

VERBS = [
    *("write", "info", "verify", "rejects", "duplicates", "report", "diff", "show", "bench", "index"),
    *("train", "evaluate", "predict"),
]
HEAVY = "apache_beam,tensorflow,keras,jax,torch,PIL,simplejpeg,obstore,matplotlib,jinja2"


def test_help_has_one_line_for_each_verb_and_version_is_the_distributions(capsys: pytest.CaptureFixture[str]) -> None:
    assert imageshards.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert re.findall(r"^  ([a-z]+)(?: +[A-Z].*)?$", shown, re.MULTILINE) == VERBS
    assert imageshards.main([]) == 2
    assert capsys.readouterr() == ("", shown)
    assert imageshards.main(["--version"]) == 0
    assert capsys.readouterr().out == f"imageshards {beam_pipeline.__version__}\nresize: {described()}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("wirte --input x", "unknown command 'wirte': did you mean write?"),
        ("verfy", "unknown command 'verfy': did you mean verify?"),
        ("--input x", f"unknown command '--input': choose one of {', '.join(VERBS)}"),
        ("write --inptu x", "unknown flag '--inptu': did you mean --input?"),
        ("show x --splt train", "unknown flag '--splt': did you mean --split?"),
        ("info a b", "info takes one dataset; to compare two: imageshards diff a b"),
    ],
)
def test_bad_usage_is_exit_2_with_one_line(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert imageshards.main(arguments.split()) == 2
    assert capsys.readouterr() == ("", f"error: {message}\n")


@pytest.mark.parametrize(
    ("package", "given"),
    [
        ("reader", "--help"),
        ("reader", "info no/such/dataset"),
        ("beam_pipeline", "--help"),
        ("beam_pipeline", "--inptu x"),
    ],
)
def test_python_m_is_the_same_program(package: str, given: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", package, *given.split()]
    done = subprocess.run(command, cwd=make.ROOT, capture_output=True, text=True)
    code = imageshards.main(["write"] * (package == "beam_pipeline") + given.split())
    assert (done.returncode, done.stdout, done.stderr) == (code, *capsys.readouterr())
    assert "python -m" not in done.stdout + done.stderr


def test_no_message_of_either_package_names_another_program() -> None:
    """`python -m beam_pipeline.sample_data` is one of its own, and docstrings may say what is the same."""
    for path in sorted([*(make.ROOT / "beam_pipeline").rglob("*.py"), *(make.ROOT / "reader").rglob("*.py")]):
        found = re.findall(r"python -m (?:reader|beam_pipeline)\b(?!\.sample_data)", path.read_text())
        assert not found or path.name == "__main__.py", path


TRAINER = [
    *("Config", "DatasetInfo", "EvalBatches", "Evaluation", "ImageShardsError", "Manifest", "Position", "Prediction"),
    *("Records", "TrainBatches", "TrainOptions", "__version__", "as_jax", "as_tf", "as_torch", "augment", "beam"),
    *("decode", "eval_batches", "eval_dataset", "evaluate", "keras", "load_info", "load_run", "mix"),
    *("predict", "record_dataset", "records", "tools", "train", "train_batches", "train_dataset", "write"),
]
TOOLS = ["bench", "diff", "duplicates", "index", "rejects", "report", "show", "verify"]
BEAM = ["ConvertedImage", "ImageRef", "ListImages", "ReadImages", "RejectLine", "WriteDataset", "from_worker"]


def test_the_public_names_are_these() -> None:
    assert dir(imageshards) == imageshards.__all__ == TRAINER
    assert dir(imageshards.tools) == imageshards.tools.__all__ == TOOLS
    assert dir(imageshards.beam) == imageshards.beam.__all__ == BEAM
    writers = ["Config", "ImageShardsError", "Manifest", "run", *BEAM]
    assert dir(beam_pipeline) == sorted(beam_pipeline.__all__) == sorted(["__version__", *writers])
    readers = {*TRAINER, *TOOLS} - {*writers, "beam", "tools", "write"}
    assert dir(reader) == sorted(reader.__all__) == sorted(readers)


@pytest.mark.parametrize("shelf", [imageshards, imageshards.tools, imageshards.beam, beam_pipeline])
def test_every_name_loads_and_is_what_editors_see(shelf: ModuleType) -> None:
    """What type checkers import is what is loaded on first use."""
    (block,) = (node for node in ast.parse(Path(shelf.__file__ or "").read_text()).body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {str(name.asname or name.name): (str(node.module), name.name) for node in imports for name in node.names}
    seen |= {"write": ("beam_pipeline", "run")} if shelf is imageshards else {}
    assert seen.keys() | {"__version__"} == {*shelf.__all__, "__version__"}
    for name, (module, original) in seen.items():
        try:
            home = importlib.import_module(module)
        except ModuleNotFoundError as error:
            assert error.name in ("jax", "keras", "tensorflow", "torch"), "a framework that isn't installed"
            continue
        assert getattr(shelf, name) is getattr(home, original)


PROGRAM = """
import imageshards
from imageshards import beam, tools

info: imageshards.DatasetInfo = imageshards.load_info("photos")
written: imageshards.Manifest | None = imageshards.write(imageshards.Config(input="a", output="b", name="c"))
batches: imageshards.TrainBatches = imageshards.train_batches(info, "train", global_batch_size=4)
report, transform = tools.verify(info), beam.ListImages(imageshards.Config(input="a", output="b", name="c"))
reveal_type(report.faults[0])
imageshards.train_batches(info, "train", batch_size=4)
imageshards.verify
"""


@pytest.mark.soak
def test_a_users_type_checker_knows_every_shelf_and_no_name_that_isnt_there(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path, tmp_path / "program.py"]
    said = subprocess.run(command, cwd=make.ROOT, capture_output=True, text=True).stdout
    assert [line.partition(": ")[2] for line in said.splitlines() if "program.py" in line] == [
        'note: Revealed type is "reader.tools.verify.Fault"',
        'error: Unexpected keyword argument "batch_size" for "train_batches"  [call-arg]',
        'note: "train_batches" defined in "reader.batches"',
        'error: Module has no attribute "verify"  [attr-defined]',
    ], said


def test_a_name_that_isnt_there_says_where_it_is_or_what_may_be_meant() -> None:
    for name, message in (
        ("imageshards.verify", "imageshards.verify is imageshards.tools.verify"),
        ("imageshards.WriteDataset", "imageshards.WriteDataset is imageshards.beam.WriteDataset"),
        ("imageshards.tools.load_info", "imageshards.tools.load_info is imageshards.load_info"),
        (
            "imageshards.train_batchs",
            "module 'imageshards' has no attribute 'train_batchs': did you mean train_batches?",
        ),
        ("imageshards.tools.verfy", "module 'imageshards.tools' has no attribute 'verfy': did you mean verify?"),
        ("imageshards.beam._x", "module 'imageshards.beam' has no attribute '_x'"),
    ):
        shelf, _, attribute = name.rpartition(".")
        with pytest.raises(AttributeError) as error:
            getattr(sys.modules[shelf], attribute)
        assert str(error.value) == message


def test_write_is_the_commands_name_and_needs_a_config() -> None:
    assert imageshards.write is beam_pipeline.run
    with pytest.raises(UsageError, match=r"^imageshards\.write\('photos'\): give an imageshards\.Config$"):
        imageshards.write("photos")


def test_importing_it_and_listing_its_names_and_verbs_needs_no_extra(tmp_path: Path) -> None:
    program = "import imageshards.beam, imageshards.tools\nassert {'write', 'load_info'} <= set(dir(imageshards))\n"
    program += "assert dir(imageshards.beam) and dir(imageshards.tools)\nimageshards.main(['--help'])"
    assert "  write " in run_without(HEAVY, program, tmp_path, PYTHONPATH=str(make.ROOT)).stdout


OF_READER = "is not installed: pip install 'imageshards[reader]'"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("write --help", "Apache Beam is not installed: pip install 'imageshards[pipeline]'"),
        ("verify DATASET", f"simplejpeg {OF_READER}"),
        ("show DATASET", f"Pillow {OF_READER}"),
        ("report DATASET", f"Pillow {OF_READER}"),
        ("train DATASET --out model", f"Keras {OF_READER.replace('reader', 'train')}"),
    ],
)
def test_a_verb_without_its_packages_says_which_extra_to_install(arguments: str, message: str, tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "1.0.0", {"train": [3], "validation": [1]})
    given = [dataset if part == "DATASET" else part for part in arguments.split()]
    program = f"import imageshards\nprint(imageshards.main({given}))"
    done = run_without(HEAVY, program, tmp_path, PYTHONPATH=str(make.ROOT))
    assert (done.stdout, done.stderr) == ("2\n", f"error: {message}\n")


@pytest.mark.parametrize(("module", "name"), [("apache_beam", "Apache Beam"), ("PIL", "Pillow")])
def test_the_write_side_without_its_packages_is_a_usage_error_in_one_line(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    for attribute in ("run", "Config"):
        with pytest.raises(UsageError) as caught:
            getattr(beam_pipeline, attribute)
        assert str(caught.value) == f"{name} is not installed: pip install 'imageshards[pipeline]'"


def test_another_package_named_reader_is_one_line(tmp_path: Path) -> None:
    other = tmp_path / "reader" / "__init__.py"
    other.parent.mkdir()
    other.write_text("def make_reader(url): ...\n")
    found = f"{other} is another package named reader, such as PyPI's: uninstall it, then install imageshards again"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{make.ROOT}"}

    def run(*arguments: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "imageshards", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    assert run("info", "datasets/photos/1.0.0") == (2, "", f"error: {found}\n")
    assert run("write", "--help")[0] == 0, "writing needs nothing of it"
