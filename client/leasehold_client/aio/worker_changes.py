"""Changes of workers, their GPUs and their disks."""

import uuid
from collections.abc import Sequence
from typing import Protocol, TypeVar, Unpack

import grpc
from leasehold.v1 import fleet_service_pb2, operation_pb2, workload_service_pb2
from leasehold.v1.command_pb2 import Command
from leasehold.v1.eviction_pb2 import EvictionPolicy
from leasehold.v1.fleet_service_pb2 import DeleteWorkerResponse

from leasehold_client.aio.connection import CALL_TIMEOUT_S
from leasehold_client.aio.watcher import AsyncWatcher
from leasehold_client.coordinator.connection import maybe_stored
from leasehold_client.coordinator.request_options import RequestOptions
from leasehold_client.errors import NoCoordinatorError
from leasehold_client.messages import duration, suspend_operation
from leasehold_client.request_fields import build


class _CreateRequest(Protocol):
    request_id: str


Request = TypeVar("Request", bound=_CreateRequest)
Response = TypeVar("Response")


class AsyncWorkerChanges(AsyncWatcher):
    """A connection to one coordinator, for reads, watches and changes of workers."""

    async def suspend_worker(
        self,
        worker: str,
        *,
        policy: EvictionPolicy | None = None,
        force: bool = False,
        lock_timeout_s: float | None = None,
        timeout_s: float | None = None,
    ) -> workload_service_pb2.SuspendWorkerResponse:
        """Suspends every workload that holds GPUs of a worker, the oldest first.

        Args:
            worker: Id or name.
            policy: Eviction policy. None: the policy of each workload's spec.
            force: Suspend even if the policy frees no memory or loses the state of a workload.
            lock_timeout_s: Longest time for submitted GPU work to drain. None: 10 s.
            timeout_s: Longest time of each command in the queue and in execution. None: 10 min.

        Returns:
            The commands in order, and the refusal of each workload that can't be suspended.
        """
        request = build(
            workload_service_pb2.SuspendWorkerRequest,
            worker=worker,
            operation=suspend_operation(lock_timeout_s, policy, force=force),
            timeout=duration(timeout_s),
        )
        # A repeated call would find other workloads: those that the first one has left.
        try:
            return await self._connection.change(self._workloads.SuspendWorker, request)
        except NoCoordinatorError as error:
            raise maybe_stored(error) from None

    async def delete_checkpoints(
        self,
        worker: str,
        checkpoint_ids: Sequence[str],
        *,
        force: bool = False,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Command:
        """Deletes checkpoints on a worker's disk.

        Args:
            worker: Id or name.
            checkpoint_ids: At least one id.
            force: Delete also the checkpoint of a suspended workload, which then can't be restored.
            timeout_s: Longest time in the queue and in execution. None: 60 s.
            options: :class:`RequestOptions`.
        """
        request = build(
            workload_service_pb2.DeleteCheckpointsRequest,
            worker=worker,
            timeout=duration(timeout_s),
            **options,
            operation=build(
                operation_pb2.DeleteCheckpointsOperation, checkpoint_ids=checkpoint_ids, force=force
            ),
        )
        response = await self._create(self._workloads.DeleteCheckpoints, request)
        return response.command

    async def cordon(
        self,
        worker: str,
        gpu_uuids: Sequence[str] = (),
        *,
        reason: str,
        cordoned_by: str,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Command:
        """Takes GPUs, or a whole worker, out of service: leases stay, and no new ones are granted.

        Args:
            worker: Id or name.
            gpu_uuids: GPUs of the worker. Empty: the whole worker, which then starts no workload.
            reason: Reason, at most 256 characters.
            cordoned_by: Name of the operator, at most 256 characters.
            timeout_s: Longest time in the queue and in execution. None: 60 s.
            options: :class:`RequestOptions`.
        """
        operation = build(
            operation_pb2.CordonOperation, gpu_uuids=gpu_uuids, reason=reason, cordoned_by=cordoned_by
        )
        request = build(
            fleet_service_pb2.CordonRequest,
            worker=worker,
            operation=operation,
            timeout=duration(timeout_s),
            **options,
        )
        response = await self._create(self._fleet.Cordon, request)
        return response.command

    async def uncordon(
        self,
        worker: str,
        gpu_uuids: Sequence[str] = (),
        *,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Command:
        """Puts GPUs, or a whole worker, back into service.

        Args:
            worker: Id or name.
            gpu_uuids: GPUs of the worker. Empty: the whole worker; GPUs with a cordon of their own keep it.
            timeout_s: Longest time in the queue and in execution. None: 60 s.
            options: :class:`RequestOptions`.
        """
        request = build(
            fleet_service_pb2.UncordonRequest,
            worker=worker,
            operation=build(operation_pb2.UncordonOperation, gpu_uuids=gpu_uuids),
            timeout=duration(timeout_s),
            **options,
        )
        response = await self._create(self._fleet.Uncordon, request)
        return response.command

    async def reset_gpu_health(
        self,
        worker: str,
        gpu_uuids: Sequence[str],
        *,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Command:
        """Resets the recorded health of GPUs of a worker. The next check finds a persisting problem again.

        Args:
            worker: Id or name.
            gpu_uuids: GPUs of the worker, at least one.
            timeout_s: Longest time in the queue and in execution. None: 60 s.
            options: :class:`RequestOptions`.
        """
        request = build(
            fleet_service_pb2.ResetGpuHealthRequest,
            worker=worker,
            operation=build(operation_pb2.ResetGpuHealthOperation, gpu_uuids=gpu_uuids),
            timeout=duration(timeout_s),
            **options,
        )
        response = await self._create(self._fleet.ResetGpuHealth, request)
        return response.command

    async def delete_worker(self, worker: str) -> DeleteWorkerResponse:
        """Deletes the record of a worker that is not connected, and returns the record.

        Its open workloads and commands become FAILED. Nothing on its host changes.

        Args:
            worker: Id or name.

        Raises:
            LeaseholdError: UNKNOWN_WORKER or WORKER_CONNECTED.
        """
        request = build(fleet_service_pb2.DeleteWorkerRequest, worker=worker)
        # Once: a repeated call would not find the worker.
        return await self._connection.once(self._fleet.DeleteWorker, request)

    async def _create(
        self,
        method: "grpc.aio.UnaryUnaryMultiCallable[Request, Response]",
        request: Request,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Response:
        request.request_id = request.request_id or uuid.uuid4().hex
        return await self._connection.create(method, request, timeout_s)
