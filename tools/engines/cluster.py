"""A two-machine Flink cluster like a user's: docs/howto/clusters.md has the recipe.

A job server is in front of Flink's job manager, and each task manager finds a worker pool on its own localhost.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.servers import free_port
from tools.engines import processes
from tools.engines.jobs import CANCELLED, ONE_KILLED, Running
from tools.engines.machines import two_machines
from tools.engines.portable import FLINK, job_flags, start_java, start_job_server, start_pool

_MASTER = "org.apache.flink.runtime.entrypoint.StandaloneSessionClusterEntrypoint"
_TASK_MANAGER = "org.apache.flink.runtime.taskexecutor.TaskManagerRunner"
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
rest.bind-address: {address}
rest.port: {port}
io.tmp.dirs: {folder}
taskmanager.numberOfTaskSlots: {slots}
# Else one task manager gets as many tasks as it has slots.
taskmanager.load-balance.mode: SLOTS
# With Beam's classes of its own each stage would start its Python processes again.
classloader.resolve-order: parent-first
# Without a strategy nothing is retried; the delay must outlast the detection of a dead task manager.
restart-strategy.type: fixed-delay
restart-strategy.fixed-delay.attempts: 3
restart-strategy.fixed-delay.delay: 6 s
heartbeat.interval: 1000
heartbeat.timeout: 5000
"""


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
        start_java(stack, FLINK, _MASTER, ["--configDir", str(logs)], logs / "job_manager.log")
        task_managers = []
        for number, address in enumerate((machines.here, machines.there), 1):
            on_machine = machines.on_second if address == machines.there else ()
            start_pool(stack, pool_port, logs / f"machine_{number}", on_machine)
            options = ["--configDir", str(logs), *(f"-Dtaskmanager.{host}={address}" for host in ("host", "bind-host"))]
            log = logs / f"machine_{number}" / "task_manager.log"
            task_managers.append(start_java(stack, FLINK, _TASK_MANAGER, options, log, on_machine))
        _wait_for_task_managers(rest, logs)
        job_port = start_job_server(stack, FLINK, f"{machines.here}:{port}", logs)
        faults = {ONE_KILLED: lambda: processes.kill(task_managers[-1]), CANCELLED: lambda: _cancel(rest)}
        yield Running(job_flags(job_port, pool_port, _TASK_MANAGERS, 1), faults)


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
