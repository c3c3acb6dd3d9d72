"""Runs one job on every Beam engine there is here and compares the datasets byte for byte: `make engines`.

Prints a table of engine, seconds, records and hash; exits 1 where a job failed or two hashes differ. What an engine
needs is installed below build/engines on first use. What can't be had is named with the command that installs it and
skipped; with CI=true in the environment it is a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "engines"
JOB = ("--name=sample", "--splits=train=0.8,validation=0.2", "--image_size=96", "--num_shards=train=4,validation=2")
DATASET = Path("sample/1.0.0")
PRISM_MODULE = "github.com/apache/beam/sdks/v2"


class Missing(Exception):
    """An engine's piece isn't here; the text is the command that installs it."""


class Engine(NamedTuple):
    """One way to run the job: its name, and the flags for it, found (and installed) when it is its turn."""

    name: str
    flags: Callable[[], Sequence[str]]


class Outcome(NamedTuple):
    """How one engine's run ended: `failure` is empty where it published."""

    engine: str
    seconds: float = 0.0
    records: int = 0
    hash: str = ""
    failure: str = ""


def find_prism() -> Path | None:
    """The Prism binary of our Beam's version: one installed here, else one that Go installed for the user."""
    if shutil.which("go") is None:
        return None
    wanted = f"{PRISM_MODULE}\tv{version('apache-beam')}"
    user_bin = Path(_output(["go", "env", "GOPATH"])) / "bin"
    for path in (WORK / "bin" / "prism", user_bin / "prism"):
        if path.exists() and wanted in _output(["go", "version", "-m", str(path)]):
            return path
    return None


def install_prism() -> Path:
    """Build Prism from its module, which takes two minutes the first time.

    Raises:
        Missing: there is no Go, or it can't build it.
    """
    command = f"go install {PRISM_MODULE}/go/cmd/prism@v{version('apache-beam')}"
    if shutil.which("go") is None:
        raise Missing(f"Go (Debian: apt-get install golang-go), then {command}")
    print(f"installing Prism: {command}", flush=True)
    environment = {**os.environ, "GOBIN": str(WORK / "bin")}
    done = subprocess.run(command.split(), env=environment, capture_output=True, text=True)
    path = find_prism()
    if done.returncode != 0 or path is None:
        raise Missing(f"{command} (it failed: {' '.join(done.stderr.split())[-200:]})")
    return path


def prism_flags() -> Sequence[str]:
    """Flags for Prism, which is installed where it isn't here."""
    return ("--runner=PrismRunner", f"--prism_location={find_prism() or install_prism()}")


ENGINES = (
    Engine("FnApiRunner, in memory", lambda: ()),
    Engine("FnApiRunner, 2 processes", lambda: ("--direct_running_mode=multi_processing", "--direct_num_workers=2")),
    Engine("DirectRunner", lambda: ("--runner=DirectRunner",)),
    Engine("Prism", prism_flags),
)


def run_job(engine: str, flags: Sequence[str], images: Path, folder: Path) -> Outcome:
    """Write the dataset anew with one engine and hash it; its output goes to `folder`.log.

    Args:
        engine: its name, for the outcome.
        flags: the engine's own.
        images: class folders.
        folder: `--output`; emptied first.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = folder.with_suffix(".log")
    command = [sys.executable, "-m", "beam_pipeline", f"--input={images}", f"--output={folder}", *JOB, *flags]
    started = time.monotonic()
    with log.open("w") as output:
        done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    seconds = time.monotonic() - started
    if done.returncode != 0:
        last = (log.read_text().strip().splitlines() or ["no output"])[-1]
        return Outcome(engine, seconds, failure=f"exit {done.returncode}: {last} (all of it: {log})")
    dataset = str(folder / DATASET)
    digest = _output([sys.executable, "-m", "reader", "info", dataset, "--hash"])
    records = json.loads((folder / DATASET / "manifest.json").read_bytes())["records"]
    return Outcome(engine, seconds, records, digest.split()[-1])


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"error: {' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


def _row(outcome: Outcome) -> str:
    if outcome.failure:
        return f"{outcome.engine:26}  {outcome.failure}"
    return f"{outcome.engine:26} {outcome.seconds:7.1f} {outcome.records:8}  {outcome.hash}"


def main() -> int:
    """The command: returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--images", type=int, default=300, metavar="N", help="pictures to draw for it (%(default)s)")
    flags = parser.parse_args()
    images = WORK / "images"
    drawn = [sys.executable, "-m", "beam_pipeline.sample_data", str(images), f"--images={flags.images}", "--broken=2"]
    print(_output(drawn), flush=True)

    print(f"\n{'engine':26} seconds  records  hash", flush=True)
    outcomes, missing = [], 0
    for number, engine in enumerate(ENGINES):
        try:
            outcomes.append(run_job(engine.name, engine.flags(), images, WORK / f"run-{number}"))
            print(_row(outcomes[-1]), flush=True)
        except Missing as error:
            missing += 1
            print(f"{engine.name:26}  skipped; to have it: {error}", flush=True)
    failed = sum(1 for outcome in outcomes if outcome.failure)
    hashes = {outcome.hash for outcome in outcomes if not outcome.failure}
    published = len(outcomes) - failed
    print(f"\n{published} published, {len(hashes)} different hash(es); {failed} failed, {missing} skipped")
    return int(bool(failed) or len(hashes) != 1 or (missing > 0 and os.environ.get("CI") == "true"))


if __name__ == "__main__":
    sys.exit(main())
