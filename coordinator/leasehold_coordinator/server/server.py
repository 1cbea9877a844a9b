"""Builds the parts of the coordinator, and serves until a signal stops it."""

import asyncio
import errno
import logging
import random
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, TypeAlias, cast, final

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from leasehold.v1 import (
    command_service_pb2,
    command_service_pb2_grpc,
    event_service_pb2,
    event_service_pb2_grpc,
    fleet_service_pb2,
    fleet_service_pb2_grpc,
    workload_service_pb2,
    workload_service_pb2_grpc,
)
from leasehold.worker.v1 import session_pb2

from leasehold_coordinator.access.local_tokens import open_tokens
from leasehold_coordinator.api.authentication import Authentication
from leasehold_coordinator.api.command_service import CommandService
from leasehold_coordinator.api.event_service import EventService
from leasehold_coordinator.api.fleet_service import FleetService
from leasehold_coordinator.api.rpc_errors import Border
from leasehold_coordinator.api.session_service import SessionService
from leasehold_coordinator.api.workload_service import WorkloadService
from leasehold_coordinator.commands.creation import CommandCreation
from leasehold_coordinator.commands.dispatcher import Dispatcher
from leasehold_coordinator.commands.plans import Plans
from leasehold_coordinator.commands.record_changes import RecordChanges
from leasehold_coordinator.errors import FleetError, StartError
from leasehold_coordinator.fleet.fleet import Fleet
from leasehold_coordinator.fleet.retention import prune
from leasehold_coordinator.server.channel_options import OPTIONS, RPC_LIMIT
from leasehold_coordinator.server.client_socket import ClientSocket
from leasehold_coordinator.server.config import CoordinatorConfig
from leasehold_coordinator.server.health_reports import report_health, set_health
from leasehold_coordinator.shielded_tasks import settle
from leasehold_coordinator.storage.store import Store
from leasehold_coordinator.storage.store_file import unusable

logger = logging.getLogger(__name__)

TICK_S: Final = 0.5
STOP_GRACE_S: Final = 1.0
RETURNS_PER_S: Final = 1000
"""Workers that reconnect per second after a stop of the coordinator."""

LEAST_SPREAD_S: Final = 0.5
"""The shortest time over which workers reconnect, for a small fleet."""

PRUNE_INTERVAL_S: Final = 10.0
"""Each round deletes at most 500 old rows per table, and 10,000 more from a store that is too large."""

Parts: TypeAlias = tuple[Callable[[], Awaitable[None] | None], ...]

SERVICES: Final = tuple(
    service.full_name
    for file in (
        fleet_service_pb2.DESCRIPTOR,
        workload_service_pb2.DESCRIPTOR,
        command_service_pb2.DESCRIPTOR,
        event_service_pb2.DESCRIPTOR,
        session_pb2.DESCRIPTOR,
    )
    for service in file.services_by_name.values()
)


async def serve(config: CoordinatorConfig, on_listening: Callable[[str], None]) -> None:
    """Serves until SIGTERM or SIGINT.

    Args:
        config: The settings.
        on_listening: Called with HOST:PORT once the coordinator serves.

    Raises:
        StartError: The address or the database can't be used.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    tokens = open_tokens(Path(config.state_dir))
    store = Store.open(config.store)
    client_socket: ClientSocket | None = None
    try:
        fleet = Fleet(store, config.load_interval_s)
        began = time.monotonic()
        await _load(fleet, config.store)
        loaded_s = time.monotonic() - began
        dispatcher = Dispatcher(fleet)
        health_servicer = health.aio.HealthServicer()  # the synchronous one's Watch would delay the stop
        await set_health(health_servicer, SERVICES, is_serving=True)
        client_socket = ClientSocket(config.socket_path)
        authentication = Authentication(tokens, client_socket.user_id)
        server = _build_server(fleet, dispatcher, health_servicer, authentication)
        address = _listen(server, config.listen)
        server.add_insecure_port(client_socket.inner_address)
        await server.start()
        workloads, commands = len(fleet.workloads), len(fleet.ledger.commands)
        logger.info("loaded %d workloads and %d open commands in %.2f s", workloads, commands, loaded_s)
        on_listening(address)
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(_tick(_watches(fleet))),
                # A task of its own, since the disk may not answer.
                tasks.create_task(_tick(_writes(fleet, dispatcher))),
                tasks.create_task(report_health(health_servicer, SERVICES, store)),
                tasks.create_task(_prune(fleet, config.retention_s)),
            ]
            await stop.wait()
            for task in background:
                task.cancel()
        logger.info("stopping")
        _send_away(fleet)
        await server.stop(STOP_GRACE_S)
    finally:
        if client_socket is not None:
            await client_socket.close()
        await settle()
        await asyncio.to_thread(store.close)


async def _load(fleet: Fleet, database: str) -> None:
    try:
        await fleet.load()
    except FleetError as error:
        raise unusable(database, error.message) from error


def _send_away(fleet: Fleet) -> None:
    """Ends every stream. Workers reconnect spread over time, to the next coordinator on this address."""
    spread_s = max(LEAST_SPREAD_S, len(fleet.sessions) / RETURNS_PER_S)
    for session in list(fleet.sessions.values()):
        session.drain(random.uniform(0, spread_s), session_pb2.GOODBYE_REASON_SHUTDOWN)


def _build_server(
    fleet: Fleet,
    dispatcher: Dispatcher,
    health_servicer: health.aio.HealthServicer,
    authentication: Authentication,
) -> grpc.aio.Server:
    server = grpc.aio.server(
        interceptors=[Border(authentication)], options=OPTIONS, maximum_concurrent_rpcs=RPC_LIMIT
    )
    services = cast(grpc.aio.Server, _Services(server))
    reader, requests = fleet.reader, CommandCreation(fleet, dispatcher)
    records = RecordChanges(fleet, requests.decisions)
    fleet_service_pb2_grpc.add_FleetServiceServicer_to_server(
        FleetService(reader, requests, records), services
    )
    workloads = WorkloadService(reader, requests, records, Plans(reader, dispatcher))
    workload_service_pb2_grpc.add_WorkloadServiceServicer_to_server(workloads, services)
    command_service_pb2_grpc.add_CommandServiceServicer_to_server(
        CommandService(reader, dispatcher), services
    )
    event_service_pb2_grpc.add_EventServiceServicer_to_server(EventService(reader, fleet.events), services)
    SessionService(fleet, dispatcher, authentication).add_to(server)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, services)
    reflection.enable_server_reflection([*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    return server


@final
class _Services:
    """A server for generated code, which registers no method with gRPC's core.

    gRPC's asyncio server keeps one task for each registered method, and scans all of them at each call. All
    unregistered methods share one task.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self.add_generic_rpc_handlers = server.add_generic_rpc_handlers

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """Does nothing, since the same handlers are also added as generic handlers."""


def _listen(server: grpc.aio.Server, address: str) -> str:
    _check_address(address)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise StartError(f"can't listen on {address}: {error}; choose another with --listen") from error
    return f"{address.rpartition(':')[0]}:{port}"


def _check_address(address: str) -> None:
    """Binds the address on trial. gRPC itself would log a line of its own, and would not report the cause.

    Raises:
        StartError: The coordinator can't listen on the address.
    """
    host, _, port = address.rpartition(":")
    refusals: list[OSError] = []
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        for family, kind, protocol, _, where in found:
            try:
                with socket.socket(family, kind, protocol) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(where)
                return
            except OSError as error:
                refusals.append(error)
    except OSError as error:
        refusals.append(error)
    last = refusals[-1]
    why = "the port is in use" if last.errno == errno.EADDRINUSE else last.strerror or str(last)
    raise StartError(f"can't listen on {address}: {why}; choose another with --listen") from last


async def _prune(fleet: Fleet, retention_s: float) -> None:
    while True:
        await asyncio.sleep(PRUNE_INTERVAL_S)
        try:
            await prune(fleet.reader, retention_s)
        except FleetError as error:
            logger.error("%s", error.message)


def _watches(fleet: Fleet) -> Parts:
    """Periodic tasks that write nothing."""
    return (
        fleet.worker_news.end_lost_sessions,
        fleet.worker_news.publish_silent_workers,
        fleet.refusals.tick,
    )


def _writes(fleet: Fleet, dispatcher: Dispatcher) -> Parts:
    """Periodic tasks that write to the store."""
    return (dispatcher.tick, fleet.events.flush)


async def _tick(parts: Parts) -> None:
    while True:
        await asyncio.sleep(TICK_S)
        await _tick_once(parts)


async def _tick_once(parts: Parts) -> None:
    """Runs periodic tasks once. A failed task does not prevent the others."""
    for part in parts:
        try:
            waiting = part()
            if waiting is not None:
                await waiting
        except FleetError as error:
            logger.error("%s", error.message)
        except Exception:  # a defect in one tick must not end the coordinator
            logger.exception("the tick failed")
