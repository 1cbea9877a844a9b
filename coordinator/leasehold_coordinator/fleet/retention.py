"""Deletes history: events, and commands, workloads and lease spans that have ended."""

import logging
import math
from collections.abc import Iterable
from typing import Final

from leasehold.v1.command_service_pb2 import WatchCommandsResponse
from leasehold.v1.workload_service_pb2 import WatchWorkloadsResponse

from leasehold_coordinator.fleet.fleet_reader import FleetReader
from leasehold_coordinator.storage import schema
from leasehold_coordinator.storage.rows import OldAudit, OldRows, clock_row
from leasehold_coordinator.storage.statements import DELETE_LIMIT
from leasehold_coordinator.storage.store import ANY_AGE_S

logger = logging.getLogger(__name__)

HISTORY_LIMIT_BYTES: Final = 8 * 2**30
"""Size of a SQLite store from which on its history is deleted at any age."""

PRUNE_ROUNDS: Final = 20
"""Most deletions by which one call of :meth:`Fleet.prune` shrinks a store that is too large."""


async def prune(reader: FleetReader, retention_s: float, audit_retention_s: float = math.inf) -> None:
    """Deletes events, ended commands, workloads and lease spans, and remembered deletions, by their age.

    Entries of the audit have a retention of their own, and are never deleted for lack of space.

    Age counts only time in which the store was served. If the history is too large, the oldest rows of its
    largest part are deleted at any age: a peer may fill the store faster than rows grow old. So a flood of
    events or deletions deletes no commands, a flood of large records deletes few small ones, and an audit of
    any size deletes nothing.
    """
    store = reader.store
    tables = (schema.commands, schema.workloads, schema.events, schema.lease_spans, schema.deletions)
    await _delete(
        reader, *(OldRows(table, retention_s) for table in tables), audit=OldAudit(audit_retention_s)
    )
    used_bytes = await store.used_bytes()
    if used_bytes is None or used_bytes <= HISTORY_LIMIT_BYTES:
        return
    limit_bytes = HISTORY_LIMIT_BYTES + await store.audit_bytes()
    if used_bytes <= limit_bytes:
        return
    logger.warning(
        "the store has %d bytes, above its limit of %d and the audit: deleting the oldest of the largest "
        "part among events, ended commands, ended workloads, lease spans and remembered deletions",
        used_bytes,
        HISTORY_LIMIT_BYTES,
    )
    sizes = await store.history_sizes()
    left_bytes = {part: count * mean for part, (count, mean) in sizes.items()}
    for _ in range(PRUNE_ROUNDS):
        largest = max(left_bytes, key=left_bytes.__getitem__)
        await _delete(reader, OldRows(largest.table, ANY_AGE_S, largest.is_large))
        left_bytes[largest] -= DELETE_LIMIT * sizes[largest][1]
        before_bytes, used_bytes = used_bytes, await store.used_bytes()
        if used_bytes is None or used_bytes <= limit_bytes or used_bytes == before_bytes:
            return


async def _delete(reader: FleetReader, *old: OldRows, audit: OldAudit | None = None) -> None:
    """Deletes rows, and then tells watchers which."""
    clock = clock_row(reader.store.highest_time_ns)
    await reader.store.write(clock, *old, *([audit] if audit else []))
    for rows in old:
        if rows.table is schema.commands:
            publish_deleted_commands(reader, rows.deleted)
        elif rows.table is schema.workloads:
            publish_deleted_workloads(reader, rows.deleted)


def publish_deleted_commands(reader: FleetReader, command_ids: Iterable[str]) -> None:
    """Tells watchers of commands that are not in the store any more, and drops them from memory."""
    for command_id in command_ids:
        reader.recent.discard(command_id)
        reader.command_hub.publish(command_id, WatchCommandsResponse(deleted_command_id=command_id))


def publish_deleted_workloads(reader: FleetReader, workload_ids: Iterable[str]) -> None:
    """Tells watchers of workloads that are not in the store any more."""
    for workload_id in workload_ids:
        response = WatchWorkloadsResponse(deleted_workload_id=workload_id)
        reader.workload_hub.publish(workload_id, response)
