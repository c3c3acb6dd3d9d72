"""The commands that read: their help, one-line errors, what they say if a package is missing, and `info`."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import reader
from beam_pipeline import schema
from beam_pipeline.schema.example import int64_feature
from beam_pipeline.text import size_text
from imageshards import main
from reader.commands import parser
from reader.tools.describe import dataset_hash
from reader.tools.diff import KINDS, Difference
from reader.tools.verify import Fault
from tests import make
from tests.make import ROOT
from tests.reading.shards import make_dataset
from tests.reading.without import run_without

VERBS = (
    *("info", "verify", "rejects", "duplicates", "report", "diff", "show", "bench", "index"),
    *("train", "evaluate", "predict"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_dataset(tmp_path_factory.mktemp("commands") / "1.0.0", {"train": [70, 80], "validation": [1]})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info"], "the following arguments are required: DATASET; see --help"),
        (["index", "x*"], "the following arguments are required: --out; see --help"),
        (["index", "--out", "x"], "the following arguments are required: PATTERN; see --help"),
        (["show", "x", "--width", "3"], "unknown flag '--width': see --help"),
        (["show", "x", "-o", "y"], "unknown flag '-o': see --help"),
        (["show", "x", "--dataset", "y"], "unknown flag '--dataset': see --help"),
        (["show", "x", "--coun", "1"], "unknown flag '--coun': did you mean --count?"),
        (["verify", "x", "y"], "unknown argument 'y': see --help"),
        (["show", "x", "--seed", "x"], "--seed: invalid int value: 'x'; see --help"),
        (["show", "DATASET", "--count", "0"], "count must be at least 1, got 0"),
        (["show", "x", "--count"], "--count: expected one argument; see --help"),
        (["show", "x", "--count", "--seed", "1"], "--count: expected one argument; see --help"),
        (["show", "x", "--json=yes"], "--json: ignored explicit argument 'yes'; see --help"),
        (["bench", "DATASET", "--images", "0"], "images must be at least 1, got 0"),
        (["bench", "DATASET", "--latency_ms", "-1"], "latency_ms must be from 0 to 10,000, got -1"),
        (["bench", "DATASET", "--latency_ms", "nan"], "latency_ms must be from 0 to 10,000, got nan"),
        (["bench", "DATASET", "--against", "/nowhere"], "'/nowhere': no such file or folder, or it is empty"),
        (["train", "x", "--epochs", "few"], "--epochs 'few': give an integer from 1"),
        (["train"], "the following arguments are required: DATASET; see --help"),
        (["train", "x", "--preset", "finetune"], "unknown flag '--preset': see --help"),
        (["train", "x", "--config", "x.json"], "unknown flag '--config': see --help"),
        (["train", "x", "--optimizer", "lamb"], "--optimizer 'lamb': choose one of adam, adamw, sgd"),
        (["train", "x", "--device", "npu"], "--device 'npu': choose one of auto, tpu, gpu, cpu"),
        (["train", "x", "--out", "y", "--learning-rate", "nan"], "--learning_rate 'nan': give a number above 0"),
        (["train", "DATASET", "--out", "y", "--model", "vgg"], "--model 'vgg': did you mean VGG19?"),
    ],
)
def test_bad_usage_is_one_line_with_the_value_and_the_fix(
    arguments: list[str], message: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([folder if one == "DATASET" else one for one in arguments]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"error: {message}\n")


def test_flags_may_be_anywhere_with_dashes_or_an_equals_sign(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--count=2", "--json", folder], [folder, "--json", "--count", "2"]):
        assert main(["show", *arguments]) == 0
        assert len(json.loads(capsys.readouterr().out)["records"]) == 2


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_sentences_an_example_and_exit_codes(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    texts = set()
    for flag in ("--help", "-h"):
        assert main([verb, "x", flag]) == 0
        texts.add(capsys.readouterr().out)
    (text,) = texts
    assert text.startswith(f"usage: imageshards {verb} ")
    assert f"example:\n  imageshards {verb} " in text
    assert "\nexit codes: 0 " in text and "2 bad usage\n" in text
    assert ("a JSON object for each" if verb == "predict" else "Print one JSON object.") in text
    assert max(map(len, text.splitlines())) <= 120
    flags = re.findall(r"^  (--\w+)(?: [A-Z]+| \S+[|,]\S+)?\s+(.*?)(?=\n\n|\n  -)", text, re.MULTILINE | re.DOTALL)
    assert len(flags) == text.partition("\n\n")[0].count("--")
    for name, shown in flags:
        assert shown[0].isupper() and shown.endswith("."), (name, shown)


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in ("info", "train")])
def test_every_argument_of_the_function_is_a_flag_with_its_default(verb: str) -> None:
    values = vars(
        parser(verb).parse_args([*["x"] * (1 + (verb in ("evaluate", "predict"))), *["--out=x"] * (verb == "index")])
    )
    arguments = inspect.signature(getattr(reader, verb)).parameters
    assert arguments.keys() - values.keys() <= {"report"}, "of Python alone"
    for name in arguments.keys() & values.keys():
        assert values[name] == arguments[name].default or values[name] in ("x", ["x"])


LINES = "import sys; from imageshards import main; print([main(line.split()) for line in sys.argv[1:]])"


def test_only_training_needs_a_framework(folder: str, tmp_path: Path) -> None:
    done = run_without(
        "tensorflow,keras,torch,jax,matplotlib",
        LINES,
        tmp_path,
        f"info {folder} --hash",
        f"verify {folder}",
        f"show {folder} --out {tmp_path}/x.png",
        f"index {folder}/photos-train* --out {tmp_path}/index",
        f"bench {folder} --images 64 --repeats 1 --image-size 16",
        f"train {folder} --out {tmp_path}/out",
    )
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0, 0, 2]", done.stderr
    *runs, error = done.stderr.splitlines()
    assert error == "error: Keras is not installed: pip install 'imageshards[train]'"
    assert [run.partition(" s: ")[0] for run in runs] == ["about 1"]
    assert "PyTorch is not installed: pip install 'imageshards[torch]'\n" in done.stdout


@pytest.mark.soak
@pytest.mark.parametrize("verb", ["train", "bench"])
def test_nothing_prints_lines_of_tensorflow(folder: str, tmp_path: Path, verb: str) -> None:
    few = {
        "train": ["--out", str(tmp_path / "out"), "--epochs", "1", "--image_size", "16"],
        "bench": ["--images", "64", "--repeats", "1", "--image_size", "16"],
    }
    command = [sys.executable, "-m", "reader", verb, folder, *few[verb]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    ours = ("warning: ", "about ")
    assert (done.returncode, [line for line in done.stderr.splitlines() if not line.startswith(ours)]) == (0, [])


def test_another_missing_module_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reader.tools.show", None)
    with pytest.raises(ModuleNotFoundError, match=r"reader\.tools\.show"):
        main(["show", "x"])


def test_info_says_columns_sizes_and_where_an_index_finds_its_shards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = [
        ("width_cm", "int64", False, int64_feature, lambda number: (number,)),
        ("codes", "int64", True, int64_feature, lambda number: range(number % 3)),
    ]
    source = make_dataset(tmp_path / "1.0.0", {"train": [70, 7], "validation": [1]}, columns=columns)
    assert main(["info", source]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:4] == [
        "78 records of 78 images, 3 classes",
        "jpeg, 3 channels, 16x24 (height x width)",
        "columns: width_cm (int64), codes (list of int64)",
    ]
    bytes_of = [size_text(path.stat().st_size).split() for path in sorted(Path(source).glob("photos-*"))]
    assert lines[4:6] == [
        f"train: 77 records in 2 shards of {bytes_of[1][0]} kB to {bytes_of[0][0]} kB",
        f"validation: 1 record in 1 shard of {' '.join(bytes_of[2])}",
    ]
    assert main(["index", f"{source}/photos-*", "--out", str(tmp_path / "index")]) == 0
    assert f"  this is an index: the shards are in {source}\n" in capsys.readouterr().out


def test_the_hash_is_that_of_the_dataset_s_own_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Finder and an editor add files; `verify` and `write` call it the same dataset."""
    folder = Path(make_dataset(tmp_path / "1.0.0", {"train": [10, 10], "validation": [3]}))
    expected = make.dataset_hash(folder)
    for stray in (".DS_Store", "README.md", "index/.DS_Store", "notes/a.txt", "report.html", "Thumbs.db"):
        (folder / stray).parent.mkdir(exist_ok=True)
        (folder / stray).write_bytes(b"stray")
    assert main(["info", str(folder), "--hash"]) == 0
    assert capsys.readouterr().out == f"{expected}\n"
    assert make.dataset_hash(folder) != expected
    info = reader.load_info(folder)
    for file, data in make.files(folder).items():
        (folder / file).write_bytes(data + b" ")
        assert (dataset_hash(info) == expected) == (data == b"stray" or file in schema.UNHASHED_FILES), file
        (folder / file).write_bytes(data)


FORGED = "a/x\nOK: 3 records in 1 shard\ny.jpg"


@pytest.mark.parametrize(
    "text",
    [
        str(Fault(FORGED, 1, 2, "the CRC of the data is wrong")),
        str(Fault("a.jpg", 1, 2, f"label {FORGED}")),
        str(
            Difference("a", "b", dict.fromkeys(KINDS, 1), {kind: [FORGED] for kind in KINDS} | {"moved": [("a", "b")]})
        ),
        str(Difference("a", "b", dict.fromkeys(KINDS, 0), {kind: [] for kind in KINDS}, {FORGED: (1, 2)})),
    ],
)
def test_a_line_break_in_a_name_forges_no_line(text: str) -> None:
    assert "OK: 3 records" in text and not any(line.startswith(("OK", "y.jpg")) for line in text.splitlines())


def test_no_hash_of_a_dataset_that_lacks_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(make_dataset(tmp_path / "1.0.0", {"train": [10, 10]}))
    assert main(["info", str(folder), "--hash", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["hash"]) == 64
    labels = folder / schema.LABELS_FILE
    kept = labels.read_bytes()
    labels.unlink()
    fix = ": run the job again with --repair"
    assert main(["info", str(folder), "--hash"]) == 1
    assert capsys.readouterr() == ("", f"error: {labels} is missing{fix}\n")
    labels.write_bytes(kept)
    shard, other = sorted(folder.glob("photos-*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    other.unlink()
    assert main(["info", str(folder), "--hash"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(f"error: {shard} has ")
    assert captured.err.endswith(f" (and 1 more file){fix}\n")
