"""What engines need besides Beam, fetched once for a user: Prism from Go, job servers of Flink and Spark from Maven.

Prism's binary and the lists of jars are in ~/.cache/imageshards/engines, the jars where Maven keeps its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

PRISM_MODULE = "github.com/apache/beam/sdks/v2"
# Not Beam's newest: Maven Central has only some of the runners. Beam's protocol is the same.
FLINK = ("org.apache.beam:beam-runners-flink-1.19:2.62.0",)
SPARK = (
    "org.apache.beam:beam-runners-spark-3:2.62.0",
    "org.apache.beam:beam-sdks-java-io-hadoop-file-system:2.62.0",
    *(f"org.apache.spark:spark-{part}_2.12:3.5.0" for part in ("core", "streaming", "sql")),
)
_LOGGING = "org.slf4j:slf4j-simple:1.7.30"  # without a logger the job server says nothing, not even why a job failed
_POM = """\
<project>
  <modelVersion>4.0.0</modelVersion>
  <groupId>imageshards</groupId><artifactId>job-server</artifactId><version>1</version>
  <dependencies>
{}
  </dependencies>
</project>
"""
_DEPENDENCY = "    <dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version></dependency>"


class Missing(Exception):
    """An engine's piece isn't here.

    Args:
        how: the commands that install it.
        refused: what installs it is here, and failed.
    """

    def __init__(self, how: str, refused: bool = False) -> None:
        super().__init__(how)
        self.refused = refused


def cache_folder() -> Path:
    """Where pieces are kept for all checkouts of this user."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "imageshards" / "engines"


def prism() -> Path:
    """The Prism binary of our Beam's version: ours, one that Go installed for the user, or a new one (two minutes).

    Raises:
        Missing: there is no Go, or it can't build it.
    """
    beam = f"v{version('apache-beam')}"
    ours = cache_folder() / f"prism-{beam}" / "prism"
    if ours.exists():
        return ours
    command = f"go install {PRISM_MODULE}/go/cmd/prism@{beam}"
    if shutil.which("go") is None:
        raise Missing(f"install Go (Debian: apt-get install golang-go); it runs {command}")
    users = Path(_output(["go", "env", "GOPATH"])) / "bin" / "prism"
    if users.exists() and f"{PRISM_MODULE}\t{beam}" in _output(["go", "version", "-m", str(users)]):
        return users
    print(f"installing Prism, once: {command}", flush=True)
    _install(command, {"GOBIN": str(ours.parent)})
    return ours


def class_path(runner: Sequence[str]) -> str:
    """The class path of a job server: 160 to 260 jars, which Maven fetches once (190 to 300 MB, one to two minutes).

    Args:
        runner: `FLINK` or `SPARK`.

    Raises:
        Missing: there is no Java or no Maven, or it can't fetch them.
    """
    absent = [name for name in ("java", "mvn") if shutil.which(name) is None]
    if absent:
        raise Missing(
            f"install {' and '.join(absent)} (Debian: apt-get install openjdk-17-jre-headless maven); "
            f"mvn fetches {runner[0]}"
        )
    folder = cache_folder() / runner[0].replace(":", "_")
    listed = folder / "class_path.txt"
    if listed.exists() and all(Path(jar).exists() for jar in listed.read_text().split(":")):
        return listed.read_text()
    folder.mkdir(parents=True, exist_ok=True)
    dependencies = [_DEPENDENCY.format(*artifact.split(":")) for artifact in (*runner, _LOGGING)]
    (folder / "pom.xml").write_text(_POM.format("\n".join(dependencies)))
    command = f"mvn -q -B -f {folder}/pom.xml dependency:build-classpath -Dmdep.outputFile={listed}"
    print(f"installing {runner[0]}, once: {command}", flush=True)
    _install(command, {})
    return listed.read_text()


def _install(command: str, environment: Mapping[str, str]) -> None:
    done = subprocess.run(command.split(" "), env={**os.environ, **environment}, capture_output=True, text=True)
    if done.returncode != 0:
        said = " ".join((done.stderr + done.stdout).split())[-300:]
        raise Missing(f"{command} (it failed: {said})", refused=True)


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout.strip()
