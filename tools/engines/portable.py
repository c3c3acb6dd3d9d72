"""What Flink and Spark share: a job server that takes a job from Beam, and external pools of Python workers.

What `start_…` starts runs until the stack is closed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.servers import free_port
from tools.engines import pieces, processes
from tools.engines.jobs import Running

# Both serialize by reflection, which Java 17 forbids for its own packages unless they are named.
_OPENED = (
    *("java.lang", "java.lang.invoke", "java.lang.reflect", "java.util", "java.util.concurrent"),
    *("java.util.concurrent.atomic", "java.net", "java.io", "java.nio", "java.time", "java.text", "jdk.internal.ref"),
    *("sun.nio.ch", "sun.nio.cs", "sun.security.action", "sun.util.calendar"),
)


class Runner(NamedTuple):
    """What makes a job server of a runner: its pieces, its main class, the option that names the cluster."""

    artifacts: Sequence[str]
    main: str
    master: str


FLINK = Runner(pieces.FLINK, "org.apache.beam.runners.flink.FlinkJobServerDriver", "--flink-master")
SPARK = Runner(pieces.SPARK, "org.apache.beam.runners.spark.SparkJobServerDriver", "--spark-master-url")


@contextmanager
def in_job_server(runner: Runner, master: str, workers: int, logs: Path) -> Iterator[Running]:
    """Run a job server with the engine inside, and a worker pool; kills both at the end.

    Args:
        runner: of which engine.
        master: the value with which the job server is the cluster, too.
        workers: the engine's parallelism, and the Python processes.
        logs: folder for their output.

    Raises:
        Missing: a piece isn't here.
        RuntimeError: one of them doesn't come up.
    """
    with ExitStack() as stack:
        job_port = start_job_server(stack, runner, master, logs)
        pool_port = free_port()
        start_pool(stack, pool_port, logs)
        yield Running(job_flags(job_port, pool_port, workers, workers))


def job_flags(job_port: int, pool_port: int, tasks: int, processes_each: int) -> list[str]:
    """A job's flags for a job server and pools of workers on this machine.

    Args:
        job_port, pool_port: which they listen on.
        tasks: of Flink at a time, over all task managers; Spark has no use for it.
        processes_each: Python processes that each of Flink's task managers, or of Spark's executors, starts.
    """
    return [
        "--runner=PortableRunner",
        f"--job_endpoint=localhost:{job_port}",
        "--environment_type=EXTERNAL",
        f"--environment_config=localhost:{pool_port}",
        # Stage runs after stage: without it each one starts workers of its own, 3 s each.
        "--environment_cache_millis=20000",
        f"--parallelism={tasks}",
        f"--sdk_worker_parallelism={processes_each}",
    ]


def start_job_server(stack: ExitStack, runner: Runner, master: str, logs: Path) -> int:
    """Start a job server for a cluster and wait until it is up; returns its port.

    Raises:
        Missing, RuntimeError: as of `in_job_server`.
    """
    port, log = free_port(), logs / "job_server.log"
    options = [
        f"{runner.master}={master}",
        f"--job-port={port}",
        f"--artifact-port={free_port()}",
        f"--expansion-port={free_port()}",
        f"--artifacts-dir={logs / 'artifacts'}",
    ]
    processes.wait_until_up(start_java(stack, runner, runner.main, options, log), port, log)
    return port


def start_java(
    stack: ExitStack, runner: Runner, main: str, options: Sequence[str], log: Path, on_machine: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """Start a program of an engine; its job server's jars hold them all.

    Args:
        on_machine: `on_second` of `two_machines`, to start it there.

    Raises:
        Missing: the jars are unavailable.
    """
    opened = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPENED]
    # Else Java takes a quarter of the machine's memory, and for a run as short as this a third more CPU.
    java = ["java", "-Xmx1g", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", *opened]
    logging = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
    command = [*on_machine, *java, logging, "-cp", pieces.class_path(runner.artifacts), main, *options]
    return stack.enter_context(processes.running(command, log))


def start_pool(stack: ExitStack, port: int, logs: Path, on_machine: Sequence[str] = ()) -> None:
    """Start a pool of workers.

    Raises:
        RuntimeError: it doesn't come up.
    """
    pool = [sys.executable, "-m", "apache_beam.runners.worker.worker_pool_main", f"--service_port={port}"]
    log = logs / "worker_pool.log"
    process = stack.enter_context(processes.running([*on_machine, *pool], log, _python_first()))
    if not on_machine:
        processes.wait_until_up(process, port, log)


def _python_first() -> dict[str, str]:
    """The pool starts whatever `python` comes first: this one, which finds our packages."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    python_path = os.pathsep.join(filter(None, (str(processes.ROOT), os.environ.get("PYTHONPATH", ""))))
    return {"PATH": path, "PYTHONPATH": python_path}
