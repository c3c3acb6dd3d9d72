"""What the job needs of a place that holds files."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import IO, NamedTuple, Protocol


class ListedFile(NamedTuple):
    """One file of a listing.

    Attributes:
        path: relative to the listed folder, `/` separators.
        bytes: size.
        etag: what tells one content from another, with its kind: `md5:`, `crc32c:` (both hexadecimal), `mtime_ns:`,
            `etag:`.
        crc32c: of the content, where the store knows it.
    """

    path: str
    bytes: int
    etag: str
    crc32c: int | None = None


class Storage(Protocol):
    """A place that holds files; all paths are full URLs.

    Every method raises StorageError when its request failed for good: refused, or no success until the deadline.
    """

    def names(self, url: str) -> Iterator[str]:
        """What lies right inside `url`, in no particular order, folders with a slash at the end."""

    def files(self, url: str, every_name: bool = False) -> Iterator[ListedFile]:
        """Every file below `url` in no particular order, in pages: memory doesn't grow with their number.

        Args:
            url: of a folder.
            every_name: also names that hold no file, of 0 bytes and without an etag: links that lead nowhere, pipes,
                devices. Only a local folder has such names.
        """

    def stat(self, url: str) -> ListedFile | None:
        """One file, or None; its `path` is the URL."""

    def read(self, url: str, start: int | None = None, end: int | None = None) -> bytes:
        """Bytes [start, end) of a file in one request. Raises FileNotFoundError, IsADirectoryError for a folder."""

    def open(self, url: str) -> IO[bytes]:
        """A file to be read from its start to its end. Raises FileNotFoundError."""

    def write(self, url: str, data: bytes) -> None:
        """Write a small file whole."""

    def create(self, url: str, data: bytes) -> bool:
        """Write a small file that isn't there yet; False, and nothing written, where one with other content is."""

    def publish(self, local_file: str, url: str) -> None:
        """Move a finished local file to `url`; the local file is gone afterwards."""

    def delete(self, url: str) -> None:
        """Delete one file; fine if there is none."""

    def delete_tree(self, url: str, keep: Collection[str] = ()) -> None:
        """Delete all below a folder, but for the files `keep` right inside it; fine if there is none."""

    def delete_temporaries(self, url: str) -> None:
        """Delete what writes that were killed left below a folder; object stores have no such files."""

    def delete_empty_folders(self, *urls: str) -> None:
        """Delete these folders, one after the other, where they hold nothing; object stores know no empty ones."""


class Version(NamedTuple):
    """One version of a file.

    Attributes:
        data: its content.
        generation: what tells it from any other version of the file.
        age_s: seconds since it was written, by the store's own clock where it tells that.
    """

    data: bytes
    generation: str
    age_s: float


class VersionedStorage(Storage, Protocol):
    """A storage that several machines write to: a file is changed only while it is as it was found."""

    def version(self, url: str) -> Version | None:
        """A file as it is now, or None."""

    def replace(self, url: str, data: bytes, generation: str) -> bool:
        """Write a small file anew if it still is that version; False, and nothing written, where it isn't."""

    def delete_version(self, url: str, generation: str) -> None:
        """Delete a file if it still is that version."""
