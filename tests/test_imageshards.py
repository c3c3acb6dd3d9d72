"""One name: the command `imageshards` hands each verb to its side, and `import imageshards` has both sides' names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import beam_pipeline
import imageshards
import reader
from beam_pipeline.errors import UsageError
from beam_pipeline.images.resize import described
from tests import make
from tests.reading.shards import make_dataset
from tests.reading.without import run_without

VERBS = [
    *("write", "info", "verify", "rejects", "duplicates", "diff", "show", "bench", "index"),
    *("train", "evaluate", "predict"),
]
HEAVY = "apache_beam,tensorflow,keras,jax,torch,PIL,simplejpeg,obstore,matplotlib"


def test_help_has_one_line_for_each_verb_and_version_is_the_distributions(capsys: pytest.CaptureFixture[str]) -> None:
    assert imageshards.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert re.findall(r"^    ([a-z]+)(?: +[A-Z].*)?$", shown, re.MULTILINE) == VERBS
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
        ("reader", "write --help"),
        ("reader", "show --help"),
        ("reader", "info no/such/dataset"),
        ("reader", "inf"),
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


def test_public_names_are_both_packages_and_the_error_to_catch() -> None:
    both = {"ImageShardsError", "write", *beam_pipeline.__all__, *reader.__all__} - {"run"}
    assert set(dir(imageshards)) == both == set(imageshards.__all__)
    assert dir(beam_pipeline) == sorted(beam_pipeline.__all__)
    for package in (beam_pipeline, reader):
        for name in {"Config", "Manifest", "load_info", "train_batches", "verify"} & set(package.__all__):
            assert getattr(imageshards, name) is getattr(package, name)
    assert imageshards.write is beam_pipeline.run, "as the command is called"
    with pytest.raises(UsageError, match=r"^imageshards\.write\('photos'\): give an imageshards\.Config$"):
        imageshards.write("photos")
    # Of two things with one name, one would be lost.
    assert set(beam_pipeline.__all__) & set(reader.__all__) == {"__version__"}
    with pytest.raises(AttributeError, match="'imageshards' has no attribute 'train_batchs'"):
        imageshards.train_batchs  # noqa: B018


def test_importing_it_and_listing_its_names_and_verbs_needs_no_extra(tmp_path: Path) -> None:
    program = "import imageshards\nassert {'write', 'load_info'} <= set(dir(imageshards))\nimageshards.main(['--help'])"
    assert "  write " in run_without(HEAVY, program, tmp_path, PYTHONPATH=str(make.ROOT)).stdout


OF_READER = "is not installed: pip install 'imageshards[reader]'"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("write --help", "Apache Beam is not installed: pip install 'imageshards[pipeline]'"),
        ("verify DATASET", f"simplejpeg {OF_READER}"),
        ("show DATASET", f"Pillow {OF_READER}"),
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
    line = f"{name} is not installed: pip install 'imageshards[pipeline]'"
    program = (
        f"import runpy, sys; sys.modules[{module!r}] = None; runpy.run_module('beam_pipeline', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=make.ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {line}\n")
    monkeypatch.setitem(sys.modules, module, None)
    for attribute in ("run", "Config"):
        with pytest.raises(UsageError) as caught:
            getattr(beam_pipeline, attribute)
        assert str(caught.value) == line


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
