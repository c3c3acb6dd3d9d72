"""What a process has converted for the sample, it needn't convert again for a shard."""

from __future__ import annotations

import threading

from beam_pipeline import images


class _SampleCache:
    """Images that this process converted for the sample, by the MD5 of their bytes: they needn't be converted again.

    In a job of one process it halves the work of a small input. What doesn't fit is converted again.
    """

    _MOST_BYTES = 64 << 20

    def __init__(self) -> None:
        self._images: dict[tuple[bytes, images.ImageOptions], images.EncodedImage] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def keep(self, key: tuple[bytes, images.ImageOptions], image: images.EncodedImage) -> None:
        """Keep a converted image, if there is room."""
        with self._lock:
            if key not in self._images and self._bytes + len(image.data) <= self._MOST_BYTES:
                self._images[key] = image
                self._bytes += len(image.data)

    def get(self, key: tuple[bytes, images.ImageOptions]) -> images.EncodedImage | None:
        """A kept image; it isn't kept any longer."""
        with self._lock:
            image = self._images.pop(key, None)
            self._bytes -= len(image.data) if image else 0
            return image


SAMPLED = _SampleCache()
