"""Small inputs for tests, and what tests look at: pictures, class folders, folder contents, one job in this process."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import subprocess
import traceback
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from PIL import Image

from beam_pipeline import errors, schema
from beam_pipeline.config import Config
from beam_pipeline.schema.job import Plan
from beam_pipeline.schema.manifest import Statistics

ROOT = Path(__file__).resolve().parent.parent
# Legal names of files and objects.
ODD_NAMES = [
    *("plain.jpg", "a space.jpg", " leading and trailing .jpg", "trailing space ", "trailing dots..", "a..b.jpg"),
    *("hash#1.jpg", "generation.jpg#123", "percent%20.jpg", "slash%2F.jpg", "percent%.jpg", "plus+.jpg"),
    *("brackets[x].jpg", "[x]*", "star*.jpg", "question?.jpg", "curly{a,b}.jpg", "quote'\".jpg", "back\\slash.jpg"),
    *("semi;colon,comma&and=equals.jpg", "tilde~.jpg", "at@colon:.jpg", "日本語 🐈.jpg", "x" * 240 + ".jpg"),
    *("folder/with #/nested.jpg", "folder/trailing space /x.jpg"),
    *(unicodedata.normalize("NFC", name) for name in ("größe é 1.jpg", "twin é.jpg")),
    *(unicodedata.normalize("NFD", name) for name in ("größe é 2.jpg", "twin é.jpg")),
]
# obstore asks for none of these, or for another object.
REFUSED_BY_OBSTORE = [
    *("double//slash.jpg", "/leading slash.jpg", "dot/./in.jpg", "dots/../in.jpg", "a/b//c///d.jpg"),
    *("tab\t.jpg", "new\nline.jpg", "delete\x7f.jpg"),
]
ONLY_REMOTE = ["y" * 900 + ".jpg", *REFUSED_BY_OBSTORE[:5]]
TWO_SPLITS = ("--splits", "train=0.8,validation=0.2", "--num_shards", "2")


def parsed(arguments: Sequence[str]) -> tuple[Config, list[str]]:
    """What a command line says: our configuration, and the arguments for Beam."""
    from beam_pipeline.cli.main import beam_arguments, parse

    config, rest = parse(arguments)
    return config, beam_arguments(rest) if rest else []


def picture(width: int = 48, height: int = 36, seed: int = 0) -> Image.Image:
    """A smooth RGB picture without symmetry, of other colours for another seed."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture that doesn't compress: 3 bytes per pixel as PNG."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(image: Image.Image, format: str = "JPEG", **options: Any) -> bytes:
    """The bytes of an image file."""
    out = io.BytesIO()
    image.save(out, format, **({"quality": 95} if format == "JPEG" else {}) | options)
    return out.getvalue()


def class_folders(
    folder: Path, classes: Mapping[str, int], suffix: str = "jpg", size: tuple[int, int] = (48, 36)
) -> Path:
    """`folder/CLASS/0000.jpg` and so on, every picture another one; returns `folder`."""
    seed = 0
    for name, count in classes.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            seed += 1
            data = encoded(picture(*size, seed=seed), "PNG" if suffix == "png" else "JPEG")
            (folder / name / f"{number:04d}.{suffix}").write_bytes(data)
    return folder


def files(folder: Path) -> dict[str, bytes]:
    """Path below `folder` → content, of every file."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def put_files(folder: Path, contents: Mapping[str, bytes]) -> Path:
    """The opposite of `files`; a name that ends in a slash is a folder. Returns `folder`."""
    for name, data in contents.items():
        path = folder / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_bytes(data)
    return folder


def same_each_time(folder: Path) -> dict[str, bytes]:
    """`files` of a published version without run.json, which says how the run went."""
    return {name: data for name, data in files(folder).items() if name != schema.RUN_FILE}


def dataset_hash(folder: Path) -> str:
    """The hash of a dataset as the design defines it for `imageshards info --hash`."""
    total = hashlib.sha256()
    contents = {name.encode(): data for name, data in files(folder).items() if name not in schema.UNHASHED_FILES}
    for name in sorted(contents):
        total.update(name + b"\0" + str(len(contents[name])).encode() + b"\0" + contents[name])
    return total.hexdigest()


def traces(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Everything that shows a write below `folder`: size, time of change and inode of each file and folder."""
    found = {}
    for path in (folder, *folder.rglob("*")):
        stat = path.lstat()
        found[str(path)] = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
    return found


def manifest(version: Path) -> dict[str, Any]:
    """Content of a published version's manifest.json."""
    return dict(json.loads((version / schema.MANIFEST_FILE).read_bytes()))


def rejects(version: Path) -> list[dict[str, str]]:
    """Lines of a published version's rejects.jsonl."""
    return [json.loads(line) for line in (version / schema.REJECTS_FILE).read_text().splitlines()]


def shard_files(version: Path) -> list[Path]:
    """Every shard, in order of split and number."""
    return sorted(path for path in version.iterdir() if schema.ShardName.parse(path.name))


def flip_byte(path: Path, position: int | None = None) -> None:
    """Change one byte of a file and nothing else of it, its size and times included."""
    stat = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if position is None else position] ^= 0x10
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def told_by_worker(error: Exception) -> str:
    """A worker's traceback of an error of ours, as Beam sends it."""
    try:
        with errors.errors_as_tokens():
            raise error
    except errors.WorkerError:
        return traceback.format_exc().rstrip() + " [while running 'a/b-12']\n"


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Finished(NamedTuple):
    """What a command left: exit code, text on stdout and on stderr."""

    code: int
    out: str
    err: str


def done(*command: object, **more: Any) -> subprocess.CompletedProcess[str]:
    """A program that has run well."""
    finished = subprocess.run(list(map(str, command)), capture_output=True, text=True, **more)
    assert finished.returncode == 0, f"{command}\n{finished.stdout}\n{finished.stderr}"
    return finished


def run(*arguments: object) -> Finished:
    """`imageshards write ARGUMENTS`, in this process: the imports cost 3 s. Without the lines on progress in a log."""
    from beam_pipeline.cli import progress
    from beam_pipeline.cli.main import main as write_command

    out, err = io.StringIO(), io.StringIO()
    not_slow = mock.patch.object(progress, "LOG_LINE_EVERY_S", math.inf)  # however slow the machine is
    with not_slow, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = write_command([str(argument) for argument in arguments])
        except SystemExit as stop:  # argparse's --help
            code = int(stop.code or 0)
    return Finished(code, out.getvalue(), err.getvalue())


def job(input: object, output: object, *more: object) -> Finished:
    """Convert `input` into `output`/photos/1.0.0, with small pictures unless told otherwise."""
    return run("--input", input, "--output", output, "--name", "photos", "--image_size", "24", *more)


def published(input: object, output: Path, *more: object) -> Path:
    """As `job`, which must succeed; returns the version's folder."""
    finished = job(input, output, *more)
    assert finished.code == 0, finished.err
    return output / "photos" / "1.0.0"


def again(images: object, version: Path, *more: object) -> Finished:
    """The command that published `original`, or a copy of it, once more."""
    return job(images, version.parent.parent, *TWO_SPLITS, *more)


def before(monkeypatch: Any, owner: Any, method: str, act: Callable[..., object]) -> None:
    """From now on `act` is called with the positional arguments of each call of `owner.method`, ahead of it."""
    real = getattr(owner, method)

    def with_act(*arguments: Any, **more: Any) -> Any:
        act(*arguments)
        return real(*arguments, **more)

    monkeypatch.setattr(owner, method, with_act)


def plan_of(**parts: Any) -> Plan:
    """A plan of nothing, with these parts."""
    empty: dict[str, Any] = {"configuration": {}, "classes": (), "features": (), "splits": {}, "codec": {}}
    return Plan(**empty | {"statistics": Statistics((), (), 0), "inputs": ""} | parts)
