"""A page of a listing that arrives as something else, with status 200: no image is lost by it without a word."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

import pytest

from beam_pipeline.config import Config
from beam_pipeline.errors import StorageError
from beam_pipeline.inputs.folders import all_images
from beam_pipeline.storage import causes, gs, objects
from tests.conftest import forget_clients
from tests.faults.proxy import Proxy, _Handler
from tests.servers import S3, Gcs, serving

PAGE = 2
LISTING = b"""<?xml version="1.0" encoding="UTF-8"?><ListBucketResult><Name>bucket</Name><Prefix>x/</Prefix>
<KeyCount>1</KeyCount><IsTruncated>false</IsTruncated><Contents><Key>x/1.jpg</Key><Size>7</Size><ETag>"e"</ETag>
<LastModified>2024-01-01T00:00:00.000Z</LastModified></Contents></ListBucketResult>"""
BODIES = [
    b"<?xml version='1.0'?><Error><Code>InternalError</Code><Message>try again</Message></Error>",
    b"<html>oops</html>",
    b'{"error": {"code": 503}}',
    b"{}",
    b"[]",
    b"",
    LISTING[:200],
    LISTING.replace(b"</Key>", b"</Ke{>"),
    LISTING.replace(b">7<", b">w<"),
]
IMAGES = {"a": 5, **dict.fromkeys("bcd", 1)}  # three pages of images; two of folders, and the last of them is full


class _Interposing(Proxy):
    """Answers a listing request of `prefix` with `body`: its page number `page`, or that and all after it."""

    def __init__(self, scheme: str, upstream: str) -> None:
        super().__init__(upstream, 0)
        self.scheme = scheme
        self.RequestHandlerClass = _InterposingHandler
        self.prefix, self.page, self.is_lasting, self.body, self.asked, self.hits = "", 0, False, b"", 0, 0

    def hits_it(self, target: str) -> bool:
        with self._lock:
            self.asked += parse_qs(urlsplit(target).query).get("prefix") == [self.prefix]
            is_it = self.asked > self.page if self.is_lasting else self.asked == self.page + 1 and not self.hits
            is_it = is_it and parse_qs(urlsplit(target).query).get("prefix") == [self.prefix]
            self.hits += is_it
            return is_it


class _InterposingHandler(_Handler):
    server: _Interposing

    def _answer(self) -> None:
        if self.server.hits_it(self.path):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._reply(200, {"Content-Type": "application/xml"}, self.server.body)
            return
        if "list-type" in self.path:
            self.path += f"&max-keys={PAGE}"  # moto looks at no signature
        super()._answer()

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _answer


@pytest.fixture(scope="module")
def buckets(gcs: Gcs, s3: S3) -> dict[str, str]:
    """Scheme → a bucket with the images."""
    found = {}
    for scheme, server in (("gs", gcs), ("s3", s3)):
        found[scheme] = server.new_bucket()
        for folder, count in IMAGES.items():
            for number in range(count):
                server.put(found[scheme], f"in/{folder}/{number:05d}.jpg", b"1")
    return found


@pytest.fixture
def interposing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Interposing]:
    scheme = request.param
    upstream = request.getfixturevalue("gcs" if scheme == "gs" else "s3").url
    monkeypatch.setattr(causes, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(causes, "_MAX_PAUSE_S", 0.02)
    monkeypatch.setattr(gs, "PAGE_NAMES", PAGE)
    monkeypatch.setattr(objects, "PAGE_NAMES", PAGE)
    with serving(_Interposing(scheme, upstream)) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST" if scheme == "gs" else "AWS_ENDPOINT_URL", server.url)
        forget_clients()
        yield server
    monkeypatch.undo()
    forget_clients()


CASES = [("gs", "in/a/", 1), ("gs", "in/b/", 0), *(("s3", "in/a/", page) for page in (0, 1, 2))]
CASES += [("s3", "in/b/", 0), ("s3", "in/", 0), ("s3", "in/", 1)]


@pytest.mark.parametrize(
    ("interposing", "prefix", "page", "body", "is_lasting"),
    [
        *((*case, BODIES[0], False) for case in CASES),
        *((*case, body, False) for case in CASES[:3:2] for body in BODIES[1:]),  # of gs:// and of s3://
        *((*case, body, True) for case in CASES[:3:2] for body in BODIES[:2]),
    ],
    indirect=["interposing"],
)
def test_a_page_that_is_no_listing_loses_no_image(
    interposing: _Interposing, buckets: dict[str, str], prefix: str, page: int, body: bytes, is_lasting: bool
) -> None:
    interposing.prefix, interposing.page, interposing.is_lasting, interposing.body = prefix, page, is_lasting, body
    url = f"{interposing.scheme}://{buckets[interposing.scheme]}"
    config = Config(input=f"{url}/in", output=f"{url}/out", name="x", io_deadline=0.2 if is_lasting else 20)
    try:
        listed = len(list(all_images(config)))
    except StorageError as error:
        assert is_lasting, error
        assert "no success for 0 s: the " in str(error) and "\n" not in str(error)
    else:
        assert not is_lasting and listed == sum(IMAGES.values())
    assert interposing.hits
