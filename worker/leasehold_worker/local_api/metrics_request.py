"""One HTTP request for metrics: the bounds, the rules and the bytes of the answer. Pure."""

import email.utils
from http import HTTPStatus
from typing import Final, NamedTuple

HEAD_LIMIT_BYTES: Final = 8_192
"""Most bytes of a request line with its headers. Prometheus sends about 300."""

PATH: Final = "/metrics"
OPENMETRICS: Final = "application/openmetrics-text"


class HttpError(Exception):
    """The request is refused.

    Attributes:
        status: The status of the answer.
    """

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class MetricsRequest(NamedTuple):
    """A request for metrics.

    Attributes:
        is_openmetrics: The answer is in OpenMetrics, and otherwise in Prometheus's text format.
        is_head: Only the headers of the answer are wanted.
    """

    is_openmetrics: bool
    is_head: bool


def parse_head(head: bytes) -> MetricsRequest:
    """Reads a request line and its headers.

    Args:
        head: The bytes up to the empty line.

    Raises:
        HttpError: The request is malformed, or not for metrics.
    """
    line, *fields = head.decode("latin-1").split("\r\n")
    method, _, rest = line.partition(" ")
    target, _, version = rest.partition(" ")
    if version not in ("HTTP/1.0", "HTTP/1.1"):
        raise HttpError(HTTPStatus.BAD_REQUEST, "not a request of HTTP/1.1")
    if target.partition("?")[0] != PATH:
        raise HttpError(HTTPStatus.NOT_FOUND, f"only {PATH} is served here: GET {PATH}")
    if method not in ("GET", "HEAD"):
        raise HttpError(HTTPStatus.METHOD_NOT_ALLOWED, f"only GET and HEAD are served: GET {PATH}")
    headers = dict(map(_header, filter(None, fields)))
    return MetricsRequest(OPENMETRICS in headers.get("accept", ""), method == "HEAD")


def _header(field: str) -> tuple[str, str]:
    name, colon, value = field.partition(":")
    if not colon:
        raise HttpError(HTTPStatus.BAD_REQUEST, "a header has no colon")
    return name.lower(), value.strip()


def answer(status: HTTPStatus, content_type: str, body: bytes, *, is_head: bool = False) -> bytes:
    """The bytes of an answer. The connection ends after it."""
    headers = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Date: {email.utils.formatdate(usegmt=True)}",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
        "",
        "",
    ]
    return "\r\n".join(headers).encode() + (b"" if is_head else body)


def refusal(error: HttpError) -> bytes:
    """The answer to a refused request."""
    return answer(error.status, "text/plain; charset=utf-8", f"{error}\n".encode())
