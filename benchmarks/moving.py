"""Runs the blocks of docs/howto/moving.md that need another library, and compares what they print with the page.

    benchmarks/peers_env.sh             # the other libraries, once
    python benchmarks/moving.py [PYTHON]

PYTHON is that environment's, build/peers/.venv/bin/python by default. The images are drawn; tests/test_moving.py runs
the other blocks.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "howto" / "moving.md"
PEERS = ROOT / "build" / "peers" / ".venv" / "bin" / "python"
LIBRARIES = {"torchvision", "webdataset", "streaming", "ffcv"}
IMAGES, SHARDS = 100, 4
_SIDE = 64  # of the images in WebDataset's tars


class Block(NamedTuple):
    """A block of Python of the page.

    Attributes:
        section: its heading.
        code: that runs.
        said: what it prints, as the comment at its end says.
        imports: top-level packages.
    """

    section: str
    code: str
    said: str
    imports: frozenset[str]


def blocks(page: Path = DOCUMENT) -> list[Block]:
    """The blocks of a page that say what they print, in order."""
    found = []
    for section in re.split(r"^## ", page.read_text(), flags=re.MULTILINE)[1:]:
        for text in re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL):
            if (parts := re.fullmatch(r"(.*?)((?:^# .*\n)+)", text, re.MULTILINE | re.DOTALL)) is None:
                continue
            code, said = parts.groups()
            imports = frozenset(re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE))
            found.append(Block(section.splitlines()[0], code, re.sub(r"^# ", "", said, flags=re.MULTILINE), imports))
    return found


def main() -> None:
    """Run those of other libraries; exits with 1 if one prints something else."""
    from beam_pipeline.sample_data import draw_folder

    python, faults = sys.argv[1] if len(sys.argv) > 1 else str(PEERS), 0
    with tempfile.TemporaryDirectory() as folder:
        draw_folder(Path(folder, "photos"), images=IMAGES, broken=0)
        subprocess.run([python, __file__, "--prepare"], cwd=folder, check=True)
        for block in blocks():
            if not block.imports & LIBRARIES:
                continue
            # A file, since worker processes may import it.
            Path(folder, "block.py").write_text(block.code)
            done = subprocess.run([python, "block.py"], cwd=folder, capture_output=True, text=True)
            is_same = done.stdout == block.said
            faults += not is_same
            print(f"{block.section}: {'as the page says' if is_same else done.stdout + done.stderr[-2000:]}")
    sys.exit(min(faults, 1))


# --- in the other environment: the files that the blocks read


def _photos() -> Iterator[tuple[Path, int]]:
    classes = sorted(path.name for path in Path("photos").iterdir())
    for path in sorted(Path("photos").rglob("*.*")):
        yield path, classes.index(path.parent.name)


def _jpeg(path: Path) -> bytes:
    out = io.BytesIO()
    Image.open(path).convert("RGB").resize((_SIDE, _SIDE)).save(out, "JPEG")
    return out.getvalue()


def write_tars() -> None:
    """WebDataset's shards."""
    Path("tars").mkdir()
    photos = list(_photos())
    for shard in range(SHARDS):
        with tarfile.open(f"tars/{shard:05d}.tar", "w") as tar:
            for path, label in photos[shard::SHARDS]:
                for suffix, content in (("jpg", _jpeg(path)), ("cls", str(label).encode())):
                    entry = tarfile.TarInfo(f"{path.stem}.{suffix}")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))


def write_mds() -> None:
    """MosaicML's shards."""
    from streaming import MDSWriter

    with MDSWriter(out="mds", columns={"image": "jpeg", "class": "int"}) as writer:
        for path, label in _photos():
            image: Any = Image.open(io.BytesIO(_jpeg(path)))
            writer.write({"image": image, "class": label})


def write_beton() -> None:
    """FFCV's file."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    images = [(Image.open(path).convert("RGB"), label) for path, label in _photos()]
    fields = {"image": RGBImageField(write_mode="jpg"), "label": IntField()}
    DatasetWriter("photos.beton", fields, num_workers=1).from_indexed_dataset(images)


if __name__ == "__main__":
    if sys.argv[1:] == ["--prepare"]:
        write_tars()
        write_mds()
        write_beton()
    else:
        main()
