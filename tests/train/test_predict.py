"""`predict` and `evaluate`: what a run says of photos, exactly as of their records; of files, folders and buckets."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import reader
from beam_pipeline import images
from imageshards import main
from reader.training import evaluate as evaluating
from reader.training import run as predicting
from reader.training.fit import train
from reader.training.options import TrainOptions
from tests import make, servers

SERVICE = make.ROOT / "examples" / "serve.py"


@pytest.fixture(scope="module")
def run(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training on `original`, which is `photos` at 24 pixels; not to be changed."""
    out = tmp_path_factory.mktemp("run") / "photos-1"
    train(str(original), TrainOptions(out=str(out), image_size=16, batch_size=8, epochs=2, augment="none"))
    return out


def probabilities(run: Path, version: Path) -> dict[str, Any]:
    """File name → what the model says of its record."""
    loaded, found = reader.load_run(run), {}
    for split in reader.load_info(version).splits:
        records = reader.records(version, split, image_size=16)[:]
        rows = loaded.probabilities(np.stack([one["image"] for one in records]))
        found |= {one["filename"]: row for one, row in zip(records, rows, strict=True)}
    return found


@pytest.mark.parametrize("batch_size", [64, 7])
def test_a_photo_has_the_probabilities_of_its_record(batch_size: int, run: Path, original: Path, photos: Path) -> None:
    of_records, names = probabilities(run, original), []
    for one in reader.predict(run, photos, top=3, batch_size=batch_size):
        names.append(one.file.removeprefix(f"{photos}/"))
        expected = of_records[names[-1]]
        found = [one.probabilities[label] for label in ("ant", "bee", "cat")]
        assert np.abs(np.array(found) - expected).max() < 1e-5
        assert one.label == ("ant", "bee", "cat")[expected.argmax()] and not one.error
        assert list(one.probabilities.values()) == sorted(found, reverse=True)
    assert names == sorted(of_records) and len(names) == 40


def test_pixels_that_may_differ_are_warned_of(
    run: Path, photos: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reader.load_run(run).preprocessing.mismatch_warning == ""
    here = images.codec_versions()
    monkeypatch.setattr(images, "codec_versions", lambda: {**here, "pillow": "99.0"})
    warning = reader.load_run(run).preprocessing.mismatch_warning
    assert warning == f"the dataset was written with pillow {here['pillow']} (here 99.0): pixels may differ from it"
    assert main(["predict", str(run), str(photos / "ant" / "0001.jpg")]) == 0
    assert f"warning: {warning}\n" in capsys.readouterr().err


def test_files_and_folders_come_in_order_and_what_cannot_be_read_is_told(
    run: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = (photos / "ant" / "0001.jpg").read_bytes()
    files = {"b/2.JPG": good, "b/1.jpg": good[:300], ".hidden/3.jpg": good, "a.jpg": b"hello", "notes.txt": b"x"}
    for name, data in files.items():
        (tmp_path / "new" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "new" / name).write_bytes(data)
    (tmp_path / "new" / "gone.jpg").symlink_to("nowhere")
    shutil.copy(photos / "ant" / "0001.jpg", tmp_path / "no_suffix")
    monkeypatch.chdir(tmp_path)
    assert main(["predict", str(run), "no_suffix", "new", "--top", "1"]) == 1
    shown = capsys.readouterr()
    assert [re.sub(r"(ant|bee|cat) [01]\.\d{3}$", "CLASS", line) for line in shown.out.splitlines()] == [
        "no_suffix: CLASS",
        "new/b/2.JPG: CLASS",
    ]
    assert shown.err.splitlines() == [
        "warning: new/a.jpg: text (not_an_image)",
        "warning: new/b/1.jpg: truncated JPEG (truncated)",
        "warning: new/gone.jpg: not found",
    ]
    assert main(["predict", str(run), "no_suffix", "new/a.jpg", "--json"]) == 1
    valid, bad = map(json.loads, capsys.readouterr().out.splitlines())
    assert (valid["file"], valid["error"], sorted(valid["probabilities"])) == ("no_suffix", "", ["ant", "bee", "cat"])
    assert valid["label"] == max(valid["probabilities"], key=valid["probabilities"].__getitem__)
    assert sum(valid["probabilities"].values()) == pytest.approx(1, abs=1e-5)
    assert bad == {"file": "new/a.jpg", "label": None, "probabilities": {}, "error": "text (not_an_image)"}
    assert main(["predict", str(run), "no_suffix"]) == 0


def test_no_more_than_three_batches_are_read_ahead(run: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    make.before(monkeypatch, predicting, "_prepared", lambda run, photo: read.append(photo.file))
    predictions = reader.predict(run, photos, batch_size=4)
    next(predictions)
    assert len(read) <= 12
    assert sum(1 for _ in predictions) == 39 and len(read) == 40


def test_photos_run_and_dataset_may_be_in_a_bucket(
    run: Path, original: Path, photos: Path, gcs: servers.Gcs, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket = gcs.new_bucket()
    gcs.put_folder(bucket, "new", photos / "ant")
    gcs.put_folder(bucket, "run", run)
    gcs.put_folder(bucket, "data/1.0.0", original)
    local = [one.probabilities for one in reader.predict(run, photos / "ant")]
    for place in (f"gs://{bucket}/new", f"gs://{bucket}/new/"):
        remote = list(reader.predict(f"gs://{bucket}/run", place))
        assert [one.probabilities for one in remote] == local
        assert remote[0].file == f"gs://{bucket}/new/0000.jpg"
    assert [one.probabilities for one in reader.predict(run, f"gs://{bucket}/new/0003.jpg")] == local[3:4]
    assert main(["evaluate", f"gs://{bucket}/run", f"gs://{bucket}/data"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"written to gs://{bucket}/run/evaluation"
    assert "run/evaluation/metrics.json" in gcs.names(bucket)
    with pytest.raises(ValueError, match=f"^'gs://{bucket}/none': no such file or folder"):
        reader.predict(run, f"gs://{bucket}/none")
    gcs.put_folder(other := gcs.new_bucket(), "ant", photos / "ant")  # which holds nothing but photos
    assert len(list(reader.predict(run, f"gs://{other}"))) == 14


def broken_run(run: Path, folder: Path, change: Any) -> Path:
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("checkpoints"))
    document = json.loads((folder / "run.json").read_text())
    change(document)
    (folder / "run.json").write_text(json.dumps(document))
    return folder


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("predict RUN nope.jpg", 2, "'nope.jpg': no such file or folder, or it is empty"),
        ("predict RUN empty", 2, "'empty': no such file or folder, or it is empty"),
        ("predict RUN texts", 2, "'texts': no image in this folder (1 file without an image suffix, 1 hidden); images"),
        ("predict RUN ftp://a/b", 2, "'ftp://a/b': no such storage; use"),
        ("predict RUN gs://", 2, "'gs://': name a bucket"),
        ("predict RUN", 2, "the following arguments are required: PHOTO; see --help"),
        ("predict RUN ONE --top 0", 2, "top must be at least 1, got 0"),
        ("predict RUN ONE --top x", 2, "--top: invalid int value: 'x'; see --help"),
        ("predict RUN ONE --batch_size 0", 2, "batch_size must be at least 1, got 0"),
        ("predict nope ONE", 2, "nope: no run.json in it: give the folder that imageshards train wrote to"),
        ("predict old ONE", 2, "old: its run.json doesn't say how photos are prepared: it was written by an earlier"),
        ("predict unfinished ONE", 1, "unfinished: this run isn't finished: run the same imageshards train"),
        ("predict corrupt ONE", 1, "corrupt/model.keras can't be loaded: ValueError: File not found: filepath=corr"),
        ("evaluate RUN nope", 1, "CWD/nope holds no manifest.json, so no dataset is published there"),
        ("evaluate nope DATASET", 2, "nope: no run.json in it: give the folder"),
        ("evaluate RUN DATASET --split nope", 2, "there is no split 'nope'"),
        ("evaluate RUN DATASET --classes ant=dog", 2, "the run has no class dog, only ant, bee, cat: leave them"),
        ("evaluate RUN DATASET --classes dog", 2, "the run has no class dog, only ant, bee, cat: leave them out"),
        ("evaluate RUN DATASET --batch_size 0", 2, "batch_size must be at least 1, got 0"),
        ("evaluate RUN DATASET --out ONE", 2, "--out 'ONE': it is a file; choose a folder"),
        ("evaluate RUN DATASET --out ftp://a", 2, "--out 'ftp://a': no such storage"),
    ],
)
def test_what_cannot_be_done_is_one_line_with_the_value(
    arguments: str, code: int, message: str, run: Path, request: pytest.FixtureRequest
) -> None:
    original, photos, tmp_path, capsys, monkeypatch = map(
        request.getfixturevalue, ("original", "photos", "tmp_path", "capsys", "monkeypatch")
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts").mkdir()
    for name in ("notes.txt", ".hidden.jpg"):
        (tmp_path / "texts" / name).write_text("x")
    changes = {
        "old": lambda one: one.update(dataset={"url": "x"}),
        "unfinished": lambda one: one.update(finished=False),
        "corrupt": lambda one: (tmp_path / "corrupt" / "model.keras").write_text("x"),
    }
    for name, change in changes.items():
        if name in arguments:
            broken_run(run, tmp_path / name, change)
    places = {"RUN": run, "DATASET": original, "ONE": photos / "ant" / "0000.jpg", "CWD": tmp_path}
    assert main([str(places.get(word, word)) for word in arguments.split()]) == code
    shown = capsys.readouterr()
    for word, place in places.items():
        message = re.sub(rf"\b{word}\b", lambda _, place=place: str(place), message)
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert shown.err.startswith(f"error: {message}")


# --- evaluate


def test_an_evaluation_counts_every_record_once(
    run: Path, original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_records = probabilities(run, original)
    labels = ["ant", "bee", "cat"]
    held = {record["filename"]: record["label"] for record in reader.records(original, "train")}
    predicted = {name: labels[of_records[name].argmax()] for name in held}
    expected = [[sum(predicted[n] == p for n in held if held[n] == c) for p in labels] for c in labels]
    assert main(["evaluate", str(run), str(original), "--split", "train", "--out", str(tmp_path), "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err == "warning: --split train: the accuracy on images that were trained on says little of others\n"
    result = json.loads(shown.out)
    assert result == json.loads((tmp_path / "metrics.json").read_text())
    confusion = list(csv.reader(io.StringIO((tmp_path / "confusion.csv").read_text())))
    assert confusion == [["class", *labels], *([c, *map(str, row)] for c, row in zip(labels, expected, strict=True))]
    correct = sum(held[name] == predicted[name] for name in held)
    assert (result["images"], result["accuracy"]) == (len(held), correct / len(held))
    losses = [-np.log(of_records[name][labels.index(label)]) for name, label in held.items()]
    assert result["loss"] == pytest.approx(np.mean(losses), abs=1e-5)
    assert [one["recall"] for one in result["classes"]] == [
        pytest.approx(row[number] / sum(row), abs=1e-6) for number, row in enumerate(expected)
    ]
    mistakes = [
        (one["file"], one["label"], one["predicted"], pytest.approx(one["probability"], abs=1e-5))
        for one in result["mistakes"]
    ]
    wrong = sorted((name for name in held if held[name] != predicted[name]), key=lambda n: -of_records[n].max())
    assert mistakes == [(n, held[n], predicted[n], of_records[n].max()) for n in wrong] and mistakes
    for picture in ("mistakes.png", "confusion.png"):
        with Image.open(tmp_path / picture) as image:
            assert min(image.size) > 100


def test_every_mistake_is_told_and_the_most_confident_are_drawn(
    run: Path, original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(evaluating, "_SHOWN_MISTAKES", 2)
    make.before(monkeypatch, evaluating, "_picture", lambda *given: drawn.extend(given))
    result = reader.evaluate(run, original, split="train", out=tmp_path, batch_size=4)
    assert len(result.mistakes) == round(result.images * (1 - result.accuracy)) > 2
    order = [(-one.probability, one.record) for one in result.mistakes]
    assert order == sorted(order)
    told = json.loads((tmp_path / "metrics.json").read_text())["mistakes"]
    assert told == [one._asdict() for one in result.mistakes]
    head, *rows = str(result).splitlines()[1:-1]
    assert [len(row) for row in rows] == [len(head)] * 3 and "Mistake(" not in repr(result)
    recalls = [float(row.split()[-1]) for row in rows]
    assert recalls == sorted(recalls)
    stored = reader.records(original, "train", image_size=16)
    assert [one.file for one in drawn[0]] == [one.file for one in result.mistakes[:2]]
    for one, pixels in zip(*drawn, strict=True):
        assert np.array_equal(pixels, stored[one.record]["image"])


def test_classes_may_be_left_out_and_the_rest_keep_their_names(run: Path, original: Path, tmp_path: Path) -> None:
    counts = dict(zip("abc", reader.load_info(original).splits["validation"].class_counts, strict=True))
    result = reader.evaluate(run, original, classes=["cat", "bee"], out=tmp_path)
    assert result.split == "validation"
    found = [(one.name, one.images) for one in result.classes]
    assert found == [("ant", 0), ("bee", counts["b"]), ("cat", counts["c"])]
    merged = reader.evaluate(run, original, classes={"ant": "bee", "bee": "bee", "cat": "cat"}, out=tmp_path)
    assert [one.images for one in merged.classes] == [0, counts["a"] + counts["b"], counts["c"]]


def test_more_classes_than_a_confusion_has_leave_the_sums(
    run: Path, original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_of_it = reader.evaluate(run, original, out=tmp_path / "all")
    monkeypatch.setattr(evaluating, "MAX_CLASSES", 2)
    sums = reader.evaluate(run, original, out=tmp_path / "sums")
    assert (sums.accuracy, sums.loss, sums.mistakes) == (all_of_it.accuracy, all_of_it.loss, all_of_it.mistakes)
    assert sums.classes == () and {*make.files(tmp_path / "sums")} == {"metrics.json", "mistakes.png"}


def test_a_dataset_that_was_stored_in_another_way_is_warned_of(run: Path, photos: Path, tmp_path: Path) -> None:
    other = make.published(photos, tmp_path, "--image_size", "48", *make.TWO_SPLITS)
    result = reader.evaluate(run, other, out=tmp_path / "out")
    assert result.warnings == (f"{other} was written with another --image_size than the dataset that was trained on",)


@pytest.mark.soak
def test_without_a_split_for_it_what_the_training_held_out_is_read(photos: Path, tmp_path: Path) -> None:
    url = str(make.published(photos, tmp_path))
    options = {"model": "tests.train.runs:linear", "batch_size": 8, "epochs": 2}
    done = train(url, TrainOptions(out=str(tmp_path / "run"), **options))
    best = next(line for line in done.epochs if line["epoch"] == done.best_epoch)
    result = reader.evaluate(tmp_path / "run", url)
    assert (result.split, result.images, result.warnings) == ("train[90%:]", 4, ())
    assert result.accuracy == pytest.approx(best["val_accuracy"], abs=1e-5)
    assert result.loss == pytest.approx(best["val_loss"], abs=1e-4)
    index = reader.index(f"{url}/*.tfrecord-*", tmp_path / "index").info.url
    assert train(index, TrainOptions(out=str(tmp_path / "other"), **options)).best_epoch == 2
    with pytest.raises(ValueError, match=r"^--split is missing: .* has no test or validation, only train$"):
        reader.evaluate(tmp_path / "other", index)


# --- examples/serve.py


@pytest.fixture(scope="module")
def service(run: Path) -> Iterator[tuple[str, int]]:
    """The service in this process: its address."""
    started: list[socketserver.BaseServer] = []
    serve = socketserver.BaseServer.serve_forever
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socketserver.BaseServer, "serve_forever", lambda server: started.append(server))
        patch.setattr(sys, "argv", ["service.py", str(run), "0"])
        names: dict[str, Any] = {"__name__": "service"}
        exec(compile(SERVICE.read_text(), str(SERVICE), "exec"), names)
    assert 1 <= names["Service"].timeout <= 60
    names["Service"].timeout = 1
    names["Service"].log_message = lambda *_: None
    (server,) = started
    threading.Thread(target=serve, args=(server,), daemon=True).start()
    yield server.server_address[:2]  # type: ignore[misc]
    server.shutdown()
    server.server_close()


def answered(address: tuple[str, int], request: bytes) -> bytes:
    """All that comes back before the service closes the connection."""
    with socket.create_connection(address, timeout=30) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def posted(photo: bytes) -> bytes:
    return b"POST / HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s" % (len(photo), photo)


@pytest.mark.parametrize("clients", [32, 100])
def test_many_clients_at_once_are_all_answered(
    clients: int, service: tuple[str, int], run: Path, original: Path, photos: Path
) -> None:
    photo, barrier = (photos / "ant" / "0000.jpg").read_bytes(), threading.Barrier(clients)

    def ask(_: int) -> bytes:
        barrier.wait()
        return answered(service, posted(photo))

    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(ask, range(clients)))
    assert [one.split(b"\r\n")[0] for one in answers] == [b"HTTP/1.0 200 OK"] * clients
    expected = probabilities(run, original)["ant/0000.jpg"]
    for body in {one.partition(b"\r\n\r\n")[2] for one in answers}:
        assert list(found := json.loads(body)) == ["ant", "bee", "cat"]
        assert np.abs(np.array(list(found.values())) - expected).max() < 1e-5


LENGTHS = ("abc", "-1", "+5", "1_0", "5.0", "", "0", (32 << 20) + 1, "9" * 5000)


@pytest.mark.parametrize(
    ("headers", "body", "status", "error"),
    [
        *((f"Content-Length: {length}", b"", "413", "send a photo of 1 to") for length in LENGTHS),
        ("X: y", b"", "413", "send a photo of 1 to"),
        ("Transfer-Encoding: chunked", b"", "413", "send a photo of 1 to"),
        ("Content-Length: 5", b"hello", "400", "text (not_an_image)"),
        ("Content-Length: 5", b"", "", ""),  # the client is given up
        ("Content-Length: 5", b"hel", "", ""),
    ],
)
def test_a_hostile_request_is_answered_or_given_up(
    headers: str, body: bytes, status: str, error: str, service: tuple[str, int], capfd: pytest.CaptureFixture[str]
) -> None:
    answer = answered(service, f"POST / HTTP/1.0\r\n{headers}\r\n\r\n".encode() + body)
    assert answer.split(b" ")[1:2] == [status.encode()] * bool(status)
    assert not status or json.loads(answer.partition(b"\r\n\r\n")[2])["error"].startswith(error)
    assert "Traceback" not in capfd.readouterr().err


def test_a_client_that_sends_half_a_request_holds_no_thread(service: tuple[str, int]) -> None:
    before = threading.active_count()
    clients = [socket.create_connection(service) for _ in range(20)]
    for number, client in enumerate(clients):
        client.sendall(b"POST / HTTP/1.0\r\nContent-Length: 9\r\n" + b"\r\n" * (number % 2))
    assert all(client.recv(9) == b"" for client in clients)
    for _ in range(200):
        if threading.active_count() > before:
            time.sleep(0.05)
    assert threading.active_count() <= before
