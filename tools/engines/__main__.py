"""Runs one job on every Beam engine installed here and compares the datasets byte for byte: `make engines`.

Each engine runs the job once uninterrupted, and some once killed with all processes and resumed by the same command;
some jobs read from and write to gs:// URLs. On a two-machine Flink cluster one task manager is killed, and a job is
cancelled and run again. Prints a table; exits 1 if a job failed or two hashes differ. A missing engine is fetched once
(`pieces`); one whose tools are missing is skipped, with the command that installs them. With CI=true in the environment
an engine whose tools are installed must run.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

from beam_pipeline import sample_data
from tests import servers
from tools.engines import jobs, pieces, portable, processes
from tools.engines.cluster import flink_cluster
from tools.engines.machines import two_machines

WORK = processes.ROOT / "build" / "engines"
_BUCKET = "engines"


def _always(*flags: str) -> AbstractContextManager[jobs.Running]:
    return nullcontext(jobs.Running(flags))


def _in_job_server(name: str, runner: portable.Runner, master: str, workers: int) -> jobs.Engine:
    return jobs.Engine(name, lambda logs: portable.in_job_server(runner, master, workers, logs))


ONE_PROCESS = jobs.Engine("FnApiRunner, one process", lambda logs: _always())
FOUR_THREADS = jobs.Engine(
    "FnApiRunner, 4 threads", lambda logs: _always("--direct_running_mode=multi_threading", "--direct_num_workers=4")
)
TWO_PROCESSES = jobs.Engine(
    "FnApiRunner, 2 processes", lambda logs: _always("--direct_running_mode=multi_processing", "--direct_num_workers=2")
)
DIRECT = jobs.Engine("DirectRunner", lambda logs: _always("--runner=DirectRunner"))
PRISM = jobs.Engine("Prism", lambda logs: _always("--runner=PrismRunner", f"--prism_location={pieces.prism()}"))
FLINK = _in_job_server("Flink, 1 external worker", portable.FLINK, "[local]", 1)
FLINK_TWO = _in_job_server("Flink, 2 external workers", portable.FLINK, "[local]", 2)
SPARK = _in_job_server("Spark, 2 external workers", portable.SPARK, "local[2]", 2)
CLUSTER = jobs.Engine("Flink, 2 task managers", flink_cluster)


class Row(NamedTuple):
    """One line of the table: which engine, what happens to it in the middle, and where images and dataset are."""

    engine: jobs.Engine
    fault: str = ""
    source: str = "local"
    target: str = "local"


MATRIX = (
    *(Row(engine) for engine in (ONE_PROCESS, FOUR_THREADS, TWO_PROCESSES, DIRECT, PRISM, FLINK, SPARK)),
    *(Row(engine, jobs.KILLED) for engine in (ONE_PROCESS, TWO_PROCESSES, PRISM, FLINK_TWO)),
    Row(ONE_PROCESS, source="gs", target="gs"),
    Row(PRISM, source="local", target="gs"),
    Row(TWO_PROCESSES, jobs.KILLED, source="gs", target="gs"),
    *(Row(CLUSTER, fault, source="gs", target="gs") for fault in (jobs.ONE_KILLED, jobs.CANCELLED)),
)


class Places(NamedTuple):
    """Where jobs read and write: `local` and `gs` each as folder of images and as root of outputs."""

    images: dict[str, str]
    outputs: dict[str, str]


def main(arguments: Sequence[str] | None = None, matrix: Sequence[Row] = MATRIX) -> int:
    """The command: returns its exit code."""
    parser = argparse.ArgumentParser(prog="make engines", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=int, default=600, metavar="N", help="pictures to draw for it (%(default)s)")
    parser.add_argument("--shards", type=int, default=jobs.SHARDS, metavar="N", help="of the dataset (%(default)s)")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="engines whose names contain TEXT, besides the first"
    )
    flags = parser.parse_args(arguments)
    processes.exit_on_signals()
    started = time.monotonic()
    folder = WORK / f"images-{flags.images}"
    sample_data.draw_folder(folder, images=flags.images, classes=5, broken=2)
    with _places(folder) as places:
        rows = [row for row in matrix if row is matrix[0] or flags.only in row.engine.name]
        return _run(rows, places, started, flags.shards)


@contextmanager
def _places(folder: Path) -> Iterator[Places]:
    """The local folders and, if fake-gcs-server is installed, a bucket with the same images."""
    images, outputs = {"local": str(folder)}, {"local": str(WORK)}
    if servers.fake_gcs_binary() is None:
        yield Places(images, outputs)
        return
    host = "127.0.0.1"
    with suppress(pieces.Missing):
        host = two_machines().here
    with servers.fake_gcs(WORK / "fake_gcs_server.log", host=host) as url:
        os.environ["STORAGE_EMULATOR_HOST"] = url
        gcs = servers.Gcs(url)
        gcs.put_folder(gcs.new_bucket(_BUCKET), "images", folder)
        images["gs"], outputs["gs"] = f"gs://{_BUCKET}/images", f"gs://{_BUCKET}"
        yield Places(images, outputs)


def _run(matrix: Sequence[Row], places: Places, started: float, shards: int = jobs.SHARDS) -> int:
    """Run the rows, print their table and what it comes to."""
    print(
        f"\n{'engine':26} {'from':>5} → {'to':5} {'fault, shards kept':>20} {'seconds':>8} {'records':>8}  hash",
        flush=True,
    )
    outcomes, skipped, refused = [], 0, 0
    for number, row in enumerate(matrix):
        try:
            outcomes.append(_run_row(row, places, f"run-{number:02d}", shards))
            print(_line(row, outcomes[-1], shards), flush=True)
        except pieces.Missing as error:
            skipped, refused = skipped + 1, refused + error.refused
            print(f"{row.engine.name:26}  skipped; to enable it: {error}", flush=True)
    published = [outcome for outcome in outcomes if not outcome.failure]
    hashes = {outcome.hash for outcome in published}
    failed = len(outcomes) - len(published)
    print(
        f"\n{len(published)} published, {len(hashes)} different hash{'es' * (len(hashes) != 1)} "
        f"({', '.join(sorted(hashes))}); {failed} failed, {skipped} skipped; {time.monotonic() - started:.0f} s"
    )
    if refused and os.environ.get("CI") == "true":
        print(f"CI=true: {refused} skipped though the tools to install them are present: a failure")
        return 1
    return int(failed > 0 or len(hashes) != 1)


def _run_row(row: Row, places: Places, name: str, shards: int) -> jobs.Outcome:
    """Run one row.

    Raises:
        Missing: its engine, or a server for its bucket, isn't here.
    """
    if "gs" in (row.source, row.target) and "gs" not in places.images:
        raise pieces.Missing(servers.HOW_TO_ENABLE)
    output = f"{places.outputs[row.target]}/{name}"
    return jobs.run_job(row.engine, places.images[row.source], output, WORK / "logs" / name, row.fault, shards)


def _line(row: Row, outcome: jobs.Outcome, shards: int) -> str:
    where = f"{row.engine.name:26} {row.source:>5} → {row.target:5}"
    if outcome.failure:
        return f"{where}  {outcome.failure}"
    fault = f"{row.fault}, {outcome.kept} of {shards}" if row.fault else ""
    return f"{where} {fault:>20} {outcome.seconds:8.1f} {outcome.records:8}  {outcome.hash[:16]}…"


if __name__ == "__main__":
    sys.exit(main())
