"""Decoders that really crash or hang: a job ends, the same command resumes, one image is lost and no neighbour."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

import pytest
from PIL import Image

from beam_pipeline import images, schema
from beam_pipeline.config import Config
from beam_pipeline.conversion import decoder, isolation, watchdog
from beam_pipeline.conversion.attempts import Inflight
from beam_pipeline.conversion.decoder import Decoding
from beam_pipeline.conversion.isolation import Died, IsolatedDecoder
from beam_pipeline.errors import ImageShardsError, Reject
from beam_pipeline.inputs.references import order_key
from reader.example import parse_example
from tests import make

CODEC = Path(__file__).parent / "deadly_codec"


def options(**more: object) -> images.ImageOptions:
    return Config(output="out", name="photos", input="in", **more).image_options  # type: ignore[arg-type]


def deadly(kind: str) -> bytes:
    """A good JPEG that the codec of these tests dies of."""
    return make.encoded(make.picture(seed=99), comment=f"DEADLY: {kind}".encode())


# --- the child process


@pytest.fixture
def quick_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The codec that dies, and its limits, in this process too: a hang is one after 2 s, in a child after 4 s."""
    monkeypatch.setenv("PYTHONPATH", str(CODEC))
    monkeypatch.setattr(watchdog, "LEAST_S", 2.0)
    monkeypatch.setattr(watchdog, "SECONDS_A_PIXEL", 0.0)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"image_size": "none", "image_format": "png"},
        {"resize_mode": "crop"},
        {"channels": "1"},
        {"background": "#102030"},
    ],
)
def test_a_child_process_makes_the_same_bytes(more: dict[str, object]) -> None:
    isolated = IsolatedDecoder(options(**more))
    for data in (
        make.encoded(make.picture()),
        make.encoded(make.noise(300, 200), "PNG"),
        make.encoded(make.picture().convert("L")),
        make.encoded(make.noise(900, 700)),
    ):
        assert isolated.convert(data) == Decoding(options(**more), None, False, "").measure("here", data, b"")


def test_a_child_process_rejects_for_the_same_reason_and_goes_on() -> None:
    isolated = IsolatedDecoder(options())
    for data in (b"", b"not an image", make.encoded(make.picture())[:500]):
        with pytest.raises(Reject) as expected:
            images.convert(data, options())
        with pytest.raises(Reject) as caught:
            isolated.convert(data)
        assert caught.value.args == expected.value.args
        assert not isinstance(caught.value, Died)


@pytest.mark.parametrize(
    ("kind", "reason", "detail"),
    [
        ("crash", "decoder_crash", "its decoder ended by signal SIGABRT, twice"),
        ("segfault", "decoder_crash", "its decoder ended by signal SIGSEGV, twice"),
        ("exit", "decoder_crash", "its decoder ended with exit code 3, twice"),
        ("killed", "out_of_memory", "its decoder was killed by the system, twice"),
        ("spin", "decoder_timeout", "no end in 2 s, twice"),
        ("sleep with the interpreter", "decoder_timeout", "no end in 2 s, twice"),
        ("nonsense", "decoder_crash", "its decoder gave no valid answer, twice"),
        ("out of step", "decoder_timeout", "no end in 2 s, twice"),
        ("half an answer", "decoder_crash", "its decoder ended with exit code 0, twice"),
    ],
)
@pytest.mark.usefixtures("quick_limits")
def test_what_kills_two_child_processes_is_rejected(kind: str, reason: str, detail: str) -> None:
    isolated = IsolatedDecoder(options())
    with pytest.raises(Died) as caught:
        isolated.convert(deadly(kind))
    assert (caught.value.reason, caught.value.detail) == (reason, detail)
    good = make.encoded(make.picture())
    assert isolated.convert(good)[0] == images.convert(good, options())


def answer(*values: int, text: bytes = b"", data: bytes = b"") -> IO[bytes]:
    kind, image_bytes = values
    return io.BytesIO(isolation._ANSWER.pack(kind, len(text), image_bytes, *range(11)) + text + data)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (answer(0, 0), ValueError),
        (answer(4, 0), ValueError),
        (answer(1, 1 << 40), ValueError),
        (answer(1, 9, text=b"JPEG\0"), EOFError),
        (answer(1, 1, text=b"JPEG\0other", data=b"x"), ValueError),
        (answer(2, 0, text=b"no_such_reason\0detail"), ValueError),
        (answer(2, 0, text=b"\xff"), ValueError),
        (io.BytesIO(b"\2"), EOFError),
        (io.BytesIO(), EOFError),
    ],
)
def test_an_answer_that_no_child_gives_is_none(given: IO[bytes], error: type[Exception]) -> None:
    with pytest.raises(error):
        isolation._received(given, options())


def test_an_interrupt_is_no_image_s_fault() -> None:
    isolated = IsolatedDecoder(options())
    good = make.encoded(make.picture())
    isolated.convert(good)
    assert isolated._child is not None
    isolated._child.send_signal(signal.SIGINT)
    with pytest.raises(ImageShardsError, match="was ended by signal SIGINT; the same command resumes"):
        isolated.convert(good)
    assert isolated.convert(good)[0] == images.convert(good, options())


def test_an_answer_that_nobody_waited_for_is_not_taken_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    isolated = IsolatedDecoder(options())
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(isolation, "_received", interrupted)
        isolated.convert(make.encoded(make.picture(seed=1)))
    good = make.encoded(make.picture(seed=2))
    assert isolated.convert(good)[0] == images.convert(good, options())


def test_a_child_process_ends_with_its_decoder() -> None:
    isolated = IsolatedDecoder(options())
    isolated.convert(make.encoded(make.picture()))
    assert isolated._child is not None
    child = Path(f"/proc/{isolated._child.pid}")
    assert child.exists()
    del isolated
    assert not child.exists()


HOLD = """
import signal, sys
from beam_pipeline.decoding.careful import IsolatedDecoder
from tests.conversion.test_isolation import options
isolated = IsolatedDecoder(options())
try:
    with open(sys.argv[1], "rb") as file:
        isolated.convert(file.read())
except Exception as error:
    print("converted:", error)
print(isolated._child and isolated._child.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["its end", "a kill", "an interrupt"])
def test_no_child_process_outlives_its_parent(tmp_path: Path, how: str) -> None:
    (tmp_path / "good.jpg").write_bytes(make.encoded(make.picture()))
    command = [sys.executable, "-c", HOLD, str(tmp_path / "good.jpg")]
    process = subprocess.Popen(command, cwd=make.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdin is not None
    child = Path(f"/proc/{process.stdout.readline().strip()}")
    assert child.exists()
    if how == "its end":
        process.stdin.close()
    else:
        process.send_signal(signal.SIGKILL if how == "a kill" else signal.SIGINT)
    process.wait()
    wait_until_gone(child)


def wait_until_gone(process: Path) -> None:
    end = time.monotonic() + 10
    while process.exists() and "\nState:\tZ" not in (process / "status").read_text():
        assert time.monotonic() < end, process
        time.sleep(0.05)


@pytest.mark.usefixtures("quick_limits")
def test_a_child_process_that_hangs_ends_without_its_parent(tmp_path: Path) -> None:
    (tmp_path / "deadly.jpg").write_bytes(deadly("sleep with the interpreter"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(CODEC), str(make.ROOT)))}
    command = [sys.executable, "-c", HOLD, str(tmp_path / "deadly.jpg")]
    process = subprocess.Popen(command, cwd=make.ROOT, env=environment)
    children: list[str] = []
    while not children:
        time.sleep(0.05)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait()
    wait_until_gone(Path(f"/proc/{children[0]}"))


def of_colour(colour: tuple[int, int, int]) -> bytes:
    return make.encoded(Image.new("RGB", (9, 9), colour), "PNG")


def test_an_error_of_this_program_is_no_reject_in_a_child_process_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(CODEC))
    decoding = Decoding(options(), None, is_careful=True, plan="")
    with pytest.raises(ImageShardsError) as caught:
        decoding.convert("a/b.png", of_colour((1, 2, 3)), b"")
    assert str(caught.value) == "'a/b.png' makes this program fail, please report it: TypeError: no image's fault"
    good = of_colour((4, 5, 6))
    assert decoding.convert("a/c.png", good, b"") == images.convert(good, options()), "the child goes on"


def test_a_job_that_an_error_of_this_program_ends_is_ended_by_it_each_time(tmp_path: Path) -> None:
    make.class_folders(tmp_path / "in", {"a": 3}, size=(24, 20))
    (tmp_path / "in/a/9.png").write_bytes(of_colour((1, 2, 3)))
    for _ in range(2):
        finished = job(tmp_path)
        assert finished.returncode == 1
        assert finished.stderr.startswith("error: 'a/9.png' makes this program fail, please report it: TypeError: no i")
        assert not (tmp_path / "out/photos/1.0.0" / schema.MANIFEST_FILE).exists()


def test_one_death_is_not_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nfrom PIL import ImageFile\nload = ImageFile.ImageFile.load\n"
        f"def once(image):\n    try:\n        os.mkdir({str(tmp_path / 'died')!r})\n"
        "    except FileExistsError:\n        return load(image)\n    os.abort()\n"
        "ImageFile.ImageFile.load = once\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    good = make.encoded(make.picture())
    assert IsolatedDecoder(options()).convert(good)[0] == images.convert(good, options())
    assert (tmp_path / "died").exists()


def test_a_process_that_cannot_start_is_no_image_s_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ImageShardsError, match="can't start a process to decode in: it ended with exit code 3"):
        IsolatedDecoder(options()).convert(make.encoded(make.picture()))


def test_the_limit_grows_with_the_pixels_that_are_permitted() -> None:
    assert watchdog.limit_s(options()) == pytest.approx(239, abs=1)
    assert watchdog.limit_s(options(max_pixels=10**9)) == pytest.approx(1060, abs=1)


# --- memory


LARGE = make.encoded(Image.new("RGB", (7000, 4000), (10, 20, 30)), "PNG", compress_level=1)  # takes more than 100 MiB


def test_large_images_share_memory_and_one_that_wants_more_than_all_of_it_gets_it_alone() -> None:
    begun: list[int] = []
    go_on = {mebibytes: threading.Event() for mebibytes in (600, 424, 5000, 1)}
    threads = {}

    def take(mebibytes: int) -> None:
        with decoder.memory_for(mebibytes << 20):
            begun.append(mebibytes)
            go_on[mebibytes].wait()

    for mebibytes in go_on:
        threads[mebibytes] = threading.Thread(target=take, args=(mebibytes,))
        threads[mebibytes].start()
        time.sleep(0.2)
    for mebibytes, expected in ((600, [600, 424]), (424, [600, 424, 5000]), (5000, [600, 424, 5000, 1])):
        go_on[mebibytes].set()
        threads[mebibytes].join()
        time.sleep(0.2)
        assert begun == expected
    go_on[1].set()
    threads[1].join()


def test_large_images_wait_for_memory_and_small_ones_do_not() -> None:
    decoding = Decoding(options(), None, is_careful=False, plan="")
    found: list[images.EncodedImage] = []
    thread = threading.Thread(target=lambda: found.append(decoding.convert("large", LARGE, b"")))
    with decoder.memory_for(1 << 30):
        thread.start()
        time.sleep(1.0)
        small = make.encoded(make.picture())
        assert decoding.convert("small", small, b"") == images.convert(small, options())
        assert not found
        assert not watchdog._watched, "who waits doesn't hang"
    thread.join()
    assert found == [images.convert(LARGE, options())]


def test_child_processes_decode_one_image_at_a_time() -> None:
    decoders = [IsolatedDecoder(options()) for _ in range(2)]
    found: list[images.EncodedImage] = []
    with isolation._one_at_a_time:
        threads = [threading.Thread(target=lambda one=one: found.append(one.convert(LARGE)[0])) for one in decoders]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        assert not found
    for thread in threads:
        thread.join()
    assert found == [images.convert(LARGE, options())] * 2


def test_a_child_process_has_the_limits_of_its_options() -> None:
    more = {"max_pixels": 27_999_999}
    with pytest.raises(Reject) as caught:
        IsolatedDecoder(options(**more)).convert(LARGE)
    assert caught.value.args == ("too_many_pixels", "7000x4000 pixels, --max_pixels 27999999")


# --- the notes of those who sample


def test_only_a_part_that_was_begun_before_and_an_earlier_job_s_sample_are_suspect(tmp_path: Path) -> None:
    def inflight() -> Inflight:
        return Inflight(Config(input="in", output=str(tmp_path), name="photos"))

    first = inflight()
    assert not first.begin_sampling(["a/1.jpg", "a/2.jpg"])
    assert not first.begin_sampling(["a/3.jpg"]), "another process of the same job"
    assert first.begin_sampling(["a/1.jpg", "a/2.jpg"]), "a retry"
    second = inflight()
    assert second.begin_sampling(["a/4.jpg"])
    second.end_sampling()
    assert not inflight().begin_sampling(["a/4.jpg"])


def test_a_note_that_is_not_whole_is_none(tmp_path: Path) -> None:
    inflight = Inflight(Config(input="in", output=str(tmp_path), name="photos"))
    inflight.reject("whole", "decoder_crash", "signal 6")
    folder = tmp_path / "state/inflight/rejected"
    broken = (b"", b"{}", b"[]", b'{"detail":"sig', b'{"detail":"","reason":"other"}')
    for number, data in enumerate(broken):
        (folder / f"{number}.json").write_bytes(data)
    assert inflight.rejected("") == {"whole": ("decoder_crash", "signal 6")}


# --- whole jobs, killed by their codec


def job(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "beam_pipeline", "--input", str(folder / "in"), "--output", str(folder / "out")]
    command += ["--name", "photos", "--image_size", "24", "--num_shards", "4", "--max_reject_fraction", "0.1"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(CODEC), str(make.ROOT)))}
    return subprocess.run(command, env=environment, cwd=make.ROOT, capture_output=True, text=True, timeout=120)


def records(version: Path) -> list[tuple[str, bytes]]:
    """(file name, record) of all records, in order of their shards."""
    found = []
    for shard in make.shard_files(version):
        for record in schema.unframe(shard.read_bytes()):
            name = parse_example(record)[schema.FILENAME_KEY][0]
            assert isinstance(name, bytes)
            found.append((name.decode(), record))
    return found


def last_in_order(images: int) -> str:
    """An image that is not in the sample of so many."""
    return max((f"a/{number:04d}.jpg" for number in range(images)), key=lambda path: order_key(path, 0))


def rejects(version: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (version / schema.REJECTS_FILE).read_text().splitlines()]


def test_a_crash_costs_one_image_and_the_same_command_resumes(tmp_path: Path) -> None:
    victim = last_in_order(540)
    make.class_folders(tmp_path / "in", {"a": 540}, size=(24, 20))
    (tmp_path / "in" / victim).write_bytes(deadly("crash"))
    assert job(tmp_path).returncode == -signal.SIGABRT
    version = tmp_path / "out/photos/1.0.0"
    finished = {path: make.traces(path) for path in make.shard_files(version)} if version.exists() else {}
    second = job(tmp_path)
    assert second.returncode == 0, second.stderr
    assert rejects(version) == [
        {"path": victim, "reason": "decoder_crash", "detail": "its decoder ended by signal SIGABRT, twice"}
    ]
    assert make.manifest(version)["rejects"] == {"by_reason": {"decoder_crash": 1}, "environment": 1}
    assert all(make.traces(path) == before for path, before in finished.items())
    assert not (tmp_path / "out/photos/_state").exists()
    good = records(make.published(tmp_path / "in", tmp_path / "good", "--num_shards", "4"))
    assert records(version) == [one for one in good if one[0] != victim]


def test_a_hang_in_the_sample_ends_the_job_with_a_line_and_the_same_command_resumes(tmp_path: Path) -> None:
    make.class_folders(tmp_path / "in", {"a": 20})
    (tmp_path / "in/a/0007.jpg").write_bytes(deadly("sleep"))
    first = job(tmp_path)
    assert first.returncode == 1
    line = first.stderr.strip()
    assert line.startswith("error: 'a/0007.jpg' has been decoded for ")
    assert line.endswith("this process ends; the same command resumes, and decodes it in one of its own")
    second = job(tmp_path)
    assert second.returncode == 0, second.stderr
    (reject,) = rejects(tmp_path / "out/photos/1.0.0")
    assert (reject["path"], reject["reason"]) == ("a/0007.jpg", "decoder_timeout")
    assert not (tmp_path / "out/photos/_state").exists()


def test_a_repair_decodes_in_child_processes_from_its_first_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make.class_folders(tmp_path / "in", {"a": 3})
    (tmp_path / "in/a/9.jpg").write_bytes(deadly("crash"))
    version = make.published(tmp_path / "in", tmp_path)
    whole = make.files(version)
    make.shard_files(version)[0].unlink()
    monkeypatch.setenv("PYTHONPATH", str(CODEC))
    finished = make.job(tmp_path / "in", tmp_path)
    assert (finished.code, "comes out with other bytes" in finished.err) == (1, True)  # without this picture
    monkeypatch.undo()
    assert make.job(tmp_path / "in", tmp_path).code == 0
    assert make.files(version) == whole
