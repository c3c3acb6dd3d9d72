"""Flink: Beam's job server with Flink inside, or in front of a cluster; and external pools of Python workers.

A user's cluster runs the same programs: a job server in front of Flink's job manager, and on each task manager's
machine a worker pool, which the task manager finds on its own localhost.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.servers import free_port
from tools.engines import pieces, processes
from tools.engines.jobs import CANCELLED, ONE_KILLED, Running
from tools.engines.machines import two_machines

# Flink serializes by reflection, which Java 17 forbids for its own packages unless they are named.
_OPENED = (
    *("java.lang", "java.lang.reflect", "java.util", "java.util.concurrent", "java.util.concurrent.atomic"),
    *("java.net", "java.io", "java.nio", "sun.nio.ch", "java.time", "java.text"),
)
_MASTER = "org.apache.flink.runtime.entrypoint.StandaloneSessionClusterEntrypoint"
_TASK_MANAGER = "org.apache.flink.runtime.taskexecutor.TaskManagerRunner"
_JOB_SERVER = "org.apache.beam.runners.flink.FlinkJobServerDriver"
_TASK_MANAGERS = 2
_SLOTS = 2  # of a task manager: one is enough for a job of two, as when the other has died
#: What a cluster's own start scripts would compute of the task managers' memory comes first.
CLUSTER = """\
taskmanager.cpu.cores: {slots}
taskmanager.memory.framework.heap.size: 128m
taskmanager.memory.framework.off-heap.size: 128m
taskmanager.memory.task.heap.size: 256m
taskmanager.memory.task.off-heap.size: 0m
taskmanager.memory.managed.size: 128m
taskmanager.memory.network.min: 256m
taskmanager.memory.network.max: 256m
taskmanager.memory.jvm-metaspace.size: 256m
taskmanager.memory.jvm-overhead.min: 192m
taskmanager.memory.jvm-overhead.max: 192m
jobmanager.memory.process.size: 1g
jobmanager.rpc.address: {address}
rest.address: {address}
rest.port: {port}
io.tmp.dirs: {folder}
taskmanager.numberOfTaskSlots: {slots}
# Else one task manager gets all tasks that fit it.
taskmanager.load-balance.mode: SLOTS
# Without a strategy nothing is tried again; a delay must outlast the detection of a dead task manager.
restart-strategy.type: fixed-delay
restart-strategy.fixed-delay.attempts: 3
restart-strategy.fixed-delay.delay: 6 s
heartbeat.interval: 1000
heartbeat.timeout: 5000
"""


@contextmanager
def flink(workers: int, logs: Path) -> Iterator[Running]:
    """Run a job server with Flink inside and a worker pool; kills both at the end.

    Args:
        workers: Flink's parallelism, and the Python processes.
        logs: folder for what the two say.

    Raises:
        Missing: a piece isn't here.
        RuntimeError: one of them doesn't come up.
    """
    with ExitStack() as stack:
        pool_port = free_port()
        _start_pool(stack, pool_port, logs)
        yield Running(job_flags(_start_job_server(stack, "[local]", logs), pool_port, workers, workers))


@contextmanager
def flink_cluster(logs: Path) -> Iterator[Running]:
    """Run a cluster of a job manager and two task managers on two machines, each with a worker pool; kills all.

    Raises:
        Missing: a piece isn't here.
        RuntimeError: one of them doesn't come up.
    """
    machines = two_machines()
    with ExitStack() as stack:
        pool_port, port = free_port(), free_port()
        rest = f"http://{machines.here}:{port}"
        logs.mkdir(parents=True, exist_ok=True)
        configuration = CLUSTER.format(address=machines.here, port=port, folder=logs / "flink", slots=_SLOTS)
        (logs / "config.yaml").write_text(configuration)
        _start_java(stack, _MASTER, ["--configDir", str(logs)], logs / "job_manager.log")
        task_managers = []
        for number, address in enumerate((machines.here, machines.there), 1):
            on_machine = machines.on_second if address == machines.there else ()
            _start_pool(stack, pool_port, logs / f"machine_{number}", on_machine)
            options = ["--configDir", str(logs), f"-Dtaskmanager.host={address}"]
            log = logs / f"machine_{number}" / "task_manager.log"
            task_managers.append(_start_java(stack, _TASK_MANAGER, options, log, on_machine))
        _wait_for_task_managers(rest, logs)
        job_port = _start_job_server(stack, f"{machines.here}:{port}", logs)
        faults = {ONE_KILLED: lambda: processes.kill(task_managers[-1]), CANCELLED: lambda: _cancel(rest)}
        yield Running(job_flags(job_port, pool_port, _TASK_MANAGERS, 1), faults)


def job_flags(job_port: int, pool_port: int, tasks: int, processes_each: int) -> list[str]:
    """A job's flags for a job server and pools of workers on this machine.

    Args:
        job_port, pool_port: which both listen on.
        tasks: Flink's at a time, over all task managers.
        processes_each: Python processes that each task manager starts.
    """
    return [
        "--runner=PortableRunner",
        f"--job_endpoint=localhost:{job_port}",
        "--environment_type=EXTERNAL",
        f"--environment_config=localhost:{pool_port}",
        # Flink runs stage after stage: without it each one starts workers of its own, 3 s each.
        "--environment_cache_millis=20000",
        f"--parallelism={tasks}",
        f"--sdk_worker_parallelism={processes_each}",
    ]


def _start_job_server(stack: ExitStack, master: str, logs: Path) -> int:
    """Start it and wait until it is up; returns its port."""
    port, log = free_port(), logs / "flink_job_server.log"
    options = [
        f"--flink-master={master}",
        f"--job-port={port}",
        f"--artifact-port={free_port()}",
        f"--expansion-port={free_port()}",
        f"--artifacts-dir={logs / 'artifacts'}",
    ]
    server = _start_java(stack, _JOB_SERVER, options, log)
    processes.wait_until_up(server, port, log)
    return port


def _start_java(
    stack: ExitStack, main: str, options: Sequence[str], log: Path, on_machine: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """Start one of Flink's programs; the class path of Beam's job server holds them all."""
    opened = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPENED]
    # Else Java takes a quarter of the machine's memory, and for a run as short as this a third more CPU.
    java = ["java", "-Xmx1g", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", *opened]
    logging = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
    command = [*on_machine, *java, logging, "-cp", pieces.flink_class_path(), main, *options]
    return stack.enter_context(processes.running(command, log))


def _start_pool(stack: ExitStack, port: int, logs: Path, on_machine: Sequence[str] = ()) -> None:
    """Start a worker pool."""
    pool = [sys.executable, "-m", "apache_beam.runners.worker.worker_pool_main", f"--service_port={port}"]
    log = logs / "flink_worker_pool.log"
    process = stack.enter_context(processes.running([*on_machine, *pool], log, _python_first()))
    if not on_machine:
        processes.wait_until_up(process, port, log)


def _python_first() -> dict[str, str]:
    """The pool starts whatever `python` comes first: this one, which finds our packages."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    python_path = os.pathsep.join(filter(None, (str(processes.ROOT), os.environ.get("PYTHONPATH", ""))))
    return {"PATH": path, "PYTHONPATH": python_path}


def _wait_for_task_managers(rest: str, logs: Path, deadline_s: float = 60) -> None:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        with suppress(OSError):
            if len(_ask(f"{rest}/taskmanagers")["taskmanagers"]) == _TASK_MANAGERS:
                return
        time.sleep(0.2)
    raise RuntimeError(f"the Flink cluster isn't up after {deadline_s:.0f} s: see {logs}")


def _cancel(rest: str) -> None:
    """Cancel the job that runs, as Flink's web page does."""
    for job in _ask(f"{rest}/jobs/overview")["jobs"]:
        if job["state"] == "RUNNING":
            _ask(f"{rest}/jobs/{job['jid']}?mode=cancel", "PATCH")


def _ask(url: str, method: str = "GET") -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=10) as answer:
        return json.load(answer)
