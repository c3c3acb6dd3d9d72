"""The package as a newcomer meets it: its names, its imports, and what it says of wrong arguments."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import beam_pipeline
import reader
from beam_pipeline.errors import ImageShardsError, NotPublishedError, UsageError
from beam_pipeline.schema.example import float_feature, int64_feature
from reader.features import warn_once
from tests.make import ROOT
from tests.reading.shards import draw, make_dataset
from tests.reading.test_commands import VERBS
from tests.reading.without import run_without

FRAMEWORKS = "tensorflow,jax,torch,keras,grain,apache_beam"


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> reader.DatasetInfo:
    folder = tmp_path_factory.mktemp("api") / "1.0.0"
    return reader.load_info(make_dataset(folder, {"train": [40, 23], "validation": [9]}))


def builders() -> list[Any]:
    """What reads a split, by the one size that it needs."""
    found: list[Any] = [reader.train_batches, reader.eval_batches]
    if importlib.util.find_spec("tensorflow"):
        found += [reader.train_dataset, reader.eval_dataset]
    return found


BUILDERS = pytest.mark.parametrize("build", builders(), ids=lambda build: build.__name__)


def test_the_version_is_the_distributions() -> None:
    assert reader.__version__ == beam_pipeline.__version__ == importlib.metadata.version("imageshards")
    with pytest.raises(AttributeError, match="module 'reader' has no attribute 'train_data'"):
        _ = reader.train_data


def test_everything_public_says_what_it_does() -> None:
    keras = dict.fromkeys(("train", "keras", "evaluate", "predict", "load_run"), "keras")
    needs = {**keras, "as_jax": "jax", "as_torch": "torch"}
    absent = {name for name, module in needs.items() if importlib.util.find_spec(module) is None}
    for name in {*reader.__all__} - {"__version__"} - absent:
        thing = getattr(reader, name)
        names = getattr(thing, "__all__", []) if inspect.ismodule(thing) else []
        for one in (thing, *(getattr(thing, inner) for inner in names)):
            doc = inspect.getdoc(one) or ""
            if not (inspect.isfunction(one) or inspect.isclass(one) or inspect.ismodule(one)):
                continue  # a type alias
            assert len(doc.split()) >= 5, one
            if inspect.isfunction(thing) and "as `" not in doc:
                assert all(argument in doc for argument in inspect.signature(thing).parameters), thing
            if inspect.isclass(one):
                methods = [method for key, method in vars(one).items() if key[0] != "_" and inspect.isfunction(method)]
                assert all(inspect.getdoc(method) for method in methods), one


PROGRAM = """
import pickle, sys
import reader
reader.train_batches, reader.eval_batches, reader.load_info, reader.augment.flip, reader.Position
info = reader.load_info(sys.argv[1])
batches = reader.train_batches(info, "train", global_batch_size=8, augment=reader.augment.flip_crop)
records = pickle.loads(pickle.dumps(reader.records(info, "train")))
print(sum(len(labels) for _, labels in batches), records[3]["image"].shape)
print(reader.decode(open(sys.argv[4], "rb").read(), sys.argv[3], image_size=16).shape)
print(sorted(set(sys.argv[2].split(",")) & set(sys.modules)))
for name in ("train_dataset", "as_jax", "as_torch", "record_dataset", "train"):
    try:
        getattr(reader, name)
    except ModuleNotFoundError as error:
        print(name, error)
"""


def test_reading_needs_no_framework_and_names_the_extra_that_brings_one(
    info: reader.DatasetInfo, original: Path, photos: Path, tmp_path: Path
) -> None:
    done = run_without(FRAMEWORKS, PROGRAM, tmp_path, info.url, FRAMEWORKS, original, photos / "ant" / "0000.jpg")
    assert done.stdout.splitlines() == [
        "56 (16, 24, 3)",
        "(16, 16, 3)",
        "[]",
        "train_dataset TensorFlow is not installed: pip install 'imageshards[tensorflow]'",
        "as_jax JAX is not installed: pip install 'imageshards[jax]'",
        "as_torch PyTorch is not installed: pip install 'imageshards[torch]'",
        "record_dataset TensorFlow is not installed: pip install 'imageshards[tensorflow]'",
        "train Keras is not installed: pip install 'imageshards[train]'",
    ]


def test_importing_the_package_loads_nothing_but_itself() -> None:
    program = f"""
import sys, reader
dir(reader), reader.__version__, repr(reader)
print(sorted(set("{FRAMEWORKS},numpy,PIL,simplejpeg,obstore,fsspec".split(",")) & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_a_verb_is_a_function_whatever_was_imported_before() -> None:
    """A package `reader.train` would hide the function of that name from whoever has imported a part of it."""
    import reader.commands
    import reader.training.options

    for name in ("decode", *({*VERBS} - {"info", "report"})):
        if name not in ("train", "evaluate", "predict") or importlib.util.find_spec("keras"):
            assert inspect.isfunction(getattr(reader, name)), name


@BUILDERS
def test_a_dataset_is_given_by_its_info_or_its_url_or_its_path(info: reader.DatasetInfo, build: Any) -> None:
    assert reader.load_info(info) is info
    for given in (info, info.url, Path(info.url), f"file://{info.url}", f"{info.url}/"):
        assert len(build(given, "train", global_batch_size=4)) in (15, 16)


def test_batches_are_shown_in_one_line(info: reader.DatasetInfo) -> None:
    name, size = f"{info.name} {info.version}", "images 16x24x3"
    train = reader.train_batches(info, "train[:50%]", global_batch_size=8, host=(1, 2), features=["filename"])
    assert repr(train) == f"TrainBatches({name} train[:50%], host 1 of 2: {len(train)} batches of 4 {size}, filename)"
    evals = reader.eval_batches(info, "train", global_batch_size=8)
    assert repr(evals) == f"EvalBatches({name} train: {len(evals)} batches of 8 {size})"


def test_a_result_is_shown_as_the_command_prints_it(info: reader.DatasetInfo) -> None:
    records = sum(split.records for split in info.splits.values())
    assert repr(reader.verify(info)) == f"OK: {records} records in 3 shards, all images decode"


NO_URLS: list[Any] = [None, 3, b"photos", ["photos"] * 1000, {}, "a\0b"]


@BUILDERS
def test_what_is_no_dataset_is_told_in_one_line(tmp_path: Path, build: Any) -> None:
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    (tmp_path / "photos" / "cat" / "a.jpg").write_bytes(draw(0, (8, 8)))
    for given, message in (
        (tmp_path / "photos", r"photos holds images, not a dataset: write one first: imageshards write --input"),
        (tmp_path / "photos" / "cat", r"cat holds images, not a dataset"),
        (tmp_path / "nowhere", r"nowhere holds no manifest\.json, so no dataset is published there"),
        *((given, r"^no dataset: .*: give its URL or path, or what .*\.load_info returns$") for given in NO_URLS),
        ("ftp://host/photos", r"^ftp://host/photos: no such storage; use a local path, gs://, s3:// or az://"),
    ):
        with pytest.raises((NotPublishedError, UsageError), match=message) as caught:
            build(given, "train", global_batch_size=4)
        assert "\n" not in str(caught.value)


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"split": "val"},
        r"there is no split 'val' \(did you mean 'validation'\?\): there are train \(63 records\), valid",
    ),
    ({"split": None}, r"split=None: write train, train\[:10%\]"),
    ({"size": 0}, "batch_size must be at least 1, got 0"),
    ({"size": 2.5}, r"batch_size must be an integer, got 2\.5"),
    ({"size": "8"}, "batch_size must be an integer, got '8'"),
    ({"features": "filename"}, r"features='filename': give a list, such as \['filename'\]"),
    ({"features": 3}, r"features=3: give a list of names"),
    ({"features": ["age"]}, r"features=\['age'\]: there is no 'age'; the records have class, label, size, filename"),
    ({"image_size": 0}, r"image_size must be a side or \(height, width\) in pixels, got 0"),
    ({"image_size": (1, 2, 3)}, r"image_size must be a side or .* got \(1, 2, 3\)"),
    ({"image_size": "224"}, r"image_size must be a side or .* got '224'"),
    ({"image_size": 8, "resize_mode": "shorter"}, r"resize_mode must be one of stretch, crop, pad, got 'shorter'"),
    ({"on_error": "ignore"}, r"on_error must be raise or skip, got 'ignore'"),
    ({"host": 3}, r"host must be \(index, count\) with 0 <= index < count, or 'auto', got 3"),
    ({"host": (0, 3)}, r"global_batch_size=4 can't be divided by 3 hosts; the nearest that fit: 3 or 6"),
    ({"labels": "float"}, r"labels must be int or one_hot, got 'float'"),
    ({"cache": "gs://bucket/x"}, r"cache='gs://bucket/x': give a local folder"),
    ({"seed": "a"}, "seed must be an integer, got 'a'"),
    ({"window_runs": 0}, "window_runs must be at least 1, got 0"),
    (
        {"augment": "flip"},
        r"augment='flip': give a function f\(image, seed\) of .*, such as imageshards\.augment\.f",
    ),
    ({"augment": lambda image: image}, r"augment=<lambda> doesn't take two arguments: give a function f\(image, seed"),
    (
        {"augment": reader.augment.random_resized_crop},
        r"augment=random_resized_crop: call it, augment=imageshards\.",
    ),
    ({"augment": reader.augment.random_resized_crop()}, r"random_resized_crop resizes its crops: give image_size"),
]


@BUILDERS
@pytest.mark.parametrize(("options", "message"), WRONG, ids=lambda value: str(value)[:30])
def test_a_wrong_argument_is_named_in_one_line(
    info: reader.DatasetInfo, build: Any, options: dict[str, Any], message: str
) -> None:
    options = dict(options)
    if not {*options} - {"size"} <= {*inspect.signature(build).parameters}:
        return  # it has no such argument
    split, size = options.pop("split", "train"), options.pop("size", 4)
    with pytest.raises(ValueError, match=message) as caught:
        build(info, split, global_batch_size=size, **options)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@BUILDERS
def test_an_argument_that_there_isnt_is_one_line_with_what_is_meant(info: reader.DatasetInfo, build: Any) -> None:
    for name, message in (
        ("batch_size", "give global_batch_size=, the records that all hosts together read in a step"),
        ("shuffle", "train_batches always shuffles, eval_batches reads in file order"),
        ("imagesize", "did you mean 'image_size'?"),
    ):
        with pytest.raises(UsageError) as caught:
            build(info, "train", **{name: 8})
        assert str(caught.value) == f"there is no argument {name}=: {message}"


def test_what_reads_a_dataset_calls_it_dataset() -> None:
    names = ["train_batches", "eval_batches", "records", "verify", "diff", "show", "bench", "duplicates", "decode"]
    names += ["train_dataset", "eval_dataset"] * bool(importlib.util.find_spec("tensorflow"))
    names += ["train", "evaluate"] * bool(importlib.util.find_spec("keras"))
    for name in names:
        parameters = [*inspect.signature(getattr(reader, name)).parameters]
        assert parameters.index("dataset") == (name in ("decode", "evaluate")), name


def test_train_takes_its_options_as_train_options(info: reader.DatasetInfo) -> None:
    pytest.importorskip("keras", reason="Keras is not installed: pip install 'imageshards[train]'")
    for given in ({"epochs": 1}, {}):
        with pytest.raises(UsageError) as caught:
            reader.train(info, given)  # type: ignore[arg-type]
        assert str(caught.value) == f"options={given}: give imageshards.TrainOptions(…)"


@pytest.mark.parametrize("adapter", ["as_tf", "as_jax", "as_torch"])
def test_an_adapter_is_given_batches(info: reader.DatasetInfo, adapter: str) -> None:
    pytest.importorskip({"as_tf": "tensorflow", "as_jax": "jax", "as_torch": "torch"}[adapter])
    mesh = [None] * (adapter == "as_jax")
    for given in (info, info.url, [1]):
        with pytest.raises(UsageError) as caught:
            getattr(reader, adapter)(given, *mesh)
        expected = f"imageshards.{adapter}({type(given).__name__}): give what train_batches or eval_batches returned"
        assert str(caught.value) == expected


@BUILDERS
def test_features_may_come_from_any_iterable(info: reader.DatasetInfo, build: Any) -> None:
    inputs, *_ = next(iter(build(info, "train", features=(name for name in ["size"]), global_batch_size=4)))
    assert list(inputs) == ["image", "size"] and np.asarray(inputs["size"]).tolist() == [[16, 24]] * 4


@pytest.mark.parametrize("build", [reader.train_batches, reader.eval_batches])
def test_one_of_several_processes_that_is_given_no_host_says_that_it_reads_all(
    info: reader.DatasetInfo, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, build: Any
) -> None:
    warn_once.cache_clear()
    everything = [build(info, "train", global_batch_size=6)]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    auto = build(info, "train", global_batch_size=6, host="auto")
    assert (auto.host, auto.hosts) == (1, 3) and not caplog.messages
    everything += [build(info, "train", global_batch_size=6) for _ in range(2)]
    assert {(one.host, one.hosts) for one in everything} == {(0, 1)}
    assert caplog.messages == ["no host= is given, so each of 3 processes reads every record: give host='auto'"]
    if importlib.util.find_spec("tensorflow"):
        with pytest.raises(UsageError, match=r"^no host= is given, so each of 3 processes would read every record: "):
            reader.as_tf(everything[0])
        assert len(reader.as_tf(build(info, "train", global_batch_size=6, host=(0, 1)))) == len(everything[0])


BOX_COLUMNS: Any = [
    ("bbox", "int64", True, int64_feature, lambda record: [record]),
    ("xmin", "float32", False, float_feature, lambda record: [1.0]),
    ("place", "float32", True, float_feature, lambda record: [0.1, 0.2, 0.3, 0.4] if record else []),
    ("three", "float32", True, float_feature, lambda record: [0.1, 0.2, 0.3]),
    ("mailbox", "int64", False, int64_feature, lambda record: [record]),
]


@pytest.mark.parametrize(
    ("moved", "build"),
    [
        *((False, build) for build in (reader.train_batches, reader.eval_batches, reader.records)),
        *((True, partial(build, image_size=8)) for build in (reader.train_batches, reader.eval_batches)),
        (True, partial(reader.records, image_size=8)),
        (False, partial(reader.records, image_size=8, decode=False)),
        (False, partial(reader.train_batches, image_size=(16, 24))),  # as they are stored
        (True, partial(reader.train_batches, augment=reader.augment.flip)),
    ],
)
def test_boxes_whose_pixels_are_moved_are_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, moved: bool, build: Any
) -> None:
    warn_once.cache_clear()
    url = make_dataset(tmp_path / "1.0.0", {"train": [12]}, columns=BOX_COLUMNS)
    columns = [name for name, *_ in BOX_COLUMNS]
    for _ in range(2):
        size = {"global_batch_size": 6} if "global_batch_size" in inspect.signature(build).parameters else {}
        assert [*build(url, "train", features=columns, **size)]
    warned = [line.partition(" looks like a box, but image_size= or augment= moves")[0] for line in caplog.messages]
    assert warned == ["'bbox'", "'xmin'", "'place'"] * moved


def test_several_datasets_are_said_not_to_be_mixed(info: reader.DatasetInfo) -> None:
    for given in ([info, info], (info.url, info.url), {info: 1}):
        with pytest.raises(UsageError, match=r"^no dataset: .* \(imageshards\.mix reads several\): give its URL"):
            reader.train_batches(given, "train", global_batch_size=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("door", ["train_batches", "train_dataset"])
def test_a_batch_larger_than_the_split_warns(
    info: reader.DatasetInfo, caplog: pytest.LogCaptureFixture, door: str
) -> None:
    if door == "train_dataset":
        pytest.importorskip("tensorflow", reason="TensorFlow is not installed: pip install 'imageshards[tensorflow]'")
    getattr(reader, door)(info, "train", global_batch_size=63)
    assert not caplog.text
    getattr(reader, door)(info, "train", global_batch_size=64)
    assert "global_batch_size=64 is larger than split 'train' (63 records): records repeat" in caplog.text


def test_mixed_sizes_and_gzip_say_what_to_do(tmp_path: Path) -> None:
    mixed = make_dataset(tmp_path / "mixed", {"train": [9]}, size_of=lambda number: (8, 8 + number))
    with pytest.raises(UsageError, match=r"mixed sizes \(8x8 to 8x16\), which make no batch: give image_size"):
        reader.train_batches(mixed, "train", global_batch_size=4)
    assert next(iter(reader.train_batches(mixed, "train", global_batch_size=4, image_size=6)))[0].shape == (4, 6, 6, 3)
    gzip = make_dataset(tmp_path / "gzip", {"train": [9]}, compression="gzip")
    with pytest.raises(ImageShardsError, match=r"is compressed with gzip.*imageshards\.record_dataset"):
        reader.eval_batches(gzip, "train", global_batch_size=4)
