"""Secrets in what a user types: found, so that they are neither written into a dataset nor said in a message."""

from __future__ import annotations

import re
from collections.abc import Sequence

HIDDEN = "***"
_PASSWORD = re.compile(r"[a-zA-Z][a-zA-Z0-9+.\-]*://[^/@\s]*:[^/@\s]*@")
_SECRET = r"[\w-]*(?:secret|token|password|passwd|credential|signature|connection_string|access_key)[\w-]*"
_SECRET_FLAG = re.compile(rf"--{_SECRET}", re.IGNORECASE)
_SECRET_PARAMETER = re.compile(rf"(?<=[?&,;])((?:{_SECRET}|key|sig)=)[^&,;\s]+", re.IGNORECASE)


def has_password(url: str) -> bool:
    """Whether a URL holds a password: `ftp://user:password@host/…`."""
    return _PASSWORD.match(url) is not None


def without_secrets(command: Sequence[str]) -> list[str]:
    """A command line as run.json keeps it: what follows a flag, or stands in a URL, under a secret's name is `***`."""
    kept: list[str] = []
    hide_next = False
    for argument in command:
        flag, equals, _ = argument.partition("=")
        secret = _SECRET_FLAG.fullmatch(flag) is not None
        if hide_next and not argument.startswith("--"):
            kept.append(HIDDEN)
        elif secret and equals:
            kept.append(f"{flag}={HIDDEN}")
        else:
            kept.append(_SECRET_PARAMETER.sub(rf"\1{HIDDEN}", argument))
        hide_next = secret and not equals
    return kept
