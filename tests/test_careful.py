"""Decoders that really crash or hang: a job ends, the same command resumes, one image is lost and no neighbour."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from beam_pipeline import images, schema
from beam_pipeline.decoding import Decoding, careful, watchdog
from beam_pipeline.decoding.careful import Decoders, Died
from beam_pipeline.decoding.inflight import Inflight
from beam_pipeline.decoding.pixel_sums import channel_sums
from beam_pipeline.errors import ImageShardsError, Reject
from beam_pipeline.options import Config
from beam_pipeline.sharding import order_key
from reader.example import parse_example
from tests import make

CODEC = Path(__file__).parent / "deadly_codec"


def options(**more: object) -> images.ImageOptions:
    return Config(output="out", name="photos", input="in", **more).image_options  # type: ignore[arg-type]


def deadly(kind: str) -> bytes:
    """A good JPEG that the codec of these tests dies of."""
    return make.encoded(make.picture(seed=99), comment=f"DEADLY: {kind}".encode())


# --- the subprocess


@pytest.fixture(scope="module")
def decoders() -> Decoders:
    return Decoders()


@pytest.mark.parametrize(
    "data",
    [
        make.encoded(make.picture()),
        make.encoded(make.noise(300, 200), "PNG"),
        make.encoded(make.picture().convert("L")),
        make.encoded(make.noise(900, 700)),
    ],
)
@pytest.mark.parametrize("more", [{}, {"image_size": "none", "image_format": "png"}, {"resize_mode": "crop"}])
def test_a_subprocess_makes_the_same_bytes(decoders: Decoders, data: bytes, more: dict[str, object]) -> None:
    seen = []
    expected = images.convert(data, options(**more), look=lambda pixels: seen.append(channel_sums(pixels)))
    assert decoders.convert(data, options(**more)) == (expected, seen[0])


@pytest.mark.parametrize("data", [b"", b"not an image", make.encoded(make.picture())[:500]])
def test_a_subprocess_rejects_for_the_same_reason_and_goes_on(decoders: Decoders, data: bytes) -> None:
    with pytest.raises(Reject) as expected:
        images.convert(data, options())
    with pytest.raises(Reject) as caught:
        decoders.convert(data, options())
    assert caught.value.args == expected.value.args
    assert not isinstance(caught.value, Died)


@pytest.mark.parametrize(
    ("kind", "reason", "detail"),
    [
        ("crash", "decoder_crash", "its decoder ended by signal SIGABRT, twice"),
        ("killed", "out_of_memory", "its decoder was killed by the system, twice"),
        ("spin", "decoder_timeout", "no end in 1 s, twice"),
    ],
)
def test_what_kills_two_subprocesses_is_rejected(
    monkeypatch: pytest.MonkeyPatch, kind: str, reason: str, detail: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(CODEC))
    monkeypatch.setattr(watchdog, "limit_s", lambda _: 1.0)
    decoders = Decoders()
    with pytest.raises(Died) as caught:
        decoders.convert(deadly(kind), options())
    assert (caught.value.reason, caught.value.detail) == (reason, detail)
    good = make.encoded(make.picture())
    assert decoders.convert(good, options())[0] == images.convert(good, options())


def of_colour(colour: tuple[int, int, int]) -> bytes:
    return make.encoded(Image.new("RGB", (9, 9), colour), "PNG")


def test_an_error_of_this_program_is_no_reject_in_a_subprocess_either(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(CODEC))
    careful.shared_decoders.cache_clear()
    decoding = Decoding(options(), None, is_careful=True, plan="")
    with pytest.raises(ImageShardsError) as caught:
        decoding.convert("a/b.png", of_colour((1, 2, 3)), b"")
    assert str(caught.value) == "'a/b.png' makes this program fail, please report it: TypeError: no image's fault"
    good = of_colour((4, 5, 6))
    assert decoding.convert("a/c.png", good, b"") == images.convert(good, options()), "the subprocess goes on"
    careful.shared_decoders.cache_clear()


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
    assert Decoders().convert(good, options())[0] == images.convert(good, options())
    assert (tmp_path / "died").exists()


def test_a_subprocess_that_cannot_start_is_no_image_s_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(
        ImageShardsError, match="can't start a subprocess to decode in: its decoder ended with exit code 3"
    ):
        Decoders().convert(make.encoded(make.picture()), options())


def test_the_limit_grows_with_the_pixels_that_are_permitted() -> None:
    assert watchdog.limit_s(options()) == pytest.approx(239, abs=1)
    assert watchdog.limit_s(options(max_pixels=10**9)) == pytest.approx(1060, abs=1)


# --- the notes of those who sample


def test_only_a_part_that_was_begun_before_and_an_earlier_job_s_sample_are_suspect(tmp_path: Path) -> None:
    def inflight() -> Inflight:
        return Inflight(Config(input="in", output=str(tmp_path), name="photos"), str(tmp_path / "state"))

    first = inflight()
    assert not first.begin_sampling(["a/1.jpg", "a/2.jpg"])
    assert not first.begin_sampling(["a/3.jpg"]), "another process of the same job"
    assert first.begin_sampling(["a/1.jpg", "a/2.jpg"]), "a retry"
    second = inflight()
    assert second.begin_sampling(["a/4.jpg"])
    second.end_sampling()
    assert not inflight().begin_sampling(["a/4.jpg"])


def test_a_note_that_is_not_whole_is_none(tmp_path: Path) -> None:
    inflight = Inflight(Config(input="in", output=str(tmp_path), name="photos"), str(tmp_path / "state"))
    inflight.reject("whole", "a/1.jpg", Reject("decoder_crash", "signal 6"))
    folder = tmp_path / "state/inflight/rejected"
    broken = (b"", b"{}", b"[]", b'{"path":"a/2.jp', b'{"detail":"","path":"a/2.jpg","reason":"other"}')
    for number, data in enumerate(broken):
        (folder / f"{number}.json").write_bytes(data)
    (noted,) = inflight.rejected("").values()
    assert (noted.path, noted.reject.reason, noted.reject.detail) == ("a/1.jpg", "decoder_crash", "signal 6")


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


def test_a_repair_decodes_in_subprocesses_from_its_first_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make.class_folders(tmp_path / "in", {"a": 3})
    (tmp_path / "in/a/9.jpg").write_bytes(deadly("crash"))
    version = make.published(tmp_path / "in", tmp_path)
    whole = make.files(version)
    make.shard_files(version)[0].unlink()
    careful.shared_decoders.cache_clear()
    monkeypatch.setenv("PYTHONPATH", str(CODEC))
    finished = make.job(tmp_path / "in", tmp_path)
    assert (finished.code, "comes out with other bytes" in finished.err) == (1, True)  # without this picture
    careful.shared_decoders.cache_clear()
    monkeypatch.undo()
    assert make.job(tmp_path / "in", tmp_path).code == 0
    assert make.files(version) == whole
