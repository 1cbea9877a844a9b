"""The open watches, waits and outputs of one client."""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final, final

from leasehold_client.errors import UsageError

STREAM_LIMIT: Final = 96
"""Most watches, waits and outputs of one client.

The coordinator takes 128 calls at a time on a connection (docs/protocol.md), and gRPC holds back further ones
without an error. The rest is left for unary calls. The coordinator also bounds the streams of an identity
over all its clients (``caller_streams``, 64 by default), except for its own user and root. The client can't
count the streams of its identity elsewhere, so the coordinator refuses streams beyond that bound.
"""


@final
class OpenStreams:
    """The places of streams on the connection of one client.

    A watch, wait or output has one place from its beginning to its end, also while no call of it is open: it
    reopens a broken stream in its own place.
    """

    def __init__(self) -> None:
        self._places = threading.Semaphore(STREAM_LIMIT)

    @contextmanager
    def entered(self) -> Generator[None]:
        """The context of one watch, wait or output. Its place is free again at the end of the context.

        Raises:
            UsageError: The client has too many open streams.
        """
        if not self._places.acquire(blocking=False):
            raise UsageError(
                f"{STREAM_LIMIT} watches, waits and outputs of this client are open, which is its limit: end "
                "some, or make another client, within the coordinator's bound caller_streams"
            )
        try:
            yield
        finally:
            self._places.release()
