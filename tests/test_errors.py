"""Errors: exit codes, one line each, and our own error found again in a runner's traceback."""

from __future__ import annotations

import pytest

from beam_pipeline import errors
from beam_pipeline.errors import CorruptRecordError, ImageShardsError, NotPublishedError, StorageError, UsageError


@pytest.mark.parametrize(
    ("error", "code"),
    [(ImageShardsError, 1), (StorageError, 1), (NotPublishedError, 1), (CorruptRecordError, 1), (UsageError, 2)],
)
def test_exit_codes(error: type[ImageShardsError], code: int) -> None:
    assert error.exit_code == code
    assert issubclass(error, ImageShardsError)


def test_a_reject_is_no_error_of_the_job() -> None:
    assert not issubclass(errors.Reject, ImageShardsError)


def test_a_corrupt_record_names_file_record_and_offset() -> None:
    assert (
        str(CorruptRecordError("gs://b/x", 3, 99, "the CRC is wrong"))
        == "gs://b/x: record 3 at byte 99: the CRC is wrong"
    )


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("Traceback …\nbeam_pipeline.errors.StorageError: gs://b/x: no\n", StorageError, "gs://b/x: no"),
        (
            "RuntimeError: beam_pipeline.errors.ImageShardsError: 3 of 45 rejected [while running 'a/b-ptransform-12']",
            ImageShardsError,
            "3 of 45 rejected",
        ),
        (
            "beam_pipeline.errors.StorageError: first\nDuring handling …\nbeam_pipeline.errors.UsageError: second\n",
            UsageError,
            "second",
        ),
        # Runners that send the text as a literal.
        ("'… beam_pipeline.errors.ImageShardsError: one line\\n\\nat x'", ImageShardsError, "one line"),
        (
            "beam_pipeline.errors.CorruptRecordError: x: record 3 at byte 9: y",
            ImageShardsError,
            "x: record 3 at byte 9: y",
        ),
        ("beam_pipeline.errors.NotOneOfOurs: x", ImageShardsError, "x"),
    ],
)
def test_our_error_is_found_in_a_workers_text(text: str, kind: type[Exception], message: str) -> None:
    found = errors.from_worker(text)
    assert type(found) is kind
    assert str(found) == message


@pytest.mark.parametrize(
    "error",
    [
        UsageError("--x 1: no [while running 'a/b']"),
        StorageError("gs://b/x: no"),
        CorruptRecordError("gs://b/x [while running 'a/b']", 3, 99, "the CRC is wrong"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_ours_stays_what_it_is_without_where_a_runner_met_it(error: ImageShardsError) -> None:
    found = errors.from_worker(error)
    assert type(found) is type(error)
    assert str(found) == str(error).replace(" [while running 'a/b']", "")


@pytest.mark.parametrize("text", ["", "ValueError: x", "xbeam_pipeline.errors.StorageError: x"])
def test_other_texts_hold_no_error_of_ours(text: str) -> None:
    assert errors.from_worker(text) is None


def test_any_error_is_one_line() -> None:
    assert errors.one_line(ValueError("a\n  b\tc")) == "a b c"
    assert errors.one_line(KeyError()) == "KeyError"
