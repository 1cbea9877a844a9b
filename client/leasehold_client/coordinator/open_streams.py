"""The open streams of one client: watches, waits and outputs."""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final, final

from leasehold_client.errors import UsageError

STREAM_LIMIT: Final = 96
"""Most streams of one client.

The coordinator takes 128 calls at a time on a connection (docs/protocol.md), and gRPC holds back further ones
without a word. The rest is left for calls that are no streams.
"""


@final
class OpenStreams:
    """The places of streams on the connection of one client."""

    def __init__(self) -> None:
        self._places = threading.Semaphore(STREAM_LIMIT)

    @contextmanager
    def entered(self) -> Generator[None]:
        """The context of a stream.

        Raises:
            UsageError: The client has too many open streams.
        """
        if not self._places.acquire(blocking=False):
            raise UsageError(
                f"{STREAM_LIMIT} watches, waits and outputs of this client are open, which is the limit: end "
                "some, or make another client"
            )
        try:
            yield
        finally:
            self._places.release()
