"""Builds the parts of the coordinator, and serves until a signal stops it."""

import asyncio
import logging
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from grpc_health.v1 import health
from leasehold.v1 import errors_pb2
from leasehold.worker.v1 import session_pb2

from leasehold_coordinator.access.authorities import Authorities
from leasehold_coordinator.access.bindings import Bindings
from leasehold_coordinator.access.key_source import open_keys
from leasehold_coordinator.access.roles import Role
from leasehold_coordinator.access.secret_vault import open_vault
from leasehold_coordinator.api.token_authentication import TokenAuthentication
from leasehold_coordinator.api.unix_users import identity_of
from leasehold_coordinator.commands.dispatcher import Dispatcher
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.audit_follower import AuditFollower
from leasehold_coordinator.fleet.authority_changes import AuthorityChanges
from leasehold_coordinator.fleet.caller_bounds import CallerBounds
from leasehold_coordinator.fleet.client_certificates import ClientCertificates
from leasehold_coordinator.fleet.clock_jumps import ClockJumps
from leasehold_coordinator.fleet.fleet import Fleet
from leasehold_coordinator.fleet.live_calls import LiveCalls
from leasehold_coordinator.fleet.retention import prune
from leasehold_coordinator.server.config import CoordinatorConfig
from leasehold_coordinator.server.enrolment_listener import EnrolmentListener
from leasehold_coordinator.server.fleet_gauges import FleetGauges
from leasehold_coordinator.server.health_listener import HealthListener
from leasehold_coordinator.server.health_reports import (
    report_health,
    set_alive,
    set_audit_file,
    set_encryption,
    set_health,
)
from leasehold_coordinator.server.http_tls import AuthorityTls, HttpTls, PkiTls
from leasehold_coordinator.server.listeners import SERVICES, Addresses, Listeners
from leasehold_coordinator.server.metrics_access import MetricsAccess
from leasehold_coordinator.server.metrics_listener import MetricsListener, open_listener
from leasehold_coordinator.server.own_pki import OwnPki
from leasehold_coordinator.server.service_manager import ServiceManager
from leasehold_coordinator.server.transport import ServerTls, open_state, server_names
from leasehold_coordinator.server.web_listener import WebListener
from leasehold_coordinator.shielded_tasks import settle
from leasehold_coordinator.storage.store import Store
from leasehold_coordinator.storage.store_file import damaged_file, unusable

logger = logging.getLogger(__name__)

TICK_S: Final = 0.5
RETURNS_PER_S: Final = 1000
"""Workers that reconnect per second after a stop of the coordinator."""

LEAST_SPREAD_S: Final = 0.5
"""The shortest time over which workers reconnect, for a small fleet."""

PRUNE_INTERVAL_S: Final = 10.0
"""Each round deletes at most 500 old rows per table, and 10,000 more from a store that is too large."""

DAY_S: Final = 86_400.0
_INSECURE: Final = (
    "%s and %s have no TLS, because of --insecure: anybody on the network path can read everything, and "
    "steal the tokens of clients and workers; start without --insecure for TLS"
)

Parts: TypeAlias = tuple[Callable[[], Awaitable[None] | None], ...]


async def serve(config: CoordinatorConfig, on_listening: Callable[[Addresses], None]) -> None:
    """Serves until SIGTERM, SIGINT or SIGHUP.

    Args:
        config: The settings.
        on_listening: Called with the addresses once the coordinator serves.

    Raises:
        StartError: The address or the database can't be used.
    """
    stop = asyncio.Event()
    stopping = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup ignores it
        stopping.append(signal.SIGHUP)
    for number in stopping:
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    authorities, tokens = open_state(Path(config.state_dir), config.issue_rules)
    vault = open_vault(Path(config.state_dir))
    names = server_names(
        [
            config.listen,
            config.worker_listen,
            config.join_address,
            config.oidc_listen,
            config.metrics_address,
            config.web,
        ],
        config.server_names,
    )
    pki = OwnPki(config.pki_files) if config.pki_files is not None else None
    store = Store.open(config.store)
    listeners: Listeners | None = None
    enrolment: EnrolmentListener | None = None
    probes: HealthListener | None = None
    page: WebListener | None = None
    try:
        fleet = Fleet(store, config.load_interval_s, vault, is_store_restored=config.store_restored)
        if config.clock_corrected:
            store.forget_later_time()
        clock = ClockJumps(fleet.events, store)
        began = time.monotonic()
        certificates = ClientCertificates(
            store,
            authorities,
            fleet.reader.certificates,
            is_external=pki is not None,
            is_store_restored=config.store_restored,
        )
        changes = AuthorityChanges(fleet, certificates)
        bindings = Bindings()
        await _load(fleet, certificates, bindings, config.store)
        loaded_s = time.monotonic() - began
        dispatcher = Dispatcher(fleet, config.caller_commands)
        health_servicer = health.aio.HealthServicer()  # the synchronous one's Watch would delay the stop
        await set_health(health_servicer, SERVICES, is_serving=True)
        await set_alive(health_servicer)
        await set_encryption(health_servicer, is_insecure=config.insecure)
        paths = config.socket_path, Path(config.state_dir)
        calls = LiveCalls(certificates.refusal)
        enrolment = EnrolmentListener(fleet, certificates, authorities, _rule(bindings, Role.ADMIN))
        source = open_keys(config.oidc) if config.oidc is not None else None
        oidc = (
            TokenAuthentication(config.oidc, source, calls, fleet.audit) if config.oidc and source else None
        )
        listeners = Listeners(
            fleet,
            dispatcher,
            health_servicer,
            tokens,
            certificates,
            changes,
            calls,
            bindings,
            CallerBounds(config.caller_limits),
            *paths,
            enrolment,
            oidc,
            is_insecure=config.insecure,
            user_priority_limit=config.user_priority_limit,
        )
        addresses = await listeners.start(
            config.listen, config.worker_listen, config.oidc_listen, authorities, names, pki
        )
        if config.join_address:
            await enrolment.start(
                config.join_address,
                ServerTls(authorities, names),
                clients=addresses.clients,
                workers=addresses.workers,
                server_names=config.server_names,
            )
        if config.web:
            page = WebListener(listeners, fleet.audit, authorities, names, pki)
            addresses = addresses._replace(web=await page.start(config.web))
        if config.health_listen:
            probes = HealthListener(health_servicer)
            logger.info("listening on %s for health checks", await probes.start(config.health_listen))
        scrapes: list[Coroutine[None, None, None]] = []
        if config.metrics_listen:
            tls: HttpTls | None = None
            if config.has_metrics_tls:
                tls = PkiTls(pki) if pki is not None else AuthorityTls(authorities, names)
            gauges = FleetGauges(fleet, partial(_validities, authorities, pki))
            access = MetricsAccess(certificates, bindings.role)
            socket, address = open_listener(config.metrics_address)
            logger.info("listening on %s://%s for metrics", "https" if tls else "http", address)
            scrapes.append(MetricsListener(gauges.read, tls, access).run(socket))
        workloads, commands = len(fleet.workloads), len(fleet.ledger.commands)
        if config.insecure:
            logger.warning(_INSECURE, addresses.clients, addresses.workers)
        logger.info("loaded %d workloads and %d open commands in %.2f s", workloads, commands, loaded_s)
        on_listening(addresses)
        manager = ServiceManager.of_environment()
        manager.tell("READY=1")
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(_tick((clock.check, *_watches(fleet)))),
                # A task of its own, since the disk may not answer.
                tasks.create_task(_tick((*_writes(fleet, dispatcher), certificates.store_taken_back))),
                tasks.create_task(manager.show_life()),
                tasks.create_task(report_health(health_servicer, SERVICES, store)),
                tasks.create_task(calls.watch()),
                tasks.create_task(changes.watch()),
                tasks.create_task(
                    _prune(fleet, certificates, config.retention_s, config.audit_retention_days * DAY_S)
                ),
                *map(tasks.create_task, scrapes),
                *([tasks.create_task(source.run())] if source is not None else []),
                *([tasks.create_task(pki.watch())] if pki is not None else []),
                *([tasks.create_task(page.watch())] if page is not None else []),
            ]
            if config.audit_file:
                told = partial(set_audit_file, health_servicer)
                follower = AuditFollower(store, Path(config.audit_file), told)
                background.append(tasks.create_task(follower.follow()))
            await stop.wait()
            manager.tell("STOPPING=1")
            for task in background:
                task.cancel()
        logger.info("stopping")
        _send_away(fleet)
    finally:
        try:
            if page is not None:
                await page.stop()
            if probes is not None:
                await probes.stop()
            if enrolment is not None:
                await enrolment.stop()
            if listeners is not None:
                await listeners.stop()
                await settle()  # a flush under way may fail, and then its entries wait for the last one
                with suppress(FleetError):  # the log has the cause
                    await fleet.audit.flush(is_last=True)
            await settle()
        finally:
            await asyncio.to_thread(store.close)


def _validities(authorities: Authorities, pki: OwnPki | None) -> dict[str, tuple[float, float]]:
    """The validity of certificates that do not renew themselves: its bounds, in seconds of the Unix epoch."""
    if pki is not None:
        return {"server": (pki.content.begin_time.timestamp(), pki.content.expire_time.timestamp())}
    certificates = (member.certificate for member in authorities.members)
    first = min(certificates, key=lambda one: one.not_valid_after_utc)
    return {"authority": (first.not_valid_before_utc.timestamp(), first.not_valid_after_utc.timestamp())}


def _rule(bindings: Bindings, role: Role) -> Callable[[str], bool]:
    """Whether an identity, as KIND/NAME, has a role: by a binding, as root, or as this process's user."""
    own = {str(identity_of(uid)) for uid in (0, os.geteuid())}
    return lambda identity: identity in own or bindings.has_role(identity, role)


async def _load(fleet: Fleet, certificates: ClientCertificates, bindings: Bindings, database: str) -> None:
    try:
        await fleet.load()
        await certificates.load()
        bindings.load(await fleet.store.role_bindings())
        fleet.ledger.note_operators(_rule(bindings, Role.OPERATOR))
    except FleetError as error:
        if error.reason == errors_pb2.ERROR_REASON_STORAGE_DAMAGED and "table" not in error.metadata:
            raise damaged_file(database) from error
        raise unusable(database, error.message) from error


def _send_away(fleet: Fleet) -> None:
    """Ends every stream. Workers reconnect spread over time, to the next coordinator on this address."""
    spread_s = max(LEAST_SPREAD_S, len(fleet.sessions) / RETURNS_PER_S)
    for session in list(fleet.sessions.values()):
        session.drain(random.uniform(0, spread_s), session_pb2.GOODBYE_REASON_SHUTDOWN)


async def _prune(
    fleet: Fleet, certificates: ClientCertificates, retention_s: float, audit_retention_s: float
) -> None:
    while True:
        await asyncio.sleep(PRUNE_INTERVAL_S)
        try:
            await prune(fleet.reader, retention_s, audit_retention_s)
            await certificates.prune()
        except FleetError as error:
            logger.error("%s", error.message)


def _watches(fleet: Fleet) -> Parts:
    """Periodic tasks that write nothing."""
    return (
        fleet.worker_news.end_lost_sessions,
        fleet.worker_news.publish_silent_workers,
        fleet.worker_news.publish_due_workloads,
        fleet.worker_news.note_left_out_leases,
        fleet.refusals.tick,
    )


def _writes(fleet: Fleet, dispatcher: Dispatcher) -> Parts:
    """Periodic tasks that write to the store."""
    return (dispatcher.tick, fleet.events.flush, fleet.lease_history.flush, fleet.audit.flush)


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
