"""What threads do in a second, recorded and drawn: reads, decodes, and the accelerator that trains or waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from reader.pixels import Encoded, ImageDecoder, Pixels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SECONDS = 1.0  # that are drawn
_GAP_S = 0.001  # shorter pauses are not seen
_COLOURS = {"reads": "#2f7fc1", "decodes": "#3a9a5b", "trains": "#7b61b8", "waits": "#d9825b"}
#: The rows of a picture, from the top: what is drawn in each, and its name.
_GROUPS = ((("reads",), "reads"), (("decodes",), "decodes"), (("trains", "waits"), "accelerator"))
Span = tuple[float, float]


class Trace(NamedTuple):
    """The first second of a way to read.

    Attributes:
        name: of the way.
        lanes: what is done → for each thread that does it, from when to when, in seconds.
        images: decoded in that time.
        seconds: when the pass ended, if that was earlier.
    """

    name: str
    lanes: dict[str, list[list[Span]]]
    images: int
    seconds: float = SECONDS

    def as_json(self) -> dict[str, Any]:
        """The same for programs, rounded to 0.1 ms."""
        lanes = {
            kind: [[[round(begin, 4), round(end, 4)] for begin, end in lane] for lane in lanes]
            for kind, lanes in self.lanes.items()
        }
        return {"name": self.name, "images": self.images, "seconds": round(self.seconds, 4), "lanes": lanes}


class Tracer:
    """Records what threads do. Thread-safe: each has a list of its own."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Time begins here; what was recorded before is dropped."""
        self._spans: dict[tuple[str, int], list[Span]] = {}  # (kind, thread) → from when to when
        self._begin = time.perf_counter()

    def add(self, kind: str, begin: float, end: float) -> None:
        """This thread did something from `begin` to `end`, in seconds of `time.perf_counter`."""
        self._spans.setdefault((kind, threading.get_ident()), []).append((begin - self._begin, end - self._begin))

    def record(self, name: str, images: Iterator[int], batch: int, step_s: float) -> Trace:
        """Train `step_s` on each batch, until what is drawn and what was begun in it has ended."""
        end = waits_since = time.perf_counter()
        ready = 0
        for count in images:
            end = now = time.perf_counter()
            ready += count
            is_over = now - self._begin > SECONDS + 0.2
            if ready >= batch or is_over:
                self.add("waits", waits_since, now)
                if is_over:
                    break
                time.sleep(step_s)
                end = waits_since = time.perf_counter()
                ready = 0
                self.add("trains", now, waits_since)
        images.close()  # type: ignore[attr-defined]
        lanes: dict[str, list[list[Span]]] = {}
        decoded = 0
        for (kind, _), spans in list(self._spans.items()):
            seen = [(max(begin, 0.0), min(end, SECONDS)) for begin, end in spans if end > 0 and begin < SECONDS]
            decoded += len(seen) if kind == "decodes" else 0
            if seen:
                lanes.setdefault(kind, []).append(_merged(seen))
        return Trace(name, lanes, decoded, min(end - self._begin, SECONDS))


def _merged(spans: Sequence[Span]) -> list[Span]:
    """Spans without pauses that nobody could see."""
    merged = [spans[0]]
    for begin, end in spans[1:]:
        if begin - merged[-1][1] < _GAP_S:
            merged[-1] = merged[-1][0], end
        else:
            merged.append((begin, end))
    return merged


class TracedDecoder:
    """A decoder that records when it decodes; the same for everything else."""

    def __init__(self, decode: ImageDecoder, tracer: Tracer) -> None:
        self._decode, self._tracer, self.shape = decode, tracer, decode.shape

    def __call__(self, encoded: Encoded, row: Pixels, seed: int) -> None:
        begin = time.perf_counter()
        self._decode(encoded, row, seed)
        self._tracer.add("decodes", begin, time.perf_counter())


def draw(traces: Sequence[Trace], width: float) -> Figure:
    """One picture of all, below each other on the same time scale: a bar for each span, a lane for each thread."""
    from matplotlib.figure import Figure  # a second to import
    from matplotlib.patches import Patch

    figure = Figure(figsize=(width, 0.5 + 1.9 * len(traces)), layout="constrained")
    panels = figure.subplots(len(traces), sharex=True, squeeze=False)[:, 0]
    for axes, trace in zip(panels, traces, strict=True):
        for row, (kinds, _) in enumerate(_GROUPS):
            lanes = max(len(trace.lanes.get(kind, ())) for kind in kinds)
            for kind in kinds:
                for lane, spans in enumerate(trace.lanes.get(kind, ())):
                    bars = [(1000 * begin, 1000 * (end - begin)) for begin, end in spans]
                    height = 0.8 / lanes
                    axes.broken_barh(bars, (row - 0.4 + lane * height, height), color=_COLOURS[kind], linewidth=0)
        counts = [max((len(trace.lanes.get(kind, ())) for kind in kinds), default=0) for kinds, _ in _GROUPS]
        names = [f"{name} × {count}" if count > 1 else name for (_, name), count in zip(_GROUPS, counts, strict=True)]
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(_GROUPS) - 0.5, -0.5)
        axes.set_title(f"{trace.name}: {trace.images:,} images in {trace.seconds:.2g} s", loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlim(0, 1000 * SECONDS)
    panels[-1].set_xlabel("milliseconds")
    handles = [Patch(color=colour, label=kind) for kind, colour in _COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower right", ncols=len(_COLOURS), frameon=False)
    return figure
