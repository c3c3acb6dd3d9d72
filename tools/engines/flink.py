"""Flink on this machine: Beam's job server with Flink inside, and an external pool of Python workers.

On a cluster the same two programs run: a job server in front of Flink's master, a worker pool beside each task manager.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.servers import free_port
from tools.engines import pieces, processes

# Flink serializes by reflection, which Java 17 forbids for its own packages unless they are named.
_OPENED = (
    *("java.lang", "java.lang.reflect", "java.util", "java.util.concurrent", "java.util.concurrent.atomic"),
    *("java.net", "java.io", "java.nio", "sun.nio.ch", "java.time", "java.text"),
)


@contextmanager
def flink(workers: int, logs: Path) -> Iterator[Sequence[str]]:
    """Run a job server and a worker pool; yields the flags of a job for them, kills both at the end.

    Args:
        workers: Flink's parallelism, and the Python processes.
        logs: folder for what the two say.

    Raises:
        Missing: a piece isn't here.
        RuntimeError: one of them doesn't come up.
    """
    class_path = pieces.flink_class_path()
    job_port, worker_port = free_port(), free_port()
    log, pool_log = logs / "flink_job_server.log", logs / "flink_worker_pool.log"
    servers: list[subprocess.Popen[bytes]] = []
    try:
        servers.append(processes.start(_job_server(class_path, job_port, logs / "artifacts"), log))
        servers.append(processes.start(_worker_pool(worker_port), pool_log, _python_first()))
        processes.wait_until_up(servers[0], job_port, log)
        processes.wait_until_up(servers[1], worker_port, pool_log)
        yield (
            "--runner=PortableRunner",
            f"--job_endpoint=localhost:{job_port}",
            "--environment_type=EXTERNAL",
            f"--environment_config=localhost:{worker_port}",
            # Flink runs stage after stage: without it each one starts workers of its own, 3 s each.
            "--environment_cache_millis=20000",
            f"--parallelism={workers}",
            f"--sdk_worker_parallelism={workers}",
        )
    finally:
        for server in reversed(servers):
            processes.kill(server)


def _job_server(class_path: str, port: int, artifacts: Path) -> list[str]:
    opened = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPENED]
    options = [
        "--flink-master=[local]",
        f"--job-port={port}",
        f"--artifact-port={free_port()}",
        f"--expansion-port={free_port()}",
        f"--artifacts-dir={artifacts}",
    ]
    # Without the limit Java takes a quarter of the machine's memory.
    java = ["java", "-Xmx1g", *opened, "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp", class_path]
    return [*java, "org.apache.beam.runners.flink.FlinkJobServerDriver", *options]


def _worker_pool(port: int) -> list[str]:
    return [sys.executable, "-m", "apache_beam.runners.worker.worker_pool_main", f"--service_port={port}"]


def _python_first() -> dict[str, str]:
    """The pool starts whatever `python` comes first: this one, which finds our packages."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    python_path = os.pathsep.join(filter(None, (str(processes.ROOT), os.environ.get("PYTHONPATH", ""))))
    return {"PATH": path, "PYTHONPATH": python_path}
