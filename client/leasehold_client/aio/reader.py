"""Calls to the coordinator that change nothing: single messages, lists and plans."""

from collections.abc import Callable, Sequence
from typing import Final, Self

from leasehold.v1 import (
    audit_service_pb2,
    command_service_pb2,
    event_service_pb2,
    fleet_service_pb2,
    operation_pb2,
    workload_service_pb2,
)
from leasehold.v1.access_service_pb2_grpc import AccessServiceStub
from leasehold.v1.audit_pb2 import AuditEntry
from leasehold.v1.audit_service_pb2 import VerifyAuditResponse
from leasehold.v1.audit_service_pb2_grpc import AuditServiceStub
from leasehold.v1.command_pb2 import Command
from leasehold.v1.command_service_pb2_grpc import CommandServiceStub
from leasehold.v1.event_pb2 import Event
from leasehold.v1.event_service_pb2_grpc import EventServiceStub
from leasehold.v1.eviction_pb2 import EvictionPolicy
from leasehold.v1.fleet_service_pb2 import ListGpusResponse
from leasehold.v1.fleet_service_pb2_grpc import FleetServiceStub
from leasehold.v1.plan_pb2 import Plan
from leasehold.v1.worker_pb2 import FleetGpu, Worker
from leasehold.v1.workload_pb2 import Workload
from leasehold.v1.workload_service_pb2 import ListCheckpointsResponse, PlanRequest
from leasehold.v1.workload_service_pb2_grpc import WorkloadServiceStub

from leasehold_client.aio.certificates import AsyncCertificateCalls
from leasehold_client.aio.connection import PAGE_SIZE, AsyncConnection
from leasehold_client.aio.enrolment import AsyncEnrolmentCalls
from leasehold_client.errors import LeaseholdError
from leasehold_client.messages import (
    Moves,
    remap_operation,
    restore_operation,
    suspend_operation,
)
from leasehold_client.request_fields import build

PLAN_TIMEOUT_S: Final = 35.0
"""Deadline of plans. The worker has 30 s to inspect processes, and then the coordinator answers."""

CHECKPOINTS_TIMEOUT_S: Final = 15.0
"""Deadline of lists of checkpoints. Workers have 10 s, and then the coordinator names the silent ones."""


class AsyncReader:
    """A connection to one coordinator. Methods raise :class:`LeaseholdError` for a refusal.

    Args:
        address: HOST:PORT or insecure:HOST:PORT of the coordinator, or unix:PATH of its socket. None: that of
            the context, or of LEASEHOLD_COORDINATOR, or else this user's coordinator.
        on_wait: Called before each wait for another attempt, with the error that is waited out.
        context: Name of a context of ``leasehold login``. None: without an address, that of LEASEHOLD_CONTEXT
            or the current context.
        on_behalf_of: The user for whom a service acts, such as ``user/alice``. Empty: the caller itself.
    """

    def __init__(
        self,
        address: str | None = None,
        on_wait: Callable[[LeaseholdError], None] = lambda error: None,
        context: str | None = None,
        on_behalf_of: str = "",
    ) -> None:
        self._connection = AsyncConnection(address, on_wait, context, on_behalf_of)
        channel = self._connection.channel
        self._fleet = FleetServiceStub(channel)
        self._workloads = WorkloadServiceStub(channel)
        self._commands = CommandServiceStub(channel)
        self._events = EventServiceStub(channel)
        self._audit = AuditServiceStub(channel)
        self._access = AccessServiceStub(channel)
        self.enrolment = AsyncEnrolmentCalls(self._connection)
        """Join tokens, and the GPUs of enrolled workers."""
        self.certificates = AsyncCertificateCalls(self._connection)
        """Client certificates, blocks and authorities."""

    @property
    def address(self) -> str:
        """Address of the coordinator."""
        return self._connection.address

    @property
    def has_changed(self) -> bool:
        """Whether the coordinator has accepted a request for a change. No answer: unknown."""
        return self._connection.has_changed

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection within a second. Commands continue."""
        await self._connection.close()

    async def workers(self, *, filter: str = "", order_by: str = "") -> list[Worker]:
        """The workers that are known to the coordinator.

        Args:
            filter: Expression of AIP-160, such as ``state = CONNECTED AND labels.rack = r1``. Empty: all.
            order_by: Fields to sort by, such as ``state, name desc``. Empty: by name.
        """
        request = build(fleet_service_pb2.ListWorkersRequest, filter=filter, order_by=order_by)
        pages = self._connection.pages(self._fleet.ListWorkers, request)
        return [worker async for page in pages for worker in page.workers]

    async def worker(self, worker: str) -> Worker:
        """The worker with this id or name."""
        request = build(fleet_service_pb2.GetWorkerRequest, worker=worker)
        response = await self._connection.read(self._fleet.GetWorker, request)
        return response.worker

    async def list_gpus(self, *, filter: str = "", order_by: str = "") -> ListGpusResponse:
        """The GPUs of the workers that have reported, and the ids of the other workers.

        A lease is as of its worker's last report, which comes within about 100 ms of a change. So just after
        the outcome of a command, it may still be the old one.

        Args:
            filter: As of :meth:`workers`, such as ``gpu_name:H100 AND state = FREE``.
            order_by: As of :meth:`workers`. Empty: by worker and slot.
        """
        whole = ListGpusResponse()
        request = build(fleet_service_pb2.ListGpusRequest, filter=filter, order_by=order_by)
        async for page in self._connection.pages(self._fleet.ListGpus, request):
            whole.gpus.extend(page.gpus)
            whole.unreachable.extend(name for name in page.unreachable if name not in whole.unreachable)
        return whole

    async def gpus(self, *, filter: str = "", order_by: str = "") -> list[FleetGpu]:
        """The GPUs of the workers that have reported: :meth:`list_gpus` without the other workers."""
        response = await self.list_gpus(filter=filter, order_by=order_by)
        return list(response.gpus)

    async def workloads(
        self, *, include_ended: bool = False, filter: str = "", order_by: str = ""
    ) -> list[Workload]:
        """Workloads.

        Args:
            include_ended: Whether workloads that have ended are listed too.
            filter: As of :meth:`workers`, such as ``labels.team = vision AND NOT state = RUNNING``.
            order_by: As of :meth:`workers`. Empty: the newest first.
        """
        request = build(
            workload_service_pb2.ListWorkloadsRequest,
            include_ended=include_ended,
            filter=filter,
            order_by=order_by,
        )
        pages = self._connection.pages(self._workloads.ListWorkloads, request)
        return [workload async for page in pages for workload in page.workloads]

    async def workload(self, workload: str) -> Workload:
        """The workload with this id, or the newest with this name."""
        request = build(workload_service_pb2.GetWorkloadRequest, workload=workload)
        response = await self._connection.read(self._workloads.GetWorkload, request)
        return response.workload

    async def commands(self, limit: int = 100, *, filter: str = "", order_by: str = "") -> list[Command]:
        """The first commands of the list.

        Args:
            limit: Largest number of commands.
            filter: As of :meth:`workers`, such as ``state = FAILED AND operation = suspend``.
            order_by: ``create_time`` or ``create_time desc``. Empty: the newest first.
        """
        request = build(
            command_service_pb2.ListCommandsRequest,
            page_size=min(limit, PAGE_SIZE),
            filter=filter,
            order_by=order_by,
        )
        pages = self._connection.pages(self._commands.ListCommands, request)
        found: list[Command] = []
        async for page in pages:
            found += page.commands
            if len(found) >= limit:
                break
        return found[:limit]

    async def events(
        self, workload: str = "", limit: int = 100, *, filter: str = "", order_by: str = ""
    ) -> list[Event]:
        """The first events of the list.

        Args:
            workload: Only events of the workload with this id or name. Empty: all events.
            limit: Largest number of events.
            filter: As of :meth:`workers`, such as ``kind = GPU_HEALTH AND worker = alpha``.
            order_by: ``time`` or ``time desc``. Empty: the newest first.
        """
        request = build(
            event_service_pb2.ListEventsRequest,
            page_size=min(limit, PAGE_SIZE),
            workload=workload,
            filter=filter,
            order_by=order_by,
        )
        pages = self._connection.pages(self._events.ListEvents, request)
        found: list[Event] = []
        async for page in pages:
            found += page.events
            if len(found) >= limit:
                break
        return found[:limit]

    async def audit_entries(
        self, limit: int = 100, *, filter: str = "", order_by: str = ""
    ) -> list[AuditEntry]:
        """The first entries of the audit.

        Args:
            limit: Largest number of entries.
            filter: As of :meth:`workers`, such as ``identity = user/alice AND outcome = REFUSED``.
            order_by: ``number`` or ``number desc``. Empty: the newest first.
        """
        request = build(
            audit_service_pb2.ListAuditEntriesRequest,
            page_size=min(limit, PAGE_SIZE),
            filter=filter,
            order_by=order_by,
        )
        pages = self._connection.pages(self._audit.ListAuditEntries, request)
        found: list[AuditEntry] = []
        async for page in pages:
            found += page.entries
            if len(found) >= limit:
                break
        return found[:limit]

    async def verify_audit(self) -> VerifyAuditResponse:
        """Lets the coordinator recompute the hashes of the whole audit. The response is about all parts."""
        count, token = 0, ""
        while True:
            request = build(audit_service_pb2.VerifyAuditRequest, page_token=token)
            part = await self._connection.read(self._audit.VerifyAudit, request)
            count, token = count + part.entry_count, part.next_page_token
            if not token:
                part.entry_count = count
                return part

    async def command(self, command_id: str) -> Command:
        """The command with this id."""
        request = build(command_service_pb2.GetCommandRequest, command_id=command_id)
        response = await self._connection.read(self._commands.GetCommand, request)
        return response.command

    async def list_checkpoints(
        self, *, worker: str = "", workload: str = "", filter: str = ""
    ) -> ListCheckpointsResponse:
        """Checkpoints on the disks of the workers, the newest first, and the ids of workers without answer.

        Args:
            worker: Only checkpoints of this worker, by id or name. Empty: all workers.
            workload: Only checkpoints of this workload, by id or name, also after its end. Empty: all.
            filter: As of :meth:`workers`, such as ``kind = IMAGE AND in_use = false``.
        """
        request = build(
            workload_service_pb2.ListCheckpointsRequest, worker=worker, workload=workload, filter=filter
        )
        return await self._connection.read(self._workloads.ListCheckpoints, request, CHECKPOINTS_TIMEOUT_S)

    async def plan_suspend(
        self,
        workload: str,
        *,
        policy: EvictionPolicy | None = None,
        force: bool = False,
        lock_timeout_s: float | None = None,
    ) -> Plan:
        """The plan of a suspend: its effects, checks and refusals."""
        operation = suspend_operation(lock_timeout_s, policy, force=force)
        return await self._plan(build(PlanRequest, workload=workload, suspend=operation))

    async def plan_restore(
        self, workload: str, *, gpu_uuids: Sequence[str] = (), checkpoint_id: str = "", hold_id: str = ""
    ) -> Plan:
        """The plan of a restore: its effects, checks and refusals."""
        operation = restore_operation(gpu_uuids, checkpoint_id, hold_id)
        return await self._plan(build(PlanRequest, workload=workload, restore=operation))

    async def plan_remap(self, moves: Moves, *, lock_timeout_s: float | None = None) -> Plan:
        """The plan of a remap: its effects, checks and refusals."""
        return await self._plan(build(PlanRequest, remap=remap_operation(moves, lock_timeout_s)))

    async def plan_checkpoint(self, workload: str) -> Plan:
        """The plan of a checkpoint: its effects, checks and refusals."""
        return await self._plan(
            build(PlanRequest, workload=workload, checkpoint=operation_pb2.CheckpointOperation())
        )

    async def _plan(self, request: PlanRequest) -> Plan:
        response = await self._connection.read(self._workloads.Plan, request, PLAN_TIMEOUT_S)
        return response.plan
