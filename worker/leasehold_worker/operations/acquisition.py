"""The allocation of resources for the coordinator's commands: free ones, or those of preemptible workloads.

A command never waits for ordinary workloads to end. Only preemptible workloads make room, as for any claim.
"""

from collections.abc import Sequence
from typing import Final, final

import trio
from leasehold.v1 import errors_pb2, operation_pb2, workload_pb2

from leasehold_worker.commands.progress import Progress
from leasehold_worker.errors import OperationError
from leasehold_worker.gpus.inventory import Inventory
from leasehold_worker.gpus.uuids import normalize_uuid
from leasehold_worker.leasing.allocation import Allocation, AllocRequest, Resources
from leasehold_worker.leasing.gpu_selection import GpuRequest
from leasehold_worker.leasing.leases import Lease
from leasehold_worker.leasing.pool import GpuPool
from leasehold_worker.operations.preemption import helpers_would_do
from leasehold_worker.planning.plan import Plan
from leasehold_worker.workloads.foreign_processes import ForeignWatch
from leasehold_worker.workloads.registry import Workloads
from leasehold_worker.workloads.workload import Workload

HELPERS_TIMEOUT_S: Final = 60.0
"""Time for preemptible workloads to release their GPUs, unless the command's own timeout passes first."""

WAITS_FOR_HELPERS: Final = "waits for GPUs of preemptible workloads"
"""Text behind the phase of a command that waits for them."""


@final
class Acquisition:
    """Allocates GPUs and host resources for runs, and GPUs for restores."""

    def __init__(
        self,
        inventory: Inventory,
        pool: GpuPool,
        resources: Resources,
        workloads: Workloads,
        foreign: ForeignWatch,
    ) -> None:
        self._inventory = inventory
        self._pool = pool
        self._resources = resources
        self._workloads = workloads
        self._foreign = foreign

    async def for_run(
        self,
        workload_id: str,
        operation: operation_pb2.RunOperation,
        progress: Progress,
        preferred: Sequence[str] = (),
    ) -> Allocation:
        """Allocates the resources of a run. Named GPUs are allocated even if claims wait for them.

        On cancellation nothing is held.

        Args:
            workload_id: The workload that is to hold them.
            operation: The run.
            progress: The report of the operation.
            preferred: GPUs of its last run, used if they are free and its spec prefers no others.

        Raises:
            OperationError: The resources are not available.
        """
        spec = operation.spec
        request = self._request(operation, preferred)
        await self._foreign.look(self._workloads)
        if operation.gpu_uuids:
            named = [normalize_uuid(uuid) for uuid in operation.gpu_uuids]
            return self._resources.alloc_named(workload_id, named, request)
        self._check_precedence(operation, request)
        try:
            return self._resources.alloc(workload_id, request, live=True, priority=spec.priority)
        except OperationError as error:
            if not self.may_claim(operation.spec, request, error):
                raise
            # Preemptible workloads make room for a waiting claim.
            with progress.wait(WAITS_FOR_HELPERS, error), trio.move_on_after(HELPERS_TIMEOUT_S):
                return await self._resources.claim(workload_id, request, priority=spec.priority)
            raise

    async def check_run(self, operation: operation_pb2.RunOperation) -> None:
        """Refuses what :meth:`for_run` would refuse now, and allocates nothing.

        Raises:
            OperationError: The resources are not available.
        """
        request = self._request(operation, ())
        await self._foreign.look(self._workloads)
        if operation.gpu_uuids:
            named = [normalize_uuid(uuid) for uuid in operation.gpu_uuids]
            held = self._pool.holds.gpus_of(operation.hold_id)
            self._pool.slots.check_free(named, allow_foreign=request.gpus.allow_foreign, held=held)
            return
        self._check_precedence(operation, request)
        try:
            self._resources.alloc("", request, live=False, priority=operation.spec.priority)
        except OperationError as error:
            if not self.may_claim(operation.spec, request, error):
                raise

    def _request(self, operation: operation_pb2.RunOperation, preferred: Sequence[str]) -> AllocRequest:
        wanted = workload_pb2.Resources()
        wanted.CopyFrom(operation.spec.resources)
        if preferred and not wanted.gpu_preference:
            wanted.gpu_preference = workload_pb2.GPU_PREFERENCE_SAME_AS_BEFORE
        preferred = preferred or self._workloads.last_gpus(operation.name)
        return AllocRequest.of(wanted, preferred, operation.hold_id)

    def _check_precedence(self, operation: operation_pb2.RunOperation, request: AllocRequest) -> None:
        """Refuses a preemptible workload while others wait for GPUs."""
        takes = request.gpus.count and not operation.hold_id
        if operation.spec.HasField("helper") and takes and self._pool.waiting:
            raise self._pool.why_not(request.gpus)

    def may_claim(
        self, spec: workload_pb2.WorkloadSpec, request: AllocRequest, error: OperationError
    ) -> bool:
        """Whether preemptible workloads would make room for a program that was refused with this error."""
        lacks_gpus = error.reason == errors_pb2.ERROR_REASON_NO_FREE_GPU
        may_wait = not spec.HasField("helper") and not request.hold_id
        return lacks_gpus and may_wait and self._helpers_would_do(request.gpus, spec.priority)

    async def request_of_helpers(
        self, workload: Workload, operation: operation_pb2.RestoreOperation
    ) -> GpuRequest | None:
        """The GPUs for a restore, if it needs some of preemptible workloads. None: they can't help.

        A preemptible workload preempts no other.
        """
        parked = workload.parked
        named = bool(operation.gpu_uuids or operation.pairs or operation.hold_id)
        if parked is None or not parked.gpu_uuids or named or workload.spec.HasField("helper"):
            return None
        if not self._leases_of_helpers():
            return None
        await self._foreign.look(self._workloads)
        chips = {self._inventory.chips.get(gpu_uuid, "") for gpu_uuid in parked.gpu_uuids}
        request = GpuRequest(
            len(parked.gpu_uuids),
            name=chips.pop(),
            preference=workload_pb2.GPU_PREFERENCE_SAME_AS_BEFORE,
            preferred=parked.gpu_uuids,
            allow_foreign=workload.spec.resources.allow_foreign,
        )
        if chips or self._pool.preview(request) is not None or not self._helpers_would_do(request, 0):
            return None
        return request

    async def from_helpers(
        self, workload: Workload, request: GpuRequest, refusal: OperationError | None, progress: Progress
    ) -> Lease | None:
        """Claims GPUs of preemptible workloads for a restore. None: they did not yield in time.

        Args:
            workload: The workload.
            request: The GPUs.
            refusal: The refusal of the restore without these GPUs. None: there was none.
            progress: The report of the operation.
        """
        with progress.wait(WAITS_FOR_HELPERS, refusal), trio.move_on_after(HELPERS_TIMEOUT_S):
            return await self._pool.claim(workload.workload_id, request)
        return None

    def reserve(self, plan: Plan) -> list[Lease]:
        """Reserves the GPUs that a plan needs beyond those of its workloads, all or nothing.

        Raises:
            OperationError: NO_FREE_GPU, and nothing is reserved.
        """
        reserved: list[Lease] = []
        try:
            for target in plan.targets:
                if gpu_uuids := plan.to_reserve(target):
                    reserved.append(
                        self._pool.reserve_gpus(
                            target.workload.workload_id,
                            gpu_uuids,
                            allow_foreign=target.workload.spec.resources.allow_foreign,
                            hold_id=plan.hold_id,
                        )
                    )
        except OperationError:
            self.release(reserved)
            raise
        return reserved

    def release(self, reserved: Sequence[Lease]) -> None:
        """Releases reserved GPUs, except those that a workload has received meanwhile."""
        for lease in reserved:
            self._pool.release(lease)

    def _helpers_would_do(self, request: GpuRequest, priority: int) -> bool:
        """Whether free GPUs and those of preemptible workloads suffice, beside those of earlier claims."""
        return helpers_would_do(self._pool, self._leases_of_helpers(), request, priority)

    def _leases_of_helpers(self) -> list[Lease]:
        return [
            workload.lease
            for workload in self._workloads.all()
            if workload.spec.HasField("helper") and workload.lease is not None
        ]
