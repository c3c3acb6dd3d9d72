"""The same bytes on every engine: the matrix of `make engines`, on a few pictures."""

from __future__ import annotations

from pathlib import Path

import pytest

from beam_pipeline import sample_data
from tools import engines

HOW_TO_ENABLE = "Prism isn't installed: make engines installs it where Go is"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    # Below the default limit of rejects, and at least one of them.
    sample_data.draw_folder(folder, images=120, classes=3, broken=1)
    return folder


@pytest.fixture(scope="module")
def in_memory(images: Path, tmp_path_factory: pytest.TempPathFactory) -> engines.Outcome:
    return engines.run_job("in memory", (), images, tmp_path_factory.mktemp("in_memory") / "out")


def test_the_reference_has_a_record_for_every_picture(in_memory: engines.Outcome) -> None:
    assert in_memory.failure == ""
    assert in_memory.records == 120
    assert len(in_memory.hash) == 64


@pytest.mark.parametrize("engine", engines.ENGINES[1:], ids=lambda engine: engine.name)
def test_another_engine_writes_the_same_bytes(
    engine: engines.Engine, images: Path, in_memory: engines.Outcome, tmp_path: Path
) -> None:
    if engine.flags is engines.prism_flags and engines.find_prism() is None:
        pytest.skip(HOW_TO_ENABLE)
    outcome = engines.run_job(engine.name, engine.flags(), images, tmp_path / "out")
    assert outcome.failure == ""
    assert (outcome.records, outcome.hash) == (in_memory.records, in_memory.hash)


def test_a_failed_job_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    outcome = engines.run_job("in memory", (), tmp_path / "empty", tmp_path / "out")
    assert outcome.failure.startswith("exit 2: error: ")
    assert str(tmp_path / "out.log") in outcome.failure


def matrix(monkeypatch: pytest.MonkeyPatch, outcomes: list[engines.Outcome | None], ci: str) -> int:
    """Exit code of `make engines` where its engines end as given; None: the engine isn't here."""

    def flags(outcome: engines.Outcome | None) -> list[str]:
        if outcome is None:
            raise engines.Missing("install it")
        return []

    def run_job(name: str, *_: object) -> engines.Outcome:
        outcome = outcomes[int(name)]
        assert outcome is not None
        return outcome

    matrix = [engines.Engine(str(number), lambda end=end: flags(end)) for number, end in enumerate(outcomes)]
    monkeypatch.setattr(engines, "ENGINES", matrix)
    monkeypatch.setattr(engines, "run_job", run_job)
    monkeypatch.setattr(engines, "_output", lambda command: "drawn")
    monkeypatch.setattr("sys.argv", ["engines"])
    monkeypatch.setenv("CI", ci)
    return engines.main()


def test_the_matrix_fails_on_another_hash_a_failed_job_and_in_ci_on_a_missing_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = engines.Outcome("good", 1.0, 5, "a" * 64)
    other = engines.Outcome("other", 1.0, 5, "b" * 64)
    failed = engines.Outcome("failed", 1.0, failure="exit 1: error: no")
    assert matrix(monkeypatch, [good, good], ci="true") == 0
    assert matrix(monkeypatch, [good, other], ci="") == 1
    assert matrix(monkeypatch, [good, failed], ci="") == 1
    assert matrix(monkeypatch, [good, None], ci="") == 0
    assert "skipped; to have it: install it" in capsys.readouterr().out
    assert matrix(monkeypatch, [good, None], ci="true") == 1
