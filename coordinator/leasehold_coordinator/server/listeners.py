"""The gRPC servers: one for clients, on a socket and a port, and one for workers, on a port of its own."""

import asyncio
import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, cast, final

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from leasehold.v1 import (
    access_service_pb2,
    access_service_pb2_grpc,
    audit_service_pb2,
    audit_service_pb2_grpc,
    certificate_service_pb2,
    certificate_service_pb2_grpc,
    command_service_pb2,
    command_service_pb2_grpc,
    enrolment_service_pb2,
    enrolment_service_pb2_grpc,
    event_service_pb2,
    event_service_pb2_grpc,
    fleet_service_pb2,
    fleet_service_pb2_grpc,
    workload_service_pb2,
    workload_service_pb2_grpc,
)

from leasehold_coordinator.access.authorities import Authorities
from leasehold_coordinator.access.bindings import Bindings
from leasehold_coordinator.access.local_tokens import LocalTokens
from leasehold_coordinator.access.roles import Credential
from leasehold_coordinator.api.access_service import AccessService
from leasehold_coordinator.api.audit_service import AuditService
from leasehold_coordinator.api.authentication import Authentication
from leasehold_coordinator.api.authorization import Authorization
from leasehold_coordinator.api.certificate_service import CertificateService
from leasehold_coordinator.api.command_service import CommandService
from leasehold_coordinator.api.enrolment_service import EnrolmentService
from leasehold_coordinator.api.event_service import EventService
from leasehold_coordinator.api.fleet_service import FleetService
from leasehold_coordinator.api.live_streams import LiveStreams
from leasehold_coordinator.api.method_gate import MethodGate
from leasehold_coordinator.api.renewal_service import RenewalService, WorkerRenewals
from leasehold_coordinator.api.rpc_errors import Border
from leasehold_coordinator.api.session_service import SessionService
from leasehold_coordinator.api.token_authentication import TokenAuthentication
from leasehold_coordinator.api.workload_service import WorkloadService
from leasehold_coordinator.commands.creation import CommandCreation
from leasehold_coordinator.commands.dispatcher import Dispatcher
from leasehold_coordinator.commands.plans import Plans
from leasehold_coordinator.commands.record_changes import RecordChanges
from leasehold_coordinator.errors import StartError
from leasehold_coordinator.fleet.authority_changes import AuthorityChanges
from leasehold_coordinator.fleet.binding_changes import BindingChanges
from leasehold_coordinator.fleet.caller_bounds import CallerBounds
from leasehold_coordinator.fleet.client_certificates import ClientCertificates
from leasehold_coordinator.fleet.fleet import Fleet
from leasehold_coordinator.fleet.live_calls import LiveCalls
from leasehold_coordinator.fleet.revocations import Revocations
from leasehold_coordinator.server.channel_options import (
    CLIENT_CONNECTIONS,
    RPC_LIMIT,
    WORKER_CONNECTIONS,
    server_options,
)
from leasehold_coordinator.server.client_socket import ClientSocket
from leasehold_coordinator.server.config import is_loopback
from leasehold_coordinator.server.enrolment_listener import EnrolmentListener
from leasehold_coordinator.server.own_pki import OwnPki, OwnPkiTls
from leasehold_coordinator.server.ports import add_port
from leasehold_coordinator.server.transport import PortTls, ServerTls

logger = logging.getLogger(__name__)

STOP_GRACE_S: Final = 1.0

_ENROLMENT: Final = enrolment_service_pb2.DESCRIPTOR.services_by_name

SERVICES: Final = tuple(
    service.full_name
    for service in (
        *fleet_service_pb2.DESCRIPTOR.services_by_name.values(),
        *workload_service_pb2.DESCRIPTOR.services_by_name.values(),
        *command_service_pb2.DESCRIPTOR.services_by_name.values(),
        *event_service_pb2.DESCRIPTOR.services_by_name.values(),
        *audit_service_pb2.DESCRIPTOR.services_by_name.values(),
        *access_service_pb2.DESCRIPTOR.services_by_name.values(),
        *certificate_service_pb2.DESCRIPTOR.services_by_name.values(),
        _ENROLMENT["EnrolmentService"],
        _ENROLMENT["RenewalService"],
    )
)
"""The services for clients."""


class Addresses(NamedTuple):
    """Where the coordinator serves, each HOST:PORT, or insecure:HOST:PORT without TLS.

    Attributes:
        clients: For clients.
        workers: For workers.
        web: The URL of the web page. Empty: there is none.
    """

    clients: str
    workers: str
    web: str = ""


@final
class Listeners:
    """The servers, from :meth:`start` to :meth:`stop`.

    Args:
        fleet: The known state.
        dispatcher: Sends commands to workers.
        health_servicer: Answers probes.
        tokens: The tokens of clients and workers.
        certificates: The client certificates.
        changes: Changes of the authorities.
        calls: The calls under way.
        bindings: The role bindings.
        bounds: The requests and streams of each caller.
        socket_path: Path of the socket for clients of this host.
        state_directory: The state directory.
        enrolment: Creates join tokens, and issues certificates.
        oidc: Establishes callers with tokens of an OpenID Connect issuer. None: there is no listener for
            them.
        is_insecure: Whether the ports have no TLS, except for OpenID Connect.
        user_priority_limit: The highest priority of users' workloads.

    Raises:
        StartError: The socket can't be created.
    """

    def __init__(
        self,
        fleet: Fleet,
        dispatcher: Dispatcher,
        health_servicer: health.aio.HealthServicer,
        tokens: LocalTokens,
        certificates: ClientCertificates,
        changes: AuthorityChanges,
        calls: LiveCalls,
        bindings: Bindings,
        bounds: CallerBounds,
        socket_path: Path,
        state_directory: Path,
        enrolment: EnrolmentListener,
        oidc: TokenAuthentication | None,
        *,
        is_insecure: bool,
        user_priority_limit: int,
    ) -> None:
        self._is_insecure = is_insecure
        self._socket = ClientSocket(socket_path, state_directory)
        authentication = Authentication(
            tokens, self._socket.user_id, certificates, calls, is_insecure=is_insecure
        )
        self.authentication, self.oidc_authentication = authentication, oidc
        authorization = Authorization(bindings)
        live = LiveStreams(authorization.role)
        border = Border(authentication, authorization, live, fleet.audit, bounds)
        self._clients = _client_server(border)
        self._oidc = _client_server(border.beside(oidc)) if oidc is not None else None
        servers = [server for server in (self._clients, self._oidc) if server is not None]
        _add_client_services(
            servers,
            fleet,
            dispatcher,
            health_servicer,
            bindings,
            certificates,
            changes,
            calls,
            enrolment,
            live,
            bounds,
            user_priority_limit,
        )
        self._workers = grpc.aio.server(
            interceptors=[MethodGate(Credential.WORKER, fleet.audit)],
            options=server_options(WORKER_CONNECTIONS),
            maximum_concurrent_rpcs=RPC_LIMIT,
        )
        SessionService(fleet, dispatcher, authentication).add_to(self._workers)
        WorkerRenewals(enrolment.enrolment, authentication, fleet.audit).add_to(self._workers)

    async def start(
        self,
        clients: str,
        workers: str,
        oidc: str,
        authorities: Authorities,
        names: frozenset[str],
        pki: OwnPki | None,
    ) -> Addresses:
        """Serves on the addresses, with port numbers in the place of port 0.

        A port off loopback requires client certificates.

        Args:
            clients: Address for clients, HOST:PORT.
            workers: Address for workers, HOST:PORT.
            oidc: Address for OpenID Connect, HOST:PORT. Empty: none.
            authorities: Issue the certificates.
            names: Names and addresses by which clients and workers call the server.
            pki: The PKI of others, for ports off loopback. None: the CA of the state directory.

        Raises:
            StartError: An address can't be used.
        """

        def tls(address: str, *, is_mutual: bool) -> PortTls:
            if is_loopback(address.rpartition(":")[0]):
                return ServerTls(authorities, names)
            if pki is not None:
                return OwnPkiTls(pki, is_mutual=is_mutual)
            return ServerTls(authorities, names, is_mutual=is_mutual)

        def main_tls(address: str) -> PortTls | None:
            return None if self._is_insecure else tls(address, is_mutual=True)

        addresses = Addresses(
            add_port(self._clients, clients, "--listen", main_tls(clients)),
            add_port(self._workers, workers, "--worker-listen", main_tls(workers)),
        )
        try:
            self._clients.add_insecure_port(self._socket.inner_address)
        except RuntimeError as error:
            raise StartError(
                f"can't listen on {self._socket.inner_address}: {error}; choose another directory with "
                "--state-dir"
            ) from error
        if self._oidc is not None:
            address = add_port(self._oidc, oidc, "oidc_listen", tls(oidc, is_mutual=False))
            logger.info("listening on %s for OpenID Connect", address)
        await asyncio.gather(*(server.start() for server in self._servers))
        return addresses

    @property
    def inner_address(self) -> str:
        """Address of gRPC's own listener behind the socket, which only this process's user can reach."""
        return self._socket.inner_address

    @property
    def sessions_path(self) -> Path:
        """The file of the web page's sessions."""
        return self._socket.sessions_path

    @property
    def _servers(self) -> list[grpc.aio.Server]:
        return [server for server in (self._clients, self._workers, self._oidc) if server is not None]

    async def stop(self) -> None:
        """Ends all calls after a grace period, and removes the socket."""
        await asyncio.gather(*(server.stop(STOP_GRACE_S) for server in self._servers))
        await self._socket.close()


def _client_server(border: Border) -> grpc.aio.Server:
    return grpc.aio.server(
        interceptors=[border],
        options=server_options(CLIENT_CONNECTIONS),
        maximum_concurrent_rpcs=RPC_LIMIT,
    )


def _add_client_services(
    servers: Collection[grpc.aio.Server],
    fleet: Fleet,
    dispatcher: Dispatcher,
    health_servicer: health.aio.HealthServicer,
    bindings: Bindings,
    certificates: ClientCertificates,
    authority_changes: AuthorityChanges,
    calls: LiveCalls,
    enrolment: EnrolmentListener,
    live: LiveStreams,
    bounds: CallerBounds,
    user_priority_limit: int,
) -> None:
    services = cast(grpc.aio.Server, _Services(servers))
    reader, requests = fleet.reader, CommandCreation(fleet, dispatcher, bounds, user_priority_limit)
    revocations = Revocations(fleet.store, certificates)
    records = RecordChanges(fleet, requests.decisions, revocations)
    fleet_service_pb2_grpc.add_FleetServiceServicer_to_server(
        FleetService(reader, requests, records), services
    )
    workloads = WorkloadService(reader, requests, records, Plans(reader, dispatcher))
    workload_service_pb2_grpc.add_WorkloadServiceServicer_to_server(workloads, services)
    command_service_pb2_grpc.add_CommandServiceServicer_to_server(
        CommandService(reader, dispatcher), services
    )
    event_service_pb2_grpc.add_EventServiceServicer_to_server(
        EventService(reader, fleet.events, fleet.lease_history), services
    )
    audit_service_pb2_grpc.add_AuditServiceServicer_to_server(AuditService(reader, fleet.audit), services)
    certificate_service_pb2_grpc.add_CertificateServiceServicer_to_server(
        CertificateService(certificates, revocations, authority_changes, calls), services
    )
    enrolment_service_pb2_grpc.add_EnrolmentServiceServicer_to_server(
        EnrolmentService(enrolment.tokens), services
    )
    enrolment_service_pb2_grpc.add_RenewalServiceServicer_to_server(
        RenewalService(enrolment.enrolment), services
    )
    changes = BindingChanges(fleet.store, bindings, live.authorize_again)
    access_service_pb2_grpc.add_AccessServiceServicer_to_server(AccessService(bindings, changes), services)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, services)
    for server in servers:
        names = [*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, server)


@final
class _Services:
    """Several servers as one, for generated code. It registers no method with gRPC's core.

    gRPC's asyncio server keeps one task for each registered method, and scans all of them at each call. All
    unregistered methods share one task.
    """

    def __init__(self, servers: Collection[grpc.aio.Server]) -> None:
        self._servers = servers

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Adds handlers to each server."""
        for server in self._servers:
            server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """Does nothing, since the same handlers are also added as generic handlers."""
