"""A client of the Dataflow API (https://cloud.google.com/dataflow/docs/reference/rest), by Google's library.

A request that fails for reasons that pass is sent again, by that library, with a warning to the log.
"""

from __future__ import annotations

import logging
import os
import re
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import google.auth
import requests
from google.api_core.client_options import ClientOptions
from google.api_core.exceptions import GoogleAPICallError, RetryError
from google.api_core.retry import Retry
from google.auth.credentials import AnonymousCredentials
from google.auth.environment_vars import CREDENTIALS
from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError, InvalidOperation, TransportError
from google.auth.impersonated_credentials import Credentials as ImpersonatedCredentials
from google.auth.transport.requests import Request
from google.cloud import dataflow_v1beta3 as api
from google.oauth2.credentials import Credentials as UserCredentials
from google.protobuf.json_format import ParseError

from beam_pipeline.errors import ImageShardsError

_LOG = logging.getLogger(__name__)
_SCOPES = ["https://www.googleapis.com/auth/cloud-platform"]
_TIMEOUT_S = 30.0
_FIND_FOR_S, _WATCH_FOR_S = 30.0, 600.0  # an API that fails is asked again, before there is a job and while one runs
_MAX_CHARACTERS = 300  # of an answer, which may be an HTML page
_LOG_IN = f"run gcloud auth application-default login, or set {CREDENTIALS}"
_FIXES = {
    403: "your account needs roles/dataflow.developer, and roles/iam.serviceAccountUser on the workers' account; "
    "the project needs the Dataflow API",
    404: "check --project and --region",
    409: "choose another --version or --job_name",
    429: "wait, or request more quota",
}


class ServiceError(ImageShardsError):
    """The Dataflow API rejected a request, or couldn't be reached.

    Args:
        text: what is wrong, and the fix.
        code: the HTTP status; 0 without one.
    """

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code

    @property
    def is_transient(self) -> bool:
        """Whether a retry may succeed."""
        return self.code in (0, 408, 429) or self.code >= 500


def as_service_error(error: BaseException) -> ServiceError | None:
    """An error of Google's client library in one line; None for any other error."""
    if isinstance(error, RetryError):
        return as_service_error(error.cause)
    has_file = bool(os.environ.get(CREDENTIALS))
    log_in = f"correct {CREDENTIALS}" if has_file else _LOG_IN
    if isinstance(error, GoogleAPICallError):
        code = int(error.code or 0)
        message = " ".join(str(error.message).split())
        text = re.sub(r"^[A-Z]+ \S+: ", "", message)
        detail = _shortened(text)
        if "/storage/v1/" in message.removesuffix(text):  # where the package is staged
            return ServiceError(f"Cloud Storage answers {code} ({detail})", code)
        fix = log_in if code == 401 else _FIXES.get(code)
        return ServiceError(f"the Dataflow API answers {code} ({detail}){f'; {fix}' if fix else ''}", code)
    if isinstance(error, requests.RequestException | TransportError):
        return ServiceError(f"Google's API can't be reached ({type(error).__name__})", 0)
    if isinstance(error, InvalidOperation):
        return ServiceError("the Dataflow API requires credentials; leave out --no_auth", 401)
    if isinstance(error, DefaultCredentialsError) and not has_file:
        return ServiceError(f"there are no Google credentials here; {log_in}", 401)
    if isinstance(error, GoogleAuthError):
        detail = _shortened(str(error.args[0] if error.args else error)).rstrip(".")
        if error.retryable:
            return ServiceError(f"Google's credentials are temporarily unavailable ({detail})", 0)
        return ServiceError(f"Google's credentials can't be used ({detail}); {log_in}", 401)
    if isinstance(error, ParseError | UnicodeDecodeError):
        return ServiceError("the Dataflow API's answer is not JSON; is it a proxy's?", 0)
    return None


def _shortened(text: str) -> str:
    return textwrap.shorten(text, _MAX_CHARACTERS, placeholder="…")


@contextmanager
def translating_api_errors() -> Iterator[None]:
    """Errors of Google's client library become `ServiceError`s."""
    try:
        yield
    except Exception as error:
        if ours := as_service_error(error):
            raise ours from error
        raise


def _retry(for_s: float, and_on: int = 0) -> Retry:
    """Another try after an error that may pass, or with this status."""

    def may_pass(error: Exception) -> bool:
        ours = as_service_error(error)
        return ours is not None and (ours.is_transient or ours.code == and_on)

    return Retry(may_pass, timeout=for_s, on_error=lambda error: _LOG.warning("%s", as_service_error(error)))


class Service:
    """The jobs of one project and region. The constructor and every method raise `ServiceError`.

    Args:
        options: Beam's, of a job.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._project, self._region, endpoint = (options[name] for name in ("project", "region", "dataflow_endpoint"))
        impersonated = options["impersonate_service_account"] or ""
        with translating_api_errors():
            account = AnonymousCredentials() if options["no_auth"] else credentials(self._project, impersonated)[0]
            # REST: Ctrl-C ends a request at once, and tests can run a server.
            settings: dict[str, Any] = {
                "credentials": account,
                "client_options": ClientOptions(api_endpoint=endpoint.strip().rstrip("/")),
                "transport": "rest",
            }
            self._jobs = api.JobsV1Beta3Client(**settings)
            self._messages = api.MessagesV1Beta3Client(**settings)
            self._metrics = api.MetricsV1Beta3Client(**settings)
        self._scope = {"project_id": self._project, "location": self._region}
        # Dataflow doesn't know a new job at once, says Beam.
        self._watching: dict[str, Any] = {"timeout": _TIMEOUT_S, "retry": _retry(_WATCH_FOR_S, and_on=404)}

    def running(self, name: str) -> Any:
        """The running `api.Job` of a name, with its labels, or None; Dataflow runs one job of a name at a time."""
        request = {**self._scope, "name": name, "filter": "ACTIVE"}
        finding: dict[str, Any] = {"timeout": _TIMEOUT_S, "retry": _retry(_FIND_FOR_S)}
        with translating_api_errors():
            for job in self._jobs.list_jobs(request, **finding):
                if job.name == name:  # the listing has no labels
                    described = {**self._scope, "job_id": job.id, "view": "JOB_VIEW_DESCRIPTION"}
                    return self._jobs.get_job(described, **finding)
        return None

    def get_job(self, job_id: str) -> Any:
        """A job as an `api.Job`."""
        request = {**self._scope, "job_id": job_id, "view": "JOB_VIEW_SUMMARY"}
        with translating_api_errors():
            return self._jobs.get_job(request, **self._watching)

    def list_messages(self, job_id: str, page_token: None, start_time: datetime | None) -> tuple[list[Any], None]:
        """Warnings and errors of a job since a time, the oldest first, as one page."""
        request = {**self._scope, "job_id": job_id, "minimum_importance": "JOB_MESSAGE_WARNING"}
        with translating_api_errors():
            found = self._messages.list_job_messages({**request, "start_time": start_time}, **self._watching)
            return sorted((message for message in found if message.time), key=lambda message: message.time), None

    def get_job_metrics(self, job_id: str) -> Any:
        """A job's counters, as the API has them."""
        with translating_api_errors():
            return self._metrics.get_job_metrics({**self._scope, "job_id": job_id}, timeout=_TIMEOUT_S)

    def console(self, job_id: str) -> str:
        """URL of a job's page."""
        return f"https://console.cloud.google.com/dataflow/jobs/{self._region}/{job_id}?project={self._project}"

    def cancel_command(self, job_id: str) -> str:
        """The command that cancels a job."""
        return f"gcloud dataflow jobs cancel {job_id} --region={self._region} --project={self._project}"


def credentials(project: str, impersonated: str = "", fetch: bool = False) -> tuple[Any, str | None]:
    """The user's credentials, or those of Beam's `--impersonate_service_account`, and their project.

    Args:
        project: of the job; its quota counts a user's requests unless the credentials name a quota project.
        impersonated: accounts, separated by commas: the last one is impersonated, through the others; "" for none.
        fetch: fetch a token, too.

    Raises:
        ServiceError: there are none, or they are refused.
    """
    with translating_api_errors():
        account, own_project = google.auth.default(scopes=_SCOPES)
        if impersonated:
            *delegates, target = impersonated.split(",")
            account = ImpersonatedCredentials(account, target, _SCOPES, delegates)
        elif isinstance(account, UserCredentials) and not account.quota_project_id:
            account = account.with_quota_project(project)
        if fetch:
            account.refresh(Request())
    return account, own_project
