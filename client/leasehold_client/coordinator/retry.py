"""Calls and streams that outlive a restart of the coordinator."""

import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

from leasehold_client.errors import LeaseholdError, NoCoordinatorError

Response = TypeVar("Response")

OUTAGE_LIMIT_S: Final = 30.0
"""How long a stream is opened anew without an answer."""

REPEAT_LIMIT_S: Final = 3.0
"""How long a call is made again without an answer: a coordinator that is replaced is back by then."""

RETRY_INTERVAL_S: Final = 0.2

BUSY_LIMIT_S: Final = 30.0
"""How long a call is made again that the coordinator has no room for."""

CONNECT_TIMEOUT_S: Final = 5.0
"""How long one attempt to connect may take."""


def is_outage(error: LeaseholdError) -> bool:
    """Whether the coordinator is away, and may come back."""
    return isinstance(error, NoCoordinatorError)


def repeat(call: Callable[[], Response], *, through_outages: bool = True) -> Response:
    """What a call answered, made again where the coordinator went away before it did.

    Args:
        call: One that is safe to repeat: one that only asks, or whose request has a request_id.
        through_outages: It is made again, for 3 s, also where nobody answers.

    Raises:
        LeaseholdError: A refusal at once; an outage once it has lasted so long; or a refusal that says when
            to try again, once that has lasted 30 s.
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
    passes: Callable[[LeaseholdError], bool] = is_outage,
) -> Iterator[Response]:
    """The responses of a stream that is opened anew each time that it breaks, until it ends.

    Args:
        open_stream: Opens the stream where it is to go on, which the caller knows from the responses.
        passes: Whether an error may pass by itself. Others are raised at once.

    Raises:
        LeaseholdError: One that does not pass, or the last one when an outage has lasted 30 s. The time that
            a stream lived in peace doesn't count, however quiet it was.
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
            if not passes(error):
                raise
            now = time.monotonic()
            # An attempt that lived longer than a connection takes had one.
            if lost_since is None or now - opened > 2 * CONNECT_TIMEOUT_S:
                lost_since = now
            if now - lost_since >= OUTAGE_LIMIT_S:
                raise
        time.sleep(RETRY_INTERVAL_S)
