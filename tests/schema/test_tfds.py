"""`features.json` as TFDS itself reads it; `dataset_info.json` is read in tests/test_round_trip.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from beam_pipeline.schema.manifest import Column
from beam_pipeline.schema.tfds import features_document

COLUMNS = [Column("age", "int64", False), Column("box", "float32", True), Column("note", "bytes", False)]


@pytest.mark.parametrize("shape", [(24, 32, 3), (None, None, 3), (24, 24, 1)])
@pytest.mark.parametrize("format", ["jpeg", "png"])
@pytest.mark.parametrize("one_hot", [False, True])
def test_tfds_reads_the_features(tmp_path: Path, shape: tuple, format: str, one_hot: bool) -> None:
    from tensorflow_datasets.core import features as tfds_features

    document = features_document(format, shape, 3, one_hot, COLUMNS)
    (tmp_path / "features.json").write_text(json.dumps(document))
    (tmp_path / "class.labels.txt").write_text("a\nb\nc\n")
    features = tfds_features.FeaturesDict.from_config(str(tmp_path))
    assert features["image"].shape == shape
    assert features["class"].names == ["a", "b", "c"]
    assert features["size"].shape == (2,)
    assert (features["age"].shape, features["box"].shape, features["note"].shape) == ((), (None,), ())
    assert (features["age"].np_dtype, features["box"].np_dtype) == ("int64", "float32")
    assert ("one_hot_class" in features) == one_hot
    if one_hot:
        assert (features["one_hot_class"].shape, features["one_hot_class"].np_dtype) == ((3,), "float32")
