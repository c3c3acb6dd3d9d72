"""What a process uses, CPU time, requests and bytes of object stores, and what a cloud charges for it.

Whoever finishes a piece of work takes what was used since the last call, by any thread: summed over all pieces and
processes it is what the job used, except attempts that failed.

Prices come from prices.json, which holds Google's list prices, each with its address and date: nothing is fetched.
Another cloud's, or with your discounts, come from a file of the same format.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from pathlib import Path

import msgspec

from beam_pipeline import storage
from beam_pipeline.errors import ImageShardsError, UsageError
from beam_pipeline.schema.job import UnitPrices, Usage
from beam_pipeline.text import one_line

_FILE = Path(__file__).with_name("prices.json")
_DEFAULT = "default"
_lock = threading.Lock()
_used, _process, _cpu_s = Usage(), os.getpid(), 0.0


def count(lists_and_writes: int = 0, reads: int = 0, bytes_read: int = 0, bytes_written: int = 0) -> None:
    """Add to what this process has used; from any thread."""
    with _lock:
        _used.lists_and_writes += lists_and_writes
        _used.reads += reads
        _used.bytes_read += bytes_read
        _used.bytes_written += bytes_written


def take() -> Usage:
    """What this process has used since the last call, or since it started; from any thread."""
    global _used, _process, _cpu_s
    with _lock:
        if _process != os.getpid():  # a forked one counts from zero
            _used, _process, _cpu_s = Usage(), os.getpid(), 0.0
        taken, _used = _used, Usage()
        now = time.process_time()
        taken.cpu_s, _cpu_s = now - _cpu_s, now
        return taken


# --- prices


class Price(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One price.

    Attributes:
        dollars: for one unit, which the field's name in `Rates` says.
        address: of the page that states it.
        date: when it was read.
    """

    dollars: float
    address: str
    date: str


class Rates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All prices of one region: of Dataflow's batch workers, and of an object store.

    Attributes:
        class_a_per_1000: 1,000 requests that list or write.
        class_b_per_1000: 1,000 requests that read data or metadata.
    """

    dataflow_vcpu_hour: Price
    dataflow_memory_gb_hour: Price
    dataflow_disk_gb_hour: Price
    class_a_per_1000: Price
    class_b_per_1000: Price

    def requests(self, class_a: float, class_b: float) -> float:
        """Dollars for these requests."""
        return (class_a * self.class_a_per_1000.dollars + class_b * self.class_b_per_1000.dollars) / 1000


class Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of prices.

    Attributes:
        note: the kind of prices, such as "list price, without discounts".
        regions: region → its prices by the names of `Rates`; a missing one is that of `default`, which has all.
    """

    note: str
    regions: dict[str, dict[str, Price]]

    def at(self, region: str = _DEFAULT) -> Rates:
        """The prices of a region; those of `default` if the file doesn't have it."""
        return msgspec.convert(self.regions[_DEFAULT] | self.regions.get(region, {}), Rates, from_attributes=True)


@functools.cache
def load_prices(file: str = "") -> Prices:
    """The prices in a file.

    Args:
        file: a path or URL; "" for this package's.

    Raises:
        UsageError: it can't be read, or isn't a file of prices.
    """
    try:
        data = storage.open_storage(file, storage.FIRST_CONTACT_S).read(file) if file else _FILE.read_bytes()
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
    """Dollars that a job costs for requests and, on Dataflow, for cores that are never idle."""
    if not prices.note:
        return {}
    requests = used.lists_and_writes * prices.class_a_per_1000 + used.reads * prices.class_b_per_1000
    amounts = {"requests": requests / 1000}
    if prices.core_hour is not None:
        amounts["cores"] = used.cpu_s / 3600 * prices.core_hour
    return amounts
