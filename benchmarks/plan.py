"""The planner alone at scale: 10 million synthetic references in 1,000 bundles, cut into 1,000 shards.

    python benchmarks/plan.py [--references 10000000] [--bundles 1000] [--shards 1000]

Record sizes spread by 0.29 of their mean, as measured on real photos, and the planner sees only estimates: the mean of
a size class, as for every image outside the sample. Prints seconds, peak memory, and how far the real bytes of the
worst shard lie from the mean.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Iterator

import numpy as np

from beam_pipeline.inputs.references import order_key
from beam_pipeline.planning.plan import Histogram, SizeModel, plan_split

_MEAN_RECORD_BYTES = 13_000
_SPREAD = 0.29


def main() -> None:
    """Plan, then measure the plan against the real sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--references", type=int, default=10_000_000)
    parser.add_argument("--bundles", type=int, default=1_000)
    parser.add_argument("--shards", type=int, default=1_000)
    arguments = parser.parse_args()
    per_bundle = arguments.references // arguments.bundles
    model = SizeModel.learn(("", 110_000, int(size)) for size in record_sizes(-1, 512))

    start = time.perf_counter()
    total = Histogram(Histogram.shift_for(arguments.references))
    for bundle in range(arguments.bundles):
        part = Histogram(total.shift)
        for path, key in keys(bundle, per_bundle):
            part.add(key, model.estimate(path, 110_000))
        total.merge(part)
    plan = plan_split(total, arguments.shards)
    seconds = time.perf_counter() - start

    cuts = np.array(plan.cuts, np.uint64)
    shard_bytes = np.zeros(plan.shards)
    for bundle in range(arguments.bundles):
        places = np.fromiter((key for _, key in keys(bundle, per_bundle)), np.uint64, per_bundle)
        shards = np.searchsorted(cuts, places, side="right")
        shard_bytes += np.bincount(shards, weights=record_sizes(bundle, per_bundle), minlength=plan.shards)
    worst = np.abs(shard_bytes / shard_bytes.mean() - 1).max() * 100
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{plan.images:,} references in {arguments.bundles:,} bundles -> {plan.shards:,} shards: {seconds:.1f} s, "
        f"peak RSS {memory:.0f} MB, worst shard {worst:.2f} % from the mean, "
        f"std {shard_bytes.std() / shard_bytes.mean() * 100:.2f} %"
    )


def keys(bundle: int, count: int) -> Iterator[tuple[str, int]]:
    """(path, order key) of a bundle's references."""
    for number in range(count):
        path = f"class_{number % 1000:04d}/image_{bundle:06d}_{number:08d}.jpg"
        yield path, order_key(path, 0)


def record_sizes(bundle: int, count: int) -> np.ndarray:
    """Bytes of a bundle's records, always the same."""
    sizes = np.random.default_rng(bundle + 1).normal(_MEAN_RECORD_BYTES, _SPREAD * _MEAN_RECORD_BYTES, count)
    return np.maximum(sizes, 500)


if __name__ == "__main__":
    main()
