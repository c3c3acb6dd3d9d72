"""Attempt markers: which images are suspect, and what an earlier attempt found out about them."""

from __future__ import annotations

from pathlib import Path

from beam_pipeline.config import Config
from beam_pipeline.conversion.attempts import Attempts
from beam_pipeline.errors import Reject


def attempts(folder: Path) -> Attempts:
    """Those of a new job."""
    return Attempts(Config(input="in", output=str(folder), name="photos"))


def test_only_a_part_that_was_begun_before_and_an_earlier_job_s_sample_are_suspect(tmp_path: Path) -> None:
    first, second = attempts(tmp_path), attempts(tmp_path)
    assert not first.begin_sampling(["a/1.jpg", "a/2.jpg"])
    assert not first.begin_sampling(["a/3.jpg"]), "another process of the same job"
    assert first.begin_sampling(["a/1.jpg", "a/2.jpg"]), "a retry"
    assert second.begin_sampling(["a/4.jpg"])
    second.end_sampling()
    assert not attempts(tmp_path).begin_sampling(["a/4.jpg"])


def test_a_corrupt_reject_is_ignored(tmp_path: Path) -> None:
    attempts(tmp_path).add_reject("valid", Reject("decoder_crash", "signal 6"))
    (folder,) = tmp_path.rglob("rejected")
    for number, data in enumerate((b"", b"{}", b"[]", b'{"detail":"sig', b'{"detail":"","reason":"other"}')):
        (folder / f"{number}.json").write_bytes(data)
    found = attempts(tmp_path).rejects()
    assert {image: reject.args for image, reject in found.items()} == {"valid": ("decoder_crash", "signal 6")}
