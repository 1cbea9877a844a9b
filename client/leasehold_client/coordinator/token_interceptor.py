"""Adds the token of a local coordinator to each call."""

from collections.abc import Callable
from typing import Any, NamedTuple, final

import grpc

from leasehold_client.coordinator.local_token import read_token


class _CallDetails(NamedTuple):
    """The attributes of a call that gRPC reads (grpc.ClientCallDetails)."""

    method: str
    timeout: float | None
    metadata: list[tuple[str, str | bytes]]
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: grpc.Compression | None


@final
class TokenInterceptor(
    grpc.UnaryUnaryClientInterceptor[Any, Any], grpc.UnaryStreamClientInterceptor[Any, Any]
):
    """Sends ``authorization: Bearer …`` with each call, if there is a token.

    Args:
        address: HOST:PORT of the coordinator.
    """

    def __init__(self, address: str) -> None:
        self._address = address

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
        token = read_token(self._address)
        if token is None:
            return details
        return _CallDetails(
            details.method,
            details.timeout,
            [*(details.metadata or ()), ("authorization", f"Bearer {token}")],
            details.credentials,
            details.wait_for_ready,
            details.compression,
        )
