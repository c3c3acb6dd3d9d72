"""Paths and URLs as text; no request is made here."""

from __future__ import annotations

import os
import re
from typing import Any

_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.\-]*)://")


def scheme_of(url: str) -> str | None:
    """`gs` of `gs://…`, or None for a path on this machine."""
    match = _SCHEME.match(url)
    return match[1].lower() if match else None


def is_local(url: str) -> bool:
    """Whether `url` is a path on this machine."""
    return scheme_of(url) is None


def join(base: str, relative: str) -> str:
    """`relative` below `base`, untouched: it may hold `//`, `..` and any other character."""
    return f"{base.rstrip('/')}/{relative}" if base.rstrip("/") else f"/{relative}"


def normalize(url: str) -> str:
    """A user's folder as the job carries it: local paths made absolute, `file://` ones too, no slash at the end."""
    if scheme_of(url) == "file":
        url = url.partition("://")[2]
    if is_local(url):
        return os.path.abspath(os.path.expanduser(url))
    scheme, _, path = url.partition("://")
    return f"{scheme}://{path.rstrip('/')}"


def bucket_and_name(url: str) -> tuple[str, str]:
    """`("bucket", "a/b")` of `gs://bucket/a/b`."""
    bucket, _, name = url.partition("://")[2].partition("/")
    return bucket, name


def why_unusable(url: str) -> str | None:
    """Why no storage can hold `url`: no such protocol, its package isn't installed, no bucket; None if one can."""
    scheme = scheme_of(url)
    if scheme is None:
        return None
    if not url.partition("://")[2]:
        return "name a bucket"
    try:
        load_fsspec().get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        return f"no such protocol here ({error}); install its fsspec package"
    return None


def load_fsspec() -> Any:
    """fsspec, ready to import gcsfs."""
    # gcsfs otherwise asks for the bucket's type over gRPC, which stalls for a minute without that permission; it looks
    # at this when it is imported.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    import fsspec

    return fsspec
