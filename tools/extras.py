"""Installs the wheel with each set of extras into an environment of its own, and tries what README promises of it.

python -m tools.extras                  # all of them, as `make extras` does
python -m tools.extras reader,jax       # some
python -m tools.extras FILE reader,jax  # from this wheel or sdist, in place of a wheel of the checkout

Needs uv, which `make setup` puts into .venv; nothing of the checkout is on the path of what runs here. Prints a table
and exits with 1 if an environment can't be made or doesn't do what it should.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_FRAMEWORKS = ("apache_beam", "jax", "tensorflow", "torch")
_PHOTOS = "python -m beam_pipeline.sample_data photos --images 90 --classes 3"
_WRITE = (
    "imageshards write --input photos --output datasets --name photos --image_size 48 --splits train=0.7,validation=0.3"
)
_READ = """
import sys, imageshards
for images, labels in imageshards.train_batches("datasets/photos", "train", global_batch_size=16, image_size=32):
    assert images.shape == (16, 32, 32, 3) and images.dtype == "uint8" and labels.shape == (16,)
images, labels, weights = next(iter(imageshards.eval_batches("datasets/photos", "validation", global_batch_size=64)))
assert weights.sum() == imageshards.load_info("datasets/photos").splits["validation"].records
assert imageshards.records("datasets/photos", "train")[0]["image"].shape == (48, 48, 3)
print("batches")
"""
_NO_FRAMEWORK = _READ + f"assert not {{*sys.modules}} & {set(_FRAMEWORKS)}, 'a framework is imported'\n"
_TENSORFLOW = """
import imageshards
for images, labels in imageshards.train_dataset("datasets/photos", "train", global_batch_size=16):
    assert images.shape == (16, 48, 48, 3), images.shape
assert len(list(imageshards.record_dataset("datasets/photos/*/photos-validation.tfrecord-*")))
print("tf.data")
"""
_JAX = """
import imageshards, jax
mesh = jax.sharding.Mesh(jax.devices(), ("data",))
batches = imageshards.train_batches("datasets/photos", "train", global_batch_size=16)
for images, labels in imageshards.as_jax(batches, mesh):
    assert isinstance(images, jax.Array) and images.shape == (16, 48, 48, 3)
print("jax.Array")
"""
_TORCH = """
import imageshards, torch
batches = imageshards.train_batches("datasets/photos", "train", global_batch_size=16)
for images, labels in torch.utils.data.DataLoader(imageshards.as_torch(batches), batch_size=None):
    assert images.shape == (16, 3, 48, 48), images.shape
print("DataLoader")
"""
_HEIC = """
import pillow_heif
from pathlib import Path
from PIL import Image
Path("phone/x").mkdir(parents=True)
pillow_heif.from_pillow(Image.new("RGB", (64, 48), "red")).save("phone/x/1.heic")
print("drawn")
"""
_GRAIN = """
import grain, imageshards
source = imageshards.records("datasets/photos", "train")
assert next(iter(grain.MapDataset.source(source).shuffle(seed=1)))["image"].shape == (48, 48, 3)
print("Grain")
"""
_LOOK = (
    "imageshards verify datasets/photos",
    "imageshards show datasets/photos --out grid.png",
    "imageshards report datasets/photos --out report.html",
)
_TRAIN = (
    "imageshards train datasets/photos --epochs 1 --batch_size 16 --out run-{backend}",
    "imageshards evaluate run-{backend} datasets/photos",
    "imageshards predict run-{backend} photos/circle/circle_00000.jpg",
)


@dataclass(frozen=True)
class Environment:
    """What one set of extras is for.

    Attributes:
        extras: their names, separated by commas; "" for the package alone.
        does: commands, and programs of several lines, that must exit with 0 and print something.
        refuses: a command → words of the one line with which it must end.
        backend: of Keras.
    """

    extras: str
    does: Sequence[str]
    refuses: tuple[str, str] | None = None
    backend: str = ""


ENVIRONMENTS = (
    Environment("pipeline", ("imageshards --version", _PHOTOS, _WRITE)),  # writes what the others read
    Environment("", ("imageshards --version", "imageshards --help"), (_WRITE, "pip install 'imageshards[pipeline]'")),
    Environment("pipeline,heic", (_HEIC, "imageshards write --input phone --output datasets --name phone")),
    Environment(
        "reader",
        (_NO_FRAMEWORK, "imageshards info datasets/photos", *_LOOK),
        ("imageshards train datasets/photos", "pip install 'imageshards[train]'"),
    ),
    Environment("reader,tensorflow", (_READ, _TENSORFLOW)),
    Environment("reader,tpu", (_NO_FRAMEWORK,)),  # TensorFlow with libtpu ends with SIGABRT where there is no TPU
    Environment("reader,jax", (_READ, _JAX)),
    Environment("reader,torch", (_READ, _TORCH)),
    Environment("reader,examples", (_READ, _GRAIN)),
    Environment("reader,tensorflow,train", _TRAIN, backend="tensorflow"),
    Environment("reader,jax,train", _TRAIN, backend="jax"),
    Environment(  # README's, and the one that `make release` tries
        "pipeline,reader,tensorflow,train",
        (_PHOTOS, _WRITE + " --overwrite", *_LOOK, _READ, *_TRAIN),
        backend="tensorflow",
    ),
)


def main(arguments: Sequence[str]) -> int:
    """Try the named environments, or all, with the wheel or sdist that is named, or this checkout's; 1 if one fails."""
    files = [Path(name).resolve() for name in arguments if name.endswith((".whl", ".tar.gz"))]
    names = [name for name in arguments if not name.endswith((".whl", ".tar.gz"))]
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is None:
        print("error: there is no uv: make setup puts it into .venv", file=sys.stderr)
        return 2
    if unknown := {*names} - {one.extras for one in ENVIRONMENTS}:
        known = ", ".join(one.extras for one in ENVIRONMENTS if one.extras)
        print(f"error: no such set of extras: {', '.join(sorted(unknown))}; there are {known}", file=sys.stderr)
        return 2
    print("| environment | seconds to install | MB | seconds to try | result |\n|---|---|---|---|---|", flush=True)
    chosen = [one for one in ENVIRONMENTS if not names or one.extras in ("pipeline", *names)]
    rows = []
    with tempfile.TemporaryDirectory(prefix="imageshards-extras-") as folder:
        for package in files or [_built(Path(folder))]:
            for one in chosen:
                rows.append(_tried(one, uv, package, Path(folder)))
                print("| {} | {:.0f} | {:.0f} | {:.0f} | {} |".format(*rows[-1]), flush=True)
    return int(any(row[-1] != "passed" for row in rows))


def _built(folder: Path) -> Path:
    """The wheel of this checkout."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder / "dist", ROOT]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = (folder / "dist").glob("*.whl")
    return Path(wheel)


def _tried(one: Environment, uv: str, built: Path, folder: Path) -> tuple[str, float, float, float, str]:
    """A row of the table: environment, seconds to install, MB, seconds to try, result."""
    home, started = folder / "environment", time.monotonic()
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, home], check=True)
    package = f"imageshards[{one.extras}] @ {built.as_uri()}" if one.extras else f"imageshards @ {built.as_uri()}"
    command = [uv, "pip", "install", "--quiet", "--python", home, package, "--constraint", ROOT / "constraints.txt"]
    installed = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    ready = time.monotonic()
    size = sum(path.lstat().st_size for path in home.rglob("*")) / 1e6
    if installed.returncode:
        result = f"not installed: {' '.join(installed.stderr.split())[:200]}"
    else:
        result = _run(one, home / "bin", folder / "work")
    shutil.rmtree(home)
    return one.extras or "(none)", ready - started, size, time.monotonic() - ready, result


def _run(one: Environment, programs: Path, work: Path) -> str:
    """`passed`, or what failed; in a folder without a checkout."""
    work.mkdir(exist_ok=True)
    names = ("HOME", "TMPDIR", "LANG")
    environment = {name: os.environ[name] for name in names if name in os.environ}
    environment |= {"PATH": f"{programs}:/usr/bin:/bin", "TF_CPP_MIN_LOG_LEVEL": "2"}
    environment |= {"KERAS_BACKEND": one.backend} if one.backend else {}
    absent = [name for name in _FRAMEWORKS if name not in _brought(one)]
    found = f"from importlib.util import find_spec\nprint({{*filter(find_spec, {absent})}} or 'nothing else')"
    for text in (found, *one.does):
        done = _done(text.format(backend=one.backend) if text in _TRAIN else text, environment, work)
        if done.returncode or not done.stdout.strip() or (text is found and "nothing else" not in done.stdout):
            print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
            lines = (done.stderr or done.stdout).strip().splitlines() or ["nothing is printed"]
            return f"failed: {text.strip().splitlines()[0]}: {lines[-1]}"
    if one.refuses:
        text, words = one.refuses
        done = _done(text, environment, work)
        if not done.returncode or words not in done.stderr or "Traceback" in done.stderr:
            return f"failed: {text}: exit {done.returncode}, {done.stderr.strip()[-200:]!r}"
    return "passed"


def _brought(one: Environment) -> set[str]:
    """The frameworks that a set of extras may bring; Orbax, an example's, brings JAX."""
    brings = {"pipeline": "apache_beam", "examples": "jax", "tpu": "tensorflow"}
    return {brings.get(extra, extra) for extra in one.extras.split(",")}


def _done(text: str, environment: dict[str, str], work: Path) -> subprocess.CompletedProcess[str]:
    command = ["python", "-c", text] if "\n" in text else text.split()
    command[0] = shutil.which(command[0], path=environment["PATH"]) or command[0]
    return subprocess.run(command, env=environment, cwd=work, capture_output=True, text=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
