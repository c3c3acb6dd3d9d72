"""The pictures of the documents: `python benchmarks/pictures.py` writes docs/images.

What they show was measured elsewhere: `benchmarks/results/experiment.json` is what `benchmarks/experiment.py`
printed, and the local readers are those of `benchmarks/results/reading.json`. The shuffles are
computed here, by the reader's own order. Charts are SVGs in two versions, for pages in light and in dark.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import experiment
import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from traces import Trace, draw

import beam_pipeline
import reader
from beam_pipeline.inputs.references import order_key
from beam_pipeline.sample_data import draw_folder
from reader import order
from reader.position import Phase, Position

HERE = Path(__file__).parent
IMAGES = HERE.parent / "docs" / "images"
EXPERIMENT, READING = (HERE / "results" / f"{name}.json" for name in ("experiment", "reading"))
WIDTH = 5.0  # inches: letters of 10 points are still 10 pixels high on a telephone of 390

OURS, OTHERS = "#2f7fc1", "#8a94a0"
INK = {"light": "#1f2328", "dark": "#e6edf3"}
# Rows of the local table: as it names them → as the chart does.
LOCAL = {
    "tutorial: GZIP, single images": "TFRecords, GZIP, one by one",
    "tutorial: plain, batch 64": "TFRecords, plain",
    "WebDataset, 2 workers": "WebDataset",
    "MosaicML streaming, 2 workers": "MosaicML",
    "tfds.load": "tfds.load",
    "FFCV, 2 workers": "FFCV",
    "TensorFlow": "imageshards, TensorFlow",
    "PyTorch": "imageshards, PyTorch",
    "NumPy": "imageshards, NumPy",
}
SORTED_IMAGES, CLASSES, BUFFER, BATCH = 100_000, 100, 300, 64


def main() -> None:
    """Write all of them."""
    measured = json.loads(EXPERIMENT.read_text())
    rates = {row["name"]: row["images_per_s"] for row in measured["rows"] if "missing" not in row}
    traces = [Trace(**trace) for trace in measured["traces"]]
    orders = buffered(), ours()
    for name, shown in zip(("buffer", "ours"), orders, strict=True):
        print(f"{name}: {classes_in_a_batch(shown):.1f} of {CLASSES} classes in a batch of {BATCH}")
    charts: dict[str, Callable[[], Figure]] = {
        "speed": lambda: speed(rates, local_rates(), measured["latency_ms"]),
        "latency": lambda: latency(rates, measured["latency_ms"]),
        "remedies": lambda: remedies(rates),
        "shuffle": lambda: shuffle(*orders),
        "trace": lambda: draw(traces, WIDTH),
    }
    IMAGES.mkdir(exist_ok=True)
    for theme, ink in INK.items():
        with themed(ink):
            for name, chart in charts.items():
                chart().savefig(IMAGES / f"{name}-{theme}.svg", transparent=True, metadata={"Date": None})
    grid(IMAGES / "grid.png")


@contextmanager
def themed(ink: str) -> Iterator[None]:
    """Letters and lines in this colour; the same bytes each time."""
    named = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style = {"font.size": 10, "axes.titlesize": 10, "svg.hashsalt": "imageshards", **dict.fromkeys(named, ink)}
    with mpl.rc_context(style):
        yield


def axes_of(figure: Figure, **options: Any) -> Sequence[Axes]:
    """Axes without a frame."""
    found = figure.subplots(squeeze=False, **options).ravel()
    for axes in found:
        axes.spines[["top", "right"]].set_visible(False)
    return list(found)


def bars(axes: Axes, rates: Mapping[str, float], title: str, longest: float) -> None:
    """Horizontal bars of images/s, ours in another colour; `longest` is as long as the picture is wide."""
    colours = [OURS if name.startswith("imageshards") else OTHERS for name in rates]
    drawn = axes.barh(list(rates), list(rates.values()), 0.7, color=colours)
    axes.bar_label(drawn, fmt="{:,.0f}", padding=3)
    axes.set_xlim(0, 1.18 * longest)
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.spines[["bottom"]].set_visible(False)
    axes.tick_params(left=False)
    axes.set_title(title, loc="left", fontweight="bold", x=-0.62)


def speed(rates: Mapping[str, float], local: Mapping[str, float], latency_ms: float) -> Figure:
    """The same pictures in a bucket, and on the local disk."""
    names = {
        experiment.ONE_AT_A_TIME: "files, one by one",
        experiment.FAIR: "files, 32 at a time",
        "GZIP shards, interleave": "TFRecords, GZIP",
        "plain shards, interleave": "TFRecords, plain",
        experiment.OURS: "imageshards",
    }
    bucket = {short: rates[name] for name, short in names.items()}
    figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
    ratios = {"height_ratios": [len(bucket), len(local)]}
    above, below = axes_of(figure, nrows=2, gridspec_kw=ratios)
    longest = max(*bucket.values(), *local.values())
    bars(above, bucket, f"images/s, a bucket at {latency_ms:g} ms a request", longest)
    bars(below, local, "images/s, local disk", longest)
    return figure


def local_rates() -> dict[str, float]:
    """Images/s of local readers, from the table that was measured."""
    found = {name: rate.partition(" ")[0] for name, rate, *_ in json.loads(READING.read_text())["rows"]}
    rates = {short: float(found[name].replace(",", "")) for name, short in LOCAL.items()}
    return dict(sorted(rates.items(), key=lambda item: (item[0].startswith("imageshards"), item[1])))


def latency(rates: Mapping[str, float], latency_ms: float) -> Figure:
    """Requests in flight × images in each, divided by the latency: lines; what was measured: dots."""
    figure = Figure(figsize=(WIDTH, 3.6), layout="constrained")
    (axes,) = axes_of(figure)
    in_flight = np.array([1, 64])
    for images, colour in ((1, OTHERS), (64, OURS)):
        axes.plot(in_flight, images * in_flight * 1000 / latency_ms, color=colour, linewidth=1.5)
    axes.annotate("1 image a request", (2.6, 170), color=OTHERS, ha="center")
    axes.annotate("64 images a request", (1.05, 8000), color=OURS)
    dots = [
        (1, experiment.ONE_AT_A_TIME, "one by one", OTHERS),
        (2, experiment.PARALLEL_MAP, "tf.data's parallel map", OTHERS),
        (32, experiment.FAIR, "32 stored files", OTHERS),
        (32, experiment.OURS, "imageshards", OURS),
    ]
    for in_flight_here, name, label, colour in dots:
        axes.plot([in_flight_here], [rates[name]], "o", color=colour)
        is_right = in_flight_here > 2
        options = {"xytext": (0, -22), "ha": "right"} if is_right else {"xytext": (8, -4)}
        place = 64 if is_right else in_flight_here
        axes.annotate(f"{label}, {rates[name]:,.0f}", (place, rates[name]), textcoords="offset points", **options)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([1, 2, 4, 8, 16, 32, 64], ["1", "2", "4", "8", "16", "32", "64"])
    axes.set_ylim(10, 100_000)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("requests in flight")
    axes.set_title(f"images/s at {latency_ms:g} ms a request", loc="left", fontweight="bold")
    return figure


def remedies(rates: Mapping[str, float]) -> Figure:
    """Before and after each."""
    fed = next(name.removesuffix(", prefetch") for name in rates if name.endswith(" a batch, prefetch"))
    pairs = {
        "parallel map": (experiment.ONE_AT_A_TIME, experiment.PARALLEL_MAP),
        "32 in flight": (experiment.PARALLEL_MAP, experiment.FILES_AT_ONCE),
        "stored size": (experiment.FILES_AT_ONCE, experiment.FAIR),
        "cache in memory": ("files cached in memory, first epoch", "files cached in memory, second epoch"),
        "cache on disk": ("files cached on disk, first epoch", "files cached on disk, second epoch"),
        "shards, not files": (experiment.FAIR, "plain shards, one after the other"),
        "interleave": ("plain shards, one after the other", "plain shards, interleave"),
        "prefetch": (f"{fed}, no prefetch", f"{fed}, prefetch"),
        "no GZIP": ("GZIP shards, interleave", "plain shards, interleave"),
    }
    figure = Figure(figsize=(WIDTH, 3.9), layout="constrained")
    (axes,) = axes_of(figure)
    for row, (before, after) in enumerate(pairs.values()):
        low, high = rates[before], rates[after]
        axes.plot([low, high], [row, row], color=OTHERS, linewidth=2, zorder=1)
        axes.plot([low], [row], "o", color=OTHERS)
        axes.plot([high], [row], "o", color=OURS)
        axes.annotate(
            f"× {high / low:.1f}", (max(low, high), row), xytext=(8, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks(range(len(pairs)), list(pairs))
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(8, 900_000)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("images/s, before (grey) and after (blue)")
    return figure


def buffered() -> np.ndarray[Any, Any]:
    """What a shuffle buffer hands out of sorted images: it draws from the next ones only."""
    random, held, handed_out = np.random.default_rng(0), list(range(BUFFER)), []
    for image in range(BUFFER, SORTED_IMAGES + BUFFER):
        drawn = int(random.integers(len(held)))
        handed_out.append(held[drawn])
        if image < SORTED_IMAGES:
            held[drawn] = image
        else:
            held[drawn] = held[-1]
            held.pop()
    return np.array(handed_out)


def ours() -> np.ndarray[Any, Any]:
    """What our reader hands out of the same images: stored in the order of hashes, an epoch by `reader.order`."""
    keys = [
        order_key(f"{image // (SORTED_IMAGES // CLASSES):03d}/{image:06d}.jpg", 0) for image in range(SORTED_IMAGES)
    ]
    stored = np.argsort(np.array(keys, np.uint64), kind="stable")
    first = np.append(np.arange(0, SORTED_IMAGES, 64), SORTED_IMAGES)
    position = Position("", SORTED_IMAGES, 0, BATCH, 0, (Phase(1, 16),), step=0)
    found: list[np.ndarray[Any, Any]] = []
    for window in order.train_windows(order.each_once(first), position, 0):
        if window.epoch:
            break
        found.append(stored[window.numbers])
    return np.concatenate(found)


def classes_in_a_batch(handed_out: np.ndarray[Any, Any]) -> float:
    """How many classes a batch has, on average."""
    batches = (handed_out // (SORTED_IMAGES // CLASSES))[: len(handed_out) // BATCH * BATCH].reshape(-1, BATCH)
    return float(np.mean([len(np.unique(batch)) for batch in batches]))


def shuffle(buffer: np.ndarray[Any, Any], reader_s: np.ndarray[Any, Any]) -> Figure:
    """Which image comes when, of both orders."""
    figure = Figure(figsize=(WIDTH, 2.9), layout="constrained")
    shown = np.sort(np.random.default_rng(0).choice(SORTED_IMAGES, 450, replace=False))
    titles = f"shuffle({BUFFER})", "imageshards"
    for axes, title, handed_out in zip(axes_of(figure, ncols=2, sharey=True), titles, (buffer, reader_s), strict=True):
        axes.plot(shown / 1000, handed_out[shown] / 1000, ".", markersize=2.5, color=OURS)
        mean = classes_in_a_batch(handed_out)
        axes.set_title(f"{title}\n{mean:.0f} classes in a batch of {BATCH}", loc="left")
        axes.set_xlabel("handed out as, thousands")
        axes.set_box_aspect(1)
    figure.axes[0].set_ylabel("image of the sorted folders")
    return figure


def grid(path: Path) -> None:
    """Sample pictures as `imageshards show` draws them."""
    with tempfile.TemporaryDirectory() as folder:
        draw_folder(Path(folder) / "photos", images=60, broken=0)
        config = beam_pipeline.Config(input=f"{folder}/photos", output=f"{folder}/datasets", name="photos")
        manifest = beam_pipeline.run(config)
        assert manifest is not None
        reader.show(manifest.url, count=8).save(path)


if __name__ == "__main__":
    main()
