"""What a job will cost, by its plan, and what it has cost, by run.json: CPU time, bytes, requests, dollars."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from beam_pipeline import storage
from beam_pipeline.cli import dataflow
from beam_pipeline.cli.progress import duration
from beam_pipeline.config import Config
from beam_pipeline.schema.job import PlannedJob, Run, UnitPrices, Usage
from beam_pipeline.storage.usage import Price, Rates, dollars, load_prices
from beam_pipeline.text import plural, size_text

# CPU seconds besides decoding, measured by benchmarks/cost.py.
_CPU_S_PER_IMAGE = 0.1e-3
_CPU_S_PER_FETCH = 0.1e-3  # of a remote image
_CPU_S_PER_TAKEN_IMAGE = 0.05e-3  # of an image from the base
_CPU_S_PER_BYTE_READ = 1.7e-9  # with its MD5
_CPU_S_PER_SHARD = 0.03
_CPU_S_PER_JOB = 0.4
_OF_SAMPLE_CPU = 0.9  # the first images of a thread, as those of the sample, cost more than later ones
# Requests, counted on fake-gcs-server by benchmarks/cost.py.
_WRITES_PER_SHARD = 6  # a marker, rejected images, four files
_READS_PER_SHARD = 10  # of their metadata, and of the claim
_WRITES_PER_JOB = 14
_READS_PER_JOB = 8
_WRITES_PER_SAMPLE_PART, _SAMPLE_PART_IMAGES = 2, 32
_INPUT_LISTS = 2  # besides those of the listing
_BYTES_PER_RECORD = 77  # of indexes and record tables
_BYTES_PER_SHARD = 1800  # of its sidecar
_PIECE_BYTES = 8 << 20  # of a base's shard, as dataset/base.py reads it
HOW_TO_KNOW = "--plan_only lists the input, converts up to 512 images of it, and estimates what the job costs"
_GB_PER_CORE = {"highmem": 8.0, "highcpu": 1.0}  # others have 4


class Fleet(NamedTuple):
    """The machines that a job runs on.

    Attributes:
        where: their name in a sentence.
        cores: of all workers; 0 if unknown.
        workers, machine_type, disk_gb, region: on Dataflow, the most workers and what each is.
    """

    where: str
    cores: int = 0
    workers: int = 1
    machine_type: str = ""
    disk_gb: int = 0
    region: str = "default"


def dataflow_fleet(options: Mapping[str, Any]) -> Fleet:
    """The workers of a job on Dataflow, by Beam's options with their defaults."""
    workers, machine = options["max_num_workers"], options["machine_type"]
    where = f"up to {plural(workers, 'worker')} of {machine}"
    cores = workers * (dataflow.cores_of(machine) or 0)
    return Fleet(where, cores, workers, machine, options["disk_size_gb"], options["region"])


def prices_of(config: Config, fleet: Fleet) -> UnitPrices:
    """The prices of a job; without a note if none of them is known.

    Raises:
        UsageError: `--prices` names no file of prices.
    """
    prices = load_prices(config.prices)
    schemes = {storage.scheme_of(url) for url in (config.input, config.output)} - {None}
    if not config.prices and not fleet.machine_type and schemes != {"gs"}:
        return UnitPrices()
    rates, core_hour = prices.at(fleet.region), None
    addresses = [_source(rates.class_b_per_1000)]
    if fleet.machine_type and fleet.cores:
        gb = next((gb for kind, gb in _GB_PER_CORE.items() if kind in fleet.machine_type), 4.0)
        if custom := re.search(r"custom-(\d+)-(\d+)", fleet.machine_type):  # cores, megabytes
            gb = int(custom[2]) / 1024 / int(custom[1])
        disk_gb = fleet.disk_gb * fleet.workers / fleet.cores
        core_hour = round(_dataflow_dollars(rates, 1, gb, disk_gb), 6)
        addresses.append(_source(rates.dataflow_vcpu_hour))
    requests = rates.class_a_per_1000.dollars, rates.class_b_per_1000.dollars
    return UnitPrices(prices.note, tuple(addresses), *requests, core_hour)


def _source(price: Price) -> str:
    """`https://… of us-central1`: prices.json has one region's prices for all regions."""
    address, _, details = price.address.partition(" (")
    return f"{address} of {details.partition(',')[0]}" if details else address


def bill_text(config: Config, region: str, counts: Mapping[str, float]) -> str:
    """What a job on Dataflow has cost, without its requests.

    Args:
        config, region: of the job.
        counts: the service's counters: vCPU, megabyte and gigabyte-of-disk seconds.
    """
    prices = load_prices(config.prices)
    vcpu, memory_mb, disk = (
        counts.get(name, 0) / 3600 for name in ("TotalVcpuTime", "TotalMemoryUsage", "TotalPdUsage")
    )
    return f"${_dataflow_dollars(prices.at(region), vcpu, memory_mb / 1000, disk):,.2f} ({prices.note})"


def _dataflow_dollars(rates: Rates, vcpu_hours: float, memory_gb_hours: float, disk_gb_hours: float) -> float:
    return (
        vcpu_hours * rates.dataflow_vcpu_hour.dollars
        + memory_gb_hours * rates.dataflow_memory_gb_hour.dollars
        + disk_gb_hours * rates.dataflow_disk_gb_hour.dollars
    )


def estimate(config: Config, planned: PlannedJob) -> tuple[Usage, int]:
    """What a job will use, and how many of its images will be taken from the base; `planned` is by `--plan_only`."""
    plan, sample, base = planned.plan, planned.sample, planned.base
    images, shards, splits = plan.images, plan.shards, plan.splits.values()
    records_bytes = sum(split.estimated_bytes for split in splits)
    sampled = max(1, sample.images)
    taken = min(base.records, images * base.unchanged // sampled) if base else 0
    are_listed = base is not None and base.are_listed
    fetched = images - taken if are_listed else images
    read_bytes = planned.source_bytes * fetched // images

    used = Usage()
    used.merge(planned.listing)
    used.cpu_s += (
        _CPU_S_PER_JOB + shards * _CPU_S_PER_SHARD + images * _CPU_S_PER_IMAGE + taken * _CPU_S_PER_TAKEN_IMAGE
    )
    used.cpu_s += ((images - taken) * _OF_SAMPLE_CPU + sample.images) * planned.cpu_s
    only_hashed = 0 if are_listed else taken
    used.cpu_s += _CPU_S_PER_BYTE_READ * planned.source_bytes * only_hashed / images
    used.bytes_read += read_bytes + sample.source_bytes + shards * _BYTES_PER_SHARD
    used.bytes_written += records_bytes + images * _BYTES_PER_RECORD + shards * _BYTES_PER_SHARD
    requests = (fetched + sample.images) * sample.remote // sampled
    used.reads += requests
    used.cpu_s += requests * _CPU_S_PER_FETCH
    if not storage.is_local(config.input or config.manifest):
        used.lists_and_writes += _INPUT_LISTS
    pieces = 0
    if base:  # its shards, record tables and manifest
        pieces = records_bytes * taken // images // _PIECE_BYTES + 2 * shards + 2
        used.bytes_read += (records_bytes + images * _BYTES_PER_RECORD) * taken // images
    if not storage.is_local(config.output):
        parts = -(-sample.images // _SAMPLE_PART_IMAGES)
        used.lists_and_writes += (
            shards * _WRITES_PER_SHARD + parts * _WRITES_PER_SAMPLE_PART + _WRITES_PER_JOB + len(splits)
        )
        used.reads += shards * _READS_PER_SHARD + _READS_PER_JOB + pieces
    return used, taken


def estimate_text(config: Config, planned: PlannedJob, fleet: Fleet) -> str:
    """The estimate of `--plan_only`, in at most five lines."""
    used, taken = estimate(config, planned)
    prices = prices_of(config, fleet)
    hours = duration(used.cpu_s / max(1, fleet.cores))
    on = f": {hours} on {plural(fleet.cores, 'core')} of {fleet.where}" if fleet.cores else ""
    start = "; the workers' start and idle time come on top" if fleet.machine_type else ""
    sampled = planned.sample.images
    lines = [
        f"estimated cost, from {plural(sampled, 'sampled image')}:",
        f"{_cpu_text(used.cpu_s)}{on}{start}",
        *_bytes_and_dollars(used, prices, "reads", "writes"),
    ]
    if base := planned.base:
        without, _ = estimate(config, msgspec.structs.replace(planned, base=None))
        saved = _cpu_text(without.cpu_s - used.cpu_s)
        if without.reads > used.reads:
            saved += f" and {plural(without.reads - used.reads, 'request')}"
        share = f"{base.unchanged:,} of {sampled:,} in the sample are unchanged"
        lines.append(f"base {config.base}: about {plural(taken, 'image')} from it ({share}) save {saved}")
    return "\n  ".join(lines)


def spent_text(run: Run) -> list[str]:
    """The lines on cost in the summary of a published version; none if run.json has no figures."""
    if run.used == Usage():
        return []
    first, *more = _bytes_and_dollars(run.used, run.prices, "read", "wrote")
    return [f"{_cpu_text(run.used.cpu_s)}, {first}", *more]


def _dollar_text(amount: float) -> str:
    return f"${amount:,.2f}" if amount >= 1 else f"${amount:.4f}"


def _cpu_text(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} CPU-hours" if seconds >= 3600 else f"{seconds:,.1f} CPU-seconds"


def _bytes_and_dollars(used: Usage, prices: UnitPrices, reads: str, writes: str) -> list[str]:
    """Bytes and requests, and their price."""
    lines = [f"{reads} {size_text(used.bytes_read)}, {writes} {size_text(used.bytes_written)}"]
    if used.reads or used.lists_and_writes:
        lines[0] += f"; {plural(used.reads, 'request')} that read, {used.lists_and_writes:,} that list or write"
    if amounts := dollars(used, prices):
        text = " + ".join(f"{_dollar_text(amount)} for {what}" for what, amount in amounts.items())
        total = f"{_dollar_text(sum(amounts.values()))} = " if len(amounts) > 1 else ""
        lines.append(f"{total}{text}: {prices.note} ({', '.join(prices.addresses)})")
    return lines
