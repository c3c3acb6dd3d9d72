"""`report`: what the page says of a dataset with planted faults, of odd names, and in a browser."""

from __future__ import annotations

import html
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import imageshards
from reader.tools.page import snippet
from reader.tools.report import Report, report
from tests import make
from tests.reading.test_near import photo

HOSTILE = ("<script>alert(1)<", '"onload="x', "a&b {{7*7}}", "ünïcødé 图")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
AXE = make.ROOT / "build" / "ci" / "npm" / "node_modules" / "axe-core" / "axe.min.js"


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A leak, a contradiction, a black picture, a rare class, a reject, hostile names; a second version of it."""
    folder = tmp_path_factory.mktemp("report")
    for number, name in enumerate(HOSTILE):
        for image in range(3 if number == 3 else 12):
            path = folder / "photos" / name / f"{image} '<img>.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            photo(100 * number + image, 120, 90).save(path, quality=90)
    first, second = (folder / "photos" / name for name in HOSTILE[:2])
    for copy in range(6):  # in both splits, with near certainty
        shutil.copy(first / "1 '<img>.jpg", first / f"leak {copy}.jpg")
    photo(2, 120, 90).save(second / "wrong.jpg", quality=70)
    (second / "text.jpg").write_text("no image")
    (first / "black.png").write_bytes(make.encoded(Image.new("RGB", (120, 90)), "PNG"))
    for version in ("1.0.0", "1.1.0"):
        flags = f"--output {folder}/datasets --name planted --image_size 64 --splits train=0.5,validation=0.5"
        more = ["--max_reject_fraction", "0.1", "--version", version]
        assert imageshards.main(["write", "--input", str(folder / "photos"), *flags.split(), *more]) == 0
        (first / "new.jpg").write_bytes(make.encoded(photo(999, 120, 90)))
    return folder / "datasets" / "planted"


@pytest.fixture(scope="module")
def made(planted: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, str]:
    out = tmp_path_factory.mktemp("page") / "page.html"
    return report(planted, out), out.read_text()


def test_every_planted_fault_is_on_the_page(made: tuple[Report, str]) -> None:
    found, page = made
    counts = {one.kind: one.count for one in found.findings}
    assert counts["leaks"] == 1 and counts["labels"] == 1 and counts["dark"] == 1 and counts["rejects"] == 1
    assert [line.split(" of ")[0] for line in found.faults] == ["1 group", "1 group"]
    for text in ("1 group of copies in several splits", "Dark pictures", "1 image added", "text (not_an_image)"):
        assert text in html.unescape(page) or text.split(" (")[0] in page, text
    leaks = next(one for one in found.findings if one.kind == "leaks")
    assert sum(line.keep is True for line in leaks.lines) == 1 and len(leaks.lines) == 7
    labels = next(one for one in found.findings if one.kind == "labels")
    assert all(line.keep is None for line in labels.lines)
    assert set(json.loads(json.dumps(found.as_json()))["pictures"][0]) > {"split", "record", "mean", "hash"}


def test_names_are_escaped_and_nothing_is_asked_from_elsewhere(made: tuple[Report, str]) -> None:
    _, page = made
    assert page.count("<script") == 1 and "alert(1)<" not in page.replace("&lt;script&gt;alert(1)&lt;", "")
    assert "{{7*7}}" in page and "49" not in re.findall(r"a&amp;b (.*?)<", page)
    assert re.findall(r"<[^>]*\b(?:src|href)=\"(?!data:|#)", page) == []
    assert "default-src 'none'" in page and len(page) < 400_000


def test_strict_is_for_a_check_before_a_training(
    planted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "report.html")
    assert imageshards.main(["report", str(planted), "--out", out]) == 0
    assert "leaks between splits: 1 group" in capsys.readouterr().out
    assert imageshards.main(["report", str(planted), "--out", out, "--strict", "--json"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["findings"]["leaks"]["count"] == 1
    assert printed.err.splitlines()[0] == "error: 1 group of copies in several splits"
    for number in range(24):
        path = tmp_path / "input" / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        photo(number, 120, 90).save(path)
    url = str(make.published(tmp_path / "input", tmp_path / "out", "--splits", "train=0.5,validation=0.5"))
    assert imageshards.main(["report", url, "--strict"]) == 0
    assert (Path(url) / "report.html").exists()
    assert imageshards.main(["verify", url]) == 0  # the page is no part of the version
    assert imageshards.main(["report", url, "--out", str(tmp_path)]) == 2


def test_an_index_gets_the_page(tmp_path: Path, planted: Path) -> None:
    indexed = imageshards.tools.index(str(planted / "1.0.0" / "*.tfrecord-*"), tmp_path / "index").info.url
    found = report(indexed, tmp_path / "page.html")
    assert next(one for one in found.findings if one.kind == "leaks").count == 1
    assert "This is an index" in (tmp_path / "page.html").read_text()


def test_lists_are_read_by_write(planted: Path, made: tuple[Report, str], tmp_path: Path) -> None:
    """What the page copies leaves the pictures out of the next version."""
    lists = re.findall(r"<textarea[^>]*>(.*?)</textarea>", made[1], re.DOTALL)
    lines = [json.loads(line) for text in lists for line in html.unescape(text).split("\n") if line]
    for line in lines:
        if line["path"].endswith("wrong.jpg"):
            line["keep"] = False
        elif "whose label" in line["reason"]:
            line["keep"] = True
    (tmp_path / "gone.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = (
        f"--output {planted.parent} --name planted --version 1.1.1 --image_size 64 --splits train=0.5,validation=0.5"
    )
    photos = ["--input", str(planted.parents[1] / "photos"), "--exclude", str(tmp_path / "gone.jsonl")]
    assert imageshards.main(["write", *photos, *flags.split()]) == 0
    cleaned = report(planted / "1.1.1", tmp_path / "page.html")
    assert cleaned.faults == [] and {one.kind for one in cleaned.findings if one.count} <= {"classes", "blurred"}


def test_a_leak_with_several_labels_is_shown_with_the_leaks_and_is_in_the_list_of_the_labels(tmp_path: Path) -> None:
    for seed, (split, label) in enumerate((("train", "ant"), ("train", "bee"), ("test", "bee"))):
        folder = tmp_path / "input" / split / label
        folder.mkdir(parents=True)
        for number in range(3):
            photo(100 * seed + 100 + number, 48, 36).save(folder / f"{number}.jpg")
        if folder.parts[-2:] != ("train", "bee"):
            photo(7, 48, 36).save(folder / "same.jpg")
    url = str(make.published(tmp_path / "input", tmp_path / "out", "--layout", "split_class_folders"))
    leaks, labels, *_ = report(url, tmp_path / "page.html").findings
    assert (leaks.count, len(leaks.groups), leaks.lines, leaks.listed) == (1, 1, [], 0)
    assert (labels.count, len(labels.lines)) == (1, 2)
    ids = re.findall(r' id="(.*?)"', (tmp_path / "page.html").read_text())
    assert len(ids) == len({*ids}) and "look-classes" in ids  # the heading of all classes has its own


def test_a_class_or_split_without_a_record_has_its_counts_and_no_picture_of_others(tmp_path: Path) -> None:
    """All images of the validation are rejected; nothing that is on the page in part says that more is left out."""
    for split, label in (("train", "ant"), ("train", "none"), ("validation", "ant")):
        (tmp_path / "input" / split / label).mkdir(parents=True)
    for number in range(6):
        photo(number, 48, 36).save(tmp_path / "input" / "train" / "ant" / f"{number}.jpg")
        (tmp_path / "input" / "validation" / "ant" / f"{number}.jpg").write_text("no image")
    flags = ["--layout", "split_class_folders", "--max_reject_fraction", "0.9"]
    url = str(make.published(tmp_path / "input", tmp_path / "out", *flags))
    found = report(url, tmp_path / "page.html")
    (classes,) = (one for one in found.findings if one.kind == "classes")
    titles = [group.title for group in classes.groups]
    assert titles == ["none · train 0, validation 0", "ant · train 6, validation 0"]
    page = (tmp_path / "page.html").read_text()
    assert re.findall(r"<dt>validation</dt><dd.*?>(.*?)<", page) == ["0"] and "more image" not in page
    assert len(re.findall(r"<td><img", page)) == 1  # of the table of classes
    assert found.faults == ["1 class without a record: none"]


def test_a_command_of_the_page_can_be_pasted_into_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reader.tools.page._LIST_BYTES", 100)
    folder = tmp_path / "input" / ("x" * 200)
    folder.mkdir(parents=True)
    for number in range(12):
        photo(number % 6, 48, 36).save(folder / f"{number}.jpg")
        Image.new("RGB", (9, 9 if number else 300)).save(folder / f"plain {number}.png")
    flags = ["--image_size", "64", "--splits", "train=0.5,test=0.5"]
    url = str(make.published(tmp_path / "input", tmp_path / "a $(b) 'c'", *flags))
    report(url, tmp_path / "page.html")
    commands = re.findall(r"<code>(imageshards (?:report|duplicates).*?)</code>", (tmp_path / "page.html").read_text())
    assert len(commands) > 2
    for command in commands:
        assert shlex.split(html.unescape(command))[2] == url, command


@pytest.mark.parametrize("images", [1, 3])
def test_a_dataset_of_one_class_gets_the_page(images: int, tmp_path: Path) -> None:
    (tmp_path / "input" / "ant").mkdir(parents=True)
    for number in range(images):
        photo(number, 48, 36).save(tmp_path / "input" / "ant" / f"{number}.jpg")
    url = str(make.published(tmp_path / "input", tmp_path / "out", "--splits", "train=1"))
    found = report(url, tmp_path / "page.html")
    assert found.faults == [] and [one.kind for one in found.findings if one.count] == []
    assert "No earlier version" in (tmp_path / "page.html").read_text()


@pytest.mark.soak
def test_the_program_of_the_page_loads_the_dataset_in_four_frameworks(planted: Path) -> None:
    _, jax, _, keras = map(pytest.importorskip, ("tensorflow", "jax", "torch", "keras"))
    model = keras.Sequential([keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(len(HOSTILE))])
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    names = {"mesh": jax.sharding.Mesh(jax.devices()[:1], ("data",)), "model": model}
    exec(snippet(imageshards.load_info(planted / "1.0.0")), names)
    for loaded in ("dataset", "arrays", "loader"):
        images, _ = next(iter(names[loaded]))
        assert images.shape[0] > 1 and type(images).__module__.split(".")[0] in ("tensorflow", "jaxlib", "torch")


# --- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.mark.soak
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "light"), (1280, "dark")])
def test_the_page_in_a_browser(width: int, scheme: str, made: tuple[Report, str], browser: Any, tmp_path: Path) -> None:
    found, page = made
    (tmp_path / "page.html").write_text(page)
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab, printed, asked = context.new_page(), [], []
    tab.on("console", lambda message: printed.append(message.text))
    tab.on("pageerror", lambda error: printed.append(str(error)))
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto((tmp_path / "page.html").as_uri())
    for one in found.findings:
        if one.count:
            assert f"{one.count:,} " in tab.locator(f"#section-{one.kind} .count").inner_text()
    assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth")

    name, body = tab.locator("#table thead th.name button"), "#table tbody tr th"
    tab.keyboard.press("Tab")
    name.focus()
    tab.keyboard.press("Enter")
    ascending = tab.locator(body).all_inner_texts()
    tab.keyboard.press("Enter")
    assert tab.locator(body).all_inner_texts() == ascending[::-1] and len(ascending) == len(HOSTILE)
    assert tab.locator("#table thead th.name").get_attribute("aria-sort") == "descending"

    tab.locator("#section-leaks button").click()
    tab.locator("#section-leaks output", has_text="save it as exclude.jsonl").wait_for()  # the clipboard answers later
    leaks = next(one for one in found.findings if one.kind == "leaks")
    assert len(tab.evaluate("navigator.clipboard.readText()").splitlines()) == len(leaks.lines)

    axe = Path(os.environ.get("AXE", AXE))
    if axe.exists():
        tab.evaluate(axe.read_text())
        faults = tab.evaluate("axe.run().then(found => found.violations)")
        serious = [fault for fault in faults if fault["impact"] in ("serious", "critical")]
        assert [(fault["id"], [node["html"][:200] for node in fault["nodes"]]) for fault in serious] == []
    assert printed == [] and all(url.startswith(("file:", "data:")) for url in asked)
    if not axe.exists():
        pytest.skip("axe-core isn't there: npm install axe-core, and AXE=…/axe.min.js")
