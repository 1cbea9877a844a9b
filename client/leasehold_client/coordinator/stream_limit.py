"""The deadline of a stream, which leaves time to renew the client certificate."""

import time
from typing import Final, final

import grpc

from leasehold_client.contexts import Context
from leasehold_client.coordinator.renewing_channel import RenewedContext
from leasehold_client.errors import LeaseholdError, NoCoordinatorError, RenewalDueError

LIMIT_MIN_S: Final = 1.0
"""Shortest deadline, so that a stream whose certificate can't be renewed is not reopened in a loop."""


@final
class StreamLimit:
    """The deadline of one stream: half of the time until its certificate expires, or the caller's deadline.

    A connection keeps its certificate, and certificates are renewed when a call begins. So a stream that only
    waits ends in time and is reopened. A deadline needs no thread, and also ends a stream without responses.

    Args:
        renewed: The context of the client. None: the client has none.
        opened: The context with the certificate of the stream. None: as of ``renewed``.
        timeout_s: The deadline of the caller. None: no deadline.

    Attributes:
        timeout_s: The deadline of the stream. None: no deadline.
    """

    def __init__(
        self, renewed: RenewedContext | None, opened: Context | None, timeout_s: float | None
    ) -> None:
        self._renewed = renewed
        self._opened = opened
        self.timeout_s = timeout_s
        self._is_early = False
        left_s = opened.expire_s - time.time() if opened is not None else 0.0
        limit_s = max(left_s / 2, LIMIT_MIN_S)
        if left_s > 0 and (timeout_s is None or limit_s < timeout_s):
            self.timeout_s = limit_s
            self._is_early = True

    def error(self, error: LeaseholdError) -> LeaseholdError:
        """The error of the stream, which is transient if the stream can be reopened with a newer certificate.

        Reads the contexts after UNAUTHENTICATED, since another process may have stored a newer certificate.
        """
        if self._renewed is None or self._opened is None:
            return error
        if (
            self._is_early
            and isinstance(error, NoCoordinatorError)
            and error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        ):
            return RenewalDueError(
                f"the certificate of {self._opened.identity} is to be renewed: open the stream again",
                code=error.code,
                retry_after_s=0.0,
            )
        if error.reason == "UNAUTHENTICATED" and self._renewed.newest() is not self._opened:
            error.retry_after_s = 0.0
        return error
