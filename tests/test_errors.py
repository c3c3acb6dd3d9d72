"""Errors: exit codes, one line each, found in a runner's traceback; counts and sizes; printing that fails nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from beam_pipeline import errors
from beam_pipeline.errors import CorruptRecordError, ImageShardsError, NotPublishedError, StorageError, UsageError
from beam_pipeline.text import one_line, plural, print_line, size_text
from tests import make

KINDS = {
    ImageShardsError: 1, StorageError: 1, NotPublishedError: 1, errors.UnforeseenError: 1, CorruptRecordError: 1,
    UsageError: 2,
}  # fmt: skip


def test_exit_codes_and_that_a_reject_is_no_error_of_the_job() -> None:
    assert {error: error.exit_code for error in KINDS} == KINDS
    assert all(issubclass(error, ImageShardsError) for error in KINDS)
    assert not issubclass(errors.Reject, ImageShardsError)


ODD = "a\\new.jpg, a\nb, 'one' \"two\", größe, \udcff, %20, \\\\, {x} [while running 'c']"


@pytest.mark.parametrize(
    "error",
    [
        UsageError(f"--x 1: {ODD}"),
        StorageError("gs://b/x: no", ODD, "resume"),
        errors.MissingFileError(f"{ODD} is missing"),
        errors.MissingFileError("x", "check its name", "resume"),
        CorruptRecordError(ODD, 3, 99, "the CRC is wrong"),
        errors.OtherFormatError("x"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("quoted", [str, repr, lambda text: repr(repr(text)), json.dumps])
def test_an_error_of_ours_comes_out_of_any_text_of_a_runner_as_it_was(
    error: ImageShardsError, quoted: Callable[[str], str]
) -> None:
    found = errors.from_worker(
        RuntimeError(quoted(make.told_by_worker(UsageError("an earlier one")) + make.told_by_worker(error)))
    )
    assert type(found) is type(error)
    assert (str(found), vars(found)) == (str(error), vars(error))


def test_an_error_that_met_no_runner_stays_what_it_is() -> None:
    error = CorruptRecordError("x", 3, 99, "the CRC is wrong")
    assert errors.from_worker(error) is error


def test_versions_that_differ_are_told_of_beams_own_words() -> None:
    text = (
        "RuntimeError: … are not compatible. … at pipeline construction time. Submission environment: "
        "beam:version:sdk_base:apache/beam_python3.11_sdk:2.77.0. Runtime environment: "
        "beam:version:sdk_base:apache/beam_python3.12_sdk:2.76.0.\n"
    )
    assert str(errors.from_worker(Exception(text))) == (
        "the worker has Python 3.12 with Beam 2.76.0, the launcher Python 3.11 with Beam 2.77.0: " + errors.OTHER_IMAGE
    )


@pytest.mark.parametrize(
    "text",
    ["", "ValueError: x", "imageshards-error:", "imageshards-error:%7B", make.told_by_worker(UsageError("cut"))[:-50]],
)
def test_other_texts_hold_no_error_of_ours(text: str) -> None:
    assert errors.from_worker(Exception(text)) is None


@pytest.mark.parametrize(
    ("byte_count", "text"),
    [(0, "0 bytes"), (1, "1 byte"), (999, "999 bytes"), (1_000, "1.00 kB"), (12_345, "12.3 kB"), (999_499, "999 kB"),
     (999_500, "1.00 MB"), (2_500_000_000, "2.50 GB"), (5e15, "5,000 TB")],
)  # fmt: skip
def test_sizes(byte_count: float, text: str) -> None:
    assert size_text(byte_count) == text


def test_counts_and_any_error_in_one_line() -> None:
    assert [plural(count, "shard") for count in (0, 1, 1200)] == ["0 shards", "1 shard", "1,200 shards"]
    assert [plural(count, "class") for count in (1, 2)] == ["1 class", "2 classes"]
    assert [one_line(error) for error in (ValueError("a\n  b\tc"), KeyError())] == ["a b c", "KeyError"]


def test_what_a_terminal_would_obey_is_printed_as_repr_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    print_line("größe \x1b[31m\x9b \u202e\ttwo\nlines 🐈", wipe=True)
    assert capsys.readouterr().out == "\r\x1b[Kgröße \\x1b[31m\\x9b \\u202e\\ttwo\nlines 🐈\n"


SAYS = "import sys; from beam_pipeline.text import print_line; print_line('größe'); print_line('\\udcff', sys.stderr)"


@pytest.mark.parametrize(
    ("redirection", "output"),
    [("2>/dev/null", "größe\n"), ("| true", ""), (">/dev/full", "\\udcff\n"), (">&- 2>&-", "")],
)
def test_what_cannot_be_printed_fails_nothing(redirection: str, output: str) -> None:
    command = ["bash", "-o", "pipefail", "-c", f'"{sys.executable}" -c "{SAYS}" {redirection}']
    done = subprocess.run(command, cwd=make.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0
    assert done.stdout.decode() in (output, "\\udcff\n" + output)


def test_who_reads_no_unicode_is_told_nevertheless() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", SAYS], cwd=make.ROOT, env=environment, capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"gr\\xf6\\xdfe\n", b"\\udcff\n")
