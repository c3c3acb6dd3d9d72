"""What `bench` found, as a table, as JSON and as a chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reader.bench.breakdown import Advice, Part
from reader.bench.measure import Rate, ratio

_OURS, _OTHERS, _CEILING = "tab:blue", "tab:gray", "tab:orange"
_PARTS = ("tab:olive", "tab:cyan", "tab:purple", "tab:pink", "tab:brown")


@dataclass(frozen=True, slots=True)
class Row:
    """One way to read, and its ceiling where it decodes."""

    name: str
    rate: Rate
    ceiling: Rate | None


_COLUMNS = (
    "CPU s/1,000: CPU seconds of the whole process for 1,000 images; of its ceiling: as a share of the rate of the "
    "same decoding, resizing and augmentation alone, on bytes in memory, by wall clock and by CPU time"
)


def table(rows: Sequence[Row]) -> str:
    """Lines of text, a way to read each, and one that explains the columns."""
    width = max(len(row.name) for row in rows)
    lines = [f"{'':{width}}  images/s (slowest to fastest)   CPU s/1,000   of its ceiling: clock   CPU"]
    for row in rows:
        low, high = row.rate.spread
        line = f"{row.name:{width}} {row.rate.images_per_s:9,.0f} ({low:,.0f} to {high:,.0f})"
        line = f"{line:{width + 34}} {row.rate.cpu_per_1000:10.3f}"
        if row.ceiling is not None:
            by_clock, by_cpu = ratio(row.rate, row.ceiling)
            line += f" {by_clock:23.2f} {by_cpu:5.2f}"
        lines.append(line)
    return "\n".join([*lines, _COLUMNS])


def explain(found: Sequence[Part], advice: Advice) -> str:
    """Where the time goes, and what to change."""
    total = sum(part.cpu_per_1000 for part in found)
    shares = ", ".join(f"{part.name} {part.cpu_per_1000:.3f} ({part.cpu_per_1000 / total:.0%})" for part in found)
    grows = f" (at most {advice.factor:.1f} times the rate)" if advice.factor > 1 else ""
    return f"CPU s for 1,000 images: {shares}\nwhat would help most: {advice.text}{grows}"


def document(rows: Sequence[Row], found: Sequence[Part], advice: Advice, conditions: dict[str, Any]) -> dict[str, Any]:
    """The same for programs."""
    return {
        **conditions,
        "rows": [
            {
                "name": row.name,
                "images": row.rate.images,
                "images_per_s": round(row.rate.images_per_s, 1),
                "images_per_s_spread": [round(rate, 1) for rate in row.rate.spread],
                "cpu_s_per_1000": round(row.rate.cpu_per_1000, 4),
                "of_ceiling": None if row.ceiling is None else _of_ceiling(row.rate, row.ceiling),
            }
            for row in rows
        ],
        "cpu_s_per_1000": {part.name: round(part.cpu_per_1000, 4) for part in found},
        "advice": {"text": advice.text, "factor": round(advice.factor, 2)},
    }


def _of_ceiling(rate: Rate, ceiling: Rate) -> dict[str, float]:
    by_clock, by_cpu = ratio(rate, ceiling)
    return {"clock": round(by_clock, 4), "cpu": round(by_cpu, 4), "images_per_s": round(ceiling.images_per_s, 1)}


def chart(rows: Sequence[Row], found: Sequence[Part], title: str, path: str) -> None:
    """Bars of images/s with their ceilings and spread, and one bar of where the time goes, as a PNG.

    Raises:
        OSError: the file can't be written.
    """
    from matplotlib.figure import Figure  # a second to import

    figure = Figure(figsize=(10, 2.4 + 0.5 * len(rows)), layout="constrained")
    rates, times = figure.subplots(2, 1, height_ratios=[len(rows), 1.6])
    _draw_rates(rates, rows)
    rates.set_title(title, loc="left", pad=26)  # above the legend
    _draw_times(times, found)
    figure.savefig(path, dpi=120, format="png")


def _draw_rates(axes: Any, rows: Sequence[Row]) -> None:
    """For each row a bar that ends in its figure, and a thin one below it for its ceiling.

    Caches of decoded pixels are so much faster that their bars are cut off.
    """
    decoding = [rate for row in rows if row.ceiling for rate in (row.rate.spread[1], row.ceiling.images_per_s)]
    limit = 1.2 * max(decoding)
    for place, row in enumerate(rows):
        median, (low, high) = row.rate.images_per_s, row.rate.spread
        middle = place - 0.1
        axes.barh(middle, min(median, limit), height=0.5, color=_OURS if row.name.startswith("train_") else _OTHERS)
        if median > limit:
            axes.text(0.99 * limit, middle, f"{median:,.0f} →", va="center", ha="right", color="white")
            continue
        axes.plot([low, high], [middle, middle], color="black", linewidth=1)
        axes.text(max(median, high) + 0.006 * limit, middle, f"{median:,.0f}", va="center")
    places = [(place + 0.25, row.ceiling.images_per_s) for place, row in enumerate(rows) if row.ceiling]
    label = "its ceiling: the same work on bytes in memory"
    axes.barh(*zip(*places, strict=True), height=0.12, color=_CEILING, label=label)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, limit)
    axes.set_xlabel("images/s: median, and a line from the slowest to the fastest run")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), frameon=False, borderaxespad=0.2)


def _draw_times(axes: Any, found: Sequence[Part]) -> None:
    """One bar of all parts of the work; the legend has their shares, of which small ones show no width."""
    total = sum(part.cpu_per_1000 for part in found)
    left = 0.0
    for part, colour in zip(found, _PARTS, strict=True):
        label = f"{part.name} {part.cpu_per_1000 / total:.0%}"
        axes.barh([0], [part.cpu_per_1000], left=left, label=label, color=colour)
        left += part.cpu_per_1000
    axes.set_yticks([0], ["train_dataset, flip_crop"])
    axes.set_xlim(0, total)
    axes.set_xlabel("where the CPU time goes: CPU seconds for 1,000 images")
    axes.legend(ncols=len(found), loc="lower right", bbox_to_anchor=(1, 1), frameon=False, borderaxespad=0.2)
