"""Streams that are read in pieces, by whoever asks for the next one: tf.data tells us of no iterator's end."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

S = TypeVar("S")

# Streams that wait to be read on, in the whole process, each with up to two windows in memory. TensorFlow keeps the
# Python functions of a dataset for ever, so what an abandoned iterator left can only be bounded; a stream that was
# dropped is opened again where it was when its iterator goes on.
_OPEN_STREAMS = 8


class OpenStreams(Generic[S]):
    """The streams of one dataset's iterators by the number of the next element.

    Args:
        open_at: the stream from an element on.
    """

    _serial_numbers = itertools.count()
    _waiting: ClassVar[OrderedDict[tuple[int, int], Any]] = OrderedDict()
    _lock = threading.Lock()

    def __init__(self, open_at: Callable[[int], S]) -> None:
        self._open_at = open_at
        self._serial = next(self._serial_numbers)

    def at(self, number: int) -> S:
        """The stream whose next element is `number`; nobody else has it until `leave`."""
        with self._lock:
            stream: S | None = self._waiting.pop((self._serial, number), None)
        return self._open_at(number) if stream is None else stream

    def leave(self, number: int, stream: S) -> None:
        """Keep a stream whose next element is `number`."""
        with self._lock:
            self._waiting[self._serial, number] = stream
            while len(self._waiting) > _OPEN_STREAMS:
                self._waiting.popitem(last=False)
