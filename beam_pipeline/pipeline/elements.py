"""Elements that flow between the transforms, how they are encoded, added up and counted."""

import functools
import inspect
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

import apache_beam as beam
from apache_beam.coders import FastPrimitivesCoder, registry
from apache_beam.metrics import Metrics

from beam_pipeline import storage
from beam_pipeline.errors import errors_as_tokens
from beam_pipeline.inputs.references import ImageRef
from beam_pipeline.schema import relative_path_bytes

PAGE_REFS = 1000
ShardId = tuple[str, int]  # split, number in it
_FASTEST = 1  # of zlib
Key = TypeVar("Key")
Part = TypeVar("Part", bound=Any)
Called = TypeVar("Called", bound=Callable[..., Any])


class Page(list[ImageRef]):
    """Up to 1,000 references as one element: a runner's cost per element (0.1 ms in process) is paid once per page."""


def keyed(page: Page) -> tuple[int, Page]:
    """A page under a key that spreads pages over workers and is the same after a retry."""
    return page[0].order_key >> 1, page  # Beam's integers have a sign


def by_key(refs: Iterable[ImageRef], key: Callable[[ImageRef], Key]) -> dict[Key, Page]:
    """References in a page for each key."""
    pages: dict[Key, Page] = {}
    for ref in refs:
        pages.setdefault(key(ref), Page()).append(ref)
    return pages


class PageCoder(beam.coders.Coder):  # type: ignore[misc]
    """References as plain tuples, a third of the bytes and time of pickling named ones, and these compressed.

    Neighbours share most of their path: zlib's fastest level takes a reference from 107 bytes to 18 in a page of 1,000
    and to 23 in one of 33, for 0.25 µs. A runner that groups in memory then holds a third less (benchmarks/memory.py),
    and less goes through a shuffle that is paid for by the byte.
    Paths go as bytes: a local name need not be UTF-8.
    """

    _tuples = FastPrimitivesCoder()

    def encode(self, page: Page) -> bytes:
        rows = [(relative_path_bytes(ref.path), *ref[1:-1], ref.part and tuple(ref.part)) for ref in page]
        return zlib.compress(self._tuples.encode(rows), _FASTEST)

    def decode(self, encoded: bytes) -> Page:
        rows = self._tuples.decode(zlib.decompress(encoded))
        return Page(
            ImageRef(path.decode("utf-8", "surrogateescape"), *fields)._replace(part=part and storage.Part(*part))
            for path, *fields, part in rows
        )

    def is_deterministic(self) -> bool:
        return True


registry.register_coder(Page, PageCoder)

KeyedPage = tuple[int, Page]
Pages = tuple[int, Iterable[Page]]  # grouped by the key


def reports_errors(function: Called) -> Called:
    """A function that Beam calls, whose errors reach the launcher as they are, also from another process."""

    @functools.wraps(function)
    def call(*args: Any, **more: Any) -> Any:
        with errors_as_tokens():
            return function(*args, **more)

    @functools.wraps(function)
    def generate(*args: Any, **more: Any) -> Iterator[Any]:
        with errors_as_tokens():
            yield from function(*args, **more)

    return cast(Called, generate if inspect.isgeneratorfunction(function) else call)


def merge_all(parts: Iterable[Part], empty: Callable[[], Part]) -> Part:
    """Adds up parts that have a method `merge`, for `CombineGlobally`: first on each worker."""
    total = empty()
    for part in parts:
        total.merge(part)
    return total


def counter(name: str) -> Any:
    """One of the counters below."""
    return Metrics.counter(NAMESPACE, name)


NAMESPACE = "imageshards"
IMAGES_LISTED = "images-listed"
IMAGES_EXCLUDED = "images-excluded"
SKIPPED_HIDDEN = "files-skipped-hidden"
SKIPPED_OTHER_SUFFIX = "files-skipped-other-suffix"
SKIPPED_OUTSIDE_CLASSES = "images-skipped-outside-classes"
CLASSES_EMPTY = "classes-without-images"
IMAGES_SAMPLED = "images-sampled"
IMAGES_PLANNED = "images-planned"
SHARDS_PLANNED = "shards-planned"
IMAGES_DONE = "images-done"  # with a record or a reject, or in a shard that is kept
IMAGES_REJECTED = "images-rejected"
RECORDS_WRITTEN = "records-written"
SHARDS_WRITTEN = "shards-written"
SHARDS_KEPT = "shards-kept"
SOURCE_BYTES = "source-bytes-read"
WRITTEN_BYTES = "shard-bytes-written"
SHARD_MSEC = "shard-write-msec"
