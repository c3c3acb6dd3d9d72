"""What is shipped and pinned: the wheel's contents, the extras, the constraints, and the scripts that install them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement

import beam_pipeline
from tests.make import ROOT, done
from tools.extras import ENVIRONMENTS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
# Whether the resize can be compiled here.
COMPILER = shutil.which(os.environ.get("CC") or str(sysconfig.get_config_var("CC")).split()[0])
COMPILES = bool(COMPILER) and Path(sysconfig.get_path("include"), "Python.h").is_file()
README = ROOT / "README.md"
TEXTS = ("README.md", "LICENSE", "CHANGELOG.md", "constraints.txt")


def pinned(file: str) -> dict[str, list[Requirement]]:
    """Name → its pins (several where Python versions differ) in a requirements file."""
    pins: dict[str, list[Requirement]] = {}
    for line in (ROOT / file).read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            pins.setdefault(requirement.name, []).append(requirement)
    return pins


def version_of(requirement: Requirement) -> str:
    (pin,) = requirement.specifier
    assert pin.operator == "=="
    return pin.version


PACKAGES = ("beam_pipeline", "imageshards", "reader")


def modules() -> set[str]:
    """Every module of the distribution, by its path."""
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    found = {path.relative_to(ROOT).as_posix() for path in paths}
    assert {"beam_pipeline/__main__.py", "reader/commands.py", "reader/training/fit.py"} <= found
    return found


def copied(source: Path, *more: str) -> Path:
    """The folder `source` with what is packed, and more folders."""
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", *TEXTS):
        shutil.copy(ROOT / name, source)
    for folder in (*PACKAGES, *more):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return source


@pytest.fixture(autouse=True, scope="module")
def _without_this_checkout() -> Iterator[None]:
    """An installed package is looked for where it is installed only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONPATH", raising=False)
        yield


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make wheel` builds: a wheel from an sdist, as `pip install` of a published sdist would."""
    source = copied(tmp_path_factory.mktemp("wheel") / "source", "tests", "deploy", "examples", "tools")
    if COMPILES:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done(source / "tools" / "wheel.sh", env={**os.environ, "PATH": path})
    else:
        done(sys.executable, "-m", "build", "--no-isolation", source)
    (made,) = (source / "dist").glob("imageshards-*.whl")
    return made


def test_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    shipped = {name for name in names if ".dist-info/" not in name and not name.endswith("/")}
    data = {*(f"{package}/py.typed" for package in PACKAGES), "reader/tools/report.html"}
    assert shipped == modules() | data | ({"beam_pipeline/images/_resample.abi3.so"} if COMPILES else set())
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_one_wheel_is_for_every_python_and_most_linuxes(wheel: Path) -> None:
    platform = "manylinux" if COMPILES else "linux"
    assert re.fullmatch(rf"imageshards-{beam_pipeline.__version__}-cp311-abi3-{platform}[\w.]+\.whl", wheel.name)


def new_environment(folder: Path) -> Path:
    """The programs of a fresh environment whose packages are those of this one; what is installed there comes first."""
    venv.create(folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    return folder / "bin"


def install(programs: Path, *what: object, **environment: str) -> None:
    """Install by pip, with nothing from an index."""
    pip = (sys.executable, "-m", "pip", "--python", programs / "python", "install", "--quiet")
    done(*pip, "--no-deps", "--no-index", *what, env={**os.environ, **environment})


@pytest.mark.soak
def test_an_editable_install_is_found_from_the_folder_that_holds_its_checkout(tmp_path: Path) -> None:
    """That folder is on Python's path, where a folder without `__init__.py` is an empty package."""
    checkout, programs = copied(tmp_path / "imageshards"), new_environment(tmp_path / "environment")
    install(programs, "--no-build-isolation", "--editable", checkout)
    program = "import imageshards; print(imageshards.__file__); print(imageshards.tools, imageshards.load_info)"
    shown = done(programs / "python", "-c", program, cwd=tmp_path).stdout
    assert shown.startswith(f"{checkout}/imageshards/__init__.py\n")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel in it."""
    programs = new_environment(tmp_path_factory.mktemp("installed"))
    install(programs, wheel)
    return programs


@pytest.mark.soak
def test_without_a_compiler_the_package_is_installed_and_pillow_resizes(tmp_path: Path) -> None:
    programs = new_environment(tmp_path / "environment")
    install(programs, "--no-build-isolation", "--editable", copied(tmp_path / "source"), CC="/bin/false")
    said = done(programs / "imageshards", "--version", cwd=tmp_path).stdout
    assert said.startswith(f"imageshards {beam_pipeline.__version__}\nresize: Pillow")


@pytest.mark.soak
def test_an_installed_wheel_resizes_by_what_was_compiled_for_it(installed: Path, tmp_path: Path) -> None:
    """That it writes and reads, away from any checkout, is what `make extras` tries; without it Pillow would resize."""
    said = done(installed / "imageshards", "--version", cwd=tmp_path).stdout
    assert said.startswith(f"imageshards {beam_pipeline.__version__}\nresize: ")
    assert ("with a C compiler" in said) is not COMPILES


@pytest.mark.soak
def test_an_extra_is_added_without_looking_for_the_package_itself(installed: Path, tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "--python", installed / "python", "install", "--dry-run", "--no-index")
    said = done(*pip, "imageshards[reader]", cwd=tmp_path).stdout
    assert "already satisfied: imageshards[reader]" in said


@pytest.mark.soak
def test_an_installed_wheel_says_that_dataflow_needs_an_image_or_a_checkout(installed: Path, tmp_path: Path) -> None:
    flags = "--input=gs://in --output=gs://out --name=photos --runner=DataflowRunner --project=p --region=europe-west4"
    command = [installed / "imageshards", "write", *flags.split()]
    refused = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: --sdk_container_image is missing: without an image, ")


def test_a_trainer_gets_no_beam_and_a_worker_no_tensorflow() -> None:
    names = {extra: {Requirement(text).name for text in texts} for extra, texts in EXTRAS.items()}
    assert not any("beam" in name for name in names["reader"] | names["tpu"] | names["torch"] | names["jax"])
    assert not any("tensorflow" in name for name in names["pipeline"])
    assert "tensorflow" not in names["tpu"], "tensorflow-tpu takes its place"


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_constraints_pin_what_every_extra_asks_for(python: str) -> None:
    pins = pinned("constraints.txt")
    machine = {**default_environment(), "python_version": python, "python_full_version": f"{python}.0"}
    wanted = PROJECT["dependencies"] + [text for extra in EXTRAS if extra != "tpu" for text in EXTRAS[extra]]
    for requirement in map(Requirement, wanted):
        if requirement.name == "imageshards":
            continue
        here = [pin for pin in pins[requirement.name] if pin.marker is None or pin.marker.evaluate(machine)]
        assert len(here) == 1, f"{requirement.name} on Python {python}: {here}"
        assert requirement.specifier.contains(version_of(here[0])), f"{requirement} but {here[0]}"


@pytest.mark.parametrize("extras", [("pipeline",), ("pipeline", "heic")])
def test_worker_requirements_are_the_extras_without_beam_at_the_constraints_versions(extras: tuple[str, ...]) -> None:
    file = "-".join(["deploy/requirements-worker", *extras[1:]]) + ".txt"
    worker, constraints = pinned(file), pinned("constraints.txt")
    for name, (pin,) in worker.items():
        assert version_of(pin) in [version_of(other) for other in constraints[name]], name
    direct = {Requirement(text).name for text in sum((EXTRAS[extra] for extra in extras), PROJECT["dependencies"])}
    assert direct - {"apache-beam"} <= set(worker)
    assert ("pillow-heif" in worker) is ("heic" in extras)
    assert not {"apache-beam", "tensorflow"} & set(worker)


def test_pins_name_no_address_and_no_folder() -> None:
    for file in ("constraints.txt", "deploy/requirements-worker.txt", "deploy/requirements-worker-heic.txt"):
        text = (ROOT / file).read_text()
        assert "://" not in text
        assert not re.search(r"(^|\s)(/|file:|-)", text, re.MULTILINE)


def test_readme_says_what_make_installs_and_contributing_what_ci_does() -> None:
    makefile, contributing, ci = ((ROOT / name).read_text() for name in ("Makefile", "CONTRIBUTING.md", ".ci/run"))
    ((installed),) = re.findall(r"^EXTRAS \?= (\S+)$", makefile, re.MULTILINE)
    (sentence,) = re.findall(r"^Both first make `\.venv` with (.*?)\. ", README.read_text(), re.MULTILINE | re.DOTALL)
    with_them, without = sentence.split("; ")
    extra_of = {"Beam": "pipeline", "TensorFlow": "tensorflow", "Keras": "train", "JAX": "jax", "PyTorch": "torch"}
    assert "are skipped without them" in " ".join(without.split())
    for name, extra in extra_of.items():
        assert (name in with_them, name in without) == (
            extra in installed.split(","),
            extra not in installed.split(","),
        )
    (all_of_them,) = set(re.findall(r"make setup EXTRAS=([\w,]+examples[\w,]*)", contributing + ci))
    assert set(all_of_them.split(",")) == set(EXTRAS) - {"tpu", "all"}


def test_every_extra_is_tried_by_itself() -> None:
    tried = {name for one in ENVIRONMENTS for name in one.extras.split(",") if name}
    assert tried == set(EXTRAS) - {"all", "test", "docs"}, "make test is in [test], make docs in [docs]"
    (promised,) = re.findall(r"^pip install '\.\[(.*?)\]' -c constraints.txt$", README.read_text(), re.MULTILINE)
    assert promised in [one.extras for one in ENVIRONMENTS]


def test_setup_takes_the_python_it_is_given_and_refuses_an_unsuitable_one_in_one_line(tmp_path: Path) -> None:
    def find(python: str, path: str) -> subprocess.CompletedProcess[str]:
        command = ["/bin/bash", ROOT / "tools" / "find_python.sh"]
        return subprocess.run(command, env={"PATH": path, "PYTHON": python}, capture_output=True, text=True)

    assert find(sys.executable, os.environ["PATH"]).stdout.strip() == sys.executable
    old = tmp_path / "python3"
    for answers in ("exit 1", "exit 127"):
        old.write_text(f"#!/bin/sh\n{answers}\n")
        old.chmod(0o755)
        for python, said in ((str(old), f"PYTHON={old} is no Python of 3.11 to 3.13"), ("", "no Python of 3.11")):
            refused = find(python, str(tmp_path))
            assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
            assert refused.stderr.startswith(f"error: {said}")


def test_extras_that_are_named_are_installed_where_others_are_already(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    made_of = ("pyproject.toml", "setup.py", "constraints.txt", "beam_pipeline/images/resample.c")
    for file in (*made_of, "tools/venv.sh", "tools/find_python.sh", ".venv/.installed"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    make_setup = ("make", "--no-print-directory", "-n", "setup")
    assert "venv.sh" not in done(*make_setup, cwd=tmp_path).stdout
    assert "tools/venv.sh reader,jax" in done(*make_setup, "EXTRAS=reader,jax", cwd=tmp_path).stdout


def test_make_without_a_target_lists_the_targets() -> None:
    listed = re.findall(r"^make (\w+) ", done("make", "--no-print-directory", cwd=ROOT).stdout, re.MULTILINE)
    assert {"help", "demo", "test", "lint", "bench", "engines", "clean"} <= set(listed)
