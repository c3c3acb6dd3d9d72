"""docs/howto/moving.md: blocks print what it says; old feature columns and new layers agree."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import imageshards
from beam_pipeline.sample_data import draw_folder
from benchmarks.moving import DOCUMENT, IMAGES, LIBRARIES, ROOT, Block, blocks
from tests.blocks import run as run_block

HERE = [block for block in blocks() if not block.imports & LIBRARIES]
COLUMNS_PAGE = ROOT / "docs" / "howto" / "columns.md"
(FEATURES,) = (block for block in blocks(COLUMNS_PAGE) if "feature_column" in block.code)
# Row of the table: name, the old call, the new one.
COLUMNS = re.findall(r"^\| ([\w, ]+) \| `(fc\..+)`<br>`(.+)` \|$", COLUMNS_PAGE.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the page says there is."""
    folder = tmp_path_factory.mktemp("moving")
    draw_folder(folder / "photos", images=IMAGES, broken=0)
    with contextlib.chdir(folder):
        (command,) = re.findall(r"^imageshards (write .*)$", DOCUMENT.read_text(), re.MULTILINE)
        assert imageshards.main(command.split()) == 0
        write_cities(folder)
        write_records(folder)
    return folder


def write_cities(folder: Path) -> None:
    """A dataset with columns, and the vocabulary of one of them."""
    (folder / "cities.txt").write_text("Lima\nOslo\n")
    lines = ["path,label,split,width_cm:float32,city,month:int64,lat:float32,long:float32"]
    rows = ("4,Lima,1,-12,-77", "12,Oslo,12,59.9,10.7", "20,Quito,6,-0.2,-78.5", "50,Tokyo,7,35.7,139.7")
    paths = sorted(path.relative_to("photos") for path in Path("photos").rglob("*.*"))
    lines += [f"{path},{path.parent},train,{row}" for path, row in zip(paths, rows, strict=False)]
    (folder / "cities.csv").write_text("\n".join(lines) + "\n")
    options = {"layout": "manifest", "manifest": "cities.csv", "input": "photos", "output": "datasets"}
    imageshards.write(imageshards.Config(name="cities", image_size=64, **options))


def write_records(folder: Path) -> None:
    """Files as a script of one's own leaves them."""
    tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed: pip install '.[tensorflow]'")
    (folder / "records").mkdir()
    photos = sorted(Path("photos").rglob("*.jp*g"))
    for shard in range(2):
        with tf.io.TFRecordWriter(f"records/train-{shard:05d}.tfrec") as writer:
            for path in photos[shard::2]:
                image = tf.train.Feature(bytes_list=tf.train.BytesList(value=[path.read_bytes()]))
                label = tf.train.Feature(int64_list=tf.train.Int64List(value=[len(path.parent.name)]))
                features = tf.train.Features(feature={"image": image, "label": label})
                writer.write(tf.train.Example(features=features).SerializeToString())


def run(block: Block, variables: dict[str, Any]) -> str:
    """What it prints."""
    for package in block.imports:
        pytest.importorskip(package)
    return run_block("python", block.code, f"{DOCUMENT} ({block.section})", variables)


@pytest.mark.parametrize("number", range(len(HERE)), ids=lambda number: f"{number}-{HERE[number].section[:12]}")
def test_a_block_prints_what_the_page_says(number: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert run(HERE[number], {"__name__": "block"}) == HERE[number].said


def test_both_sides_of_each_library_are_there_and_short() -> None:
    sections: dict[str, list[Block]] = {}
    for block in blocks():
        sections.setdefault(block.section, []).append(block)
        lines = [line for line in block.code.splitlines() if line.strip() and not re.match("from|import", line)]
        assert len(lines) <= (10 if "imageshards" in block.imports else 13), block
    for section, (before, *rest) in sections.items():
        assert "imageshards" not in before.imports and "imageshards" in rest[0].imports, section
        assert before.said.replace("float32", "uint8").endswith(rest[0].said)
    assert {*LIBRARIES, "keras", "tensorflow", "tensorflow_datasets"} <= frozenset.union(
        *(block.imports for block in blocks())
    )


@pytest.fixture(scope="module")
def inputs(folder: Path) -> dict[str, Any]:
    """Variables of the block above the table."""
    variables: dict[str, Any] = {"__name__": "block"}
    with contextlib.chdir(folder):
        run(FEATURES, variables)
    return variables


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("name", "before", "here"), COLUMNS, ids=[name for name, *_ in COLUMNS])
def test_an_old_column_and_its_layer_give_the_same_numbers(
    name: str, before: str, here: str, folder: Path, inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    old, new = values_before(before, inputs), np.asarray(eval(here, inputs))
    if name == "embedding":  # random weights
        assert new.shape == old.shape
    else:  # a lookup has one column more, the first one
        np.testing.assert_allclose(new[:, -old.shape[1] :], old)
        assert old.any()


def values_before(column: str, variables: dict[str, Any]) -> Any:
    """What a feature column makes of the batch: it needs a graph of TensorFlow 1."""
    tf = variables["tf"]
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        features = {key: tf.constant(value.numpy()) for key, value in variables["inputs"].items()}
        old = eval(column, variables)
        if re.match(r"fc\.(categorical|crossed)_", column):
            old = tf.feature_column.indicator_column(old)
        layer = v1.feature_column.input_layer(features, [old])
        session.run([v1.global_variables_initializer(), v1.tables_initializer()])
        return session.run(layer)


def test_the_table_has_every_kind_of_column() -> None:
    assert len(COLUMNS) == 10
    kinds = "numeric bucketized vocabulary_list vocabulary_file identity hash_bucket crossed embedding"
    assert [kind for kind in kinds.split() if not any(kind in before for _, before, _ in COLUMNS)] == []
