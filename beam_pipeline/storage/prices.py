"""What a cloud charges, from prices.json: nothing is fetched, so each price has an address and a date.

It holds Google's list prices. Those of another cloud, or with your discounts, come from a file of the same format.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path

import msgspec

from beam_pipeline import storage
from beam_pipeline.errors import ImageShardsError, UsageError
from beam_pipeline.schema.job import UnitPrices, Usage
from beam_pipeline.text import one_line

_FILE = Path(__file__).with_name("prices.json")
_DEFAULT = "default"
_FIRST_CONTACT_S = 15.0


class Price(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One price.

    Attributes:
        dollars: for one unit, which the name of the field in `Rates` says.
        address: where it is written.
        date: when it was read there.
    """

    dollars: float
    address: str
    date: str


class Rates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All prices of one region: of Dataflow's batch workers, and of the store of images and shards.

    Attributes:
        class_a_per_1000: 1,000 requests that list or write.
        class_b_per_1000: 1,000 requests that read, or ask for an object's metadata.
    """

    dataflow_vcpu_hour: Price
    dataflow_memory_gb_hour: Price
    dataflow_disk_gb_hour: Price
    class_a_per_1000: Price
    class_b_per_1000: Price

    def requests(self, class_a: float, class_b: float) -> float:
        """Dollars for so many requests."""
        return (class_a * self.class_a_per_1000.dollars + class_b * self.class_b_per_1000.dollars) / 1000


class Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of prices.

    Attributes:
        note: what kind of prices they are, such as "list price, without discounts".
        regions: region → its prices by the names of `Rates`; what one leaves out is that of `default`, which has all.
    """

    note: str
    regions: dict[str, dict[str, Price]]

    def at(self, region: str = _DEFAULT) -> Rates:
        """The prices of a region; those of `default` if the file doesn't name it."""
        return msgspec.convert(self.regions[_DEFAULT] | self.regions.get(region, {}), Rates, from_attributes=True)


@functools.cache
def load_prices(file: str = "") -> Prices:
    """The prices of this package, or of a file in their place.

    Args:
        file: a path or URL; "" for the package's own.

    Raises:
        UsageError: it can't be read, or isn't a file of prices.
    """
    try:
        data = storage.open_storage(file, _FIRST_CONTACT_S).read(file) if file else _FILE.read_bytes()
        prices = msgspec.json.decode(data, type=Prices)
        for region in (_DEFAULT, *prices.regions):
            rates = prices.at(region)
            for name in Rates.__struct_fields__:
                if not 0 <= getattr(rates, name).dollars < math.inf:
                    raise ValueError(f"{name} of {region} isn't 0 or more")
        return prices
    except (ImageShardsError, ValueError, KeyError) as error:
        why = f"it has no region {error}" if isinstance(error, KeyError) else one_line(error)
        raise UsageError(f"--prices {file!r}: {why}; write it as beam_pipeline/storage/prices.json is") from None


def dollars(used: Usage, prices: UnitPrices) -> dict[str, float]:
    """Dollars by what they are for: requests, and on Dataflow cores, as if none were ever idle.

    Args:
        used: by a job.
        prices: of the job.
    """
    if not prices.note:
        return {}
    requests = used.lists_and_writes * prices.class_a_per_1000 + used.reads * prices.class_b_per_1000
    amounts = {"requests": requests / 1000}
    if prices.core_hour is not None:
        amounts["cores"] = used.cpu_s / 3600 * prices.core_hour
    return amounts
