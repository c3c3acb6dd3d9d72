"""Memory for large images: decode threads share it, so that many of them take no more of it than one image may.

Only images of more than `images.memory.LARGE` bytes ask for it: all others neither wait nor count.
"""

from __future__ import annotations

import threading

# What one image may take at the default --max_pixels. One that takes more has it alone.
MOST_BYTES = 1 << 30


class Room:
    """Bytes that several take of. Safe from any thread."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._taken = 0
        self._changed = threading.Condition()

    def take(self, count: int) -> None:
        """Wait until so many bytes are free, or all are, and take them."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken or self._taken + count <= self._most_bytes)
            self._taken += count

    def give(self, count: int) -> None:
        """Give back what was taken."""
        with self._changed:
            self._taken -= count
            self._changed.notify_all()


ROOM = Room(MOST_BYTES)  # of this process
