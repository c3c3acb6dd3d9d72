"""`python -m reader`: its help, its one-line errors, what it says where a package is missing, and `info`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from beam_pipeline import schema
from beam_pipeline.examples import int64_feature
from reader.commands import main
from reader.words import count, size, size_range
from tests.make import ROOT
from tests.reading.shards import make_dataset

VERBS = ("info", "verify", "show", "bench", "copy", "index", "train")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_dataset(tmp_path_factory.mktemp("commands") / "1.0.0", {"train": [70, 80], "validation": [1]})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "a verb is missing: choose one of info, verify, show, bench, copy, index, train; see --help"),
        (["inf"], "unknown verb 'inf': did you mean info?"),
        (["frobnicate"], "unknown verb 'frobnicate': see --help"),
        (["--json", "info", "x"], "'--json' stands where a verb is expected: python -m reader VERB … --json"),
        (["info"], "DATASET is missing; see --help"),
        (["index", "x*"], "--out is missing; see --help"),
        (["show", "x", "--width", "3"], "unknown flag '--width': see --help"),
        (["show", "x", "--splt=train"], "unknown flag '--splt': did you mean --split?"),
        (["info", "x", "y"], "unexpected argument 'y': every value belongs to a flag; see --help"),
        (["show", "x", "--seed", "x"], "--seed 'x': give a whole number"),
        (["show", "x", "--count", "0"], "--count '0': give a whole number from 1"),
        (["show", "x", "--count"], "--count lacks its value; see --help"),
        (["show", "x", "--terminal=yes"], "--terminal takes no value; see --help"),
        (["train", "x", "--out", "y", "--learning_rate", "nan"], "--learning_rate 'nan': give a number above 0"),
        (["train", "x", "--out", "y", "--model", "vgg"], "--model 'vgg': choose one of small_cnn, mobilenet_v2"),
        (["copy", "x", "y", "--files_at_once", "0"], "--files_at_once '0': give a whole number from 1"),
        (["bench", "x", "--storage_latency_ms", "-1"], "--storage_latency_ms '-1': give a number from 0"),
    ],
)
def test_bad_usage_is_one_line_with_the_value_and_the_fix(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"error: {message}\n")


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_sentences_an_example_and_exit_codes(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"example:\n  python -m reader {verb} " in text
    assert "\nexit codes: 0 " in text and "2 bad usage\n" in text
    assert "Print one JSON object." in text
    from reader.commands import _parser

    for action in _parser()[1][verb]._actions[1:]:
        assert action.help and action.help[0].isupper() and action.help.endswith("."), action.dest
        if action.option_strings and action.default not in (None, False):
            assert "(default: " in action.help, action.dest


BLOCKED = """
import sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None
import reader
from reader.commands import main
print([main(line.split()) for line in sys.argv[2:] if not line.startswith(".")])
for name in (line[1:] for line in sys.argv[2:] if line.startswith(".")):
    try:
        getattr(reader, name)
    except ModuleNotFoundError as error:
        print(name, error.name, error)
"""


def without(packages: str, *lines: str) -> subprocess.CompletedProcess[str]:
    """Run commands, and look for `.names` of `reader`, in a Python that lacks some packages."""
    program = [sys.executable, "-c", BLOCKED, packages, *lines]
    return subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_only_what_decodes_needs_pillow_or_tensorflow(folder: str, tmp_path: Path) -> None:
    done = without(
        "PIL,tensorflow,keras,torch,jax,matplotlib,fsspec,gcsfs",
        f"info {folder}",
        f"info {folder} --hash",
        f"verify {folder} --decode none",
        f"copy {folder} {tmp_path}/copy",
        f"verify {folder}",
        f"show {folder}",
        f"index {folder}/photos-train* --out {tmp_path}/index",
        f"train {folder} --out {tmp_path}/out",
        f"bench {folder}",
    )
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0, 2, 2, 2, 2, 2]", done.stderr
    pillow, tensorflow = (
        f"error: {name} is not installed: pip install '.[reader]'" for name in ("Pillow", "TensorFlow")
    )
    assert done.stderr.splitlines() == [pillow, pillow, pillow, tensorflow, tensorflow]


def test_the_package_says_what_is_missing(folder: str) -> None:
    functions = (".train_dataset", ".as_jax", ".torch", ".pillow", ".nothing")
    done = without("tensorflow,torch,PIL", *functions[:-1])
    tensorflow = "tensorflow TensorFlow is not installed: pip install '.[reader]'"
    assert done.stdout.splitlines()[1:] == [
        f"train_dataset {tensorflow}",
        f"as_jax {tensorflow}",
        "torch PIL Pillow is not installed: pip install '.[reader]'",
        "pillow PIL Pillow is not installed: pip install '.[reader]'",
    ], done.stderr
    done = without("torch", ".torch")
    assert done.stdout.splitlines()[1:] == ["torch torch PyTorch is not installed: pip install '.[torch]'"]


def test_another_missing_module_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reader.show", None)
    with pytest.raises(ModuleNotFoundError, match=r"reader\.show"):
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
    bytes_of = [size(path.stat().st_size).split() for path in sorted(Path(source).glob("photos-*"))]
    assert lines[4:6] == [
        f"train: 77 records in 2 shards of {bytes_of[1][0]} to {bytes_of[0][0]} kB",
        f"validation: 1 record in 1 shard of {' '.join(bytes_of[2])}",
    ]
    assert main(["index", f"{source}/photos-*", "--out", str(tmp_path / "index")]) == 0
    assert f"  this is an index: the shards lie in {source}\n" in capsys.readouterr().out


def test_no_hash_of_a_dataset_that_lacks_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(make_dataset(tmp_path / "1.0.0", {"train": [10, 10]}))
    assert main(["info", str(folder), "--hash", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["hash"]) == 64
    labels = folder / schema.LABELS_FILE
    kept = labels.read_bytes()
    labels.unlink()
    says_more = f"so there is no hash: python -m reader verify {folder} says more"
    assert main(["info", str(folder), "--hash"]) == 1
    assert capsys.readouterr() == ("", f"error: {labels} is missing, {says_more}\n")
    labels.write_bytes(kept)
    shard, other = sorted(folder.glob("photos-*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    other.unlink()
    assert main(["info", str(folder), "--hash"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(f"error: {shard} has ")
    assert captured.err.endswith(f" (and 1 more file), {says_more}\n")


def test_numbers_read_as_people_write_them() -> None:
    assert (count(1, "shard"), count(1200, "shard"), count(2, "class", "classes")) == (
        "1 shard",
        "1,200 shards",
        "2 classes",
    )
    sizes = (1, 999, 1000, 4200, 43_210, 999_499, 999_600, 131_000_000, 5 * 10**15)
    assert [size(number) for number in sizes] == [
        "1 byte",
        "999 bytes",
        "1.00 kB",
        "4.20 kB",
        "43.2 kB",
        "999 kB",
        "1.00 MB",
        "131 MB",
        "5,000 TB",
    ]
    assert size_range(4200, 4201) == "4.20 kB"
    assert size_range(4200, 131_000) == "4.20 to 131 kB"
    assert size_range(4200, 131_000_000) == "4.20 kB to 131 MB"
