"""Immediate answers of the local API: lists of leases, and the release of a workload."""

from typing import Final, final

import trio
from leasehold.local.v1 import local_service_pb2
from leasehold.v1 import errors_pb2, operation_pb2, workload_pb2
from leasehold.v1.operation_pb2 import Operation

from leasehold_worker.commands.executor import Commands
from leasehold_worker.commands.states import SUCCEEDED
from leasehold_worker.errors import OperationError
from leasehold_worker.host.clock_offset import ClockOffset
from leasehold_worker.host.peers import Peer
from leasehold_worker.leasing.allocation import Resources
from leasehold_worker.leasing.messages import cordon_message, gpu_lease_messages
from leasehold_worker.leasing.pool import GpuPool
from leasehold_worker.local_api.claim_waiting import ClaimWaiting
from leasehold_worker.timestamps import duration
from leasehold_worker.workloads.messages import workload_message
from leasehold_worker.workloads.registry import Workloads
from leasehold_worker.workloads.release_rules import check_releasable
from leasehold_worker.workloads.states import ENDED
from leasehold_worker.workloads.workload import Workload

LIST_LIMIT_BYTES: Final = 3 * 2**20
"""Size of a list. A client accepts 4 MiB. In a longer list, command lines are left out."""


@final
class LocalQueries:
    """Answers queries of one host's processes.

    Args:
        pool: The GPUs.
        resources: Resources of the host.
        workloads: The registry.
        commands: Releases workloads.
        turns: The waiting claims.
        worker_id: Id of the worker, for reported workloads.
        clock: The offset of the coordinator's clock.
    """

    def __init__(
        self,
        pool: GpuPool,
        resources: Resources,
        workloads: Workloads,
        commands: Commands,
        claim_waiting: ClaimWaiting,
        worker_id: str,
        clock: ClockOffset,
    ) -> None:
        self._pool = pool
        self._resources = resources
        self._workloads = workloads
        self._commands = commands
        self._claim_waiting = claim_waiting
        self._worker_id = worker_id
        self._clock = clock
        self._list_turn = trio.Lock()

    async def list(self, peer: Peer) -> local_service_pb2.ListResponse:
        """The GPUs, the workloads and the waiting claims. The list always fits into a message.

        A turn of the event loop makes one list at most, however many callers wait.

        Args:
            peer: The caller. Only root and the worker's user see command lines of other users.
        """
        async with self._list_turn:
            return self._list(peer)

    def _list(self, peer: Peer) -> local_service_pb2.ListResponse:
        found = local_service_pb2.ListResponse(
            gpus=gpu_lease_messages(self._pool.slots.snapshot().slots, {}),
            workloads=[
                workload_message(workload, self._worker_id, self._listed_spec(workload, peer))
                for workload in self._workloads.all()
                if workload.state not in ENDED
            ],
            waiting=self._claim_waiting.waiting(),
            resources=self._resources.fetch_machine_resources(),
            cordon=cordon_message(self._pool.slots.worker_cordon),
        )
        if (offset_s := self._clock.offset_s) is not None:
            found.coordinator_clock_offset.CopyFrom(duration(offset_s))
        for workload in found.workloads:  # values may be secrets, and any user may list
            for name in list(workload.spec.environment):  # a map must not change during its iteration
                workload.spec.environment[name] = ""
        if not peer.is_trusted:
            self._hide_others(found, peer)
        if found.ByteSize() > LIST_LIMIT_BYTES:
            for workload in found.workloads:
                for field in ("arguments", "environment"):
                    workload.spec.ClearField(field)
        return found

    def _listed_spec(self, workload: Workload, peer: Peer) -> workload_pb2.WorkloadSpec:
        """The spec of a workload in a list: of other users' workloads only the resources.

        Hooks are left out before the copy: 256 claims may have 16 MiB of hooks, and no client shows them.
        """
        is_shown = peer.is_trusted or workload.uid == peer.uid
        return workload_pb2.WorkloadSpec(
            **{
                field.name: value
                for field, value in workload.spec.ListFields()
                if field.name == "resources" or (is_shown and field.name != "hooks")
            }
        )

    def _hide_others(self, found: local_service_pb2.ListResponse, peer: Peer) -> None:
        """Leaves out the texts of other users' errors, and the command lines of their processes."""
        for workload in found.workloads:
            is_own = self._workloads.get(workload.workload_id).uid == peer.uid
            if not is_own and workload.status.HasField("error"):  # its text may be the output of a hook
                workload.status.error.CopyFrom(errors_pb2.Error(reason=workload.status.error.reason))
        for gpu in found.gpus:
            for process in gpu.foreign_processes:
                if process.user != peer.user:
                    process.ClearField("command")

    async def release(self, peer: Peer, name: str) -> workload_pb2.Workload:
        """Releases a claim or an adopted process.

        Args:
            peer: The caller: the owner, the worker's user or root.
            name: Id or name of the workload, or id of its lease.

        Raises:
            OperationError: UNKNOWN_WORKLOAD, NOT_PERMITTED, or the reason why it can't be released.
        """
        workload = self._find(name)
        if not peer.is_trusted and peer.uid != workload.uid:
            raise OperationError(
                errors_pb2.ERROR_REASON_NOT_PERMITTED,
                f"workload {workload.name} is of user {workload.user}: only that user, the "
                "worker's user and root may release it",
            )
        check_releasable(workload)  # before the command, which would be written to the journal and the log
        operation = Operation(release=operation_pb2.ReleaseOperation())
        outcome = await self._commands.carry_out(workload.workload_id, operation)
        if outcome.state != SUCCEEDED:
            error = outcome.error
            raise OperationError(error.reason, error.message, dict(error.metadata))
        return workload_message(workload, self._worker_id)

    def _find(self, name: str) -> Workload:
        for workload in self._workloads.all():
            ids = {workload.workload_id, workload.name}
            if workload.lease is not None:  # without one, its id is no empty text that a caller may send
                ids.add(workload.lease.lease_id)
            if workload.state not in ENDED and name in ids:
                return workload
        raise OperationError(
            errors_pb2.ERROR_REASON_UNKNOWN_WORKLOAD,
            "no running or suspended workload of this host has the id, name or lease "
            f"{name!r}: `leasehold local leases` lists them",
        )
