"""Members are found as tarfile and zipfile wrote them; corrupt archives give members or one line, never a hang."""

from __future__ import annotations

import io
import random
import tracemalloc
import zipfile
from collections.abc import Callable
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_pipeline.archives import tar
from beam_pipeline.archives import zip as zips
from beam_pipeline.archives.members import FOLDER, Member, Members
from beam_pipeline.errors import UsageError
from tests.archives import pack

Find = Callable[..., object]
NAMES = st.text(st.characters(exclude_characters="\0\\", exclude_categories=("Cs",)), min_size=1, max_size=300)
# Of no folder that another name has as a file.
PATHS = st.lists(NAMES.map(lambda name: name.replace("/", "_").strip(".") or "x"), min_size=1, max_size=3).map("/".join)
FILES = st.dictionaries(PATHS.map(lambda path: f"c/{path}.jpg"), st.binary(max_size=1500), max_size=5)


def of(find: Find, data: bytes) -> dict[str, bytes]:
    """The files that ours finds in an archive, where it finds them."""
    found = list(find(lambda start, stop: data[start:stop], len(data), "a"))  # type: ignore[call-overload]
    Members.of(iter(found), "a")
    return {member.name.decode(): data[member.start : member.stop] for member in found if member.method != FOLDER}


@given(FILES, st.sampled_from(["gnu", "pax"]))
def test_a_tar_has_the_files_that_were_put_in(files: dict[str, bytes], format: str) -> None:
    assert of(tar.members, pack.tarred(files, format)) == files


@given(FILES, st.sampled_from([b"", b"#!/bin/sh\n"]), st.sampled_from([zipfile.ZIP64_LIMIT, 0]))
def test_a_zip_has_the_files_that_were_put_in_and_says_of_them_what_zipfile_says(
    files: dict[str, bytes], before: bytes, limit: int
) -> None:
    with mock.patch.object(zipfile, "ZIP64_LIMIT", limit):  # above it, zip64
        data = pack.zipped(files, zipfile.ZIP_STORED, before)
    found = of(zips.members, data)
    assert found.keys() == files.keys()
    assert all(found[name].endswith(content) for name, content in files.items())
    infos = {info.filename: (info.file_size, info.CRC) for info in zipfile.ZipFile(io.BytesIO(data)).infolist()}
    members = zips.members(lambda start, stop: data[start:stop], len(data), "a")
    assert {member.name.decode(): (member.size, member.crc32) for member in members} == infos


def large() -> tuple[bytes, bytes]:
    files = {f"cat/{number}.jpg": bytes([number]) * (number * 37) for number in range(40)}
    return pack.tarred({**files, "cat/" + "long" * 60 + ".jpg": b"1", "ü.jpg": b"2"}, "pax"), pack.zipped(files)


def fuzz(rounds: int, seed: int) -> None:
    rng = random.Random(seed)
    for find, good in zip((tar.members, zips.members), large(), strict=True):
        for _ in range(rounds):
            data = bytearray(good)
            start = 0 if find is tar.members else good.index(b"PK\1\2")
            for _ in range(rng.randrange(1, 5)):
                at = rng.randrange(start, len(data))
                if find is tar.members and rng.random() < 0.9:
                    at = at // 512 * 512 + rng.choice((*range(124, 136), 156, *range(345, 350), 482))
                data[at] = rng.choice((0, 0x37, 0x80, 0xFF, rng.randrange(256)))
                if find is tar.members and rng.random() < 0.8:  # a valid sum
                    header = at // 512 * 512
                    block = bytes(data[header : header + 148]) + b" " * 8 + bytes(data[header + 156 : header + 512])
                    data[header + 148 : header + 156] = b"%06o\0 " % sum(block)
            corrupt = bytes(data[: rng.randrange(len(data))] if rng.random() < 0.2 else data)
            try:
                found: list[Member] = list(find(lambda start, stop, data=corrupt: data[start:stop], len(corrupt), "a"))
                Members.of(iter(found), "a")
            except UsageError as error:
                assert "\n" not in str(error)
            else:
                assert all(0 <= member.start <= member.stop <= len(corrupt) + (1 << 18) for member in found)


def test_corrupt_archives_are_members_or_one_line() -> None:
    tracemalloc.start()
    fuzz(200, seed=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 << 20


@pytest.mark.soak
def test_100_000_corrupt_archives_are_members_or_one_line() -> None:
    fuzz(50_000, seed=1)
