"""Adds a header to each call. gRPC's own call credentials start a thread for each call."""

from collections.abc import Callable
from typing import Any, NamedTuple, final

import grpc


class _CallDetails(NamedTuple):
    """The attributes of a call that gRPC reads (grpc.ClientCallDetails)."""

    method: str
    timeout: float | None
    metadata: list[tuple[str, str | bytes]]
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: grpc.Compression | None


@final
class HeaderInterceptor(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Sends a header with each call.

    Args:
        key: The name of the header.
        value: Returns the value. It is called for each call, since another program may replace a token.
    """

    def __init__(self, key: str, value: Callable[[], str]) -> None:
        self._key = key
        self._value = value

    def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: grpc.ClientCallDetails, request: object
    ) -> Any:
        """Makes a call with the header."""
        return continuation(with_header(client_call_details, self._key, self._value()), request)

    def intercept_unary_stream(
        self, continuation: Callable[..., Any], client_call_details: grpc.ClientCallDetails, request: object
    ) -> Any:
        """Opens a stream with the header."""
        return continuation(with_header(client_call_details, self._key, self._value()), request)


def with_header(details: grpc.ClientCallDetails, key: str, value: str) -> Any:
    """The details of a call with one more header."""
    return _CallDetails(
        details.method,
        details.timeout,
        [*(details.metadata or ()), (key, value)],
        details.credentials,
        details.wait_for_ready,
        details.compression,
    )
