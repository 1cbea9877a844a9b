"""Logins, and the API as one caller uses it. The process that serves the page provides both."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, final

import grpc
from leasehold.v1.access_service_pb2_grpc import AccessServiceStub
from leasehold.v1.command_service_pb2_grpc import CommandServiceStub
from leasehold.v1.event_service_pb2_grpc import EventServiceStub
from leasehold.v1.fleet_service_pb2_grpc import FleetServiceStub
from leasehold.v1.workload_service_pb2_grpc import WorkloadServiceStub

if TYPE_CHECKING:
    from leasehold.v1.access_service_pb2_grpc import AccessServiceAsyncStub
    from leasehold.v1.command_service_pb2_grpc import CommandServiceAsyncStub
    from leasehold.v1.event_service_pb2_grpc import EventServiceAsyncStub
    from leasehold.v1.fleet_service_pb2_grpc import FleetServiceAsyncStub
    from leasehold.v1.workload_service_pb2_grpc import WorkloadServiceAsyncStub

Metadata = tuple[tuple[str, str], ...]


class Api(NamedTuple):
    """The services of the API on one channel, and the metadata of each call."""

    access: "AccessServiceAsyncStub"
    commands: "CommandServiceAsyncStub"
    events: "EventServiceAsyncStub"
    fleet: "FleetServiceAsyncStub"
    workloads: "WorkloadServiceAsyncStub"
    metadata: Metadata


def open_api(channel: grpc.aio.Channel, metadata: Metadata = ()) -> Api:
    """The services on a channel."""
    return Api(
        AccessServiceStub(channel),
        CommandServiceStub(channel),
        EventServiceStub(channel),
        FleetServiceStub(channel),
        WorkloadServiceStub(channel),
        metadata,
    )


class LoginRefusedError(Exception):
    """A login is refused. The text says why, and what to do."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """The result of a successful login.

    Attributes:
        caller: The identity, which has a bounded number of sessions.
        api: The API with the credentials of the caller. Called for each call, since credentials may change.
            Raises LoginRefusedError if they can't be read.
        view: Logins with the same view share watches. Everything that one of them sees, the others see too,
            and the end of their credential ends all of them.
        kept: What :meth:`Doors.again` needs after a restart. Empty: the login does not survive it.
        leave: Ends the login.
    """

    caller: str
    api: Callable[[], Awaitable[Api]]
    view: object
    kept: bytes
    leave: Callable[[], Awaitable[None]]

    async def is_renewed(self, api: Api) -> bool:
        """Whether the login has a newer credential than an API that it gave before."""
        try:
            return (await self.api()).access is not api.access
        except LoginRefusedError:
            return False


class Doors(Protocol):
    """The logins that a server of the page accepts."""

    @property
    def hint(self) -> str:
        """Where a user finds the token, for the login form."""

    async def by_token(self, token: str, address: str) -> Entry:
        """The login with a token.

        Args:
            token: The token, as typed.
            address: The host of the browser.

        Raises:
            LoginRefusedError: The token is not valid.
        """

    async def by_certificate(self, der: bytes, address: str) -> Entry:
        """The login with the client certificate of the connection, which the server has verified.

        Raises:
            LoginRefusedError: The certificate is of nobody who may log in.
        """

    async def again(self, kept: bytes) -> Entry:
        """The login of an earlier run of the server.

        Raises:
            LoginRefusedError: The credential of the login is not valid any more.
        """
