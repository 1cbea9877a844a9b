"""The gRPC server for enrolment. Its callers have no identity yet, but a join token."""

import socket
from collections.abc import Callable, Sequence
from typing import Final, final

import grpc

from leasehold_coordinator.access.authorities import Authorities
from leasehold_coordinator.access.identities import Kind
from leasehold_coordinator.access.roles import Credential
from leasehold_coordinator.api.join_service import JoinService
from leasehold_coordinator.api.method_gate import MethodGate
from leasehold_coordinator.commands.enrolment import Enrolment
from leasehold_coordinator.commands.join_tokens import JoinTokenChanges
from leasehold_coordinator.fleet.client_certificates import ClientCertificates
from leasehold_coordinator.fleet.fleet import Fleet
from leasehold_coordinator.server.channel_options import server_options
from leasehold_coordinator.server.config import is_loopback
from leasehold_coordinator.server.ports import add_port
from leasehold_coordinator.server.transport import WILDCARDS, PortTls

CONNECTIONS: Final = 256
"""Most connections for enrolment, and most of their calls."""

STOP_GRACE_S: Final = 1.0


@final
class EnrolmentListener:
    """The server for enrolment, and what the services of the other servers share with it.

    Args:
        fleet: The known state.
        certificates: The client certificates.
        authorities: The CAs.
        is_admin: Whether an identity, as KIND/NAME, is an admin by a binding or as a Unix user.
    """

    def __init__(
        self,
        fleet: Fleet,
        certificates: ClientCertificates,
        authorities: Authorities,
        is_admin: Callable[[str], bool],
    ) -> None:
        def bundle() -> Sequence[bytes]:
            return authorities.der

        self.tokens = JoinTokenChanges(fleet, bundle, is_admin)
        self.enrolment = Enrolment(fleet, certificates, bundle, is_admin)
        self._server = grpc.aio.server(
            interceptors=[MethodGate(Credential.JOIN_TOKEN, fleet.audit)],
            options=server_options(CONNECTIONS),
            maximum_concurrent_rpcs=CONNECTIONS,
        )
        JoinService(self.enrolment).add_to(self._server)

    async def start(
        self, address: str, tls: PortTls, *, clients: str, workers: str, server_names: Sequence[str]
    ) -> str:
        """Serves on an address, with a port number in the place of port 0.

        Args:
            address: HOST:PORT.
            tls: The server's certificate.
            clients: HOST:PORT of the listener for clients.
            workers: HOST:PORT of the listener for workers.
            server_names: Names of this host by the settings. The first one stands for a wildcard address.

        Returns:
            The address.

        Raises:
            StartError: The address can't be used.
        """
        found = add_port(self._server, address, "--join-listen", tls)
        self.tokens.address = _reachable(found, server_names)
        listeners = {Kind.WORKER: workers, Kind.USER: clients, Kind.SERVICE: clients}
        self.enrolment.addresses = {
            kind: _reachable(listener, server_names) for kind, listener in listeners.items()
        }
        self.tokens.kinds = frozenset(
            kind for kind, listener in listeners.items() if not is_loopback(listener.rpartition(":")[0])
        )
        await self._server.start()
        return found

    async def stop(self) -> None:
        """Ends all calls after a grace period."""
        await self._server.stop(STOP_GRACE_S)


def _reachable(address: str, server_names: Sequence[str]) -> str:
    """A listener's address as other hosts write it."""
    host, _, port = address.rpartition(":")
    if host.strip("[]") not in WILDCARDS:
        return address
    name = next(iter(server_names), socket.gethostname())
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
