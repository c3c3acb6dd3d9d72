"""Archives as inputs: the same references, bytes and dataset as of the folder that they are unpacked into."""

from __future__ import annotations

import io
import os
import stat
import tarfile
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from beam_pipeline.archives import tar, tree
from beam_pipeline.config import Config
from beam_pipeline.conversion.fetch import _fetch
from beam_pipeline.errors import Reject, UsageError
from beam_pipeline.inputs.checks import check_input
from beam_pipeline.inputs.folders import ClassFolder, ListingSummary, all_images, class_folders, list_images
from beam_pipeline.inputs.references import listing_fields
from tests import make
from tests.archives import pack
from tests.inputs.test_folders import config, refused
from tests.servers import Bucket, Gcs

ODD = [name for name in make.ODD_NAMES if name.endswith(".jpg") and not name.startswith("x")]
FILES = {
    **{f"cat/{name}": bytes([number]) * (number + 1) for number, name in enumerate(ODD)},
    **{f"d ög/deep/{number}.JPEG": os.urandom(3000) for number in range(3)},
    "d ög/notes.txt": b"text",
    "cat/.hidden.jpg": b"1",
    "cat/empty.jpg": b"",
    "none/": b"",
}


def seen(configuration: Config) -> dict[bytes, bytes]:
    """What a listing gives: the fields of each image that every storage has, and its bytes."""
    refs = list(all_images(configuration))
    return {b"|".join(listing_fields(ref)): _fetch(configuration, configuration.image_options, ref) for ref in refs}


def skipped(configuration: Config) -> Any:
    summary = ListingSummary()
    for folder in class_folders(configuration, summary):
        list(list_images(configuration, folder, summary))
    return summary.skipped, sorted({folder.label for folder in class_folders(configuration, summary)})


def put(bucket: Bucket, files: pack.Files, below: str = "") -> None:
    for name, data in files.items():
        if not name.endswith("/"):
            bucket.put(below + name, data)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """The same files in a folder of this machine."""
    return str(make.put_files(tmp_path / "unpacked", FILES))


@pytest.mark.parametrize("form", pack.FORMS)
def test_an_archive_gives_the_images_classes_and_skipped_files_of_its_folder(
    bucket: Bucket, folder: str, form: str
) -> None:
    files, url = pack.FORMS[form]
    put(bucket, files(FILES))
    assert seen(config(f"{bucket.url}/{url}")) == seen(config(folder))
    assert skipped(config(f"{bucket.url}/{url}")) == skipped(config(folder))


@pytest.mark.parametrize("form", {**pack.FORMS, **pack.DEEP})
@pytest.mark.parametrize("columns", ["path,label", "path,label,bytes"])
@pytest.mark.parametrize("bucket", ["local", "gs"], indirect=True)
def test_rows_name_members_as_unpacked(bucket: Bucket, folder: str, form: str, columns: str, tmp_path: Path) -> None:
    files, url = {**pack.FORMS, **pack.DEEP}[form]
    below = "a/b/" * (form in pack.DEEP)
    names = [name for name in FILES if "deep" in name]
    rows = [f"{below}{name},one" + f",{len(FILES[name])}" * ("bytes" in columns) for name in names]
    manifest = tmp_path / "rows.csv"
    manifest.write_text("\n".join([columns, *rows]))
    put(bucket, packed := files(FILES))
    if any(name.startswith("in/a/") for name in packed):
        put(bucket, {"in/a/c.tar": b"corrupt", "in/a/d.zip": b"PK, and no row needs it"})
    if below:
        os.rename(folder, f"{folder}.b")
        os.makedirs(f"{folder}/a")
        os.rename(f"{folder}.b", f"{folder}/a/b")
    more = {"layout": "manifest", "manifest": str(manifest), "header": tuple(columns.split(","))}
    listed = seen(config(f"{bucket.url}/{url}", **more))
    assert listed == seen(config(folder, **more))
    assert len(listed) == len(names)


@pytest.mark.parametrize("below", ["", "a/", "a/b/"])
@pytest.mark.parametrize("bucket", ["local", "gs"], indirect=True)
def test_a_row_of_a_folder_and_of_an_archive_is_the_folder_s_and_one_of_two_archives_an_error(
    bucket: Bucket, tmp_path: Path, below: str
) -> None:
    (tmp_path / "rows.csv").write_text(f"path,label\n{below}cat/1.jpg,cat\n")
    given = config(bucket.url, layout="manifest", manifest=f"{tmp_path}/rows.csv", header=("path", "label"))
    put(bucket, {f"{below}cat.zip": pack.zipped({"1.jpg": b"22"}), f"{below}cat.tar": pack.tarred({"1.jpg": b"333"})})
    with pytest.raises(UsageError, match=r"path '.*cat/1.jpg' is in '.*/cat.tar' and in '.*/cat.zip': keep one"):
        seen(given)
    tree._of_run.cache_clear()
    put(bucket, {f"{below}cat/1.jpg": b"1"})
    put(bucket, {f"{below}cat.tar": b"corrupt, and not opened"})
    assert list(seen(given).values()) == [b"1"]


@pytest.mark.parametrize(
    "files",
    [
        {"in.tar": pack.tarred({f"{split}.tar": pack.tarred({"cat/1.jpg": b"1"}) for split in ("train", "test")})},
        {"in.tar": pack.tarred({f"{split}/cat.tar": pack.tarred({"1.jpg": b"1"}) for split in ("train", "test")})},
        {f"in.tar/{split}.zip": pack.zipped({"cat/1.jpg": b"1"}) for split in ("train", "test")},
    ],
    ids=["splits", "classes", "each"],
)
def test_splits_and_classes_may_be_archives(tmp_path: Path, files: pack.Files) -> None:
    make.put_files(tmp_path, files)
    refs = list(all_images(config(f"{tmp_path}/in.tar", layout="split_class_folders")))
    assert sorted((ref.path, ref.label, ref.split) for ref in refs) == [
        ("test/cat/1.jpg", "cat", "test"),
        ("train/cat/1.jpg", "cat", "train"),
    ]


def test_names_of_inner_archives_and_folders_may_be_anything(tmp_path: Path) -> None:
    inner = pack.tarred({"1.jpg": b"1"})
    files = {"c\udcff.tar": inner, "d.tar/e.tar": inner, "d.tar/2.jpg": b"2"}
    (tmp_path / "a.tar").write_bytes(pack.tarred(files))
    (tmp_path / "b.tar").write_bytes(pack.tarred({"c\udcff.tar": inner}))
    with pytest.raises(UsageError, match="write a name in UTF-8"):
        class_folders(config(f"{tmp_path}/b.tar"), ListingSummary())
    given = tree.tree(config(f"{tmp_path}/a.tar"))
    assert given.is_archive(f"{tmp_path}/a.tar", "c\udcff.tar")
    assert sorted(file.path for file in given.files(f"{tmp_path}/a.tar/d.tar")) == ["2.jpg", "e.tar"]


def test_what_macos_puts_next_to_an_inner_archive_is_hidden(tmp_path: Path) -> None:
    data = b"\0\5\x16\7" + b"Mac OS X        " * 8
    files = {"._cat.tar": data, "cat.tar": pack.tarred({"._1.jpg": data, "1.jpg": b"1"})}
    (tmp_path / "a.tar").write_bytes(pack.tarred(files))
    assert list(seen(config(f"{tmp_path}/a.tar")).values()) == [b"1"]
    counted, classes = skipped(config(f"{tmp_path}/a.tar"))
    assert (counted.hidden, counted.hidden_images, counted.suffixes, classes) == (1, 1, {}, ["cat"])
    (tmp_path / "b.tar").write_bytes(pack.tarred({"sub/._x.tar": data, "sub/1.jpg": b"1"}))
    assert list(seen(config(f"{tmp_path}/b.tar")).values()) == [b"1"]


def test_a_listing_that_failed_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.zip").write_bytes(pack.zipped({"cat/1.jpg": b"1"}))
    given = config(f"{tmp_path}/a.zip")
    with monkeypatch.context() as patch:
        patch.setattr(tree.zip, "members", mock.Mock(side_effect=OSError("a fault of the network")))
        with pytest.raises(OSError, match="a fault of the network"):
            list(all_images(given))
    assert len(list(all_images(given))) == 1


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, target
        archive.addfile(info)
        archive.addfile(tarfile.TarInfo("cat/1.jpg"))
    return out.getvalue()


def zip_of(*names: str, system: int = 3, links: tuple[str, ...] = ()) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name in names:
            info = zipfile.ZipInfo("x" * len(name))
            info.filename, info.create_system = name, system
            info.external_attr = (stat.S_IFLNK | 0o777) << 16 if name in links else 0
            archive.writestr(info, name.encode())
    return out.getvalue()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.tar", link("cat/2.jpg", "1.jpg")), ("a.tar", link("cat/2.jpg", "cat/1.jpg", tarfile.LNKTYPE)),  # behind it
        ("a.tar", link("cat/2.jpg", "", tarfile.FIFOTYPE)), ("a.tar", link("cat/2.jpg", "", b"S")),
        ("a.zip", zip_of("cat/2.jpg", "cat/1.jpg", links=("cat/2.jpg",))),
    ],
)  # fmt: skip
def test_links_pipes_and_sparse_files_are_counted(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    counted, classes = skipped(config(str(tmp_path / name)))
    assert (counted.links, counted.hidden, classes) == (1, 0, ["cat"])
    assert [ref.path for ref in all_images(config(str(tmp_path / name)))] == ["cat/1.jpg"]


def test_a_hard_link_is_the_file_that_it_links_to(tmp_path: Path) -> None:
    folder = tmp_path / "in" / "cat"
    (folder / ("long" * 20)).mkdir(parents=True)
    (folder / ("long" * 20) / ("name" * 20 + ".jpg")).write_bytes(b"1" * 700)
    for number in range(3):  # with a short name, a long one, and in another folder
        name = ("2.jpg", "name" * 50 + ".jpg", "long" * 20 + "/3.jpg")[number]
        os.link(folder / ("long" * 20) / ("name" * 20 + ".jpg"), folder / name)
    for number, format in enumerate((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)):
        with tarfile.open(tmp_path / f"{number}.tar", "w", format=format) as archive:
            archive.add(folder.parent, ".")
        with tarfile.open(tmp_path / "cat.tar", "w", format=format) as archive:
            archive.add(folder, "")
        with tarfile.open(tmp_path / f"outer{number}.tar", "w", format=format) as archive:
            archive.add(tmp_path / "cat.tar", "cat.tar")
        for name in (f"{number}.tar", f"outer{number}.tar"):
            assert seen(config(str(tmp_path / name))) == seen(config(str(folder.parent)))
            assert skipped(config(str(tmp_path / name)))[0].links == 0


# --- what is called .tar or .zip and is none

JUNK = b"\x80\x02}q\x00(X\x05\x00\x00\x00epoch" * 500
PAGE = b"<!DOCTYPE html>" + b" " * 5000


@pytest.mark.parametrize("form", ["folder", "zip", "stored zip", "tar", "pax tar of ."])
@pytest.mark.parametrize("bucket", ["local", "gs"], indirect=True)
def test_what_is_called_an_archive_and_is_none_is_counted_with_the_other_files(bucket: Bucket, form: str) -> None:
    files = {"cat/1.jpg": b"1", "cat/model.tar": JUNK, "model.tar": JUNK, "cat/page.zip": PAGE, "page.zip": PAGE}
    packed, url = pack.FORMS.get(form, (dict, ""))
    put(bucket, packed(files))
    given = config(f"{bucket.url}/{url}".rstrip("/"))
    check_input(given)
    counted, classes = skipped(given)
    assert (counted.suffixes, counted.outside_classes, classes) == ({".tar": 2, ".zip": 2}, 0, ["cat"])
    assert list(seen(given).values()) == [b"1"]


@pytest.mark.parametrize("data", [JUNK, PAGE, b"", b"1", bytes(20_000)], ids=["junk", "page", "empty", "byte", "zeros"])
@pytest.mark.parametrize("form", ["folder", "tar"])
def test_one_of_several_class_archives_that_is_none_is_an_error(tmp_path: Path, form: str, data: bytes) -> None:
    files = {"cat.tar": pack.tarred({"1.jpg": b"1"}), "dog.tar": data}
    make.put_files(tmp_path, files if form == "folder" else {"in.tar": pack.tarred(files)})
    given = config(str(tmp_path if form == "folder" else tmp_path / "in.tar"))
    with pytest.raises(UsageError, match=r"dog\.tar") as error:
        check_input(given)
        list(all_images(given))
    assert "copy it again" in str(error.value)


@pytest.mark.parametrize("cut", [1, 400, 700, 1536])
def test_a_truncated_archive_among_images_is_an_error(tmp_path: Path, cut: int) -> None:
    for name in ("cat/inner.tar", "inner.tar"):
        (tmp_path / "in.tar").write_bytes(pack.tarred({"cat/1.jpg": b"1", name: TAR[:cut]}))
        with pytest.raises(UsageError, match=r"inner\.tar' in .*no valid tar file.*copy it again"):
            check_input(config(f"{tmp_path}/in.tar"))
            tree._of_run.cache_clear()


# --- what is refused


def overlapping() -> bytes:
    """Two entries of the directory share one member's bytes, as in the 42 kB bomb."""
    data = bytearray(zip_of("cat/1.jpg", "cat/2.jpg"))
    second = data.rindex(b"PK\1\2")
    data[second + 42 : second + 46] = (4).to_bytes(4, "little")
    return bytes(data)


def changed(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def enormous() -> bytes:
    """A member whose size in its directory has no place in 63 bits."""
    with mock.patch.object(zipfile, "ZIP64_LIMIT", 0):
        data = bytearray(zip_of("cat/1.jpg"))
    field = data.index(b"\1\0", data.index(b"PK\1\2") + 46 + len("cat/1.jpg")) + 4
    return changed(bytes(data), field, b"\xff" * 8)


TAR = pack.tarred({"cat/1.jpg": b"1" * 700, "cat/2.jpg": b"2"})
ZIP = pack.zipped({"cat/1.jpg": b"1" * 700, "cat/2.jpg": b"2"})
INNER = pack.tarred({"cat.tar": TAR[:700]})
HUGE = changed(pack.tarred({"cat/" + "n" * 200: b"1"}), 124, b"07777777777\0")
TWICE = "two members are called 'cat/1.jpg', at bytes 0 and "


def sparse() -> bytes:
    """A header whose map of a sparse file goes on in the next block, and there ends the file."""
    info = tarfile.TarInfo("cat/1.jpg")
    info.type = tarfile.GNUTYPE_SPARSE
    header = info.tobuf(tarfile.GNU_FORMAT)
    header = header[:148] + b" " * 8 + header[156:482] + b"\1" + header[483:]
    return changed(header, 148, b"%06o\0 " % sum(header))


def test_long_headers_of_one_member_are_not_all_kept() -> None:
    """Some archives have any number of them before a member."""
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, 1 << 20
    records = [b"1048576 key%d=" % number for number in range(10, 42)]
    headers = [header.tobuf(tarfile.GNU_FORMAT) + record.ljust((1 << 20) - 1, b"v") + b"\n" for record in records]
    data = b"".join(headers) + TAR
    tracemalloc.start()
    found = list(tar.members(lambda start, stop: data[start:stop], len(data), "a"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [member.name for member in found] == [b"cat/1.jpg", b"cat/2.jpg"]
    assert peak < 4 << 20


@pytest.mark.parametrize(
    ("name", "data", "what"),
    [
        ("a.tar", pack.tarred({"cat/../../1.jpg": b"1"}), "member 'cat/../../1.jpg' leads out of the folder"),
        ("a.zip", pack.zipped({"../cat/1.jpg": b"1"}), "member '../cat/1.jpg' leads out of the folder"),
        ("a.zip", zip_of("cat\\..\\1.jpg", system=0), "member 'cat/../1.jpg' leads out of the folder"),
        ("a.tar", pack.tarred({"cat/1.jpg": b"1", "./cat/1.jpg": b"2"}), "two members are called 'cat/1.jpg', at byt"),
        ("a.zip", zip_of("cat/1.jpg", "cat//1.jpg"), "two members are called 'cat/1.jpg', at bytes 0 and 48: remove"),
        ("a.zip", overlapping(), "and the next share bytes: pack it again"),
        ("a.tar", TAR[:1500], "no valid tar file, it has no end"),
        ("a.tar", TAR[:1100], "no valid tar file, it ends in member 'cat/1.jpg' at byte 0"),
        ("a.tar", changed(TAR, 1600, b"x"), "no valid tar file, no header at byte 1536: copy it"),
        ("a.tar", b"not a tar at all" * 100, "no valid tar file, it doesn't begin with a header"),
        ("a.tar", TAR + TAR, "behind its end, at byte 10240, another tar file begins: take them apart"),
        ("a.tar", TAR[:1024] + bytes(4 << 20), "no valid tar file, 4193792 bytes follow its end at byte 1536"),
        ("a.tar", INNER, "'cat.tar' in "),
        ("a.tar", HUGE, "no valid tar file"),
        ("a.tar", sparse(), "no valid tar file, it ends in member 'cat/1.jpg' at byte 0: copy it"),
        ("a.zip", b"", "no zip file that can be read"),
        ("a.zip", ZIP[:-30], "no zip file that can be read"),
        ("a.zip", b"PK" * 1000, "no zip file that can be read"),
        ("a.zip", ZIP[10:], "member 'cat/1.jpg' at byte -10 and the next share bytes"),
        ("a.zip", changed(ZIP, len(ZIP) - 10, b"\xff\xff\xff\xff"), "no zip file that can be read"),
        ("a.zip", changed(ZIP, len(ZIP) - 18, b"\1"), "no zip file that can be read (it is in several parts)"),
        ("a.zip", enormous(), "no zip file that can be read (a member of more than 8 exabytes)"),
        ("a.tar.gz", b"", "an archive that can't be read in place; unpack it and give the folder: tar -xf "),
        ("a.7z", b"", "7z x "), ("a.rar", b"", "unrar x "),
    ],
)  # fmt: skip
def test_what_is_wrong_with_an_archive_is_one_line(tmp_path: Path, name: str, data: bytes, what: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError) as error:
        check_input(config(str(tmp_path / name)))
        list(all_images(config(str(tmp_path / name))))
    assert what in str(error.value), str(error.value)
    assert name in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (("photos.zip", "photos/1.jpg"), "archive 'photos.zip' is next to folder 'photos': move away"),
        (("cat.tar", "dog/1.jpg"), "archive 'cat.tar' is next to folder 'dog': move away"),
        (("cat.tar", "cat.zip"), "archives 'cat.tar' and 'cat.zip' are one class: keep one"),
    ],
)
@pytest.mark.parametrize("bucket", ["local", "gs"], indirect=True)
def test_what_was_unpacked_next_to_its_archive_is_a_question(bucket: Bucket, names: tuple[str, ...], what: str) -> None:
    data = {".zip": pack.zipped({"1.jpg": b"1"}), ".tar": pack.tarred({"1.jpg": b"1"}), ".jpg": b"1"}
    put(bucket, {name: data[Path(name).suffix] for name in names}, "in/")
    assert what in refused(config(f"{bucket.url}/in"))


def test_a_folder_that_is_called_like_an_archive_is_a_folder(tmp_path: Path) -> None:
    make.put_files(tmp_path, dict.fromkeys(("in.zip/cat.tar/1.jpg", "in.zip/dog/1.jpg"), b"1"))
    given = config(str(tmp_path / "in.zip"))
    assert class_folders(given, ListingSummary()) == [
        ClassFolder("cat.tar/", "cat.tar", None, "cat.tar/"),
        ClassFolder("dog/", "dog", None, "dog/"),
    ]


@pytest.mark.parametrize(
    ("files", "what"),
    [
        (["train/cat/1.jpg", "train/dog/1.jpg", "test/cat/1.jpg"], "its folders are splits, not classes: test, train"),
        (["PetImages/cat/1.jpg", "PetImages/dog/1.jpg"], "give --input 'DIR/in.zip/PetImages'; if 'PetImages' is one "),
        (["a/a/cat/1.jpg", "a/a/dog/1.jpg"], "its only class 'a' are in the sub-folders 'a': if these are the classes"),
        (["1.jpg"], "1 image directly in it; if 'in.zip' is a class, give --input 'DIR', else sort them into DIR/CLAS"),
        (["train.zip", "test.zip"], "2 .zip files instead of images, which can't be read inside an archive: unpack it"),
        (["train.tar"], "1 .tar file instead of images, which can't be read inside an archive: unpack it and give the"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_zip_of_another_shape_than_folders_of_classes_is_a_question(
    tmp_path: Path, files: list[str], what: str
) -> None:
    (tmp_path / "in.zip").write_bytes(pack.zipped(dict.fromkeys(files, b"1")))
    what = what.replace("DIR/in", f"{tmp_path}/in").replace("'DIR'", repr(str(tmp_path)))
    assert what in refused(config(f"{tmp_path}/in.zip"))


def test_the_class_of_an_archive_is_called_as_its_folder(tmp_path: Path) -> None:
    (tmp_path / "images.zip").write_bytes(pack.zipped({"cat/1.jpg": b"1", "dog/1.jpg": b"1"}))
    with pytest.raises(UsageError, match=r"only class 'images' .* give --input '.*/images\.zip'; if 'images' is one"):
        check_input(config(str(tmp_path)))


# --- reading a member


def encrypted() -> bytes:
    data = bytearray(pack.zipped({"cat/1.jpg": b"1"}))
    data[data.index(b"PK\1\2") + 8] |= 1
    return bytes(data)


def bomb(size: int) -> bytes:
    """A member that inflates to more than the directory says."""
    data = bytearray(pack.zipped({"cat/1.jpg": bytes(1 << 20)}))
    entry = data.index(b"PK\1\2")
    data[entry + 24 : entry + 28] = size.to_bytes(4, "little")
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "reason", "detail"),
    [
        (encrypted(), "unsupported", "encrypted in its zip file"),
        (pack.zipped({"cat/1.jpg": b"1"}, zipfile.ZIP_BZIP2), "unsupported", "compressed in its zip file by method 12"),
        (bomb(1000), "decode_error", "corrupt in its zip file: not the size and CRC-32 of the directory"),
        (bomb(1 << 31), "too_many_bytes", "2147483648 bytes, --max_image_bytes 268435456"),
        (changed(pack.zipped({"cat/1.jpg": b"1" * 9}, 0), 39, b"2"), "decode_error", "corrupt in its zip file: not "),
        (changed(pack.zipped({"cat/1.jpg": b"1" * 99}), 39, b"\xff"), "decode_error", "corrupt in its zip file: not "),
        (changed(pack.zipped({"cat/1.jpg": b"1"}), 26, b"\xff\xff\xff\xff"), "decode_error", "corrupt in its zip file"),
    ],
)  # fmt: skip
def test_a_member_that_cant_be_unpacked_is_a_reject(tmp_path: Path, data: bytes, reason: str, detail: str) -> None:
    (tmp_path / "in.zip").write_bytes(data)
    given = config(str(tmp_path / "in.zip"))
    (ref,) = all_images(given)
    with pytest.raises(Reject) as reject:
        _fetch(given, given.image_options, ref)
    assert (reject.value.reason, reject.value.detail[: len(detail)]) == (reason, detail)


@pytest.mark.parametrize("name", ["in.zip", "in.tar"])
def test_an_archive_that_was_replaced_after_the_listing_gives_rejects_and_never_other_bytes(
    bucket: Bucket, name: str
) -> None:
    packed = pack.zipped if name == "in.zip" else pack.tarred
    bucket.put(name, packed({"cat/1.jpg": b"1" * 50}))
    given = config(f"{bucket.url}/{name}")
    (ref,) = all_images(given)
    assert _fetch(given, given.image_options, ref) == b"1" * 50
    for other in (packed({"cat/1.jpg": b"2" * 50}), b"2"):
        bucket.put(name, other)
        with pytest.raises(Reject) as reject:
            _fetch(given, given.image_options, ref)
        assert (reject.value.reason, reject.value.detail) == ("changed", "its archive isn't the one that was listed")


def test_a_remote_zip_is_listed_in_three_requests_and_a_large_tar_is_read_once(
    gcs: Gcs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "_SAVED_BYTES", 1 << 20)
    bucket = gcs.new_bucket()
    files = {f"c{number % 9}/{number}.jpg": b"x" for number in range(3000)}
    gcs.put(bucket, "in.zip", pack.zipped(files))
    gcs.put(bucket, "in.tar", pack.tarred(files))
    for name, most in (("in.zip", 3), ("in.tar", 4), ("in.tar", 2)):  # a tar's members are kept with the job's state
        given = Config(input=f"gs://{bucket}/{name}", output=str(tmp_path), name="x")
        before = len(gcs.requests())
        assert len(list(all_images(given))) == 3000
        assert len(gcs.requests()) - before <= most
