"""Tests the workers' image without Docker: `python -m tools.image PYTHON PYTHON`, the launcher's version first.

Each step of deploy/Dockerfile runs in a plain environment with Beam, like its base image. That environment then serves
as the worker pool of a job of this checkout, whose dataset must be the one that a local job writes; with another
Python, Pillow or extra the job must fail with one line. Repeated for the package that Dataflow stages without an image.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from beam_pipeline import sample_data
from tests import servers
from tests.dataflow.api import FakeDataflow
from tests.dataflow.cloud import Cloud, account_key
from tools.engines import jobs, processes

ROOT = processes.ROOT
_UV = Path(sys.executable).with_name("uv")  # `make setup` brings it
WORK = ROOT / "build" / "image"
_JOB = ("--name=photos", "--image_size=48", "--num_shards=4")
_LINE = re.compile(r"^(?:error: |published ).*$", re.MULTILINE)


class Row(NamedTuple):
    """An environment to test.

    Attributes:
        python: its interpreter.
        build: arguments of the Dockerfile; None to install what is staged.
        change: arguments of a last pip command, to create a mismatch.
        launches: whether it also launches the job; else this process's Python does.
        compiles: whether it has a C compiler; without one Pillow resizes there.
        is_refused: whether its workers must fail the job.
    """

    name: str
    python: str
    build: Mapping[str, str] | None
    change: str = ""
    launches: bool = False
    compiles: bool = True
    is_refused: bool = False


def steps(build: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The Dockerfile's instructions, `("RUN", "pip install …")`, with these values for its arguments."""
    values: dict[str, str] = {}
    for line in re.sub(r"\\\n\s*", "", (ROOT / "deploy" / "Dockerfile").read_text()).splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "ARG":
            name, _, value = rest.partition("=")
            values[name] = build.get(name, value)
            yield kind, f"{name}={values[name]}"
        elif kind and not kind.startswith("#"):
            yield kind, re.sub(r"\$\{(\w+)\}", lambda found: values[found[1]], rest)


def _install(row: Row, place: Path, staged: Path) -> None:
    """Make an environment with Beam and run the Dockerfile's steps in it, or install what is staged."""
    folder, environment = place / "files", _environment(place)
    if not row.compiles:
        environment |= {"CC": "/bin/false"}
    folder.mkdir(parents=True)
    _run([_UV, "venv", "--quiet", "--seed", "--python", row.python, place / "venv"])
    beam = re.findall(r"^apache-beam==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]
    _run([_UV, "pip", "install", "--quiet", "--python", place / "venv" / "bin" / "python", f"apache-beam[gcp]=={beam}"])
    for kind, rest in steps(row.build) if row.build is not None else ():
        if kind == "ARG":
            environment |= dict([rest.split("=")])
        elif kind == "COPY" and not rest.startswith("--from"):
            *sources, target = rest.split()
            _copy(sources, (folder / target) if not target.startswith("/") else Path(f"{place}{target}"))
        elif kind == "RUN":
            print(f"  RUN {rest}", flush=True)
            _run(["bash", "-c", rest], folder, environment)
    if row.build is None:
        _run(["pip", "install", "--quiet", "--requirement", staged / "requirements.txt"], folder, environment)
        _run(["pip", "install", "--quiet", staged / "workflow.tar.gz"], folder, environment)
    resizes = _run(["imageshards", "--version"], folder, environment).splitlines()[1]
    if ("with a C compiler" in resizes) is row.compiles:
        raise RuntimeError(f"{row.name}: {resizes}")
    if row.change:
        _run(["pip", *row.change.split()], folder, environment)


def _copy(sources: Sequence[str], target: Path) -> None:
    for source in (path for pattern in sources for path in ROOT.glob(pattern)):
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)


def _environment(place: Path) -> dict[str, str]:
    """PATH starts with its bin, and nothing of this checkout can be imported."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**inherited, "PATH": f"{place}/venv/bin:{os.environ['PATH']}", "PYTHONSAFEPATH": "1"}


def _run(command: Sequence[object], folder: Path = ROOT, environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout


@contextmanager
def _pool(place: Path) -> Iterator[Sequence[str]]:
    """Run a pool of workers; yields the flags of a job for it."""
    port, log = servers.free_port(), place / "pool.log"
    command = ["python", "-m", "apache_beam.runners.worker.worker_pool_main", f"--service_port={port}"]
    command = [str(place / "venv" / "bin" / "python"), *command[1:]]
    pool = processes.start(command, log, {**_environment(place), "PYTHONPATH": ""})
    try:
        processes.wait_until_up(pool, port, log)
        worker = ("--environment_type=EXTERNAL", f"--environment_config=localhost:{port}")
        yield ("--runner=PortableRunner", "--job_endpoint=embed", *worker)
    finally:
        processes.kill(pool)


def _job(row: Row, place: Path, output: Path) -> str:
    """Run a job whose workers are that environment's; returns its last line, with the hash of its dataset."""
    with _pool(place) as flags:
        python, environment = (
            (place / "venv" / "bin" / "python", _environment(place)) if row.launches else (sys.executable, None)
        )
        command = [python, "-m", "beam_pipeline", f"--input={WORK / 'images'}", f"--output={output}", *_JOB, *flags]
        done = subprocess.run(
            list(map(str, command)), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
        )
    line = (_LINE.findall(done.stdout + done.stderr) or ["no line at all"])[-1]
    return f"{line} {jobs.dataset_hash(str(output / 'photos' / '1.0.0'))[:16]}…" if done.returncode == 0 else line


def _stage(folder: Path) -> None:
    """What the DataflowRunner stages without an image, by a real submission that is written to a file."""
    folder.mkdir(parents=True)
    with servers.fake_gcs(WORK / "gcs.log") as url, account_key(folder) as key, servers.serving(FakeDataflow()) as api:
        os.environ["STORAGE_EMULATOR_HOST"] = url
        cloud = Cloud(servers.Gcs(url), api, folder, key)
        cloud.submit("staged", f"--input={cloud.input()}")
        for name in ("requirements.txt", "workflow.tar.gz"):
            (folder / name).write_bytes(cloud.read("staged", name))
    del os.environ["STORAGE_EMULATOR_HOST"]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: prints a line for each environment; returns 1 if one is not as expected."""
    parser = argparse.ArgumentParser(prog="python -m tools.image", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("python", help="an interpreter of the launcher's version")
    parser.add_argument("other", help="an interpreter of another version")
    flags = parser.parse_args(arguments)
    processes.exit_on_signals()
    shutil.rmtree(WORK, ignore_errors=True)
    sample_data.draw_folder(WORK / "images", images=60, classes=3, broken=0)
    command = [sys.executable, "-m", "beam_pipeline", f"--input={WORK / 'images'}", f"--output={WORK / 'local'}", *_JOB]
    _run(command)
    expected = jobs.dataset_hash(str(WORK / "local" / "photos" / "1.0.0"))
    print(f"local job: {expected[:16]}…")
    _stage(WORK / "staged")
    other_pillow = "install --quiet pillow==12.1.1"
    rows = (
        Row("staged package", flags.python, None),
        Row("staged package, no compiler", flags.python, None, compiles=False),
        Row("image", flags.python, {}),
        Row("image, also launches the job", flags.other, {}, launches=True),
        Row("image, other Python", flags.other, {}, is_refused=True),
        Row("image, other Pillow", flags.python, {}, other_pillow, is_refused=True),
        Row("image without HEIC", flags.python, {"EXTRA": ""}, is_refused=True),
        Row("staged package, other Pillow", flags.python, None, other_pillow, is_refused=True),
    )
    failed = [row for number, row in enumerate(rows) if not _is_as_expected(row, WORK / f"row-{number}", expected)]
    return int(len(failed) > 0)


def _is_as_expected(row: Row, place: Path, expected: str) -> bool:
    """Test an environment and print the result."""
    print(f"{row.name} ({row.python})", flush=True)
    _install(row, place, WORK / "staged")
    line = _job(row, place, place / "output")
    if row.is_refused:
        good = line.startswith("error: the worker has ") and not list(place.rglob("*.tfrecord*"))
    else:
        good = line.endswith(f"{expected[:16]}…")
    print(f"  {'as expected' if good else 'WRONG'}: {line}", flush=True)
    return good


if __name__ == "__main__":
    sys.exit(main())
