"""The tools of `make engines`; the matrix itself, every engine in it, is that command's."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.make import done
from tools.engines import __main__ as command
from tools.engines import jobs, pieces, processes
from tools.engines.machines import two_machines


@pytest.mark.parametrize(
    ("fault", "said"), [("", "exit 2: error: --input "), (jobs.KILLED, "ended with 2 before its ")]
)
def test_a_failed_job_is_told_in_one_line_with_its_log(fault: str, said: str, tmp_path: Path) -> None:
    outcome = jobs.run_job(command.ONE_PROCESS, str(tmp_path / "no"), str(tmp_path / "out"), tmp_path, fault)
    assert outcome.failure.startswith(said)
    assert f"{tmp_path}/{'fault' if fault else 'job'}.log" in outcome.failure
    assert "\n" not in outcome.failure


def _engine(outcome: jobs.Outcome | pieces.Missing) -> jobs.Engine:
    @contextmanager
    def start(logs: Path) -> Iterator[jobs.Running]:
        if isinstance(outcome, pieces.Missing):
            raise outcome
        yield jobs.Running(())

    return jobs.Engine("engine", start)


def _matrix(monkeypatch: pytest.MonkeyPatch, ends: list[jobs.Outcome | pieces.Missing], ci: str = "") -> int:
    """Exit code of the table whose rows end like this."""

    def run_job(engine: jobs.Engine, *_: object) -> jobs.Outcome:
        with engine.start(Path()):
            end = ends[rows.index(engine)]
            assert isinstance(end, jobs.Outcome)
            return end

    rows = [_engine(end) for end in ends]
    monkeypatch.setattr(jobs, "run_job", run_job)
    monkeypatch.setenv("CI", ci)
    places = command.Places({"local": "images"}, {"local": "out"})
    return command._run([command.Row(engine) for engine in rows], places, time.monotonic())


def test_the_matrix_fails_on_another_hash_a_failed_job_and_in_ci_on_an_engine_that_could_be_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, other = (jobs.Outcome(1.0, 5, letter * 64) for letter in "ab")
    failed = jobs.Outcome(1.0, failure="exit 1: error: no")
    no_tool, refused = pieces.Missing("install it"), pieces.Missing("get it", refused=True)
    for ends, ci, code, said in (
        ([good, good], "", 0, ""),
        ([good, other], "", 1, f"2 different hashes ({'a' * 64}, {'b' * 64})"),
        ([good, failed], "", 1, "exit 1: error: no"),
        ([no_tool], "", 1, ""),  # nothing was shown at all
        ([good, no_tool], "true", 0, "skipped; to enable it: install it"),
        ([good, refused], "", 0, ""),
        ([good, refused], "true", 1, ""),
    ):
        assert _matrix(monkeypatch, ends, ci) == code, ends
        assert said in capsys.readouterr().out


def test_what_is_missing_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(pieces.Missing, match=r"golang-go\); it runs go install github.com/apache/beam") as no_go:
        pieces.prism()
    with pytest.raises(pieces.Missing, match=r"install java and mvn \(Debian: apt-get install openjdk") as no_java:
        pieces.class_path(pieces.FLINK)
    two_machines.cache_clear()
    with pytest.raises(
        pieces.Missing, match=r"run it as root on Linux with ip \(Debian: apt-get install iproute2\)"
    ) as no_ip:
        two_machines()
    assert not any(missing.value.refused for missing in (no_go, no_java, no_ip))


_SECOND_MACHINE = """
import socket, subprocess, sys
from tools.engines import machines, pieces
try:
    pair = machines.two_machines()
except pieces.Missing as error:
    print("missing", error)
    sys.exit()
with socket.create_server((pair.here, 0)) as listener:
    call = f"import socket; print(socket.create_connection({listener.getsockname()[:2]}, 5).getsockname()[0])"
    called = subprocess.run([*pair.on_second, sys.executable, "-c", call], capture_output=True, text=True)
print(called.stdout.strip() == pair.there, pair.on_second[-1])
"""


def test_the_second_machine_reaches_this_one_and_is_gone_at_the_end() -> None:
    reached, name = done(sys.executable, "-c", _SECOND_MACHINE, cwd=processes.ROOT).stdout.split(maxsplit=1)
    if reached == "missing":
        pytest.skip(name)
    assert reached == "True"
    assert not Path("/run/netns", name.strip()).exists()
    assert not Path("/sys/class/net", name.strip()).exists()


_GRANDCHILD = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"


def test_no_process_outlives_a_terminated_parent(tmp_path: Path) -> None:
    parent = (
        "import sys, time; from pathlib import Path; from tools.engines import processes; "
        "processes.exit_on_signals(); "
        f"processes.start([sys.executable, '-c', {_GRANDCHILD!r}], Path({str(tmp_path / 'log')!r})); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", parent], cwd=processes.ROOT) as process:
        while not (log := tmp_path / "log").exists() or not log.read_text().endswith("\n"):
            time.sleep(0.01)
        process.terminate()
        assert process.wait(10) == 128 + 15
    child = Path(f"/proc/{int(log.read_text())}/stat")
    assert not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z"
