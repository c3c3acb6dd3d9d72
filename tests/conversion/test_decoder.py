"""Decoders that really crash or hang: a job ends, the same command resumes, one image is lost and no neighbour."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from beam_pipeline import images, schema
from beam_pipeline.config import Config
from beam_pipeline.conversion import decoder, isolation
from beam_pipeline.conversion.attempts import Attempts, sample_marker
from beam_pipeline.conversion.decoder import Decoder
from beam_pipeline.errors import ImageShardsError, Reject
from beam_pipeline.images.memory import SHARED
from beam_pipeline.inputs.references import order_key
from reader.example import parse_example
from tests import make

CODEC = Path(__file__).parent / "deadly_codec"
GOOD = make.encoded(make.picture())


def options(**more: object) -> images.ImageOptions:
    return Config(output="out", name="photos", input="in", **more).image_options  # type: ignore[arg-type]


def isolated(**more: object) -> Decoder:
    return Decoder(options(**more), None, isolated=True, with_sums=True)


def converted(data: bytes, **more: object) -> images.EncodedImage:
    return images.convert(data, options(**more), with_sums=True)


def deadly(kind: str) -> bytes:
    """A valid JPEG that the codec of these tests dies of."""
    return make.encoded(make.picture(seed=99), comment=f"DEADLY: {kind}".encode())


def deadly_environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join((str(CODEC), str(make.ROOT)))}


@pytest.fixture(autouse=True)
def _new_children() -> None:
    """Child processes import what the path had when they began."""
    decoder._isolated.cache_clear()


@pytest.fixture
def quick_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The codec that dies, and its limits, in this process too: a hang is one after 2 s, in a child after 4 s."""
    monkeypatch.syspath_prepend(CODEC)
    monkeypatch.setattr(decoder, "MIN_S", 2.0)
    monkeypatch.setattr(decoder, "SECONDS_PER_PIXEL", 0.0)


@pytest.mark.parametrize(
    "more", [{}, {"image_size": "none", "image_format": "png"}, {"resize_mode": "crop", "channels": "1"}]
)
def test_a_child_process_makes_the_same_bytes(more: dict[str, object]) -> None:
    child, here = isolated(**more), Decoder(options(**more), None, isolated=False, with_sums=True)
    noise = make.noise(900, 700)
    for data in (GOOD, make.encoded(noise, "PNG"), make.encoded(make.picture().convert("L")), make.encoded(noise)):
        assert child.convert("a", data, b"") == here.convert("a", data, b"") == converted(data, **more)


def test_a_child_process_rejects_for_the_same_reason_and_goes_on() -> None:
    child = isolated(max_pixels=1_000_000)
    for data in (b"", b"not an image", GOOD[:500], make.encoded(Image.new("L", (1001, 1000)))):
        with pytest.raises(Reject) as expected:
            converted(data, max_pixels=1_000_000)
        with pytest.raises(Reject) as caught:
            child.convert("a", data, b"")
        assert caught.value.args == expected.value.args


NO_ANSWERS = [
    *("null", "{", "[" * 50_000, '{"reject": ["no_such_reason", "detail"]}'),
    '{"image": ["", 1, 1, ["JPEG", 1, 1], "other"]}',
    '{"image": ["", "1", 1, ["JPEG", 1, 1], null]}',
]


DEADLY = {
    "crash": ("decoder_crash", "its decoder ended by signal SIGABRT, twice"),
    "segfault": ("decoder_crash", "its decoder ended by signal SIGSEGV, twice"),
    "exit": ("decoder_crash", "its decoder ended with exit code 3, twice"),
    "killed": ("out_of_memory", "its decoder was killed by the system, twice"),
    "sleep with the interpreter": ("decoder_timeout", "did not finish within 2 s (2 attempts)"),
    "half an answer": ("decoder_crash", "its decoder ended with exit code 0, twice"),
    **dict.fromkeys(
        ("nonsense", "out of step", *(f"says {answer}" for answer in NO_ANSWERS)),
        ("decoder_crash", "its decoder gave no valid answer, twice"),
    ),
}


@pytest.mark.soak
@pytest.mark.usefixtures("quick_limits")
def test_what_kills_two_child_processes_is_rejected() -> None:
    child = isolated()
    for kind, reject in DEADLY.items():
        with pytest.raises(Reject) as caught:
            child.convert("a", deadly(kind), b"")
        assert (kind, caught.value.args) == (kind, reject)
    assert child.convert("a", GOOD, b"") == converted(GOOD)


def test_an_answer_that_nobody_waited_for_is_not_taken_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    child = isolated()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(isolation, "_ANSWERS", SimpleNamespace(decode=interrupted))
        child.convert("a", make.encoded(make.picture(seed=1)), b"")
    assert child.convert("a", GOOD, b"") == converted(GOOD)


def children(process: str = "thread-self") -> list[str]:
    """Process ids of the children of this thread, or of a process with one."""
    folder = Path("/proc", process if process == "thread-self" else f"{process}/task/{process}")
    return (folder / "children").read_text().split()


def test_child_processes_end_with_their_decoder() -> None:
    before = children()
    parent = isolation.IsolatedDecoder(options(), 60.0, with_sums=True)
    parent.convert(GOOD)
    assert len(children()) == len(before) + 1
    del parent
    assert children() == before


HOLD = """
import sys
from tests.conversion.test_decoder import isolated
decoder = isolated()
decoder.convert("a", open(sys.argv[1], "rb").read(), b"")
print("done", flush=True)
sys.stdin.read()
"""


SOAKED = (pytest.param(how, marks=pytest.mark.soak) for how in ("its end", "an interrupt"))


@pytest.mark.parametrize("how", ["a kill", "a kill while it hangs", *SOAKED])
def test_no_child_process_outlives_its_parent(tmp_path: Path, how: str) -> None:
    hangs = how.endswith("hangs")
    (tmp_path / "image").write_bytes(deadly("sleep with the interpreter") if hangs else GOOD)
    holding = [sys.executable, "-c", HOLD, str(tmp_path / "image")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(holding, env=deadly_environment(), cwd=make.ROOT, text=True, **pipes) as process:
        if not hangs:
            process.stdout.readline()
        while not (found := children(str(process.pid))):
            assert process.poll() is None
            time.sleep(0.05)
        child = found[0]
        if how != "its end":  # which comes with the end of its standard input
            process.send_signal(signal.SIGINT if how == "an interrupt" else signal.SIGKILL)
    end = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and "\nState:\tZ" not in Path(f"/proc/{child}/status").read_text():
        assert time.monotonic() < end, child
        time.sleep(0.05)


DIES_ONCE = """
import os
from PIL import ImageFile
load = ImageFile.ImageFile.load
def once(image):
    try:
        os.mkdir({0!r})
    except FileExistsError:
        return load(image)
    os.abort()
ImageFile.ImageFile.load = once
"""


def test_one_death_is_not_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(DIES_ONCE.format(str(tmp_path / "died")))
    monkeypatch.syspath_prepend(tmp_path)
    assert isolated().convert("a", GOOD, b"") == converted(GOOD)
    assert (tmp_path / "died").exists()


def test_a_process_that_cannot_start_is_no_image_s_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImageShardsError, match="can't start a process to decode in: it ended with exit code 3"):
        isolated().convert("a", GOOD, b"")


LARGE = Image.new("RGB", (7000, 4000))  # takes more than 100 MiB


@pytest.mark.parametrize("is_isolated", [False, True])
def test_large_images_wait_for_memory_and_small_ones_do_not(is_isolated: bool) -> None:
    large = make.encoded(LARGE, "PNG", compress_level=1)
    one, done = Decoder(options(), None, isolated=is_isolated, with_sums=True), []
    threads = [threading.Thread(target=lambda: done.append(one.convert("large", large, b""))) for _ in range(2)]
    with SHARED.held(1 << 30):
        for thread in threads:
            thread.start()
        time.sleep(1)
        assert one.convert("small", GOOD, b"") == converted(GOOD)
        assert not done
        assert not decoder._watched, "a thread that waits doesn't hang"
    for thread in threads:
        thread.join()
    assert done == [converted(large)] * 2
    assert SHARED._reserved == 0


@pytest.mark.soak
@pytest.mark.usefixtures("quick_limits")
def test_a_child_process_that_waits_for_memory_does_not_hang() -> None:
    large = make.encoded(LARGE, "PNG", compress_level=1)
    with ThreadPoolExecutor(1) as pool, SHARED.held(1 << 30):
        waiting = pool.submit(isolated().convert, "large", large, b"")
        time.sleep(5)  # its limit is 4 s
        SHARED.release(1 << 30)
        try:
            assert waiting.result() == converted(large)
        finally:
            SHARED.reserve(1 << 30)


# --- what an attempt leaves for the next


def attempts(folder: Path) -> Attempts:
    """Those of a new job."""
    return Attempts(Config(input="in", output=str(folder), name="photos"))


def test_only_a_part_of_the_sample_that_was_begun_before_is_suspect(tmp_path: Path) -> None:
    first, second = attempts(tmp_path), attempts(tmp_path)
    assert first.begin(sample_marker(["a/1.jpg", "a/2.jpg"]))
    assert first.begin(sample_marker(["a/3.jpg"])), "another process of the same job"
    assert not second.begin(sample_marker(["a/2.jpg", "a/1.jpg"])), "a retry, or another job"
    second.end(sample_marker(["a/1.jpg", "a/2.jpg"]))
    first.end(sample_marker(["a/3.jpg"]))
    assert not list(tmp_path.iterdir())
    assert first.begin(sample_marker(["a/1.jpg", "a/2.jpg"]))


def test_a_corrupt_reject_is_ignored(tmp_path: Path) -> None:
    attempts(tmp_path).add_reject("valid", Reject("decoder_crash", "signal 6"))
    (folder,) = tmp_path.rglob("rejected")
    for number, data in enumerate((b"", b"{}", b"[]", b'{"detail":"sig', b'{"detail":"","reason":"other"}')):
        (folder / f"{number}.json").write_bytes(data)
    found = attempts(tmp_path).rejects()
    assert {image: reject.args for image, reject in found.items()} == {"valid": ("decoder_crash", "signal 6")}


# --- jobs that are killed by their codec


def command(folder: Path) -> list[str]:
    places = (f"--input={folder / 'in'}", f"--output={folder / 'out'}", "--name=photos", "--image_size=24")
    return [sys.executable, "-m", "beam_pipeline", *places, "--num_shards=4", "--max_reject_fraction=0.1"]


def job(folder: Path) -> subprocess.CompletedProcess[str]:
    how = {"env": deadly_environment(), "cwd": make.ROOT, "capture_output": True, "text": True, "timeout": 120}
    return subprocess.run(command(folder), **how)


def records(version: Path) -> dict[str, bytes]:
    """File name → record, in order of their shards."""
    some = [record for shard in make.shard_files(version) for record in schema.unframe(shard.read_bytes())]
    return {parse_example(record)[schema.FILENAME_KEY][0].decode(): record for record in some}


def test_a_crash_costs_one_image_and_the_same_command_resumes(tmp_path: Path) -> None:
    # The last in order is not in the sample of so many.
    victim = max((f"a/{number:04d}.jpg" for number in range(540)), key=lambda path: order_key(path, 0))
    make.class_folders(tmp_path / "in", {"a": 540}, size=(24, 20))
    (tmp_path / "in" / victim).write_bytes(deadly("crash"))
    assert job(tmp_path).returncode == -signal.SIGABRT
    version = tmp_path / "out/photos/1.0.0"
    finished = {path: make.traces(path) for path in make.shard_files(version)} if version.exists() else {}
    second = job(tmp_path)
    assert second.returncode == 0, second.stderr
    (reject,) = make.rejects(version)
    assert list(reject.values()) == ["its decoder ended by signal SIGABRT, twice", victim, "decoder_crash"]
    assert make.manifest(version)["rejects"] == {"by_reason": {"decoder_crash": 1}, "environment": 1}
    assert all(make.traces(path) == before for path, before in finished.items())
    assert not (tmp_path / "out/photos/_state").exists()
    good = records(make.published(tmp_path / "in", tmp_path / "good", "--num_shards", "4"))
    assert good.pop(victim)
    assert list(records(version).items()) == list(good.items())


@pytest.mark.soak
def test_a_hang_in_the_sample_ends_the_job_with_a_line_and_the_same_command_resumes(tmp_path: Path) -> None:
    make.class_folders(tmp_path / "in", {"a": 20})
    (tmp_path / "in/a/0007.jpg").write_bytes(deadly("sleep"))
    first = job(tmp_path)
    assert first.returncode == 1
    line = first.stderr.strip()
    assert line.startswith("error: 'a/0007.jpg' is still being decoded after ")
    assert line.endswith(" s: exiting; the same command resumes, and decodes it in a child process")
    second = job(tmp_path)
    assert second.returncode == 0, second.stderr
    (reject,) = make.rejects(tmp_path / "out/photos/1.0.0")
    assert (reject["path"], reject["reason"]) == ("a/0007.jpg", "decoder_timeout")
    assert not (tmp_path / "out/photos/_state").exists()


def test_an_interrupt_is_no_decoder_s_fault(tmp_path: Path) -> None:
    make.class_folders(tmp_path / "in", {"a": 20})
    (tmp_path / "in/a/0007.jpg").write_bytes(deadly("sleep"))
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command(tmp_path), env=deadly_environment(), cwd=make.ROOT, **pipes) as process:
        while not (markers := list(tmp_path.glob("out/photos/_state/1.0.0/inflight/*/*"))):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 1
    assert not any(marker.exists() for marker in markers)


@pytest.mark.soak
def test_a_repair_decodes_in_child_processes_from_its_first_attempt(tmp_path: Path, monkeypatch) -> None:
    make.class_folders(tmp_path / "in", {"a": 3})
    (tmp_path / "in/a/9.jpg").write_bytes(deadly("crash"))
    version = make.published(tmp_path / "in", tmp_path)
    before = make.files(version)
    make.shard_files(version)[0].unlink()
    monkeypatch.syspath_prepend(CODEC)
    finished = make.job(tmp_path / "in", tmp_path)
    assert (finished.code, "comes out with other bytes" in finished.err) == (1, True)  # without this picture
    monkeypatch.undo()
    decoder._isolated.cache_clear()  # children with that codec
    assert make.job(tmp_path / "in", tmp_path).code == 0
    assert make.files(version) == before
