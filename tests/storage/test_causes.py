"""Each cause of a failure is one line that says it and the fix, whatever the client; what passes is tried again."""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import google.auth.credentials
import pytest
from google.auth.exceptions import RefreshError, TransportError

from beam_pipeline.errors import MissingFileError, StorageError
from beam_pipeline.storage import causes, objects, open_storage
from tests.conftest import S3_KEYS, forget_clients
from tests.servers import BODY, RESET, SHORT, SILENCE, Answer, Telling, telling

URLS = {"gs": "gs://bucket/x", "s3": "s3://bucket/x", "az": "az://bucket/x", "http": "{server}/x"}
Reach = Callable[[str], str]


@pytest.fixture
def reach(monkeypatch: pytest.MonkeyPatch) -> Reach:
    """Makes each scheme lead to a server, with credentials that it never looks at."""
    monkeypatch.setattr(causes, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(causes, "_MAX_PAUSE_S", 0.05)

    def set_up(server: str) -> str:
        azure = {"ACCOUNT_NAME": "me", "ACCOUNT_KEY": "a2V5", "ENDPOINT": server}
        names = {**S3_KEYS, "AWS_ENDPOINT_URL": server, "STORAGE_EMULATOR_HOST": server}
        for name, value in {**names, **{f"AZURE_STORAGE_{name}": value for name, value in azure.items()}}.items():
            monkeypatch.setenv(name, value)
        forget_clients()
        return server

    yield set_up
    monkeypatch.undo()
    forget_clients()


def line(scheme: str, server: Telling, deadline_s: float | None = 30, ask: str = "read") -> str:
    """What a request says that fails."""
    url = URLS[scheme].format(server=server.url)
    with pytest.raises(StorageError) as raised:
        getattr(open_storage(url, deadline_s), ask)(url)
    text = str(raised.value)
    assert text.startswith(f"{url}: ") and "\n" not in text and "Debug" not in text, text
    return text.removeprefix(f"{url}: ")


# Answer, what is said of it, on which schemes.
LASTING = [
    (Answer(301), "the bucket is in another region (127.0.0.1:", "s3"),
    (Answer(400, "AuthorizationHeaderMalformed"), "the bucket is in another region (400: ", "s3"),
    (Answer(400, "ExpiredToken"), "credentials have expired (400: the server's own words); set AWS_ACCESS", "s3"),
    (Answer(400, "Strange"), "400: the server's own words", "s3 az"),
    (Answer(401), "credentials are refused (401: the server's own words); ", "s3 az http"),
    (Answer(401), "credentials are missing (401: the server's own words); gcloud auth", "gs"),
    (Answer(403), "credentials are missing (403: the server's own words); gcloud auth", "gs"),
    (Answer(403, "AccessDenied"), "permission denied (403: the server's own words); give this account", "s3 az http"),
    (Answer(403, "InvalidAccessKeyId"), "credentials are refused (403: the server's own words); set AWS", "s3"),
    (Answer(403, "SignatureDoesNotMatch"), "credentials are refused (403: ", "s3"),
    (Answer(404, "NoSuchBucket"), "there is no such bucket (404: the server's own words); check its name", "gs s3"),
    (Answer(404, "ContainerNotFound"), "there is no such bucket (404: ", "az"),
]


@pytest.mark.parametrize(
    ("scheme", "answer", "said"), [(scheme, *row[:2]) for row in LASTING for scheme in row[2].split()]
)
def test_a_lasting_cause_is_one_line_at_once(scheme: str, answer: Answer, said: str, reach: Reach) -> None:
    with telling(answer) as server:
        reach(server.url)
        assert line(scheme, server).startswith(said)
    assert len(server.requests) == 1


@pytest.mark.parametrize("ask", ["stat", "delete", "names"])
def test_google_cloud_storage_says_the_same(ask: str, reach: Reach) -> None:
    with telling(Answer(401)) as server:
        reach(server.url)
        assert line("gs", server, ask=ask).startswith("credentials are missing (")
    assert sum("/bucket/o" in request for request in server.requests) == 1  # it asks for the bucket by itself


@pytest.mark.parametrize("scheme", ["gs", "s3", "az"])
def test_listing_a_missing_bucket_names_the_cause(scheme: str, reach: Reach) -> None:
    with telling(Answer(404, "ContainerNotFound" if scheme == "az" else "NoSuchBucket")) as server:
        reach(server.url)
        with pytest.raises(StorageError, match=r"there is no such bucket.*check its name") as raised:
            list(open_storage(f"{scheme}://bucket/in").files(f"{scheme}://bucket/in"))
    assert isinstance(raised.value, FileNotFoundError)


@pytest.mark.parametrize("scheme", URLS)
@pytest.mark.parametrize("status", [408, 429, 500, 503, RESET, SHORT])
def test_what_passes_is_asked_again(scheme: str, status: int, reach: Reach) -> None:
    with telling(Answer(status), Answer(status), Answer(200)) as server:
        reach(server.url)
        url = URLS[scheme].format(server=server.url)
        assert open_storage(url, 30).read(url) == b"content"
    assert len(server.requests) == 3, "one retry layer"


ENDED = {
    503: "the server is busy or failing (503: the server's own words",
    RESET: "no connection (127.0.0.1:",
    SILENCE: "no answer in time (127.0.0.1:",
}


@pytest.mark.parametrize("ask", ["names", "files"])
def test_an_empty_folder_is_empty_for_an_account_that_may_not_list_the_folder_above(ask: str, reach: Reach) -> None:
    nothing = "<ListBucketResult><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>"
    with telling(Answer(BODY, words=nothing), Answer(403, "AccessDenied")) as server:
        reach(server.url)
        assert list(getattr(open_storage("s3://bucket/a/x", 5), ask)("s3://bucket/a/x")) == []
        assert len(server.requests) == 2


UPLOAD = "<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
COMPLETED = '<CompleteMultipartUploadResult><ETag>"e"</ETag></CompleteMultipartUploadResult>'
FAILED = "<?xml version='1.0'?><Error><Code>{}</Code><Message>the server's own words</Message></Error>"


@pytest.mark.parametrize("aborting", [Answer(BODY, words=""), Answer(404, "NoSuchUpload")], ids=["not done", "done"])
def test_an_upload_whose_completion_is_answered_200_with_an_error_is_sent_again(
    aborting: Answer, reach: Reach, monkeypatch: pytest.MonkeyPatch
) -> None:
    # https://docs.aws.amazon.com/AmazonS3/latest/API/API_CompleteMultipartUpload.html
    monkeypatch.setattr(objects, "CHUNK_BYTES", 1000)
    begun = [Answer(BODY, words=UPLOAD), Answer(BODY, words=""), Answer(BODY, words="")]
    failed = [Answer(BODY, words=FAILED.format("InternalError")), aborting]
    empty = [*begun, Answer(BODY, words=""), aborting]
    with telling(*empty, *begun, *failed, *begun, Answer(BODY, words=COMPLETED)) as server:
        reach(server.url)
        assert open_storage("s3://bucket/x", 30).publish(io.BytesIO(bytes(1500)), "s3://bucket/x")
        assert sum(request.startswith("PUT") for request in server.requests) == 6
    with telling(*begun, Answer(BODY, words=FAILED.format("AccessDenied")), aborting) as server:
        reach(server.url)
        with pytest.raises(StorageError, match=r"^s3://bucket/x: "):
            open_storage("s3://bucket/x", 0.2).publish(io.BytesIO(bytes(1500)), "s3://bucket/x")


@pytest.mark.parametrize("scheme", URLS)
@pytest.mark.parametrize("status", ENDED)
def test_retries_end_at_the_deadline_with_one_line(scheme: str, status: int, reach: Reach) -> None:
    with telling(Answer(status)) as server:
        reach(server.url)
        begin = time.monotonic()
        assert line(scheme, server, 0.6).startswith(f"no success for 1 s: {ENDED[status]}")
    assert time.monotonic() - begin < 20, "a silent server answers in a minute"


@pytest.mark.parametrize("scheme", URLS)
@pytest.mark.parametrize("answer", [Answer(503), Answer(403, "AccessDenied")])
def test_only_a_job_is_told_how_to_resume(
    scheme: str, answer: Answer, reach: Reach, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "DEFAULT_DEADLINE_S", 0.2)
    with telling(answer) as server:
        reach(server.url)
        assert "the same command resumes" in line(scheme, server, 0.2)
        assert "resume" not in (said := line(scheme, server, None)) and "deadline" not in said


@pytest.mark.parametrize("scheme", URLS)
def test_a_reader_gives_up_soon_if_nobody_ever_answers_and_names_no_flag(
    scheme: str, reach: Reach, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A name that doesn't resolve is silent for 15 s at most; a job's flag isn't the fix of a command without it."""
    for name, seconds in {"FIRST_CONTACT_S": 0.3, "DEFAULT_DEADLINE_S": 0.9}.items():
        monkeypatch.setattr(objects, name, seconds)
    monkeypatch.setattr(causes, "_SILENT_S", 0.0)
    with telling(Answer(503)) as server:
        reach(server.url)
        assert line(scheme, server, None).startswith("no success for 1 s: the server is busy"), "it has answered"
        server.answers[:] = [Answer(403)]
        assert "resumes" not in line(scheme, server, None)
    forget_clients()
    caplog.clear()
    said = line(scheme, server, None)
    assert said.startswith("no success for 0 s: no connection (127.0.0.1:")
    assert said.endswith("; check the URL and the network")
    (logged,) = caplog.messages
    assert logged.startswith(URLS[scheme].format(server=server.url)) and "; trying again for 0 s" in logged
    caplog.clear()
    assert line(scheme, server, 0.3).endswith("; the same command resumes, --io_deadline waits longer")
    assert not caplog.messages, "a job has its own progress line"


def test_a_reader_that_had_an_answer_waits_through_an_outage(reach: Reach, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"FIRST_CONTACT_S": 0.1, "DEFAULT_DEADLINE_S": 0.9}.items():
        monkeypatch.setattr(objects, name, seconds)
    with telling(Answer(200)) as server:
        reach(server.url)
        assert open_storage(URLS["s3"]).read(URLS["s3"]) == b"content"
        server.answers[:] = [Answer(RESET)]
        assert line("s3", server, None).startswith("no success for 1 s: no connection")


def test_a_public_bucket_needs_no_credentials(reach: Reach, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with telling(Answer(200)) as server:
        reach(server.url)
        for name in S3_KEYS:
            monkeypatch.delenv(name)
        monkeypatch.setenv("HOME", str(tmp_path))
        forget_clients()
        store = open_storage("s3://bucket/x", 2)  # so long the metadata server is waited for
        assert store.read("s3://bucket/x") == b"content"
        server.answers[:] = [Answer(403)]
        said = line("s3", server, 2)
    assert said.startswith("credentials are missing (403: the server's own words); set AWS_ACCESS_KEY_ID")


def test_an_aws_profile_is_read_by_boto3(reach: Reach, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def read(profile: str) -> bytes:
        monkeypatch.setenv("AWS_PROFILE", profile)
        forget_clients()
        return open_storage("s3://bucket/x").read("s3://bucket/x")

    (tmp_path / "credentials").write_text("[mine]\naws_access_key_id = a\naws_secret_access_key = b\n")
    with telling(Answer(200)) as server:
        reach(server.url)
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        assert read("mine") == b"content"
        with pytest.raises(StorageError, match=r"The config profile \(other\) could not be found"):
            read("other")
        monkeypatch.setitem(sys.modules, "boto3", None)
        monkeypatch.delitem(sys.modules, "obstore.auth.boto3")
        with pytest.raises(StorageError, match=r"^AWS_PROFILE='other' needs boto3; install boto3, or set AWS_ACC"):
            read("other")


def test_google_credentials_that_can_not_be_read_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "gone.json"))
    forget_clients()
    with pytest.raises(StorageError, match=r"^GOOGLE_APPLICATION_CREDENTIALS='.*gone.json': .* not found"):
        open_storage("gs://bucket/x")
    forget_clients()


class Credentials(google.auth.credentials.Credentials):
    """Of Google; each attempt to get a token fails in turn, and works when there is no failure left."""

    def __init__(self, store: object, patch: pytest.MonkeyPatch, *failures: Exception) -> None:
        super().__init__()
        self.failures = list(failures)
        patch.setattr(store, "_credentials", self)
        patch.setattr(store, "_is_anonymous", False)

    def refresh(self, _: object) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.token = "token"


@pytest.mark.parametrize("ask", ["read", "stat"])
def test_credentials_that_expired_are_one_line(ask: str, reach: Reach, monkeypatch: pytest.MonkeyPatch) -> None:
    with telling(Answer(200)) as server:
        reach(server.url)
        Credentials(open_storage("gs://bucket", 5), monkeypatch, RefreshError("invalid_grant: Token has been revoked"))
        said = line("gs", server, 5, ask)
    assert said.startswith("credentials have expired (") and "gcloud auth application-default login" in said


def test_credentials_that_can_not_be_fetched_for_a_moment_are_fetched_again(reach: Reach, monkeypatch) -> None:
    with telling(Answer(200)) as server:
        reach(server.url)
        store = open_storage("gs://bucket", 5)
        failing = Credentials(store, monkeypatch, *[TransportError("metadata server")] * 2)
        assert store.read("gs://bucket/x") == b"content"
    assert failing.token == "token"


def test_pauses_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    here, sleep = threading.current_thread(), time.sleep  # another thread of the process may sleep meanwhile
    monkeypatch.setattr(time, "sleep", lambda s: (pauses.append if threading.current_thread() is here else sleep)(s))
    request = Mock(side_effect=[ConnectionResetError(), TimeoutError(), BrokenPipeError(), "done"])
    assert causes.retry(request, "gs://b/x", 600) == "done"
    assert len(pauses) == 3 and pauses[0] < pauses[2]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("DefaultCredentialsError", "credentials are missing"),
        ("UnauthorizedSSOTokenError", "credentials have expired"),
        ("StrangeError", "nothing found"),
    ],
)
def test_errors_of_packages_that_may_be_absent_are_told_by_their_names(name: str, said: str) -> None:
    error = type(name, (Exception,), {})("nothing found")
    with pytest.raises(StorageError, match=rf"^gs://b/x: {said}"):
        causes.retry(Mock(side_effect=error), "gs://b/x", 600)


def test_a_web_file_that_is_gone_is_missing_at_once() -> None:
    for status in (404, 410):
        with telling(Answer(status, "gone")) as server:
            url = f"{server.url}/1.jpg"
            with pytest.raises(MissingFileError, match=r"is missing$"):
                open_storage(url, 60).read(url)


def test_names_of_objects_do_not_decide_the_cause(reach: Reach) -> None:
    with telling(Answer(404, "NoSuchKey")) as server:
        reach(server.url)
        for name in ("Timeout 503.jpg", "AccessDenied.jpg", "ExpiredToken/HTTP 403.jpg", "metadata.json"):
            with pytest.raises(StorageError, match=r"is missing$"):
                open_storage("s3://bucket").read(f"s3://bucket/{name}")
