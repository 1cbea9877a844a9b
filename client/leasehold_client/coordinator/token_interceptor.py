"""Adds a token to each call. gRPC's own call credentials start a thread for each call."""

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
class TokenInterceptor(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Sends ``authorization: Bearer …`` with each call.

    Args:
        token: Returns the token. It is called for each call, since another program may replace the token.
    """

    def __init__(self, token: Callable[[], str]) -> None:
        self._token = token

    def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: grpc.ClientCallDetails, request: object
    ) -> Any:
        """Makes a call with the token."""
        return continuation(self._with_token(client_call_details), request)

    def intercept_unary_stream(
        self, continuation: Callable[..., Any], client_call_details: grpc.ClientCallDetails, request: object
    ) -> Any:
        """Opens a stream with the token."""
        return continuation(self._with_token(client_call_details), request)

    def _with_token(self, details: grpc.ClientCallDetails) -> Any:
        return _CallDetails(
            details.method,
            details.timeout,
            [*(details.metadata or ()), ("authorization", f"Bearer {self._token()}")],
            details.credentials,
            details.wait_for_ready,
            details.compression,
        )
