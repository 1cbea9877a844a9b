"""The stream of one claim."""

from collections.abc import Callable
from typing import final

import trio
from leasehold.local.v1.local_service_pb2 import ClaimRequest, ClaimResponse

from leasehold_worker.errors import OperationError
from leasehold_worker.host.peers import Peer


@final
class ClaimStream:
    """One stream of a claiming process.

    Args:
        peer: The process.
        request: Its first message.
        tell: Sends a response; None or a refusal ends the stream. Callable from any thread.
    """

    def __init__(
        self,
        peer: Peer,
        request: ClaimRequest,
        tell: Callable[[ClaimResponse | OperationError | None], None],
    ) -> None:
        self.peer = peer
        self.request = request
        self.tell = tell
        self.scope = trio.CancelScope()
        self.marked_id = ""
        """The workload id that its process was started with. Empty: none, or not read yet."""

    def close(self) -> None:
        """Reports that the process closed the stream. On trio's thread."""
        self.scope.cancel()
