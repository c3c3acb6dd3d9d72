"""Paths and URLs as text; no request is made here."""

from __future__ import annotations

import os
import re

_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.\-]*)://")
_ALIASES = {"gcs": "gs", "abfs": "az", "abfss": "az", "http": "http", "https": "http"}
REMOTE_SCHEMES = ("gs", "s3", "az", "http")


def scheme_of(url: str) -> str | None:
    """`gs` of `gs://…`, one of `REMOTE_SCHEMES` if it is known; None for a path on this machine."""
    match = _SCHEME.match(url)
    if match is None or match[1].lower() == "file":
        return None
    return _ALIASES.get(match[1].lower(), match[1].lower())


def is_local(url: str) -> bool:
    """Whether `url` is a path on this machine."""
    return scheme_of(url) is None


def join(base: str, relative: str) -> str:
    """`relative` below `base`, untouched: it may hold `//`, `..` and any other character."""
    return f"{base.rstrip('/')}/{relative}" if base.rstrip("/") else f"/{relative}"


def normalize(url: str) -> str:
    """A user's folder as the job carries it: local paths made absolute, `file://` ones too, no slash at the end."""
    if is_local(url):
        return os.path.abspath(os.path.expanduser(local_path(url)))
    scheme, _, path = url.partition("://")
    return f"{scheme}://{path.rstrip('/')}"


def local_path(url: str) -> str:
    """A path of this machine without `file://`."""
    return url.partition("://")[2] if _SCHEME.match(url) else url


def bucket_and_name(url: str) -> tuple[str, str]:
    """`("bucket", "a/b")` of `gs://bucket/a/b`."""
    bucket, _, name = url.partition("://")[2].partition("/")
    return bucket, name


def why_unusable(url: str, is_file: bool = False) -> str | None:
    """Why no storage can hold the folder, or file, `url`: no such scheme, no bucket; None if one can."""
    scheme = scheme_of(url)
    if scheme is None:
        return None
    if scheme not in REMOTE_SCHEMES:
        return "no such storage; use a local path, gs://, s3:// or az:// (http:// and https:// for single files)"
    if not url.partition("://")[2].strip("/"):
        return "name a bucket"
    return "http:// and https:// name single files, not folders" if scheme == "http" and not is_file else None
