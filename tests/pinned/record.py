"""Records the files that the writer writes for each of cases.json: samples.json of drawn images, photos.json of photos.

    python tests/pinned/record.py [PHOTOS]

The first `beam_pipeline` on PYTHONPATH is recorded. Only command lines are used, in this process because their imports
take 3 s. PHOTOS holds class folders; sizes and CRCs are all that is recorded of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import runpy
import sys
import tempfile
import zlib
from importlib import metadata, util
from pathlib import Path
from typing import Any
from unittest import mock

import google_crc32c
import PIL.features

FOLDER = Path(__file__).parent
# Name → flags of a job; `@` is the folder of `prepare`. "estimated": of more than 512 images, a sample is measured.
CASES: dict[str, str] = json.loads((FOLDER / "cases.json").read_text())


def run(module: str, *arguments: object) -> tuple[int, str]:
    """`python -m MODULE ARGUMENTS` in this process: its exit code and what it printed."""
    out, argv = io.StringIO(), mock.patch.object(sys, "argv", [module, *map(str, arguments)])
    try:
        with argv, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            runpy.run_module(module, run_name="__main__")
    except SystemExit as stop:
        return int(stop.code or 0), out.getvalue()
    raise AssertionError(f"{module} ended without an exit code")


def codecs() -> dict[str, str | None]:
    """Versions that decide bytes; pillow_heif is one of those that a repair asks for."""
    heif = metadata.version("pillow_heif") if util.find_spec("pillow_heif") else None
    jpeg = PIL.features.version("libjpeg_turbo")
    return {"pillow": PIL.__version__, "libjpeg_turbo": jpeg, "zlib": zlib.ZLIB_RUNTIME_VERSION, "pillow_heif": heif}


def prepare(folder: Path, photos: Path | None) -> str:
    """Make the inputs of CASES of `photos`, or of drawn images; returns a hash of their paths and contents."""
    images = photos or folder / "drawn"
    if not photos:
        assert run("beam_pipeline.sample_data", images, "--images", 90, "--classes", 4, "--broken", 3)[0] == 0
    files = sorted(path for path in images.rglob("*") if path.is_file() and not path.name.startswith("."))
    total, rows, table = hashlib.sha256(), [], []
    for number, file in enumerate(files):
        path, label, data = file.relative_to(images).as_posix(), file.parent.name, file.read_bytes()
        total.update(f"{path}\0{len(data)}\0".encode() + data)
        split = "validation" if number % 4 == 3 else "train"
        # A decomposed accent: hashed in normal form C, stored unchanged.
        many = [f"many/{label}/{copy}/e\u0301 #{file.name}" for copy in range(540 // len(files) + 1)]
        for target in (f"images/{path}", f"splits/{split}/{path}", *many):
            (folder / target).parent.mkdir(parents=True, exist_ok=True)
            (folder / target).write_bytes(data)
        md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
        row = {"path": path, "label": f"größe {label}", "bytes": len(data), "md5": md5, "text": f"ü {number}"}
        table.append([*row.values(), number, f"{number / 2};-1.5", split])
        rows.append({**row, "number:int64": number, "half:float32[]": [number / 2, -1.5]})
    (folder / "labels.txt").write_text("\n".join(["unused", *sorted({f.parent.name for f in files}, reverse=True)]))
    table.insert(0, [*rows[0], "split"])
    (folder / "rows.csv").write_text("".join(",".join(map(str, cells)) + "\n" for cells in table))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return total.hexdigest()


def published(case: str, folder: Path) -> dict[str, str]:
    """File of the version that a job of `case` publishes → its size and CRC-32C; all but those that may change."""
    output = folder / "datasets" / case
    flags = [flag.replace("@", str(folder)) for flag in CASES[case].split()]
    code, text = run("beam_pipeline", *flags, "--output", output, "--name", "pinned", "--max_reject_fraction", 0.7)
    assert code == 0, text
    version = output / "pinned" / "1.0.0"
    files = {path.relative_to(version).as_posix(): path for path in sorted(version.rglob("*")) if path.is_file()}
    contents = {name: file.read_bytes() for name, file in files.items() if name not in ("manifest.json", "run.json")}
    return {name: f"{len(data)} {google_crc32c.value(data):08x}" for name, data in contents.items()}


def shards_hash(cases: dict[str, dict[str, str]]) -> str:
    """A hash of all pins of shards."""
    pins = [f"{case}/{file} {pin}" for case, files in cases.items() for file, pin in files.items() if "/" not in file]
    return hashlib.sha256("\n".join(pin for pin in pins if ".tfrecord-" in pin).encode()).hexdigest()


def write_own_version(recorded: dict[str, Any]) -> None:
    """Note which bytes the number of our own code stands for; it is raised when they change for the same libraries."""
    from beam_pipeline.images.codec import OWN_VERSION

    file = FOLDER / "own_version.json"
    new = {"codecs": recorded["codecs"], "imageshards": OWN_VERSION, "shards": shards_hash(recorded["cases"])}
    old = json.loads(file.read_text()) if file.exists() else new
    is_ours = old["codecs"] == new["codecs"] and old["shards"] != new["shards"]
    if is_ours and int(OWN_VERSION) <= int(old["imageshards"]):
        sys.exit("shards have other bytes: raise OWN_VERSION in beam_pipeline/images/codec.py, then record again")
    file.write_text(json.dumps(new, indent=0) + "\n")


if __name__ == "__main__":
    name, photos = ("photos", Path(sys.argv[1])) if sys.argv[1:] else ("samples", None)
    with tempfile.TemporaryDirectory() as temporary:
        recorded: dict[str, Any] = {"codecs": codecs(), "inputs": prepare(Path(temporary), photos)}
        recorded["cases"] = {case: published(case, Path(temporary)) for case in CASES}
    if not photos:
        write_own_version(recorded)
    (FOLDER / f"{name}.json").write_text(json.dumps(recorded, indent=0) + "\n")
    print(f"{name}.json: {len(CASES)} cases, written by {sys.modules['beam_pipeline'].__file__}")
