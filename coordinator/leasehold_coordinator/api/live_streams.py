"""The response streams and long calls of clients, which end when their caller loses the permission."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final, final

from leasehold.v1 import errors_pb2

from leasehold_coordinator.access.callers import Caller
from leasehold_coordinator.access.roles import Role
from leasehold_coordinator.api.authorization import require_role
from leasehold_coordinator.errors import FleetError

_RESUMED: Final = (
    "/leasehold.v1.FleetService/WatchFleet",
    "/leasehold.v1.WorkloadService/WatchWorkloads",
    "/leasehold.v1.CommandService/WatchCommands",
    "/leasehold.v1.EventService/WatchEvents",
)
"""Watches of many entries, which clients repeat. They end to show more, and other streams go on."""


@dataclass(eq=False, slots=True)
class _Stream:
    """A stream under way.

    Attributes:
        caller: The caller, with the role at the beginning of the stream.
        method: The full name of the method.
        limit: Ends the stream once its time is over.
        refusal: Why the stream ends. None: it goes on.
    """

    caller: Caller
    method: str
    limit: asyncio.Timeout
    refusal: FleetError | None = None


@final
class LiveStreams:
    """The streams under way.

    Args:
        role_of: The present role of a caller.
    """

    def __init__(self, role_of: Callable[[Caller], Role]) -> None:
        self._role_of = role_of
        self._streams: set[_Stream] = set()

    @asynccontextmanager
    async def entered(self, caller: Caller, method: str) -> AsyncIterator[None]:
        """The context of a stream.

        Raises:
            FleetError: The stream was ended, with the reason.
        """
        stream = _Stream(caller, method, asyncio.timeout(None))
        if (refusal := self._refusal(stream)) is not None:  # the role changed since it was asked for
            raise refusal
        self._streams.add(stream)
        try:
            async with stream.limit:
                yield
        except TimeoutError:
            if stream.refusal is None:
                raise
            raise stream.refusal from None
        finally:
            self._streams.discard(stream)

    def authorize_again(self) -> None:
        """Ends each stream that its caller may no longer have, or which would now show something else."""
        for stream in self._streams:
            if stream.refusal is None and (refusal := self._refusal(stream)) is not None:
                stream.refusal = refusal
                stream.limit.reschedule(asyncio.get_running_loop().time())

    def _refusal(self, stream: _Stream) -> FleetError | None:
        """Why a stream must end. None: it goes on."""
        caller = replace(stream.caller, role=self._role_of(stream.caller))
        try:
            require_role(stream.method, caller)
        except FleetError as refusal:
            return refusal
        sees_less = stream.caller.sees_all and not caller.sees_all
        sees_more = caller.sees_all and not stream.caller.sees_all
        if not sees_less and not (sees_more and stream.method in _RESUMED):
            return None
        return FleetError(
            errors_pb2.ERROR_REASON_INVALID_TOKEN,
            f"the role of {caller} is now {caller.role.name.lower()}: repeat the request, and watch again "
            "from a snapshot",
            field="resume_token",
        )
