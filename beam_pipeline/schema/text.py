"""Text that hashes depend on: canonical JSON, SHA-256, and the names that datasets, splits and versions may have."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import google_crc32c

NAME_PATTERN = re.compile(r"[a-z][a-z0-9_]*")  # TFDS reads no other dataset and split names
VERSION_PATTERN = re.compile(r"(?:0|[1-9]\d*)\.(?:0|[1-9]\d*)\.(?:0|[1-9]\d*)")


def canonical_json(value: Any) -> bytes:
    """The one JSON text of `value`: sorted keys, UTF-8, no white space to choose, a line break at the end.

    A name on disk that is no UTF-8 keeps its lone surrogates as `\\udcXX` escapes, which Python's parser reads back.
    """
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    escaped = _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    return escaped.encode("utf-8") + b"\n"


_SURROGATE = re.compile("[\ud800-\udfff]")


def is_utf8(text: str) -> bool:
    """Whether a name can be written as UTF-8: one on disk need not be."""
    return _SURROGATE.search(text) is None


def relative_path_bytes(path: str) -> bytes:
    """A listed path as bytes: UTF-8, and a local name that is no UTF-8 as the bytes it has on disk."""
    return path.encode("utf-8", "surrogateescape")


def sha256(data: bytes) -> str:
    """SHA-256 of `data` as 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def file_sums(data: bytes) -> dict[str, Any]:
    """What the manifest says of a small file: its hash, and what a listing shows of it."""
    return {"sha256": sha256(data), "bytes": len(data), "crc32c": google_crc32c.value(data)}
