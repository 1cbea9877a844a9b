"""Retries: calls and streams that survive a restart of the coordinator."""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Final, TypeVar

from leasehold_client.errors import LeaseholdError, NoCoordinatorError, RenewalDueError

Response = TypeVar("Response")

OUTAGE_LIMIT_S: Final = 30.0
"""How long a stream is reopened without any response."""

REPEAT_LIMIT_S: Final = 5.0
"""How long a call is repeated after UNAVAILABLE: a coordinator or worker that restarts takes less."""

RETRY_INTERVAL_S: Final = 0.2
"""Wait after the first failure. It doubles with each further one, up to :data:`RETRY_INTERVAL_LIMIT_S`."""

RETRY_INTERVAL_LIMIT_S: Final = 1.0

BUSY_LIMIT_S: Final = 30.0
"""How long a call is repeated that the coordinator refuses for lack of capacity."""

CONNECT_TIMEOUT_S: Final = 5.0
"""Timeout of one connection attempt."""

CALLER_STREAMS: Final = "caller_streams"
"""The bound on the streams of one identity over all its clients, as refusals name it (docs/security.md)."""


def is_outage(error: LeaseholdError) -> bool:
    """Whether the error means that no coordinator answers at the moment."""
    return isinstance(error, NoCoordinatorError)


def is_transient(error: LeaseholdError) -> bool:
    """Whether the unchanged request may succeed soon: nobody answers, or the refusal has a retry delay."""
    return is_outage(error) or error.retry_after_s is not None


def has_too_many_streams(error: LeaseholdError) -> bool:
    """Whether the caller has as many streams as the coordinator allows."""
    return error.metadata.get("bound") == CALLER_STREAMS


def retry_limit_s(error: LeaseholdError) -> float:
    """How long a call is repeated after a transient error."""
    from grpc import StatusCode

    is_away = is_outage(error) or error.code is StatusCode.UNAVAILABLE
    return REPEAT_LIMIT_S if is_away else BUSY_LIMIT_S


def back_off_s(error: LeaseholdError, failures: int) -> float:
    """The wait after a transient error: the delay of the refusal if it has one. Random, to spread clients.

    Args:
        error: The error.
        failures: Number of failures in a row before this one.
    """
    wait_s = min(RETRY_INTERVAL_S * 2 ** min(failures, 10), RETRY_INTERVAL_LIMIT_S)
    return (wait_s if error.retry_after_s is None else error.retry_after_s) * random.uniform(0.5, 1.5)


def is_unsent(error: LeaseholdError) -> bool:
    """Whether the error is transient, and the change of the request can't have been made."""
    return is_transient(error) and not (isinstance(error, NoCoordinatorError) and error.is_sent)


async def repeat(
    call: Callable[[], Awaitable[Response]],
    on_wait: Callable[[LeaseholdError], None] = lambda error: None,
    may_repeat: Callable[[LeaseholdError], bool] = is_transient,
) -> Response:
    """Makes a call, and repeats it while its errors are transient.

    Args:
        call: A call. It only reads, or its request has a request_id, or ``may_repeat`` is :func:`is_unsent`.
        on_wait: Called before each wait, with the error that is waited out.
        may_repeat: Whether the call is repeated after this error.

    Raises:
        LeaseholdError: Any other error, at once. A transient error, if the limit of :func:`retry_limit_s` is
            over or the next attempt would come after the limit.
    """
    began = time.monotonic()
    failures = 0
    is_sent = False
    while True:
        try:
            return await call()
        except LeaseholdError as error:
            if isinstance(error, NoCoordinatorError):
                is_sent = error.is_sent = is_sent or error.is_sent
            if not may_repeat(error):
                raise
            wait_s = back_off_s(error, failures)
            if time.monotonic() + wait_s >= began + retry_limit_s(error):
                raise
            on_wait(error)
        failures += 1
        await asyncio.sleep(wait_s)


async def resume(
    open_stream: Callable[[], AsyncGenerator[Response]],
    may_reopen: Callable[[LeaseholdError], bool] = is_transient,
    *,
    is_patient: bool = False,
) -> AsyncGenerator[Response]:
    """Yields the responses of a stream, which is reopened each time that it breaks, until it ends.

    Args:
        open_stream: Opens the stream after the last response, whose position the caller tracks.
        may_reopen: Whether the stream is reopened after this error. Other errors are raised at once.
        is_patient: Whether a stream that was never open waits as long as one that was, if the caller has too
            many streams: a wait does, since others end meanwhile. Otherwise it has one further attempt.

    Raises:
        LeaseholdError: An error after which the stream is not reopened, or the last error once an outage has
            lasted 30 s. A stream that stays open ends the outage, also without a response.
    """
    lost_since: float | None = None
    failures = 0
    refusals = 0
    was_open = is_patient
    while True:
        opened = time.monotonic()
        try:
            async with aclosing(open_stream()) as stream:
                async for response in stream:
                    lost_since = None
                    failures = 0
                    was_open = True
                    yield response
            return
        except LeaseholdError as error:
            is_renewal = isinstance(error, RenewalDueError)
            if not (is_renewal or may_reopen(error)):
                raise
            now = time.monotonic()
            # A stream that lasted longer than a connection attempt was connected.
            has_lasted = now - opened > 2 * CONNECT_TIMEOUT_S
            was_open = was_open or has_lasted or is_renewal
            # The place of a stream that has just ended may be free a moment later.
            if has_too_many_streams(error):
                refusals += 1
                if refusals > 1 and not was_open:
                    raise
            if lost_since is None or has_lasted:
                lost_since = now
            wait_s = back_off_s(error, failures)
            failures += 1
            if now + wait_s >= lost_since + OUTAGE_LIMIT_S:
                raise
        await asyncio.sleep(wait_s)
