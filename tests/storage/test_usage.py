"""What storage counts, each attempt at a request once, and its prices: this package's or a file of the user."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from beam_pipeline.errors import UsageError
from beam_pipeline.storage import open_storage, usage
from beam_pipeline.storage.usage import Rates, Usage, load_prices
from tests.servers import Answer, telling


def test_what_is_tried_again_counts_again_and_local_files_are_no_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("beam_pipeline.storage.causes._FIRST_PAUSE_S", 0.01)
    usage.take()
    with telling(Answer(503), Answer(503), Answer(200)) as server:
        assert open_storage(f"{server.url}/x", 30).read(f"{server.url}/x") == b"content"
    open_storage(str(tmp_path)).write(f"{tmp_path}/a", b"12345")
    assert open_storage(str(tmp_path)).read(f"{tmp_path}/a") == b"12345"
    taken = usage.take()
    assert (taken.lists_and_writes, taken.reads, taken.bytes_read, taken.bytes_written) == (0, 3, 7 + 5, 5)


def test_pieces_of_work_add_up_and_a_forked_process_begins_from_nothing() -> None:
    usage.take()
    usage.count(reads=3)
    total = usage.take()
    if (child := os.fork()) == 0:
        os._exit(usage.take().reads)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    usage.count(reads=4, bytes_read=1)
    total.merge(usage.take())
    assert (total.reads, total.bytes_read) == (7, 1) and total.cpu_s >= 0
    assert usage.take().reads == 0 and Usage() == Usage()


# --- prices


OWN = json.loads(Path(usage.__file__).with_name("prices.json").read_text())


def test_each_price_has_an_address_and_a_date() -> None:
    for region in OWN["regions"]:
        rates = load_prices().at(region)
        for name in Rates.__struct_fields__:
            price = getattr(rates, name)
            assert price.dollars > 0 and price.address.startswith("https://") and len(price.date) == len("2026-11-24")
    assert load_prices().note == "list price, without discounts"


def test_a_region_without_prices_of_its_own_has_those_of_default() -> None:
    assert load_prices().at("mars-north1") == load_prices().at("default")


def test_a_file_of_the_user_replaces_the_prices(tmp_path: Path) -> None:
    mine = json.loads(json.dumps(OWN))
    mine["regions"]["europe-west4"] = {"class_b_per_1000": {"dollars": 0.001, "address": "our contract", "date": "x"}}
    (tmp_path / "prices.json").write_text(json.dumps(mine))
    loaded = load_prices(str(tmp_path / "prices.json"))
    assert loaded.at("europe-west4").requests(class_a=0, class_b=2000) == pytest.approx(0.002)
    assert loaded.at("europe-west4").class_a_per_1000 == load_prices().at().class_a_per_1000


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "truncated"),
        ('{"note": "", "regions": {}}', "it has no region 'default'"),
        ('{"note": "", "regions": {"default": {}}}', "dataflow_vcpu_hour"),
        (json.dumps(OWN).replace("0.056", '"0.056"'), "Expected `float`, got `str`"),
        (json.dumps(OWN).replace("0.056", "-1"), "dataflow_vcpu_hour of default isn't 0 or more"),
        (json.dumps(OWN).replace("dataflow_vcpu_hour", "vcpu_hour"), "unknown field `vcpu_hour`"),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=rf"^--prices '{file}': .*{re.escape(says)}.*$"):
        load_prices(str(file))
