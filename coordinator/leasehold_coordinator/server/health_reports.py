"""The health of the coordinator, as grpc.health.v1 tells it: the store's, and whether the ports have TLS."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from grpc_health.v1 import health, health_pb2

from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.storage.rows import clock_row
from leasehold_coordinator.storage.store import Store

logger = logging.getLogger(__name__)

ENCRYPTION: Final = "leasehold.encryption"
"""Name in the health service for the encryption of the ports."""

AUDIT_FILE: Final = "leasehold.audit-file"
"""Name in the health service for the setting ``audit_file``: whether the file can be written."""

LIVENESS: Final = "leasehold.liveness"
"""Name in the health service for the process itself: SERVING whenever it answers."""

PROBE_INTERVAL_S: Final = 1.0
"""Interval of writes that find out whether a store that refused a write takes one again."""


async def set_health(
    servicer: health.aio.HealthServicer, services: Sequence[str], *, is_serving: bool
) -> None:
    """Tells that all services are SERVING or NOT_SERVING, as is the server as a whole."""
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    for name in ("", *services):
        await servicer.set(name, serving if is_serving else not_serving)


async def set_alive(servicer: health.aio.HealthServicer) -> None:
    """Tells that the process answers, whatever the state of the store."""
    await servicer.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)


async def set_encryption(servicer: health.aio.HealthServicer, *, is_insecure: bool) -> None:
    """Tells that the ports have TLS, SERVING, or that they have none, NOT_SERVING."""
    status = (
        health_pb2.HealthCheckResponse.NOT_SERVING if is_insecure else health_pb2.HealthCheckResponse.SERVING
    )
    await servicer.set(ENCRYPTION, status)


async def set_audit_file(servicer: health.aio.HealthServicer, is_serving: bool) -> None:
    """Tells whether the file of the audit can be written."""
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    await servicer.set(AUDIT_FILE, serving if is_serving else not_serving)


async def report_health(servicer: health.aio.HealthServicer, services: Sequence[str], store: Store) -> None:
    """Tells of each change: all services are NOT_SERVING while the store can't be written. Never returns."""
    while True:
        is_serving = await _next_change(store)
        logger.warning("the store %s", "can be written again" if is_serving else "can't be written")
        await set_health(servicer, services, is_serving=is_serving)


async def _next_change(store: Store) -> bool:
    """Waits for a change of the store's health, and probes a store that is not serving."""
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(None if store.health.is_serving else PROBE_INTERVAL_S):
                return await store.health.changed()
        if not store.health.is_stalled:
            with suppress(FleetError):
                await store.write(clock_row(store.highest_time_ns))
