"""Streams that are read in pieces, by whoever asks for the next one: tf.data tells us of no iterator's end."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, Generic, TypeVar

S = TypeVar("S")
P = TypeVar("P", bound=Hashable)

# Streams that wait to be read on in the whole process, beside one for each dataset that is still there; each holds up
# to two windows in memory. TensorFlow keeps the Python functions of a dataset for ever, so what an abandoned iterator
# left can only be bounded; a stream that was dropped is opened again where it was when its iterator goes on.
_ABANDONED_STREAMS = 8


class OpenStreams(Generic[P, S]):
    """The streams of one dataset's iterators, by the place of the next element.

    Args:
        open_at: the stream from a place on.
    """

    _serial_numbers = itertools.count()
    _waiting: ClassVar[OrderedDict[tuple[int, Any], Any]] = OrderedDict()
    _served: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()
    _lock = threading.Lock()

    def __init__(self, open_at: Callable[[P], S]) -> None:
        self._open_at = open_at
        self._serial = next(self._serial_numbers)

    def serve(self, dataset: Any) -> None:
        """Say that `dataset` reads these: while it is there, one stream more may wait."""
        with self._lock:
            self._served.add(dataset)

    def at(self, place: P) -> S:
        """The stream whose next element is at `place`; nobody else has it until `leave`."""
        with self._lock:
            stream: S | None = self._waiting.pop((self._serial, place), None)
        return self._open_at(place) if stream is None else stream

    def leave(self, place: P, stream: S) -> None:
        """Keep a stream whose next element is at `place`."""
        with self._lock:
            self._waiting[self._serial, place] = stream
            while len(self._waiting) > _ABANDONED_STREAMS + len(self._served):
                self._waiting.popitem(last=False)
