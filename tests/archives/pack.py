"""Folders packed as people pack them: Python's zipfile and tarfile write what ours reads."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Callable, Mapping

Files = Mapping[str, bytes]
_FORMATS = {"gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT, "ustar": tarfile.USTAR_FORMAT}


def zipped(files: Files, compression: int = zipfile.ZIP_DEFLATED, before: bytes = b"", comment: bytes = b"") -> bytes:
    """A zip file; names that end in a slash are folders."""
    out = io.BytesIO(before)
    with zipfile.ZipFile(out, "a" if before else "w", compression) as archive:
        archive.comment = comment
        for name, data in files.items():
            archive.writestr(name, data)
    return out.getvalue()


def tarred(files: Files, format: str = "gnu", top: str = "") -> bytes:
    """A tar file; names that end in a slash are folders."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=_FORMATS[format]) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(top + name)
            if name.endswith("/"):
                info.type = tarfile.DIRTYPE
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def by_folder(files: Files) -> dict[str, dict[str, bytes]]:
    """The files of each first folder."""
    folders: dict[str, dict[str, bytes]] = {}
    for name, data in files.items():
        folder, _, rest = name.partition("/")
        folders.setdefault(folder, {})
        if rest:
            folders[folder][rest] = data
    return folders


def each(pack: Callable[[Files], bytes], suffix: str) -> Callable[[Files], Files]:
    """A folder of archives, one for each class."""
    return lambda files: {f"{name}{suffix}": pack(inside) for name, inside in by_folder(files).items()}


# Form → what is put in a folder or bucket in place of the files, and the input below it.
FORMS: dict[str, tuple[Callable[[Files], Files], str]] = {
    "zip": (lambda files: {"in.zip": zipped(files)}, "in.zip"),
    "stored zip": (lambda files: {"in.zip": zipped(files, zipfile.ZIP_STORED, b"#!/bin/sh\n", b"hi")}, "in.zip"),
    "folder in a zip": (lambda files: {"in.ZIP": zipped({f"a/b/{name}": files[name] for name in files})}, "in.ZIP/a/b"),
    "tar": (lambda files: {"in.tar": tarred(files)}, "in.tar"),
    "pax tar of .": (lambda files: {"in.tar": tarred(files, "pax", "./")}, "in.tar"),
    "ustar in a folder": (lambda files: {"in.tar": tarred(files, "ustar", "a/")}, "in.tar/a"),
    "tar of tars": (lambda files: {"in.tar": tarred(each(tarred, ".tar")(files))}, "in.tar"),
    "tars deep in a tar": (lambda files: {"in.tar": tarred(each(tarred, ".tar")(files), top="a/b/c/")}, "in.tar/a/b/c"),
    "folder of tars": (lambda files: {f"in/{name}": data for name, data in each(tarred, ".tar")(files).items()}, "in"),
    "folder of zips": (lambda files: {f"in/{name}": data for name, data in each(zipped, ".zip")(files).items()}, "in"),
}

# The same for rows below a/b/ in that input.
DEEP: dict[str, tuple[Callable[[Files], Files], str]] = {
    "tar of tars in a folder": (lambda files: {"in/a/b.tar": tarred(each(tarred, ".tar")(files))}, "in"),
    "tar of tars in the input": (lambda files: {"in/a.tar": tarred(_below("b/", each(tarred, ".tar")(files)))}, "in"),
    "tar in a tar": (lambda files: {"in/a.tar": tarred({"b.tar": tarred(files)})}, "in"),
    "tars at the third level": (lambda files: _below("in/a/b/", each(tarred, ".tar")(files)), "in"),
    "tars in folders of a tar": (lambda files: {"in.tar": tarred(each(tarred, ".tar")(files), top="a/b/")}, "in.tar"),
    "zips at the third level": (lambda files: _below("in/a/b/", each(zipped, ".zip")(files)), "in"),
    "zip in the input": (lambda files: {"in/a.zip": zipped(_below("b/", files))}, "in"),
    "zip of a folder": (lambda files: {"in/a/b.zip": zipped(files)}, "in"),
}


def _below(folder: str, files: Files) -> Files:
    return {f"{folder}{name}": data for name, data in files.items()}
