"""What `bench` found, as a table, as JSON and as a chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reader.bench.breakdown import Advice, Part
from reader.bench.measure import Rate, ratio


@dataclass(frozen=True, slots=True)
class Row:
    """One way to read, and its ceiling where it decodes."""

    name: str
    rate: Rate
    ceiling: Rate | None


def table(rows: Sequence[Row]) -> str:
    """Lines of text, a way to read each."""
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
    return "\n".join(lines)


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

    figure = Figure(figsize=(10, 1.9 + 0.42 * len(rows)), layout="constrained")
    rates, times = figure.subplots(2, 1, height_ratios=[len(rows), 1.6])
    _draw_rates(rates, rows)
    rates.set_title(title, loc="left")
    left = 0.0
    for part in found:
        times.barh([0], [part.cpu_per_1000], left=left, label=part.name)
        left += part.cpu_per_1000
    times.set_yticks([0], ["train_dataset, flip_crop"])
    times.set_xlabel("CPU seconds for 1,000 images")
    times.legend(ncols=len(found), loc="upper center", bbox_to_anchor=(0.4, 1.6), frameon=False)
    figure.savefig(path, dpi=120, format="png")


def _draw_rates(axes: Any, rows: Sequence[Row]) -> None:
    """A bar for each row. Caches of decoded pixels are so much faster that their bars are cut off."""
    decoding = [rate for row in rows if row.ceiling for rate in (row.rate.spread[1], row.ceiling.images_per_s)]
    limit = 1.35 * max(decoding)
    for place, row in enumerate(rows):
        median, (low, high) = row.rate.images_per_s, row.rate.spread
        shown = min(median, limit)
        axes.barh(place, shown, color="tab:blue" if row.name.startswith("train_dataset") else "tab:gray")
        axes.plot([low, high], [place, place], "k-", linewidth=1)
        end = max(shown, min(high, limit), row.ceiling.images_per_s if row.ceiling else 0)
        if end > 0.9 * limit:
            axes.text(0.98 * limit, place, f"{median:,.0f} →", va="center", ha="right", color="white")
        else:
            axes.text(end + 0.01 * limit, place, f"{median:,.0f}", va="center")
    ceilings = [(place, row.ceiling.images_per_s) for place, row in enumerate(rows) if row.ceiling]
    lows, highs = [place - 0.4 for place, _ in ceilings], [place + 0.4 for place, _ in ceilings]
    label = "its ceiling: the same work on bytes in memory"
    axes.vlines([rate for _, rate in ceilings], lows, highs, "tab:red", linewidth=2, label=label)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, limit)
    axes.set_xlabel("images/s: median, slowest and fastest run")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
