"""What a run writes, where it may write, and what it says of storage that fails."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from PIL import Image

import reader
from beam_pipeline.errors import CorruptRecordError, ImageShardsError, StorageError, UsageError
from beam_pipeline.machine import cpu_count
from reader.runs import RunReader
from reader.training import metrics, report
from reader.training.fit import TrainResult, train
from reader.training.metrics import confusion, curves
from reader.training.options import TrainOptions, make_recipe
from reader.training.out_folder import Checkpoints, OutFolder, open_out
from tests import make, servers
from tests.reading.shards import make_dataset
from tests.train import runs

# But for the run `finished`, which draws its pictures; tests/train/test_continue.py trains with what is traced.
pytestmark = pytest.mark.usefixtures("eager", "no_pictures")
SMALL: dict[str, Any] = {"image_size": 16, "batch_size": 8, "epochs": 1, "seed": 5, "device": "cpu"}
SMALL |= {"model": "tests.train.runs:linear"}


def trained(dataset: str, out: object, **options: Any) -> tuple[TrainResult, list[str]]:
    """A run, and the lines that it reported."""
    lines: list[str] = []
    options = {**SMALL, "out": None if out is None else str(out), **options}
    return train(reader.load_info(dataset), TrainOptions(**options), lines.append), lines


@pytest.fixture(scope="module")
def finished(dataset: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run with checkpoints."""
    out = tmp_path_factory.mktemp("finished") / "out"
    trained(dataset, out, checkpoint_steps=2)
    return out


def unfinish(out: Path) -> None:
    run = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps(run | {"finished": False}))


def copied(finished: Path, folder: Path) -> Path:
    """The run as it is if it was killed just before its end."""
    out = folder / "out"
    for file in finished.rglob("*"):
        if file.is_file():
            (out / file.relative_to(finished)).parent.mkdir(parents=True, exist_ok=True)
            (out / file.relative_to(finished)).write_bytes(file.read_bytes())
    unfinish(out)
    return out


def test_all_that_comes_out_is_there(dataset: str, finished: Path) -> None:
    info, (line,) = reader.load_info(dataset), runs.metrics_of(finished)
    assert (finished / "classes.txt").read_text().splitlines() == list(info.classes)
    assert set(line) == {"epoch", "phase", "step", "loss", "accuracy", "val_loss", "val_accuracy"}
    run = json.loads((finished / "run.json").read_text())
    assert run["finished"] and run["best_epoch"] == 1 and run["verdict"].startswith("waited ")
    assert run["versions"]["keras"] == keras.__version__ and run["devices"] == "the CPU (TensorFlow)"
    assert {path.name for path in finished.iterdir()} == {
        *("model.keras", "last.keras", "classes.txt", "metrics.jsonl", "run.json", "checkpoints"),
        *("curves.png", "confusion.png", "confusion.csv", "per_class.csv"),
    }
    for name in ("curves.png", "confusion.png"):
        with Image.open(finished / name) as picture:
            assert min(picture.size) > 300
    assert sorted(path.name for path in (finished / "checkpoints").iterdir()) == [
        "step-000000004.npz",
        "step-000000005.npz",
    ]


def test_the_losses_told_are_means_over_the_records_and_not_over_the_padding(dataset: str, finished: Path) -> None:
    """11 records at a batch of 8: Keras' own val_loss would count 5 rows of padding."""
    evals = reader.eval_batches(dataset, "validation", global_batch_size=1)
    images, labels, _ = map(np.concatenate, zip(*evals, strict=True))
    logits = keras.models.load_model(finished / "model.keras").predict(images, verbose=0).astype(np.float64)
    logits -= logits.max(1, keepdims=True)
    expected = np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(labels)), labels])
    (line,) = runs.metrics_of(finished)
    assert line["val_loss"] == pytest.approx(expected, rel=1e-3)
    assert line["val_accuracy"] == pytest.approx(np.mean(logits.argmax(1) == labels), abs=1e-6)


def test_a_finished_training_says_so_and_does_nothing(dataset: str, finished: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    result, lines = trained(dataset, finished, checkpoint_steps=2)
    assert lines == [f"{finished}: this run is finished; choose another --out to train again"]
    assert len(result.epochs) == 1
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before


def test_a_folder_that_can_not_be_continued_in_is_refused(dataset: str, finished: Path, tmp_path: Path) -> None:
    run, other = (
        copied(finished, tmp_path),
        make_dataset(tmp_path / "1.0.0", {"train": [24, 16], "validation": [11]}, size=(16, 17)),
    )
    document = json.loads((run / "run.json").read_text())
    ours = "was not written by train; choose a new folder"

    def refused(message: str, url: str = dataset, out: Path = run, **options: Any) -> None:
        with pytest.raises(UsageError) as caught:
            trained(url, out, **options)
        assert str(caught.value).startswith("--out ") and str(caught.value).endswith(message)

    refused("it was trained with --seed 5, now it is 6; choose another --out", seed=6)
    refused(f"it was trained on another dataset, {dataset}; choose another --out", other)
    locked = OutFolder(str(run))
    refused("another process is training there; choose another")
    locked.close()
    assert trained(dataset, run)[0].epochs
    for text in ("{", '{"epoch": 1}\n'):
        (run / "metrics.jsonl").write_text(text)
        refused(f"its metrics.jsonl {ours}")
    deep, of_ours = "[" * 100_000, {"finished": True, "configuration": document["configuration"]}
    for text in ("[]", deep, '{"finished": ' + deep, json.dumps(of_ours)):
        (run / "run.json").write_text(text)
        refused(f"its run.json {ours}")
    (run / "run.json").unlink()
    refused("it holds checkpoints/, not a run; choose a new folder")
    refused("it is a file; choose a folder", out=run / "classes.txt")


def test_without_out_a_training_is_in_runs_and_one_of_another_configuration_needs_its_own_folder(
    dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="can't take it"):
        trained(dataset, None, model="InceptionV3")
    assert not (tmp_path / "runs/photos").exists()
    assert trained(dataset, None)[0].out == "runs/photos"
    unfinish(tmp_path / "runs/photos")
    assert "continuing after step 5" in trained(dataset, None)[1]
    with pytest.raises(UsageError, match=r"^--out 'runs/photos': it was trained with --seed 5, now it is 9; choose"):
        trained(dataset, None, seed=9)
    unfinish(tmp_path / "runs/photos")
    shutil.rmtree(tmp_path / "runs/photos/checkpoints")
    assert any("before its first checkpoint: beginning again" in line for line in trained(dataset, None)[1])


def edit(out: Path, change: Callable[[dict[str, Any], dict[str, Any]], object], *names: str) -> None:
    """Change the document and the arrays of checkpoints, as somebody might by hand; of all without names."""
    for file in [out / f"checkpoints/{name}" for name in names] or list(out.glob("checkpoints/step-*")):
        with np.load(file) as opened:
            arrays = dict(opened)
        document = json.loads(bytes(arrays.pop("document")))
        change(document, arrays)
        np.savez(file, document=np.frombuffer(json.dumps(document).encode(), np.uint8), **arrays)


BY_HAND: dict[str, Callable[[dict[str, Any], dict[str, Any]], object]] = {
    "lines that are none": lambda document, _: document["progress"].update(lines="none"),
    "lines without a phase": lambda document, _: document["progress"].update(lines=[{"epoch": 1, "loss": 0.5}]),
    "lines of words": lambda document, _: document["progress"].update(lines=[LINE | {"val_loss": "low"}]),
    "lines of epochs to come": lambda document, _: document["progress"]["lines"].extend([LINE] * 3),
    "a step of another epoch": lambda document, _: document["progress"].update(step=10**9),
    "a step before the first": lambda document, _: document["progress"].update(step=-1),
    "a phase that isn't there": lambda document, _: document["progress"].update(phase=7),
    "logs without a loss": lambda document, _: document["progress"].update(logs={"accuracy": 0.5}),
    "a position that is none": lambda document, _: document["progress"].update(position="{}"),
    "more variables": lambda document, _: document["variables"].append(["more", [2]]),
    "a number of sums that is none": lambda document, _: document.update(more="2"),
    "an array of another shape": lambda _, arrays: arrays.update({"00000": arrays["00000"][..., :1]}),
    "no document": lambda document, _: document.clear(),
    "NaN": lambda _, arrays: arrays["00000"].fill(np.nan),
}
LINE = {"epoch": 1, "phase": "train", "step": 5, "loss": 0.5, "accuracy": 0.5}


def test_a_checkpoint_that_can_not_be_used_is_told_and_the_one_before_is_taken(
    dataset: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind, spoil in (
        ("is corrupt", make.flip_byte),
        ("holds NaN", lambda last: edit(last.parents[1], BY_HAND["NaN"], last.name)),
    ):
        out = copied(finished, tmp_path / kind)
        spoil(last := out / "checkpoints/step-000000005.npz")
        assert "continuing after step 4" in trained(dataset, out)[1]
        assert f"warning: {last} {kind}: continuing from the one before\n" in capsys.readouterr().err
        assert runs.metrics_of(out) == runs.metrics_of(finished)


@pytest.mark.parametrize("kind", [*BY_HAND, "cut", "nested too deeply"])
def test_checkpoints_none_of_which_can_be_used_are_an_error_of_one_line(
    dataset: str, finished: Path, tmp_path: Path, kind: str
) -> None:
    out = copied(finished, tmp_path)
    if kind == "cut":
        for file in out.glob("checkpoints/step-*"):
            file.write_bytes(file.read_bytes()[:100])
    elif kind == "nested too deeply":
        for file in out.glob("checkpoints/step-*"):
            np.savez(file, document=np.frombuffer(b"[" * 100_000, np.uint8))
    else:
        edit(out, BY_HAND[kind])
    with pytest.raises(ImageShardsError) as error:
        trained(dataset, out)
    why = "holds NaN" if kind == "NaN" else "is corrupt"
    assert str(error.value) == (
        f"{out}/checkpoints/step-000000004.npz {why}: no save in {out}/checkpoints can be read: delete them "
        "to start again, or choose another folder"
    )
    assert error.value.exit_code == 1


def test_sums_of_another_shape_are_those_of_another_model(dataset: str, finished: Path, tmp_path: Path) -> None:
    out = copied(finished, tmp_path)
    (out / "checkpoints/step-000000005.npz").unlink()
    edit(out, lambda document, arrays: arrays.update({f"{len(document['variables']):05}": np.zeros(3)}))
    with pytest.raises(ImageShardsError, match=r"checkpoints is of another model or another Keras; choose"):
        trained(dataset, out)


def test_checkpoints_that_are_due_at_the_end_of_an_epoch_are_written(
    dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, save = [], Checkpoints.save

    def noting(self: Checkpoints, *given: Any) -> None:
        saved.append((self.at.step, "to validate" if self.at.logs else ""))
        save(self, *given)

    monkeypatch.setattr(Checkpoints, "save", noting)
    trained(dataset, tmp_path / "out", epochs=3, checkpoint_steps=5)  # the steps of an epoch
    assert saved == [(5, "to validate"), (10, "to validate"), (15, "to validate"), (15, "")]


@pytest.mark.parametrize(("every", "steps"), [(1000, "5"), (1, "[23]")])
def test_a_loss_that_is_no_number_ends_the_training_before_a_checkpoint_holds_it(
    every: int, steps: str, dataset: str, tmp_path: Path
) -> None:
    with pytest.raises(ImageShardsError, match=rf"the loss is (nan|inf) after step {steps}: lower --learning_rate"):
        trained(dataset, tmp_path / "out", learning_rate=1e38, checkpoint_steps=every)


def test_a_folder_whose_run_can_not_be_read_is_not_kept_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise StorageError("Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(OutFolder, "run", fail)
        with pytest.raises(StorageError, match="Input/output error"):
            open_out(str(tmp_path / "out"), "photos", {})
    OutFolder(str(tmp_path / "out")).close()


def test_names_of_classes_are_no_formulas() -> None:
    assert confusion(np.eye(3), ("$\\bad$", "$x^^$", "猫"), "validation").startswith(b"\x89PNG")


def test_the_curves_name_the_split_that_was_validated_on_or_say_that_none_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_png", lambda figure: figure)
    line = {"epoch": 1, "phase": "head", "loss": 1.0, "accuracy": 0.5}
    validated, fine_tuned = line | {"val_loss": 1.0, "val_accuracy": 0.5}, {**line, "epoch": 2, "phase": "fine_tuning"}
    for lines, split, labels in (
        ([validated], "test", ["training", "validation on test", "best epoch: 1"]),
        ([line, fine_tuned], "", ["training", "no validation", "fine-tuning begins", "best epoch: 1"]),
    ):
        figure: Any = curves(lines, 1, split)
        for axes in figure.axes:
            assert [text.get_text() for text in axes.get_legend().get_texts()] == labels
            assert [len(drawn.get_xdata()) for drawn in axes.lines[:2]] == [len(lines), bool(split)]


def test_a_model_that_can_not_be_saved_is_one_line_and_once_it_can_it_is_not_trained_again(
    dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import keras\n"
        "class Scaled(keras.layers.Layer):\n"
        "    def __init__(self, by, **options):\n"
        "        super().__init__(**options)\n"
        "        self.by = by\n"
        "    def call(self, images):\n"
        "        return self.by(images)\n"
        "def model(shape, classes):\n"
        "    layers = [Scaled(lambda one: one / 9), keras.layers.Flatten(), keras.layers.Dense(classes)]\n"
        "    return keras.Sequential(layers)\n"
    )
    fixed = "    def get_config(self):\n        return {**super().get_config(), 'by': 'a number'}\ndef model"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scaled.py").write_text(code)
    with pytest.raises(
        ImageShardsError, match=r"^--model 'scaled:model' can't be saved: .*; give its layers a get_con"
    ):
        trained(dataset, tmp_path / "out", model="scaled:model")
    monkeypatch.delitem(sys.modules, "scaled")
    (tmp_path / "scaled.py").write_text(code.replace("def model", fixed))
    result, lines = trained(dataset, tmp_path / "out", model="scaled:model")
    assert "continuing after step 5" in lines and not any("epoch 1" in line for line in lines)
    assert (tmp_path / "out" / "model.keras").is_file() and result.best_epoch == 1


def test_a_full_disk_is_one_line(dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_bytes

    def no_space(path: Path, data: bytes) -> int:
        if path.parent.name == "checkpoints":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", no_space)
    with pytest.raises(ImageShardsError, match=r"step-000000002.npz: no space left on device; make room"):
        trained(dataset, tmp_path / "out", checkpoint_steps=2)
    assert not list(tmp_path.glob("out/checkpoints/*")) and not list(tmp_path.rglob("*.tmp"))


def test_out_in_a_bucket_is_written_and_continued(
    dataset: str, gcs: servers.Gcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = gcs.new_bucket()
    out = f"gs://{bucket}/runs/1"

    save = Checkpoints.save

    def save_and_terminate(self: Checkpoints, *given: Any) -> None:
        save(self, *given)
        if self.at.step == 2:
            signal.raise_signal(signal.SIGTERM)

    with (
        monkeypatch.context() as patch,
        pytest.raises(
            ImageShardsError, match=rf"^stopped after step \d+, .*the same command with --out {out} continues$"
        ),
    ):
        patch.setattr(Checkpoints, "save", save_and_terminate)
        trained(dataset, out, epochs=2, checkpoint_steps=2)
    step = int(max(name for name in gcs.names(bucket) if "/step-" in name)[-13:-4])
    _, lines = trained(dataset, out, epochs=2, checkpoint_steps=1000)
    assert f"continuing after step {step:,}" in lines
    assert "runs/1/model.keras" in gcs.names(bucket)


@pytest.mark.soak
def test_the_verdict_on_slow_storage_is_a_cache(dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, read = threading.Lock(), RunReader.read

    def one_at_a_time(*arguments: Any) -> Any:
        with lock:
            time.sleep(1.5)
            return read(*arguments)

    monkeypatch.setattr(RunReader, "read", one_at_a_time)
    result, _ = trained(dataset, tmp_path / "out", epochs=2)
    assert result.epochs[1]["wait_share"] > 0.5
    assert "is the limit; --cache would help most" in result.verdict


@pytest.mark.soak
def test_a_slow_model_waits_for_no_input(dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow.py").write_text(
        "import keras\n"
        "def model(shape, classes):\n"
        "    layers = [keras.layers.Conv2D(96, 9, padding='same') for _ in range(2)]\n"
        "    return keras.Sequential([*layers, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(classes)])\n"
    )
    monkeypatch.chdir(tmp_path)
    assert trained(dataset, tmp_path / "out", model="slow:model", epochs=2)[0].epochs[1]["wait_share"] < 0.05


@pytest.mark.parametrize(
    ("waited_s", "busy", "images", "options", "verdict"),
    [
        (0.9, 1.0, 80, {}, "waited 9% of the time for input: the device is the limit"),
        (
            5,
            0.1,
            80,
            {},
            "waited 50% of the time for input, the cores were 90% idle: the disk is the limit; --cache wo",
        ),
        (
            5,
            0.1,
            80,
            {"cache": "memory"},
            "waited 50% of the time for input, the cores were 90% idle: the disk is the ",
        ),
        (5, 0.9, 80, {}, "waited 50% of the time for input: decoding is the limit; more CPU cores would help most"),
        (5, 0.9, 80, {"image_size": 120}, "waited 50% of the time for input: decoding is the limit; a dataset written"),
        (5, 0.9, 8, {}, "too few steps were timed to say what limits it: lower --batch_size or raise --epochs"),
        (5, 0.9, 80, {"batch_size": 40}, "too few steps were timed to say what limits it"),
    ],
)
def test_the_verdict_is_of_the_wait_and_of_the_cores(
    waited_s: float, busy: float, images: int, options: dict[str, Any], verdict: str, tmp_path: Path
) -> None:
    info = reader.load_info(make_dataset(tmp_path / "1.0.0", {"train": [40], "val": [3]}, size=(200, 200)))
    recipe = make_recipe(info, TrainOptions(**{"batch_size": 8, "image_size": 200, **options}))
    said = report.verdict(np.array([10, waited_s, busy * 10 * cpu_count(), images]), info, recipe)
    assert said.startswith(verdict)
    assert ("until all is in the cache" in said) == ("cache" in options)


@pytest.mark.parametrize(
    ("batch_size", "epochs", "is_known"),
    [(40, 5, False), (5000, 1, False), (20, 1, False), (20, 2, True), (8, 1, True)],
)
def test_a_verdict_needs_more_than_one_step(
    batch_size: int, epochs: int, is_known: bool, dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result, _ = trained(dataset, tmp_path / "out", epochs=epochs, batch_size=batch_size)
    assert result.verdict.startswith("waited " if is_known else "too few steps were timed to say what limits it: ")
    warned = [line for line in capsys.readouterr().err.splitlines() if "--batch_size" in line]
    assert len(warned) == 1, "a large batch and few updates are one warning"
    large = "warning: --batch_size 5000: train has 40 images, so images repeat within a batch: give at most 40"
    assert (warned == [large]) == (batch_size == 5000)


@pytest.mark.parametrize(
    ("counts", "weights", "accuracy", "largest"),
    [
        ([[9, 0, 0], [35, 0, 0], [34, 0, 1]], "none", "0.127", "'b' (0.443)"),
        ([[2, 4, 4], [4, 4, 4], [4, 4, 4]], "none", "0.294", "'b' (0.353)"),
        ([[3, 4, 4], [4, 5, 4], [4, 4, 4]], "x.h5", "0.333", "'b' (0.361)"),
        ([[4, 1, 3], [2, 5, 3], [3, 3, 4]], "none", "0.464", "'b' (0.357)"),
        ([[99, 0, 0], [1, 0, 0], [0, 0, 0]], "none", "0.990", "'a' (0.990)"),
        ([[1, 0, 0], [0, 1, 0], [0, 0, 0]], "none", "", ""),
        ([[8, 1, 1], [1, 9, 2], [1, 1, 10]], "none", "", ""),
        ([[500, 100, 0], [300, 300, 0], [0, 0, 0]], "none", "", ""),
    ],
)
def test_a_model_that_is_no_better_than_one_answer_is_told(
    counts: Any, weights: str, accuracy: str, largest: str
) -> None:
    recipe: Any = SimpleNamespace(classes=("a", "b", "c"), options=SimpleNamespace(weights=weights))
    fix = "try --model MobileNetV2 --weights imagenet" if weights == "none" else "raise --epochs"
    overfits = f"it overfits, the training accuracy is 1.000; add images, or {fix.replace('raise', 'lower')}"
    said = f"validation accuracy {accuracy} is, within chance, no better than always answering {largest}: "
    for trained_to, end in ((0.9, fix), (1.0, overfits)):
        assert report.no_better(np.array(counts), recipe, trained_to) == (said + end if accuracy else "")


def test_a_corrupt_record_is_told_as_the_reader_says_it(dataset: str, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(dataset, tmp_path / "dataset"))
    for shard in make.shard_files(copy):
        make.flip_byte(shard)
    with pytest.raises(CorruptRecordError, match=r"record \d+ at byte \d+: the CRC of the data is wrong$"):
        trained(str(copy), tmp_path / "out")


def test_a_training_on_some_balanced_classes_has_them_everywhere(dataset: str, tmp_path: Path) -> None:
    classes = {"bird": "bird", "cat": "pet", "dog": "pet"}
    result, lines = trained(dataset, tmp_path / "out", classes="bird,cat=pet,dog=pet", balance="classes", epochs=2)
    assert "40 training images, 11 validation images (validation), 2 classes" in lines[0]
    assert (tmp_path / "out" / "classes.txt").read_text() == "bird\npet\n"
    assert keras.saving.load_model(tmp_path / "out" / "model.keras").output_shape == (None, 2)
    configuration = json.loads((tmp_path / "out" / "run.json").read_text())["configuration"]
    assert configuration["classes"] == classes and configuration["balance"] == "classes" and len(result.epochs) == 2
    _, lines = trained(dataset, tmp_path / "two", classes=["dog", "cat"])
    assert "26 training images, 7 validation images (validation), 2 classes" in lines[0]
    with pytest.raises(UsageError, match=r"it was trained with --classes \{'dog': 'dog', .*, now it is None"):
        trained(dataset, tmp_path / "two")


def test_classes_and_balance_are_checked_before_anything_is_written(dataset: str, tmp_path: Path) -> None:
    for options, message in (
        ({"classes": "cta"}, "there is no class 'cta': did you mean 'cat'?"),
        ({"balance": "all"}, "--balance 'all': choose one of none, classes"),
    ):
        with pytest.raises(UsageError) as error:
            trained(dataset, tmp_path / "out", **options)
        assert str(error.value) == message and not (tmp_path / "out").exists()
