"""Complete TFRecord files read once, from end to end, and what is checked in each record spread over all cores."""

from __future__ import annotations

import bisect
import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice, pairwise
from typing import NamedTuple, TypeVar

import google_crc32c
import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image

from beam_pipeline import schema, storage
from beam_pipeline.errors import CorruptRecordError
from reader.decode import UndecodableImageError, decode_pixels
from reader.limits import cpu_count
from reader.record_files import Frame, is_gzip, scan_file
from reader.records import frame_bounds, frame_fault

T = TypeVar("T")
R = TypeVar("R")

_PIECE_BYTES = 8 << 20
_BLOCK_RECORDS = 64  # checked by a thread at a time: 20 ms of decoding
_FILES_AT_ONCE = 8
_MAX_PIXELS = 178_956_970  # above, Pillow takes an image for an attack, too
_GREY_MODES = ("1", "L", "I", "I;16", "F")
_COLOUR_MODES = {"Gray": "L", "YCbCr": "RGB", "RGB": "RGB"}  # others are four colours


class FileScan:
    """One pass over a TFRecord file, plain or GZIP; memory is about two pieces of 8 MiB.

    Args:
        file: path or URL.
        bounds: where each record begins, then where the last ends, if that is known: a corrupt length then costs one
            record. Without, it costs the rest of the file, since only lengths tell where the next record begins.

    Attributes:
        crc32c: of the complete file, once the pass has ended.
    """

    def __init__(self, file: str, bounds: Sequence[int] = ()) -> None:
        self.crc32c = 0
        self._store = storage.open_storage(file)
        self._file, self._bounds = file, bounds

    def blocks(self) -> Iterator[Iterable[Frame]]:
        """Every record, up to 64 in a block; a block's CRCs are checked by the thread that iterates over it."""
        return self._packed_blocks() if is_gzip(self._file) else self._plain_blocks()

    def _packed_blocks(self) -> Iterator[Iterable[Frame]]:
        frames = scan_file(self._file)
        while block := list(islice(frames, _BLOCK_RECORDS)):
            yield block
        self.crc32c = storage.crc32c_of(self._store, self._file, self._store.size(self._file))

    def _plain_blocks(self) -> Iterator[Iterable[Frame]]:
        data, number, offset, is_over = b"", 0, 0, False
        with self._store.open(self._file) as stream:
            while piece := stream.read(_PIECE_BYTES):
                self.crc32c = google_crc32c.extend(self.crc32c, piece)
                if is_over:
                    continue
                data += piece
                ends = self._ends_in(data, number, offset)
                for first in range(0, len(ends) - 1, _BLOCK_RECORDS):
                    yield self._frames(number + first, offset, data, ends[first : first + _BLOCK_RECORDS + 1])
                number, offset, data = number + len(ends) - 1, offset + ends[-1], data[ends[-1] :]
                if self._bounds:
                    is_over = number >= len(self._bounds) - 1
                elif len(data) >= schema.FRAME_HEADER_BYTES and schema.framed_bytes(data[:12]) is None:
                    lost = CorruptRecordError(self._file, number, offset, f"{frame_fault(data)}, so {_REST_IS_LOST}")
                    is_over, data = True, b""
                    yield [Frame(number, offset, lost)]
        if data and not is_over:
            yield self._frames(number, offset, data, [0, len(data)])

    def _ends_in(self, data: bytes, number: int, offset: int) -> list[int]:
        """Where the records that `data` holds completely begin, then where the last ends."""
        if not self._bounds:
            return frame_bounds(memoryview(data), len(data))
        stop = bisect.bisect_right(self._bounds, offset + len(data))
        return [bound - offset for bound in self._bounds[number:stop]]

    def _frames(self, number: int, offset: int, data: bytes, ends: Sequence[int]) -> Iterator[Frame]:
        for index, (begin, end) in enumerate(pairwise(ends)):
            frame, record = data[begin:end], number + index
            try:
                (found,) = schema.unframe(frame)
                yield Frame(record, offset + begin, found)
            except (CorruptRecordError, ValueError):  # the latter if the index is of other records
                error = CorruptRecordError(self._file, record, offset + begin, frame_fault(frame))
                yield Frame(record, offset + begin, error)


_REST_IS_LOST = "the rest of the file is lost"


class Scanners:
    """Threads that read some files at once, and one a core that check what is in them; a context manager.

    Args:
        files: how many there are.
    """

    def __init__(self, files: int) -> None:
        at_once = max(1, min(files, _FILES_AT_ONCE))
        self._ahead = max(2, 2 * cpu_count() // at_once)
        self._readers = ThreadPoolExecutor(at_once, "reader-files")
        self._workers = ThreadPoolExecutor(cpu_count(), "reader-records")

    def __enter__(self) -> Scanners:
        return self

    def __exit__(self, *_: object) -> None:
        # After an error readers still wait for workers: they fail at their next block.
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._readers.shutdown(cancel_futures=True)

    def files(self, read: Callable[[T], R], files: Iterable[T]) -> Iterator[R]:
        """What `read` returns of each file, in order."""
        return self._readers.map(read, files)

    def blocks(self, check: Callable[[T], R], blocks: Iterable[T]) -> Iterator[R]:
        """What `check` returns of each block of a file, in order; a few are under way."""
        pending: deque[Future[R]] = deque()
        for block in blocks:
            pending.append(self._workers.submit(check, block))
            if len(pending) > self._ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


class CheckedImage(NamedTuple):
    """An image that decodes.

    Attributes:
        format: `jpeg`, `png` or what else Pillow calls it, in small letters.
        mode: how its pixels are stored, as Pillow names it: `RGB`, `L`, `P`, `CMYK` …
        pixels: uint8 [height, width, channels].
    """

    format: str
    mode: str
    pixels: npt.NDArray[np.uint8]

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return self.pixels.shape[0], self.pixels.shape[1]

    @property
    def is_grey(self) -> bool:
        """Whether it has no colours."""
        return self.mode in _GREY_MODES

    @property
    def bands(self) -> int:
        """Values a stored pixel has."""
        return Image.getmodebands(self.mode)


def decode_image(encoded: bytes, channels: int = 3) -> CheckedImage:
    """Decode an image as the readers do. Raises UndecodableImageError."""
    try:
        height, width, colour, _ = simplejpeg.decode_jpeg_header(encoded)
        if height * width > _MAX_PIXELS:
            raise UndecodableImageError(f"the image is {height}x{width}, more than {_MAX_PIXELS:,} pixels")
        image_format, mode = "jpeg", _COLOUR_MODES.get(colour, "CMYK")
    except UndecodableImageError:
        raise
    except ValueError:
        try:
            with Image.open(io.BytesIO(encoded)) as opened:
                image_format, mode = str(opened.format).lower(), opened.mode
        except Exception as error:  # Pillow raises a dozen types for corrupt images
            raise UndecodableImageError(f"the image doesn't decode ({type(error).__name__})") from None
    return CheckedImage(image_format, mode, decode_pixels(encoded, channels))
