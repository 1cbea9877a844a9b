"""Retries: calls and streams that survive a restart of the coordinator."""

import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

from leasehold_client.errors import LeaseholdError, NoCoordinatorError

Response = TypeVar("Response")

OUTAGE_LIMIT_S: Final = 30.0
"""How long a stream is reopened without any response."""

REPEAT_LIMIT_S: Final = 3.0
"""How long an unanswered call is retried. A restart of the coordinator takes less."""

RETRY_INTERVAL_S: Final = 0.2

BUSY_LIMIT_S: Final = 30.0
"""How long a call is retried that the coordinator refuses for lack of capacity."""

CONNECT_TIMEOUT_S: Final = 5.0
"""Timeout of one connection attempt."""


def is_outage(error: LeaseholdError) -> bool:
    """Whether the error means that no coordinator answers at the moment."""
    return isinstance(error, NoCoordinatorError)


def repeat(call: Callable[[], Response], *, through_outages: bool = True) -> Response:
    """Makes a call and retries it while it can't be served.

    Args:
        call: An idempotent call: it only reads, or its request has a request_id.
        through_outages: Whether an unanswered call is retried, for 3 s.

    Raises:
        LeaseholdError: A refusal without a retry delay, at once; a refusal with a retry delay, after 30 s;
            an outage, after 3 s.
    """
    began = time.monotonic()
    while True:
        try:
            return call()
        except LeaseholdError as error:
            limit_s, wait_s = REPEAT_LIMIT_S if through_outages else 0.0, RETRY_INTERVAL_S
            if error.retry_after_s is not None:
                limit_s, wait_s = BUSY_LIMIT_S, error.retry_after_s * random.uniform(0.5, 1.5)
            elif not is_outage(error):
                raise
            if time.monotonic() + wait_s >= began + limit_s:
                raise
        time.sleep(wait_s)


def resume(
    open_stream: Callable[[], Iterable[Response]],
    is_transient: Callable[[LeaseholdError], bool] = is_outage,
) -> Iterator[Response]:
    """Yields the responses of a stream, which is reopened each time that it breaks, until it ends.

    Args:
        open_stream: Opens the stream after the last response, whose position the caller tracks.
        is_transient: Whether the stream is reopened after this error. Other errors are raised at once.

    Raises:
        LeaseholdError: An error that is not transient, or the last error once an outage has lasted 30 s. A
            stream that stays open ends the outage, also without a response.
    """
    lost_since: float | None = None
    while True:
        opened = time.monotonic()
        try:
            for response in open_stream():
                lost_since = None
                yield response
            return
        except LeaseholdError as error:
            if not is_transient(error):
                raise
            now = time.monotonic()
            # A stream that lasted longer than a connection attempt was connected.
            if lost_since is None or now - opened > 2 * CONNECT_TIMEOUT_S:
                lost_since = now
            if now - lost_since >= OUTAGE_LIMIT_S:
                raise
        time.sleep(RETRY_INTERVAL_S)
