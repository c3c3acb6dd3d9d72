"""Measures a sample of the images before the plan: record sizes for the planner, channel statistics for trainers.

Sums are integers, so that no order of addition and no CPU changes a digit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from typing import NamedTuple

from beam_pipeline import storage
from beam_pipeline.config import Config
from beam_pipeline.conversion.attempts import Attempts, sample_marker
from beam_pipeline.conversion.decoder import decoding
from beam_pipeline.conversion.fetch import convert_all, record_of
from beam_pipeline.conversion.versions import check_versions
from beam_pipeline.errors import ImageShardsError, Reject
from beam_pipeline.images import ChannelSums
from beam_pipeline.inputs.references import ImageRef
from beam_pipeline.schema import FRAME_BYTES, REJECTS_FILE
from beam_pipeline.schema.job import RejectLine, document_bytes
from beam_pipeline.schema.manifest import Statistics


class Measurement(NamedTuple):
    """One sampled image.

    Attributes:
        record_bytes: of its framed record, 0 for a reject.
        sums: of its stored pixels; None for a reject.
        reject: why there is no record, or None.
        cpu_s: what converting it took.
    """

    path: str
    split: str
    source_bytes: int
    record_bytes: int
    sums: ChannelSums | None
    reject: Reject | None
    cpu_s: float = 0.0


def measure(config: Config, class_count: int, refs: Iterable[ImageRef]) -> Iterator[Measurement]:
    """Convert some images as the writer will and measure the results.

    Args:
        config: of the job.
        class_count: number of classes, for the size of `one_hot_class`.
        refs: sampled references.

    Raises:
        ImageShardsError: this worker has other versions than the launcher.
    """
    check_versions(config)
    refs = list(refs)
    columns, one_hot_classes = config.columns, class_count if config.one_hot else 0

    def convert(ref: ImageRef, data: bytes, md5: bytes) -> tuple[int, ChannelSums | None]:
        image = decoder().convert(ref.path, data, md5)
        record = record_of(ref, image, 0, one_hot_classes, columns)
        return len(record) + FRAME_BYTES, image.sums

    marker = sample_marker(ref.path for ref in refs)
    with decoding(config, marker, with_sums=True) as decoder:
        for image in convert_all(config, refs, convert):
            ref, reject = image.ref, image.result if isinstance(image.result, Reject) else None
            record_bytes, sums = (0, None) if isinstance(image.result, Reject) else image.result
            yield Measurement(ref.path, ref.split, ref.source_bytes, record_bytes, sums, reject, image.cpu_s)
    Attempts(config).end(marker)


def statistics(sample: Iterable[Measurement]) -> Statistics:
    """Channel mean and standard deviation of the sampled train images (of all, if the sample holds none of train)."""
    measured = [(image.split, image.sums) for image in sample if image.sums is not None]
    chosen = [sums for split, sums in measured if split == "train"] or [sums for _, sums in measured]
    count = sum(sums.count for sums in chosen)
    means, deviations = [], []
    with localcontext(Context(prec=50)):  # more digits than sums have
        for channel in range(len(chosen[0].totals) if chosen else 0):
            total = sum(sums.totals[channel] for sums in chosen)
            squares = sum(sums.squares[channel] for sums in chosen)
            variance = Decimal(count * squares - total * total) / (count * count)
            means.append(_digits(Decimal(total) / (255 * count)))
            deviations.append(_digits(variance.sqrt() / 255))
    return Statistics(tuple(means), tuple(deviations), len(chosen))


def _digits(value: Decimal) -> str:
    return str(value.quantize(Decimal("0.000001")))


def cpu_s_per_image(sample: Sequence[Measurement]) -> float:
    """What converting an image takes; without the slowest one, since a process's first image loads the codec."""
    seconds = sorted(image.cpu_s for image in sample)
    kept = seconds[: max(1, len(seconds) - 1)]
    return sum(kept) / len(kept) if kept else 0.0


def check_sample(config: Config, sample: list[Measurement], images_listed: int) -> None:
    """Stop before the money is spent when the sample already shows too many rejects, which stay in the state's folder.

    Raises:
        ImageShardsError: more than the limit where everything was sampled, clearly more where it is a part.
    """
    rejected = sorted(
        (RejectLine(image.path, str(image.reject.reason), image.reject.detail) for image in sample if image.reject),
        key=lambda line: line.path,
    )
    everything = len(sample) >= images_listed
    limit = Fraction(str(config.max_reject_fraction)) * len(sample)  # in floats 0.29 of 100 is less than 29
    if len(rejected) <= (limit if everything else 3 + 3 * limit):
        return
    see = ""
    if not config.plan_only:
        url = storage.join(config.state_url, REJECTS_FILE)
        storage.open_storage(url, config.io_deadline).write(url, b"".join(map(document_bytes, rejected)))
        see = f"see imageshards rejects {config.dataset_url}, "
    first = rejected[0]
    raise ImageShardsError(
        f"{len(rejected)} of {len(sample)} {'images' if everything else 'sampled images'} rejected, "
        f"--max_reject_fraction is {config.max_reject_fraction:g}: the first is {first.path!r} ({first.reason}: "
        f"{first.detail}); {see}remove them or raise --max_reject_fraction"
    )
