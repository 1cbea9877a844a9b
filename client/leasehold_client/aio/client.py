"""The Python client of the coordinator: synchronous and typed, with idempotent calls."""

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar, Unpack, final

import grpc
from google.protobuf.field_mask_pb2 import FieldMask
from leasehold.v1 import command_service_pb2, operation_pb2, workload_service_pb2
from leasehold.v1.command_pb2 import Command
from leasehold.v1.eviction_pb2 import EvictionPolicy
from leasehold.v1.hook_pb2 import Hook
from leasehold.v1.workload_pb2 import Workload, WorkloadSpec
from leasehold.v1.workload_service_pb2 import DeleteWorkloadResponse

from leasehold_client.aio.access_changes import AsyncAccessChanges
from leasehold_client.aio.connection import CALL_TIMEOUT_S
from leasehold_client.aio.reader import CHECKPOINTS_TIMEOUT_S, PLAN_TIMEOUT_S
from leasehold_client.aio.worker_changes import AsyncWorkerChanges
from leasehold_client.coordinator.request_options import (
    ChangeOptions,
    CreateOptions,
    PlannedOptions,
    RequestOptions,
)
from leasehold_client.messages import Moves, duration, remap_operation, restore_operation, suspend_operation
from leasehold_client.request_fields import build


class _PlannedRequest(Protocol):
    request_id: str
    validate_only: bool


PlannedRequest = TypeVar("PlannedRequest", bound=_PlannedRequest)
Response = TypeVar("Response")


@final
class AsyncClient(AsyncWorkerChanges, AsyncAccessChanges):
    """A connection to one coordinator, for reads and changes.

    Methods raise :class:`LeaseholdError` for a refusal. A method that returns a command returns once the
    command is stored; :meth:`wait` waits for its end. Options of requests are in
    :mod:`leasehold_client.coordinator.request_options`.

    Args:
        address: HOST:PORT or insecure:HOST:PORT of the coordinator, or unix:PATH of its socket. None: that of
            the context, or of LEASEHOLD_COORDINATOR, or of cli.toml, or else this user's coordinator.
        on_wait: Called before each wait for another attempt, with the error that is waited out.
        context: Name of a context of ``leasehold login``. None: without an address, that of LEASEHOLD_CONTEXT
            or the current context.
        on_behalf_of: The user for whom a service acts, such as ``user/alice``. Empty: the caller itself.
    """

    async def run(
        self,
        spec: WorkloadSpec,
        *,
        name: str = "",
        worker: str = "",
        gpu_uuids: Sequence[str] = (),
        checkpoint_id: str = "",
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
        hold_id: str = "",
        preempt: Sequence[str] = (),
        timeout_s: float | None = None,
        **options: Unpack[CreateOptions],
    ) -> tuple[Workload, Command]:
        """Creates a workload and the command that starts the workload.

        Args:
            spec: The program, its resources and its policy. No response has values of
                ``secret_environment``.
            name: Name of the workload. Empty: generated.
            worker: Id or name of the worker. Empty: the one with most free GPUs, or with the checkpoint.
            gpu_uuids: Exactly these GPUs. Empty: any that satisfy the spec.
            checkpoint_id: Checkpoint that the application starts from. Empty: none.
            labels: Labels of the workload.
            annotations: Annotations of the workload.
            hold_id: Hold whose GPUs it takes before free ones, on the worker of the hold. Empty: none.
            preempt: Ids or names of workloads to suspend first, in order. If a suspend or the start fails,
                they are restored on their GPUs. ``result.preempted_workload_ids`` names those suspended now.
            timeout_s: Longest time in the queue and in execution. None: 60 s, or 10 min with ``preempt``.
            options: :class:`CreateOptions`.
        """
        request = build(
            workload_service_pb2.CreateWorkloadRequest,
            name=name,
            spec=spec,
            worker=worker,
            gpu_uuids=gpu_uuids,
            checkpoint_id=checkpoint_id,
            labels=labels,
            annotations=annotations,
            hold_id=hold_id,
            preempt=preempt,
            timeout=duration(timeout_s),
            **options,
        )
        lookup_s = CHECKPOINTS_TIMEOUT_S if checkpoint_id else 0.0
        check_s = PLAN_TIMEOUT_S if spec.hooks or request.validate_only else 0.0
        response = await self._create(
            self._workloads.CreateWorkload, request, max(CALL_TIMEOUT_S, lookup_s + check_s)
        )
        return response.workload, response.command

    async def suspend(
        self,
        workload: str,
        *,
        policy: EvictionPolicy | None = None,
        force: bool = False,
        lock_timeout_s: float | None = None,
        hold_for_s: float | None = None,
        held_by: str = "",
        timeout_s: float | None = None,
        **options: Unpack[PlannedOptions],
    ) -> Command:
        """Suspends a workload and releases its GPUs.

        A suspended workload is moved to a stronger process strategy if the policy has one.

        Args:
            workload: Id or name.
            policy: Eviction policy. None: the policy of the workload's spec.
            force: Suspend even if the policy frees no memory or loses the state of the workload.
            lock_timeout_s: Longest time for submitted GPU work to drain. None: 10 s.
            hold_for_s: Time for which the released GPUs stay reserved for the run or restore that names the
                hold, at most 600 s. ``result.hold_id`` of the command is its id. None: no hold.
            held_by: Name of the hold's owner, at most 256 characters.
            timeout_s: Longest time in the queue and in execution. None: 10 min.
            options: :class:`PlannedOptions`.
        """
        request = build(
            workload_service_pb2.SuspendWorkloadRequest,
            workload=workload,
            operation=suspend_operation(
                lock_timeout_s, policy, force=force, hold_for_s=hold_for_s, held_by=held_by
            ),
            timeout=duration(timeout_s),
            **options,
        )
        response = await self._planned(self._workloads.SuspendWorkload, request)
        return response.command

    async def restore(
        self,
        workload: str,
        *,
        gpu_uuids: Sequence[str] = (),
        checkpoint_id: str = "",
        hold_id: str = "",
        preempt: Sequence[str] = (),
        timeout_s: float | None = None,
        **options: Unpack[PlannedOptions],
    ) -> Command:
        """Restores a suspended workload, whatever its policy was.

        Args:
            workload: Id or name.
            gpu_uuids: Its GPUs, in its own order. Empty: its former GPUs if they are free, else others.
            checkpoint_id: Checkpoint that a STOPPED workload starts from. Empty: its newest intact one.
            hold_id: Hold whose GPUs it takes before free ones. Empty: none.
            preempt: Workloads to suspend first, as of :meth:`run`.
            timeout_s: Longest time in the queue and in execution. None: 10 min.
            options: :class:`PlannedOptions`.
        """
        request = build(
            workload_service_pb2.RestoreWorkloadRequest,
            workload=workload,
            operation=restore_operation(gpu_uuids, checkpoint_id, hold_id, preempt),
            timeout=duration(timeout_s),
            **options,
        )
        response = await self._planned(self._workloads.RestoreWorkload, request)
        return response.command

    async def remap(
        self,
        moves: Moves,
        *,
        lock_timeout_s: float | None = None,
        timeout_s: float | None = None,
        **options: Unpack[PlannedOptions],
    ) -> Command:
        """Moves running workloads to other GPUs of their worker, all or none. Two workloads can swap GPUs.

        Args:
            moves: Pairs of old and new GPU by workload. GPUs that are not named stay.
            lock_timeout_s: Longest time for submitted GPU work to drain. None: 10 s.
            timeout_s: Longest time in the queue and in execution. None: 10 min.
            options: :class:`PlannedOptions`.
        """
        request = build(
            workload_service_pb2.RemapWorkloadsRequest,
            operation=remap_operation(moves, lock_timeout_s),
            timeout=duration(timeout_s),
            **options,
        )
        response = await self._planned(self._workloads.RemapWorkloads, request)
        return response.command

    async def checkpoint(
        self, workload: str, *, timeout_s: float | None = None, **options: Unpack[PlannedOptions]
    ) -> Command:
        """Checkpoints the application of a running workload, which keeps running.

        The application must implement ``leasehold_client.kernel``.

        Args:
            workload: Id or name.
            timeout_s: Longest time in the queue and in execution. None: 10 min.
            options: :class:`PlannedOptions`.
        """
        request = build(
            workload_service_pb2.CheckpointWorkloadRequest,
            workload=workload,
            timeout=duration(timeout_s),
            **options,
        )
        response = await self._planned(self._workloads.CheckpointWorkload, request)
        return response.command

    async def release_hold(self, hold_id: str, *, timeout_s: float | None = None) -> Command:
        """Gives up a hold: the GPUs that the suspend released become free.

        Args:
            hold_id: The hold.
            timeout_s: Longest time in the queue and in execution. None: 60 s.

        Raises:
            LeaseholdError: UNKNOWN_HOLD. The command fails with it if the hold has ended.
        """
        request = build(workload_service_pb2.ReleaseHoldRequest, hold_id=hold_id, timeout=duration(timeout_s))
        response = await self._create(self._workloads.ReleaseHold, request)
        return response.command

    async def stop(
        self,
        workload: str,
        *,
        grace_s: float | None = None,
        force: bool = False,
        timeout_s: float | None = None,
        **options: Unpack[ChangeOptions],
    ) -> Command:
        """Stops a workload: SIGTERM, and SIGKILL after the grace period.

        Args:
            workload: Id or name.
            grace_s: Grace period. None: 10 s.
            force: Kill restored processes even if they can't be suspended first, which can hang their host.
            timeout_s: Longest time in the queue and in execution. None: 60 s.
            options: :class:`ChangeOptions`.
        """
        request = build(
            workload_service_pb2.StopWorkloadRequest,
            workload=workload,
            operation=build(operation_pb2.StopOperation, grace=duration(grace_s), force=force),
            timeout=duration(timeout_s),
            **options,
        )
        response = await self._create(self._workloads.StopWorkload, request)
        return response.command

    async def adopt(
        self,
        pid: int,
        *,
        worker: str,
        name: str = "",
        eviction: EvictionPolicy | None = None,
        hooks: Sequence[Hook] = (),
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> tuple[Workload, Command]:
        """Adopts a running process and its descendants as a workload that leases their GPUs.

        Args:
            pid: Process id on the worker's host.
            worker: Id or name of the worker.
            name: Name of the workload. Empty: generated.
            eviction: Eviction policy. None: ``retain+cuda_suspend``.
            hooks: Hooks around suspend and restore, in order.
            timeout_s: Longest time in the queue and in execution. None: 60 s.
            options: :class:`RequestOptions`.

        Returns:
            The workload, still PENDING, and the command that adopts the process.
        """
        request = build(
            workload_service_pb2.AdoptProcessRequest,
            worker=worker,
            operation=build(operation_pb2.AdoptOperation, name=name, pid=pid, hooks=hooks, eviction=eviction),
            timeout=duration(timeout_s),
            **options,
        )
        call_timeout_s = PLAN_TIMEOUT_S if hooks else CALL_TIMEOUT_S  # the worker checks hooks
        response = await self._create(self._workloads.AdoptProcess, request, call_timeout_s)
        return response.workload, response.command

    async def release(
        self, workload: str, *, timeout_s: float | None = None, **options: Unpack[ChangeOptions]
    ) -> Command:
        """Releases an adopted or claimed workload: its processes keep running, and its lease ends.

        Args:
            workload: Id or name.
            timeout_s: Longest time in the queue and in execution. None: 60 s.
            options: :class:`ChangeOptions`.

        Raises:
            LeaseholdError: WRONG_STATE if Leasehold started the workload, or if the workload is suspended.
        """
        request = build(
            workload_service_pb2.ReleaseWorkloadRequest,
            workload=workload,
            timeout=duration(timeout_s),
            **options,
        )
        response = await self._create(self._workloads.ReleaseWorkload, request)
        return response.command

    async def update_workload(
        self,
        workload: str,
        *,
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
        etag: str = "",
    ) -> Workload:
        """Replaces the labels or the annotations of a workload, and returns the workload.

        Args:
            workload: Id or name.
            labels: All labels. None: unchanged.
            annotations: All annotations. None: unchanged.
            etag: Refuse if the workload has another etag, and not these values already. Empty: any.

        Raises:
            LeaseholdError: UNKNOWN_WORKLOAD, INVALID_ARGUMENT, or ETAG_MISMATCH.
        """
        given = {"labels": labels, "annotations": annotations}
        request = build(
            workload_service_pb2.UpdateWorkloadRequest,
            workload=build(Workload, workload_id=workload, labels=labels, annotations=annotations, etag=etag),
            update_mask=FieldMask(paths=[field for field, texts in given.items() if texts is not None]),
        )
        response = await self._connection.read(self._workloads.UpdateWorkload, request)
        return response.workload

    async def delete_workload(self, workload: str, *, etag: str = "") -> DeleteWorkloadResponse:
        """Deletes the record of a workload that has ended and of its commands, and returns the record.

        Args:
            workload: Id or name.
            etag: Refuse if the workload has another etag. Empty: any.

        Raises:
            LeaseholdError: UNKNOWN_WORKLOAD, ETAG_MISMATCH, WORKLOAD_BUSY, or WRONG_STATE if it lives.
        """
        request = build(workload_service_pb2.DeleteWorkloadRequest, workload=workload, etag=etag)
        # Once: a repeated call would not find the workload.
        return await self._connection.once(self._workloads.DeleteWorkload, request)

    async def cancel(self, command_id: str) -> Command:
        """Requests the cancellation of a command, and returns the command.

        A command that was not sent to its worker ends at once. Otherwise the worker decides, and
        :meth:`wait` returns the outcome. A command that has ended is unchanged.

        Raises:
            LeaseholdError: UNKNOWN_COMMAND, or WORKER_UNAVAILABLE if the worker can't be asked.
        """
        request = build(command_service_pb2.CancelCommandRequest, command_id=command_id)
        response = await self._connection.read(self._commands.CancelCommand, request)
        return response.command

    async def _planned(
        self, method: "grpc.aio.UnaryUnaryMultiCallable[PlannedRequest, Response]", request: PlannedRequest
    ) -> Response:
        """Makes a creating call. A worker has 30 s to validate a request."""
        return await self._create(
            method, request, PLAN_TIMEOUT_S if request.validate_only else CALL_TIMEOUT_S
        )
