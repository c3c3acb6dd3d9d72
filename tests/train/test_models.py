"""The models: named as Keras names them, each with its own scaling, and refused before anything is downloaded."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from beam_pipeline.errors import ImageShardsError, UsageError
from reader.info import DatasetInfo, load_info
from reader.training.devices import Devices
from reader.training.models import Model, build, compile_for
from reader.training.options import TrainOptions, application_name, make_recipe
from tests import make
from tests.reading.shards import make_dataset

CPU = Devices("cpu", 1, "")
IMAGES = np.random.default_rng(1).integers(0, 256, (4, 32, 32, 3), np.uint8)


@pytest.fixture(scope="module")
def info(dataset: str) -> DatasetInfo:
    return load_info(dataset)


def built(info: DatasetInfo, model: str, **options: Any) -> Model:
    return build(
        info, make_recipe(info, TrainOptions(model=model, image_size=options.pop("image_size", 32), **options))
    )


def test_the_models_of_keras_are_named_in_any_spelling_and_scale_as_their_module_says() -> None:
    modules = [one for one in vars(keras.applications).values() if inspect.ismodule(one)]
    functions = {name: one for name, one in vars(keras.applications).items() if callable(one)}
    assert {"MobileNetV2", "MobileNetV3Small", "ConvNeXtTiny", "EfficientNetV2B0", "NASNetLarge"} <= functions.keys()
    scales = {getattr(one, "preprocess_input", None) for one in modules} - {None}
    for name, function in functions.items():
        assert application_name(name) == application_name(name.lower()) == name
        assert sys.modules[function.__module__].preprocess_input in scales, name
        assert "include_top" in inspect.signature(function).parameters
    assert {application_name(one) for one in ("mobilenet_v2", "mobilenet-v2", "MOBILENETV2")} == {"MobileNetV2"}


def test_a_typo_gets_the_nearest_name() -> None:
    for typo, hint in (("resnet51", r"did you mean ResNet50\?$"), ("qqq", "choose one of small_cnn, .*MobileNetV2, ")):
        with pytest.raises(UsageError, match=f"^--model '{typo}': {hint}"):
            application_name(typo)


@pytest.mark.parametrize(
    ("name", "scaled"),
    [
        ("MobileNetV2", lambda x: x / 127.5 - 1),
        ("ResNet50", lambda x: x[..., ::-1] - np.array([103.939, 116.779, 123.68])),
        ("DenseNet121", lambda x: (x / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]),
        ("EfficientNetV2B0", lambda x: x),
    ],
)
@pytest.mark.soak
def test_each_application_sees_images_scaled_as_its_weights_expect(info: DatasetInfo, name: str, scaled: Any) -> None:
    model = built(info, name)
    scale = keras.Model(model.full.inputs, model.full.get_layer(model.base.name)._inbound_nodes[0].arguments.args[0])
    assert np.allclose(scale.predict(IMAGES, verbose=0), scaled(IMAGES.astype(np.float64)), atol=1e-3)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["small_cnn", "MobileNetV2"])
def test_models_train_compiled_by_xla(info: DatasetInfo, name: str) -> None:
    recipe = make_recipe(info, TrainOptions(model=name, image_size=32, batch_size=4))
    model = build(info, recipe)
    compile_for(model, recipe.phases[0], recipe, CPU)
    model.full.jit_compile = True
    assert np.all(np.isfinite(model.full.train_on_batch(IMAGES, np.array([0, 1, 2, 0]))))


def test_only_adamw_decays_weights(info: DatasetInfo) -> None:
    for optimizer, decay in (("adam", None), ("adamw", 0.01), ("sgd", None)):
        recipe = make_recipe(info, TrainOptions(image_size=32, batch_size=4, optimizer=optimizer))
        compile_for(model := build(info, recipe), recipe.phases[0], recipe, CPU)
        assert model.full.optimizer.weight_decay == decay


def test_grey_images_are_shown_to_models_of_colours(tmp_path: Path) -> None:
    info = load_info(make_dataset(tmp_path / "1.0.0", {"train": [3]}, size=(32, 32), channels=1))
    for name in ("small_cnn", "MobileNet"):
        assert built(info, name).full(IMAGES[..., :1]).shape == (4, 3)


def test_weights_that_can_not_be_downloaded_are_one_line_with_the_cause(
    info: DatasetInfo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr(keras.config, "keras_home", lambda: str(tmp_path), raising=False)
    with pytest.raises(ImageShardsError, match="--weights imagenet: can't be downloaded: URL fetch failure on https"):
        built(info, "MobileNet", weights="imagenet", image_size=128)


@pytest.mark.soak
def test_fine_tuning_takes_the_copy_of_the_weights_that_keras_keeps_and_says_if_it_is_corrupt(
    dataset: str, tmp_path: Path
) -> None:
    kept = tmp_path / "models" / "mobilenet_v2_weights_tf_dim_ordering_tf_kernels_1.0_224_no_top.h5"
    kept.parent.mkdir()
    keras.applications.MobileNetV2(include_top=False, weights=None, input_shape=(32, 32, 3)).save(kept)

    def train(out: str) -> subprocess.CompletedProcess[str]:
        flags = ["--model", "MobileNetV2", "--weights", "imagenet", "--image_size", "32", "--epochs", "1"]
        command = [sys.executable, "-m", "reader", "train", dataset, *flags, "--out", str(tmp_path / out)]
        environment = {**os.environ, "KERAS_HOME": str(tmp_path)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    done = train("run")
    assert done.returncode == 0 and "\nfine-tuning: 1 epoch " in done.stdout + done.stderr, done.stderr
    assert (tmp_path / "run" / "model.keras").is_file()
    kept.write_bytes(kept.read_bytes()[:100_000])  # as a download leaves it that is killed
    done = train("other")
    error = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and error.startswith("error: --weights imagenet: can't be read: ")
    assert error.endswith("; if Keras' copy in ~/.keras/models is corrupt, delete it")


@pytest.fixture(scope="module")
def base_weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Weights of a MobileNetV2 without its head, as Keras ships them."""
    file = tmp_path_factory.mktemp("weights") / "base.weights.h5"
    keras.utils.set_random_seed(7)
    arguments: dict[str, Any] = {"include_top": False, "pooling": "avg", "input_shape": (32, 32, 3), "weights": None}
    keras.applications.MobileNetV2(**arguments).save_weights(file)
    return str(file)


@pytest.mark.soak
def test_transfer_trains_the_head_then_the_base_but_never_batch_normalization(
    info: DatasetInfo, base_weights: str
) -> None:
    options = TrainOptions(model="MobileNetV2", weights=base_weights, image_size=32, batch_size=4, learning_rate=10)
    recipe = make_recipe(info, options)
    model = build(info, recipe)
    head = model.full.layers[-1]
    moved = []
    for phase in recipe.phases:
        compile_for(model, phase, recipe, CPU)
        model.full.run_eagerly = True  # tracing takes seconds, and XLA compiles for half a minute
        before = [variable.numpy() for variable in (*model.base.variables, *head.variables)]
        model.full.fit(IMAGES, np.array([0, 1, 2, 0]), epochs=2, verbose=0)
        pairs = zip((*model.base.variables, *head.variables), before, strict=True)
        moved.append({variable.path for variable, was in pairs if not np.array_equal(variable.numpy(), was)})
    assert moved[0] == {variable.path for variable in head.variables}
    norms = {
        v.path for one in model.base.layers if isinstance(one, keras.layers.BatchNormalization) for v in one.variables
    }
    assert not moved[1] & norms
    assert any(variable.path in moved[1] for variable in model.base.variables)


@pytest.mark.parametrize(
    ("model", "weights", "message"),
    [
        ("InceptionV3", "imagenet", "--image_size 32: InceptionV3 can't take it: Input size must be at least 75x75"),
        ("small_cnn", "imagenet", "--weights imagenet: small_cnn has none"),
        ("MobileNet", None, "not of this model"),
        ("MobileNet", "nowhere.h5", "no such file; use none, imagenet or a file"),
        ("EfficientNetB0", None, "Keras builds EfficientNetB0 in another way for imagenet than for a file"),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_a_download(
    model: str, weights: str | None, message: str, info: DatasetInfo, base_weights: str
) -> None:
    with pytest.raises(UsageError, match=message):
        built(info, model, weights=weights or base_weights)


def test_weights_of_an_earlier_training_give_its_base_or_where_all_layers_start(
    info: DatasetInfo, tmp_path: Path
) -> None:
    other = load_info(make_dataset(tmp_path / "1.0.0", {"train": [3]}, size=(32, 32), classes=["a", "b"]))
    file = tmp_path / "model.keras"
    earlier = built(other, "MobileNet", seed=3, image_size=64)  # Keras names its base by the size
    earlier.full.save(file)
    assert all(
        map(np.array_equal, built(info, "MobileNet", weights=file).base.get_weights(), earlier.base.get_weights())
    )
    earlier = built(info, "small_cnn", seed=3)
    earlier.full.save(file)
    recipe = make_recipe(info, TrainOptions(weights=str(file), image_size=32))
    model = build(info, recipe)
    assert [phase.name for phase in recipe.phases] == ["training"] and model.base is None
    assert all(map(np.array_equal, model.full.get_weights(), earlier.full.get_weights()))


def test_a_model_of_the_user_s(info: DatasetInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "import keras\n"
        "def good(shape, classes):\n"
        "    return keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(classes)])\n"
        "def two(shape, classes):\n"
        "    inputs = keras.Input(shape)\n"
        "    outputs = [keras.layers.Dense(classes)(keras.layers.Flatten()(inputs)) for _ in range(2)]\n"
        "    return keras.Model(inputs, outputs)\n"
        "def raising(shape, classes):\n"
        "    raise RuntimeError('too small')\n"
        "def bad(shape, classes):\n"
        "    return keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(1)])\n"
    )
    (tmp_path / "broken.py").write_text("def")
    monkeypatch.chdir(tmp_path)
    assert built(info, "mine:good").full(IMAGES).shape == (4, 3)
    for name, message in (
        ("mine:bad", r"it returned a model of output \(None, 1\); return a Keras model"),
        ("mine:two", r"it returned Functional; return a Keras model"),
        ("mine:raising", r"for images \(32, 32, 3\) it raised RuntimeError: too small"),
        ("broken:model", "SyntaxError: .*; give package.module:function"),
        ("mine:none", "has no attribute 'none'; give package.module:function"),
        ("nowhere:model", "No module named 'nowhere'"),
    ):
        with pytest.raises(UsageError, match=message):
            built(info, name)


def test_batch_normalization_is_found_however_deep_it_is() -> None:
    inner = keras.Sequential([keras.layers.BatchNormalization()])
    Model(keras.Sequential([keras.layers.Flatten(), inner, keras.layers.Dense(3)]), None).synchronize(True)
    assert inner.layers[0].synchronized


def test_the_model_of_the_document_is_built(info: DatasetInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (make.ROOT / "docs/howto/train.md").read_text()
    (model,) = re.findall(r"```python\n(import keras\n.*?)```", page, re.DOTALL)
    (tmp_path / "my_models.py").write_text(model)
    monkeypatch.chdir(tmp_path)
    assert built(info, "my_models:wide", image_size=160).full.output_shape == (None, info.num_classes)
