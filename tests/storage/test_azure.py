"""A job from az:// to az://: its listings, reads and conditional writes agree on what an object's etag is."""

from __future__ import annotations

from pathlib import Path

import reader
from tests import make
from tests.servers import Azure


def test_a_job_publishes_compares_repairs_and_overwrites_on_az(photos: Path, original: Path, az: Azure) -> None:
    bucket = az.new_bucket()
    for name, data in make.files(photos).items():
        az.put(bucket, f"in/{name}", data)
    command = (f"az://{bucket}/in", f"az://{bucket}/out", *make.TWO_SPLITS)
    url = f"az://{bucket}/out/photos/1.0.0"
    for flags, outcome in (((), "published"), ((), "already published"), (("--overwrite",), "published")):
        finished = make.job(*command, *flags)
        assert finished.out.startswith(f"{outcome} {url}"), finished.err
    info = reader.load_info(url)
    shard = make.shard_files(original)[0]
    info.storage.delete(f"{url}/{shard.name}")
    finished = make.job(*command)
    assert finished.out.startswith(f"repaired {url}"), finished.err
    for file in make.shard_files(original):
        assert info.storage.read(f"{url}/{file.name}") == file.read_bytes()
    assert not [file.path for file in info.storage.files(f"az://{bucket}/out") if "_state" in file.path]
