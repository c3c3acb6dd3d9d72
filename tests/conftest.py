"""What tests share: the repository on the path of child processes, a real GCS server, one folder of pictures."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import hypothesis
import pytest

from tests import make, servers

# Cores are shared: how long an example takes proves nothing.
slow_is_fine = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture]
hypothesis.settings.register_profile("imageshards", max_examples=50, deadline=None, suppress_health_check=slow_is_fine)
hypothesis.settings.load_profile("imageshards")

# For child processes, too: PyTorch's threads spin while they wait, and what JAX compiles here runs for milliseconds.
os.environ |= {"OMP_NUM_THREADS": "1", "XLA_FLAGS": "--xla_backend_optimization_level=0"} | dict(os.environ)

# What a shell begins in the background ignores Ctrl-C, and so would every command that is tested.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Files whose tests take long, each some in processes of their own: begun first, so that none is left for the end.
_SLOW_FILES = (
    *("test_keras.py", "test_continue.py", "test_scripts.py", "test_readme.py"),
    *("test_models.py", "test_decoder.py", "test_faults.py", "test_base.py", "test_run.py"),
    *("test_tutorial.py", "test_out.py", "test_recipes.py", "test_kill.py", "test_torch.py"),
    *("test_resume.py", "test_predict.py", "test_import_rules.py", "test_graph.py", "test_user_pipeline.py"),
    *("test_pixels.py", "test_tensorflow.py", "test_packaging.py", "test_golden.py", "test_duplicates.py"),
    *("test_why.py", "test_submit.py", "test_moving.py", "test_documents.py", "test_foreign.py", "test_engine.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files first; the rest as it is."""
    items.sort(
        key=lambda item: _SLOW_FILES.index(item.path.name) if item.path.name in _SLOW_FILES else len(_SLOW_FILES)
    )


@pytest.fixture(autouse=True, scope="session")
def _children_find_the_packages() -> Iterator[None]:
    """Worker processes import beam_pipeline also where it isn't installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(make.ROOT), prepend=os.pathsep)
        yield


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 40 good JPEGs in three classes, a part of one nested; not to be changed."""
    folder = make.class_folders(tmp_path_factory.mktemp("photos"), {"ant": 14, "bee": 13, "cat": 9})
    make.class_folders(folder / "cat", {"kittens": 4})
    return folder


@pytest.fixture(scope="session")
def original(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published version of `photos`; not to be changed."""
    return make.published(photos, tmp_path_factory.mktemp("original"), *make.TWO_SPLITS)


@pytest.fixture(scope="session")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So many pictures that the sample is a part of them: there is time to kill a job between its shards."""
    return make.class_folders(tmp_path_factory.mktemp("many"), {"ant": 300, "bee": 300}, size=(320, 240))


@pytest.fixture
def version(original: Path, tmp_path: Path) -> Path:
    """A copy of `original` to damage: `tmp_path`/out/photos/1.0.0."""
    return Path(shutil.copytree(original, tmp_path / "out" / "photos" / "1.0.0"))


@contextlib.contextmanager
def reached(variables: dict[str, str]) -> Iterator[None]:
    """This process and its children reach a storage by these variables from now on."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        forget_clients()
        yield
    forget_clients()


@pytest.fixture(scope="session")
def gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Gcs]:
    """The real fake-gcs-server, which gs:// URLs lead to."""
    if servers.fake_gcs_binary() is None:
        pytest.skip(servers.HOW_TO_ENABLE)
    log = tmp_path_factory.mktemp("gcs") / "requests.log"
    with servers.fake_gcs(log) as url, reached({"STORAGE_EMULATOR_HOST": url}):
        yield servers.Gcs(url, log)


S3_KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.S3]:
    """A server of S3's protocol, which s3:// URLs lead to."""
    log = tmp_path_factory.mktemp("s3") / "server.log"
    with servers.moto_s3(log) as server, reached({**S3_KEYS, "AWS_ENDPOINT_URL": server.url}):
        yield server


@pytest.fixture(scope="session")
def az(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Azure]:
    """Azurite, which az:// URLs lead to."""
    if shutil.which("azurite-blob") is None:
        pytest.skip(servers.HOW_TO_ENABLE_AZ)
    log = tmp_path_factory.mktemp("az") / "server.log"
    with servers.azurite(log) as server, reached(server.variables):
        yield server


def forget_clients() -> None:
    """A client keeps the address that it was made with."""
    from beam_pipeline import storage

    storage.storage_of.cache_clear()


@pytest.fixture(params=["local", "gs", "s3", "az"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> servers.Bucket:
    """An empty folder here and a bucket of each protocol in turn; `indirect` parameters name fewer of them."""

    if request.param == "local":
        folder = tmp_path / "bucket"
        return servers.Bucket(str(folder), lambda name, data: make.put_files(folder, {name: data}))
    server = request.getfixturevalue({"gs": "gcs"}.get(request.param, request.param))
    name = server.new_bucket()
    return servers.Bucket(f"{request.param}://{name}", partial(server.put, name))
