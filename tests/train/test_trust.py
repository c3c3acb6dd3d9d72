"""A run's folder may be a stranger's, or edited: what it names isn't imported, and an odd value is one line."""

from __future__ import annotations

import copy
import csv
import io
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reader
from beam_pipeline.errors import ImageShardsError
from imageshards import main
from reader.training import evaluate as evaluating
from reader.training import run as run_module
from reader.training.fit import train
from reader.training.metrics import confusion_files
from reader.training.options import TrainOptions
from reader.training.run import Prediction

pytestmark = pytest.mark.usefixtures("eager", "no_pictures")

MINE = """
import keras

print("{name} is imported")

@keras.saving.register_keras_serializable("trusted_layers")
class Registered(keras.layers.Dense):
    pass

class Own(keras.layers.Dense):
    pass

def plain(shape, classes):
    return keras.Sequential([keras.layers.Rescaling(1 / 255), keras.layers.Flatten(), keras.layers.Dense(classes)])

def registered(shape, classes):
    return keras.Sequential([keras.layers.Flatten(), Registered(classes)])

def own(shape, classes):
    return keras.Sequential([keras.layers.Flatten(), Own(classes)])
"""
READ = ["dataset", "train_split", "eval_split", "classes"]
ODD = (None, "", "x", "../x", -1, 0, 7, 2.5, 10**30, True, [], {}, ["x"], [0, 0], {"x": 1}, "\x1b[2J\nerror")


@pytest.fixture(scope="module")
def home(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with trusted_layers.py and the runs of its models, as their owner has them; not to be changed."""
    folder = tmp_path_factory.mktemp("home")
    sys.modules.pop("trusted_layers", None)  # another test's
    (folder / "trusted_layers.py").write_text(MINE.format(name="trusted_layers"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [*sys.path])
        for name in ("plain", "registered", "own"):
            train(
                str(original),
                TrainOptions(out=f"runs/{name}", model=f"trusted_layers:{name}", image_size=16, batch_size=8, epochs=1),
            )
    yield folder
    sys.modules.pop("trusted_layers", None)


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in another process: nothing of trusted_layers is known, and the current folder isn't searched."""
    import keras

    monkeypatch.delitem(sys.modules, "trusted_layers", raising=False)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one and Path(one) != Path.cwd()])
    keras.saving.get_custom_objects().clear()


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize(
    ("run", "flags", "code", "is_imported"),
    [
        ("plain", "", 0, False),
        ("plain", "--model trusted_layers:plain", 0, False),
        ("plain", "--model nowhere:x", 0, False),
        ("registered", "", 1, False),
        ("registered", "--model trusted_layers:registered", 0, True),
        ("own", "", 1, False),
        ("own", "--model trusted_layers:own", 0, True),
        ("own", "--model trusted_layers:none", 2, True),
        ("own", "--model nowhere:x", 2, False),
        ("own", "--model .trusted_layers:own", 2, False),
        ("own", "--model own", 2, False),
    ],
)
@pytest.mark.parametrize("verb", ["predict", "evaluate"])
def test_a_module_is_imported_only_if_it_is_needed_and_given(
    verb: str, run: str, flags: str, code: int, is_imported: bool, home: Path, request: pytest.FixtureRequest
) -> None:
    original, photos, tmp_path, monkeypatch, capsys = map(
        request.getfixturevalue, ("original", "photos", "tmp_path", "monkeypatch", "capsys")
    )
    monkeypatch.chdir(home)
    what = [str(photos / "ant" / "0001.jpg")] if verb == "predict" else [str(original), "--out", str(tmp_path)]
    assert main([verb, f"runs/{run}", *what, *flags.split()]) == code
    shown = capsys.readouterr()
    assert ("trusted_layers is imported" in shown.out) == is_imported
    assert shown.err.count("\n") == (code > 0)
    if code == 1:
        own = f"give --model trusted_layers:{run} (model='trusted_layers:{run}' to load_run) to import it\n"
        assert shown.err.startswith(f"error: runs/{run}/model.keras can't be loaded: ") and shown.err.endswith(own)
    if code == 2:
        assert shown.err.endswith("; give package.module:function\n")


@pytest.mark.usefixtures("forgotten")
def test_a_stranger_s_run_runs_no_file_beside_it(
    home: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even if the user gives the name of a module of theirs that is elsewhere."""
    for name in ("plain", "own"):
        shutil.copytree(home / "runs" / name, tmp_path / name, ignore=shutil.ignore_patterns("checkpoints"))
        (tmp_path / name / "trusted_layers.py").write_text(MINE.format(name="evil"))
        (tmp_path / name / "evil.py").write_text("raise SystemExit('evil is imported')")
        file = tmp_path / name / "run.json"
        file.write_text(file.read_text().replace("trusted_layers:", "evil:"))
        monkeypatch.chdir(tmp_path / name)
        assert main(["predict", ".", str(photos / "ant" / "0001.jpg")]) == (name != "plain")
        assert "evil is imported" not in "".join(capsys.readouterr())
    monkeypatch.setattr(sys, "path", [*sys.path, str(home)])
    assert main(["predict", ".", str(photos / "ant" / "0001.jpg"), "--model", "trusted_layers:own"]) == 0
    assert capsys.readouterr().out.startswith("trusted_layers is imported\n")


# --- edited by hand


def places(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every value of a document that is read."""
    for key, inner in value.items():
        if path or key in ("finished", "configuration", "dataset"):
            yield (*path, key)
            if isinstance(inner, dict):
                yield from places(inner, (*path, key))


def test_an_odd_value_in_run_json_is_one_line_or_does_no_harm(
    home: Path, original: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = reader.load_run(home / "runs" / "plain")
    monkeypatch.setattr(run_module, "_load", lambda *_: loaded.model)
    monkeypatch.setattr(evaluating, "_SPLITS", ())  # so that the split follows from the training's
    shutil.copytree(home / "runs" / "plain", tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    document, counts = json.loads((home / "runs/plain/run.json").read_text()), {"right": 0, "refused": 0}
    photo, info = photos / "ant" / "0001.jpg", reader.load_info(original)
    for path in places(document):
        for odd in (*ODD, KeyError):
            edited = copy.deepcopy(document)
            inner = edited
            for key in path[:-1]:
                inner = inner[key]
            if odd is KeyError:
                del inner[path[-1]]
            else:
                inner[path[-1]] = odd
            (tmp_path / "run" / "run.json").write_text(json.dumps(edited))
            try:
                run = reader.load_run(tmp_path / "run")
                run.decode(photo.read_bytes())
                if path[-1] in READ:
                    reader.evaluate(run, info, out=tmp_path / "evaluation")
                counts["right"] += 1
            except ImageShardsError as error:
                assert "\n" not in str(error)
                counts["refused"] += 1
    assert min(counts.values()) > 100, counts


EDITED, SHAPES = (
    "written by an earlier version, or edited",
    "the shapes of its model are ((None, 16, 16, 3), (None, 3)), by",
)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("run.json", b"[" * 100_000, f"{EDITED} (maximum recursion depth"),
        ("run.json", b'{"x":' * 100_000, f"{EDITED} (maximum recursion depth"),
        ("run.json", b"\xff", f"{EDITED} ('utf-8' codec"),
        ("run.json", b"", f"{EDITED} (Expecting value"),
        ("run.json", b"null", f"{EDITED} (Expected `object`, got `null`)"),
        ("classes.txt", b"caf\xe9\nb\nc\n", "its classes.txt isn't UTF-8: save it as such, a line for each class"),
        ("classes.txt", b"ant\nbee\n", SHAPES),
        ("classes.txt", b"a\nb\nc\nd\n", SHAPES),
        ("classes.txt", b"", SHAPES),
        ("classes.txt", None, "classes.txt is missing"),
        ("model.keras", None, "model.keras is missing"),
        ("model.keras", b"", "model.keras can't be loaded: "),
    ],
)
def test_an_edited_file_is_one_line(file: str, content: bytes | None, message: str, home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "runs" / "plain", tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    (tmp_path / "run" / file).unlink()
    if content is not None:
        (tmp_path / "run" / file).write_bytes(content)
    with pytest.raises(ImageShardsError) as caught:
        reader.load_run(tmp_path / "run")
    assert message in str(caught.value) and "\n" not in str(caught.value)


# --- names


@pytest.mark.parametrize("break_", ["\n", "\r", "\r\n", "\v", "\f", "\x1b[2K", "\x85", "\u2028", "\x00", "\u202e"])
def test_a_name_forges_no_line_of_predictions(break_: str) -> None:
    for one in (Prediction(f"a{break_}b.jpg: cat 1.000", {"dog": 1.0}), Prediction(f"a{break_}b.jpg", {}, "text")):
        assert str(one).isprintable()


CELLS = {"cat": "cat", 'caf\u00e9, "big"': 'caf\u00e9, "big"', "a=1": "a=1", "a\x1b[2Jb": r"a\x1b[2Jb", "a\nb": r"a\nb"}
CELLS |= {
    '=HYPERLINK("http://x","y")': '\'=HYPERLINK("http://x","y")',
    "+1": "'+1",
    "-1": "'-1",
    "@SUM(A1)": "'@SUM(A1)",
}
CELLS |= {"\t=1": r"'\t=1", "\r=1": r"'\r=1"}


@pytest.mark.parametrize(("name", "cell"), CELLS.items())
def test_a_class_is_text_to_a_spreadsheet_and_a_terminal(name: str, cell: str) -> None:
    files = confusion_files(np.array([[0, 3], [0, 0]]), [name, "x"], "test")
    rows, confusion = (
        list(csv.reader(io.StringIO(files[f"{file}.csv"].decode()))) for file in ("per_class", "confusion")
    )
    assert rows[1:] == [[cell, "3", "0", "", "0.0"], ["x", "0", "3", "0.0", ""]]
    assert confusion == [["class", cell, "x"], [cell, "0", "3"], ["x", "0", "0"]]
