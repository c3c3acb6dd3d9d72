"""Counts and sizes as a person reads them, and printing that fails nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from beam_pipeline.errors import plural, size
from tests import make


@pytest.mark.parametrize(
    ("byte_count", "text"),
    [(0, "0 bytes"), (1, "1 byte"), (999, "999 bytes"), (1_000, "1.00 kB"), (12_345, "12.3 kB"), (999_499, "999 kB"),
     (999_500, "1.00 MB"), (131_000_000, "131 MB"), (2_500_000_000, "2.50 GB"), (5e15, "5,000 TB")],
)  # fmt: skip
def test_sizes(byte_count: float, text: str) -> None:
    assert size(byte_count) == text


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [(0, "shard", "0 shards"), (1, "shard", "1 shard"), (1200, "shard", "1,200 shards"), (1, "class", "1 class"),
     (2, "class", "2 classes")],
)  # fmt: skip
def test_counts(count: int, noun: str, text: str) -> None:
    assert plural(count, noun) == text


SAYS = "import sys; from beam_pipeline.errors import say; say('größe'); say('\\udcff', sys.stderr)"


@pytest.mark.parametrize(
    ("redirection", "output"),
    [("2>/dev/null", "größe\n"), ("| true", ""), (">/dev/full", "\\udcff\n"), (">&- 2>&-", "")],
)
def test_what_cannot_be_printed_fails_nothing(redirection: str, output: str) -> None:
    command = f'"{sys.executable}" -c "{SAYS}" {redirection}'
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=make.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0
    assert done.stdout.decode() in (output, "\\udcff\n" + output)


def test_who_reads_no_unicode_is_told_nevertheless() -> None:
    command = [sys.executable, "-c", SAYS]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=make.ROOT, env=environment, capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"gr\\xf6\\xdfe\n", b"\\udcff\n")
