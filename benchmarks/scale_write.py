"""What a job's stages cost at 1, 10 and 30 million images: CPU seconds, memory and bytes of the real functions.

    python benchmarks/scale_write.py [--millions 1,10,30]

No image is converted and nothing is stored: the names of a listing are made up, in pages of 1,000, and so are sidecars,
of shards of 10,000 records. Each size runs in a process of its own, whose imports take 1 s and 100 MB. The last line of
each stage is a billion by the slope from the smallest size to the largest. Last, the plan of a billion images by flags
that want more and more shards, and how equal the shards of ten million are. docs/scale.md says what follows.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import msgspec
import numpy as np

from beam_pipeline.config import Config
from beam_pipeline.dataset.publish import metadata_files
from beam_pipeline.dataset.state import shard_names
from beam_pipeline.dataset.totals import DatasetTotals
from beam_pipeline.dataset.writer import ClaimedPlan
from beam_pipeline.inputs.folders import ListingSummary
from beam_pipeline.inputs.references import ref_maker
from beam_pipeline.pipeline.elements import PAGE_REFS, Page, PageCoder
from beam_pipeline.pipeline.shards import assign_shards
from beam_pipeline.planning.plan import BIN_BITS, EstimatedSizes, Histogram, SizeModel, plan_split
from beam_pipeline.schema import canonical_json, run_rows
from beam_pipeline.schema.job import Counts, Plan, ReferenceSum, Sidecar, read_document
from beam_pipeline.schema.manifest import FileSums, Shard, Statistics, seal_manifest

CONFIG = Config(input="gs://bucket/photos", output="gs://bucket/datasets", name="photos")
RECORDS, RECORD_BYTES, SOURCE_BYTES, CLASSES = 10_000, 13_000, 110_000, 1_000
BILLION = 1_000_000_000


def pages(images: int) -> Iterator[Page]:
    """References as a listing of gs:// gives them, in pages."""
    make = ref_maker(CONFIG)
    for start in range(0, images, PAGE_REFS):
        label = f"class_{start // PAGE_REFS % CLASSES:04d}"
        names = (f"{label}/image_{number:010d}.jpg" for number in range(start, start + PAGE_REFS))
        yield Page(make(name, SOURCE_BYTES, start.to_bytes(16, "big"), label, None) for name in names)


def list_images(images: int) -> dict[str, float]:
    """From names to encoded pages: what a worker does with a listing's answers."""
    coder, summary, encoded = PageCoder(), ListingSummary(), 0
    for page in pages(images):
        summary.add(page)
        encoded += len(coder.encode(page))
    return {"bytes": encoded}


def plan(images: int) -> dict[str, float]:
    """From encoded pages to the plan: decoded, estimated, cut."""
    coder, sizes = PageCoder(), EstimatedSizes()
    model = SizeModel.learn(("", SOURCE_BYTES, RECORD_BYTES) for _ in range(512))
    encoded = [coder.encode(page) for page in pages(200 * PAGE_REFS)]
    begun = time.process_time()
    for number in range(images // PAGE_REFS):
        page = coder.decode(encoded[number % len(encoded)])
        if number >= len(encoded):  # others than those before
            page = Page(
                ref._replace(order_key=(ref.order_key * 6364136223846793005 + number) % (1 << 64)) for ref in page
            )
        sizes.add(page, model, images)
    cut = plan_split(sizes.histograms["train"], images // RECORDS)
    document = canonical_json({"cuts": cut.cuts})
    return {"cpu_s": time.process_time() - begun, "bytes": len(document)}


def assign(images: int) -> dict[str, float]:
    """References to shards, and encoded again: what goes through the shuffle."""
    coder, encoded = PageCoder(), 0
    job = ClaimedPlan(_plan(images))
    some = list(pages(200 * PAGE_REFS))
    begun = time.process_time()
    for number in range(images // PAGE_REFS):
        for _, page in assign_shards((0, [some[number % len(some)]]), job):
            encoded += len(coder.encode(page))
    return {"cpu_s": time.process_time() - begun, "bytes": encoded}


def publish(images: int) -> dict[str, float]:
    """Sidecars to indexes and the manifest."""
    job = _plan(images)
    sizes = np.random.default_rng(0).integers(RECORD_BYTES // 2, RECORD_BYTES * 3 // 2, RECORDS).tolist()
    sums, listing = FileSums(1, 1, "0" * 64), ReferenceSum(RECORDS, 1)
    classes = dict.fromkeys(range(CLASSES), RECORDS // CLASSES)
    counts = Counts(RECORDS, RECORDS * SOURCE_BYTES, {}, classes, {"jpeg": RECORDS})
    counts.add_sizes((224, 224), (375, 500))
    totals = DatasetTotals(CONFIG, job)
    begun = time.process_time()
    for name in shard_names(CONFIG, job.splits):
        shard = Shard(name.file, RECORDS, sum(sizes), 1, RECORDS, listing.hex, listing.hex, sums)
        made = time.process_time()
        data = seal_manifest(Sidecar(job.sha256, shard, "", sums, tuple(run_rows(name.index, sizes)), counts, ()))
        begun += time.process_time() - made  # a worker that wrote the shard has made it
        sidecar = read_document(data, Sidecar)
        assert sidecar is not None
        totals.add(name, sidecar)
    totals.check()
    manifest = totals.manifest()
    small = totals.run_indexes() | metadata_files(manifest)
    sealed = seal_manifest(msgspec.structs.replace(manifest, files=dict.fromkeys(small, "0" * 64)))
    written = sum(map(len, small.values())) + len(sealed)
    return {"cpu_s": time.process_time() - begun, "bytes": written, "manifest": len(sealed), "sidecar": len(data)}


def _plan(images: int) -> Plan:
    sizes = EstimatedSizes()
    model = SizeModel({}, {SOURCE_BYTES.bit_length(): RECORD_BYTES})
    for page in pages(min(images, 300 * PAGE_REFS)):
        sizes.add(page, model, images)
    cut = msgspec.structs.replace(plan_split(sizes.histograms["train"], images // RECORDS), images=images)
    classes = tuple(f"class_{number:04d}" for number in range(CLASSES))
    return Plan(CONFIG.fingerprint(), classes, (), {"train": cut}, Statistics((), (), 0), "", {})


STAGES: dict[str, Callable[[int], dict[str, float]]] = {
    "listing": list_images, "planning": plan, "assigning": assign, "publishing": publish,
}  # fmt: skip


def main() -> None:
    """Print a table; with --stage, measure one stage in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", default="1,10,30")
    parser.add_argument("--stage", choices=STAGES)
    flags = parser.parse_args()
    millions = [float(one) for one in flags.millions.split(",")]
    if flags.stage:
        begun = time.process_time()
        found = STAGES[flags.stage](int(millions[0] * 1e6))
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"cpu_s": time.process_time() - begun, "peak_mb": peak_mb} | found))
        return
    print("| stage | million images | CPU s | peak MB | output |\n|---|---|---|---|---|")
    for stage in STAGES:
        rows = []
        for size in millions:
            command = [sys.executable, __file__, "--stage", stage, "--millions", str(size)]
            rows.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
            print(row(stage, f"{size:g}", rows[-1]), flush=True)
        ratio = (BILLION / 1e6 - millions[0]) / (millions[-1] - millions[0])
        print(row(stage, "a billion, by the slope",
                  {key: one + ratio * (rows[-1][key] - one) for key, one in rows[0].items()}), flush=True)  # fmt: skip
    print("\n| a billion images, shards wanted | planned | images in a shard |\n|---|---|---|")
    bins = Histogram(Histogram.shift_for(BILLION))
    counts = np.random.default_rng(0).multinomial(BILLION, [1 / (1 << BIN_BITS)] * (1 << BIN_BITS)).tolist()
    for number, count in enumerate(counts):
        bins.add(number << bins.shift, count * RECORD_BYTES, count)
    edges = np.array([number << bins.shift for number in range(1 << BIN_BITS)], np.float64)
    before = np.concatenate([[0], np.cumsum(counts)])
    for wanted in (10_000, 30_000, 50_000, 65_536, 100_000, 1_000_000):
        cut = plan_split(bins, wanted)
        where = np.interp([0.0, *map(float, cut.keys), 2.0**64], [*edges, 2.0**64], before)
        shards = np.diff(where)
        print(f"| {wanted:,} | {cut.shards:,} | {shards.min():,.0f} – {shards.max():,.0f} |", flush=True)
    print(f"\n10,000,000 images in 1,000 shards: the worst is {worst_shard(10_000_000, 1000):.2f} % from the mean")


def worst_shard(images: int, shards: int) -> float:
    """How far the shard that deviates most is from the mean, in percent of bytes.

    Record sizes spread by 0.29 of their mean, as measured on photos, and the planner sees only the mean, as of every
    image outside of the sample.
    """
    draw, bins = np.random.default_rng(0), Histogram(Histogram.shift_for(images))
    keys = draw.integers(0, 1 << 64, images, np.uint64)
    sizes = np.maximum(draw.normal(RECORD_BYTES, 0.29 * RECORD_BYTES, images), 500)
    for number, count in enumerate(np.bincount((keys >> np.uint64(bins.shift)).astype(np.int64)).tolist()):
        bins.add(number << bins.shift, count * RECORD_BYTES, count)
    cut = plan_split(bins, shards)
    found = np.bincount(np.searchsorted(np.array(cut.keys, np.uint64), keys, side="right"), sizes, cut.shards)
    return float(np.abs(found / found.mean() - 1).max() * 100)


def row(stage: str, size: str, found: dict[str, Any]) -> str:
    """A line of the table."""
    more = ", ".join(f"{key} {value / 1e6:,.2f} MB" for key, value in found.items() if key not in ("cpu_s", "peak_mb"))
    return f"| {stage} | {size} | {found['cpu_s']:,.1f} | {found['peak_mb']:,.0f} | {more} |"


if __name__ == "__main__":
    main()
