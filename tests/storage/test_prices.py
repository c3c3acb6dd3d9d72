"""Prices come from a file, this package's or the user's, and a bad one is one line."""

import json
from pathlib import Path

import pytest

from beam_pipeline.errors import UsageError
from beam_pipeline.storage import prices
from beam_pipeline.storage.prices import Rates, load_prices

OWN = json.loads(Path(prices.__file__).with_name("prices.json").read_text())


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
    with pytest.raises(UsageError) as error:
        load_prices(str(file))
    assert says in str(error.value) and str(file) in str(error.value) and "\n" not in str(error.value)


def test_a_missing_file_is_one_line_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is missing"):
        load_prices(str(tmp_path / "none.json"))
