"""Changes of records that no worker takes part in: labels, annotations and deletions."""

import asyncio
import logging
from typing import final

from leasehold.v1.fleet_service_pb2 import DeleteWorkerRequest, DeleteWorkerResponse
from leasehold.v1.worker_pb2 import Worker
from leasehold.v1.workload_pb2 import Workload
from leasehold.v1.workload_service_pb2 import (
    DeleteWorkloadRequest,
    DeleteWorkloadResponse,
    UpdateWorkloadRequest,
)

from leasehold_coordinator.access.identities import Identity, Kind
from leasehold_coordinator.access.worker_bindings import WorkerBinding
from leasehold_coordinator.commands.decisions import Decisions
from leasehold_coordinator.core.workload_metadata import check_etag, updated
from leasehold_coordinator.fleet.audit_entries import change_rows
from leasehold_coordinator.fleet.fleet import Fleet
from leasehold_coordinator.fleet.permissions import require_own
from leasehold_coordinator.fleet.revocations import Revocations
from leasehold_coordinator.storage import schema
from leasehold_coordinator.storage.rows import Gone
from leasehold_coordinator.storage.write_health import look_at

logger = logging.getLogger(__name__)


@final
class RecordChanges:
    """Changes records one at a time. Deletions exclude the creation of commands; updates do not wait for it.

    A change that has begun is finished, also if its caller leaves, or is refused since the disk hangs.
    """

    def __init__(self, fleet: Fleet, decisions: Decisions, revocations: Revocations | None = None) -> None:
        self._fleet = fleet
        self._revocations = revocations
        self._decisions = decisions
        self._changing = asyncio.Lock()

    async def update_workload(self, request: UpdateWorkloadRequest) -> Workload:
        """Changes labels and annotations of a workload, and returns the workload.

        A workload that has the new values already is returned, whatever the etag: the request may be repeated
        after a lost response, and its own change gave the workload another etag (RFC 9110, 13.1.1).

        Raises:
            FleetError: UNKNOWN_WORKLOAD, NOT_PERMITTED, INVALID_ARGUMENT, ETAG_MISMATCH or
                STORAGE_UNAVAILABLE.
        """

        async def update() -> Workload:
            async with self._changing:
                known = await self._find_current(request.workload.workload_id)
                require_own([known])
                mask = request.update_mask if request.HasField("update_mask") else None
                workload = updated(known, request.workload, mask)
                if workload != known:
                    check_etag(known, request.workload.etag)
                    await self._fleet.update_workload(workload)
                return workload

        return await self._fleet.store.health.unless_stalled(update(), look_at("get workloads --all"))

    async def _find_current(self, id_or_name: str) -> Workload:
        """A workload whose creation is on disk, and which no report has changed since it was read.

        Raises:
            FleetError: UNKNOWN_WORKLOAD or STORAGE_UNAVAILABLE.
        """
        reader = self._fleet.reader
        while True:
            revision = reader.workload_hub.revision
            found = await reader.find_workload(id_or_name)
            live = reader.workloads.get(found.workload_id)
            if live is not None and reader.workloads.on_disk(found.workload_id) is None:
                async with self._decisions.alone():  # its creation is on disk now, or undone
                    live = reader.workloads.get(found.workload_id)
                if live is not None:
                    return live
                continue
            if live is None and reader.workloads.is_being_stored(found.workload_id):
                await reader.workloads.wait_stored(found.workload_id)  # its end is not on disk yet
                continue
            has_changed = reader.workload_hub.has_changed(found.workload_id, revision)
            if live is found or (live is None and not has_changed):
                return found

    async def delete_workload(self, request: DeleteWorkloadRequest) -> DeleteWorkloadResponse:
        """Deletes the record of a workload that has ended, and of its commands.

        Raises:
            FleetError: UNKNOWN_WORKLOAD, NOT_PERMITTED, ETAG_MISMATCH, WRONG_STATE, WORKLOAD_BUSY or
                STORAGE_UNAVAILABLE.
        """

        async def delete() -> DeleteWorkloadResponse:
            async with self._changing, self._decisions.alone():
                workload = await self._fleet.reader.find_workload(request.workload)
                require_own([workload])
                check_etag(workload, request.etag)
                last = self._fleet.reader.view(workload)
                count = await self._fleet.delete_workload(workload)
                logger.info("workload %s (%s) was deleted", last.name, last.workload_id)
                return DeleteWorkloadResponse(workload=last, deleted_command_count=count)

        return await self._fleet.store.health.unless_stalled(delete(), look_at("get workloads --all"))

    async def delete_worker(self, request: DeleteWorkerRequest) -> DeleteWorkerResponse:
        """Deletes the record of a worker that is not connected, and fails its open workloads and commands.

        The certificates of an enrolled worker are revoked, and its name is free for another worker.

        Raises:
            FleetError: UNKNOWN_WORKER, WORKER_CONNECTED or STORAGE_UNAVAILABLE.
        """

        async def delete() -> DeleteWorkerResponse:
            async with self._changing, self._decisions.alone(), self._fleet.enrolling:
                bound = self._fleet.bindings.get(request.worker)
                if bound is not None and self._fleet.registry.get(bound.worker_id) is None:
                    return await self._delete_binding(bound)
                known = self._fleet.registry.find(request.worker)
                last = self._fleet.reader.worker(known)
                bound = self._fleet.bindings.of_worker(last.worker_id)
                if bound is not None and last.worker_id not in self._fleet.sessions:
                    await self._revoke(bound)  # first, or the worker could connect again and be bound anew
                failed = await self._fleet.delete_worker(known)
                logger.info("worker %s (%s) was deleted", last.name, last.worker_id)
                return DeleteWorkerResponse(worker=last, failed_workload_ids=failed)

        return await self._fleet.store.health.unless_stalled(delete(), look_at("get workers"))

    async def _delete_binding(self, bound: WorkerBinding) -> DeleteWorkerResponse:
        """Deletes the binding of a worker that joined, and has never connected."""
        worker_id = bound.worker_id
        gone = Gone(schema.worker_bindings, bound.name)
        await self._revoke(bound)
        await self._fleet.store.write(gone, *change_rows(f"worker/{worker_id}"))
        self._fleet.bindings.remove(bound.name)
        logger.info("worker %s (%s), which never connected, was deleted", bound.name, worker_id)
        return DeleteWorkerResponse(worker=Worker(worker_id=worker_id, name=bound.name))

    async def _revoke(self, bound: WorkerBinding) -> None:
        if self._revocations is not None:
            await self._revocations.revoke_all(Identity(Kind.WORKER, bound.name))
