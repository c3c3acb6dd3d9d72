"""Writing throughput: the job against a bare two-thread loop over the same codec function.

    python benchmarks/write.py [IMAGES] [--count 3000] [--repeats 7]

IMAGES is a folder of class folders (drawn pictures without); its files are repeated by hard links up to the count. A
turn of the job is `beam_pipeline.run` from its call to its return, on FnApiRunner in memory, in a process that ran it
once before: Beam is imported. `write_peers.py` measures complete commands.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import turns
from turns import Case


def main() -> None:
    """Print a table."""
    import material

    flags = turns.parser(__doc__, 3000, 7).parse_args()
    with tempfile.TemporaryDirectory(prefix="imageshards-bench-") as scratch:
        images = str(material.images(flags.images, Path(scratch), flags.count))
        cases = {
            "bare": Case("write.bare", {"images": images}),
            "job": Case("write.job", {"images": images, "output": f"{scratch}/datasets"}),
        }
        print(turns.table(turns.in_turns(cases, flags.count, flags.repeats), ("bare",)))


def job(images: str, output: str, emulator: str = "", is_kept: bool = False, **flags: Any) -> turns.Reader:
    """The job, each time to an output of its own.

    Args:
        images: folder or URL.
        output: folder or URL.
        emulator: address of the server that gs:// means.
        is_kept: False removes what was written, after the turn.
        flags: fields of `Config`.
    """
    os.environ |= {"STORAGE_EMULATOR_HOST": emulator} if emulator else {}
    import apache_beam  # noqa: F401 - not part of the first turn

    import beam_pipeline
    from beam_pipeline import storage

    numbers = itertools.count()

    def write() -> Iterable[int]:
        root = f"{output}/{next(numbers)}"
        manifest = beam_pipeline.run(beam_pipeline.Config(input=images, output=root, name="bench", **flags))
        assert manifest is not None
        try:
            yield manifest.records
        finally:
            if not is_kept:
                store = storage.open_storage(root)
                for file in list(store.files(root)):
                    store.delete(storage.join(root, file.path))

    return write


def bare(images: str) -> turns.Reader:
    """The codec alone, in two threads."""
    import beam_pipeline
    from beam_pipeline.images import convert

    options = beam_pipeline.Config(input=images, output="/tmp", name="bench").image_options
    paths = [os.path.join(folder, name) for folder, _, names in os.walk(images) for name in names]

    def convert_file(path: str) -> int:
        with open(path, "rb") as file:
            return len(convert(file.read(), options).data)

    def write() -> Iterable[int]:
        with ThreadPoolExecutor(2) as pool:
            yield sum(size > 0 for size in pool.map(convert_file, paths))

    return write


if __name__ == "__main__":
    main()
