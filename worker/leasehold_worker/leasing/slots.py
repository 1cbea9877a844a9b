"""The GPUs of this host, with their leases, cordons and health verdicts.

There is one slot per GPU, in an order that is fixed at start. No claim is granted a GPU that is cordoned,
unhealthy or used by foreign processes; a workload that leases one keeps it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import final

from leasehold.v1 import errors_pb2, gpu_pb2
from leasehold.v1.gpu_pb2 import GpuHealth

from leasehold_worker.change import Change
from leasehold_worker.errors import OperationError, invalid
from leasehold_worker.gpus.health import excludes
from leasehold_worker.leasing.gpu_selection import GpuRequest, PoolGpu, choose
from leasehold_worker.leasing.leases import (
    FOREIGN,
    FREE,
    OK,
    Cordon,
    ForeignProcess,
    Hold,
    Lease,
    LeaseSnapshot,
    SlotLease,
    Standing,
)
from leasehold_worker.leasing.refusals import ITSELF, cordoned, not_free, not_matching, shortage, wanted


@final
class GpuSlots:
    """The slots. They belong to one trio thread.

    Args:
        gpus: The GPUs, in slot order.
        keep: Receives the changed standing of a GPU, and under "" that of the worker.
        serve: Called whenever a claim may have become grantable.
    """

    def __init__(
        self,
        gpus: Sequence[PoolGpu],
        keep: Callable[[str, Standing], None],
        serve: Callable[[], None],
    ) -> None:
        self.gpus = tuple(gpus)
        self._by_uuid = {gpu.uuid: gpu for gpu in gpus}
        self._slots = {
            gpu.uuid: SlotLease(gpu.uuid, slot, memory_bytes=gpu.memory_bytes)
            for slot, gpu in enumerate(gpus)
        }
        self._keep = keep
        self._serve = serve
        self._changed = Change()
        self._revision = 0
        self._free_bytes: Mapping[str, int] = {}
        self.worker_cordon: Cordon | None = None
        """No claim is granted while the whole worker is cordoned."""

    def snapshot(self) -> LeaseSnapshot:
        """The current slots."""
        return LeaseSnapshot(self._revision, tuple(self._slots.values()))

    def get(self, gpu_uuid: str) -> SlotLease:
        """The slot of a GPU.

        Raises:
            OperationError: UNKNOWN_GPU.
        """
        try:
            return self._slots[gpu_uuid]
        except KeyError:
            raise OperationError(
                errors_pb2.ERROR_REASON_UNKNOWN_GPU,
                f"{gpu_uuid} is not a GPU of this worker",
                {"gpu_uuid": gpu_uuid},
            ) from None

    async def wait_changed(self) -> None:
        """Waits for the next change of a slot, or of the queue."""
        await self._changed.wait()

    def note_change(self) -> None:
        """Notifies the tasks that wait for a change."""
        self._revision += 1
        self._changed.notify()

    def hold(
        self,
        gpu_uuids: Iterable[str],
        lease: Lease | None,
        *,
        reserved: bool = False,
        hold: Hold | None = None,
        since: datetime | None = None,
    ) -> None:
        """Puts GPUs under a lease or a hold, or frees them, without granting claims.

        Args:
            gpu_uuids: The GPUs.
            lease: The lease. None: there is none.
            reserved: Whether the lease waits for its workload.
            hold: The hold. None: there is none.
            since: When this began. None: now.
        """
        began = since or datetime.now(UTC)
        for gpu_uuid in gpu_uuids:
            self._slots[gpu_uuid] = replace(
                self._slots[gpu_uuid], lease=lease, reserved=reserved, hold=hold, since=began
            )
            self.note_change()

    def cordon(self, gpu_uuid: str, cordon: Cordon | None) -> None:
        """Cordons or uncordons a GPU; "" is the whole worker.

        Raises:
            OperationError: UNKNOWN_GPU.
        """
        if gpu_uuid:
            self._stand(gpu_uuid, replace(self.get(gpu_uuid).standing, cordon=cordon))
        else:
            self.worker_cordon = cordon
            self._keep("", Standing(cordon))
            self.note_change()
        self._serve()

    def stop_granting(self) -> None:
        """Cordons the worker until it ends. The cordon is not on disk, so the next start grants again."""
        if self.worker_cordon is None:
            reason = "it is stopping, and grants GPUs again after its next start"
            self.worker_cordon = Cordon(reason, ITSELF, datetime.now(UTC))
            self.note_change()

    def set_health(self, gpu_uuid: str, health: GpuHealth.ValueType, reason: str) -> None:
        """Sets the health verdict of a GPU. One that excludes the GPU stays until reset or loss."""
        before = self.get(gpu_uuid).standing
        if not excludes(before.health) or (health == gpu_pb2.GPU_HEALTH_LOST != before.health):
            self._stand(gpu_uuid, replace(before, health=health, health_reason=reason))
            self._serve()

    def reset_health(self, gpu_uuid: str) -> None:
        """Clears the health verdict of a GPU.

        Raises:
            OperationError: UNKNOWN_GPU.
        """
        self._stand(gpu_uuid, replace(self.get(gpu_uuid).standing, health=OK, health_reason=""))
        self._serve()

    def restore_standing(self, gpu_uuid: str, standing: Standing) -> None:
        """Restores a standing after a restart of the worker; "" is the whole worker."""
        if gpu_uuid in self._slots:  # when its state began is not known
            self._slots[gpu_uuid] = replace(self._slots[gpu_uuid], standing=standing)
            self.note_change()
        elif not gpu_uuid:
            self.worker_cordon = standing.cordon

    def add_asleep(self, kept_bytes: Mapping[str, int | None]) -> None:
        """Adds memory that another workload keeps on GPUs while it sleeps, without granting claims.

        Args:
            kept_bytes: Memory by GPU. None: unknown, which counts as all of the GPU's memory.
        """
        for gpu_uuid, kept in kept_bytes.items():
            if gpu_uuid not in self._slots:
                continue  # another worker of this host serves it
            self._set_asleep(gpu_uuid, None if kept is None else self.get(gpu_uuid).asleep_bytes + kept)

    def _set_asleep(self, gpu_uuid: str, asleep_bytes: int | None) -> None:
        slot = self.get(gpu_uuid)
        known = (slot.memory_bytes or 0) if asleep_bytes is None else asleep_bytes
        if slot.asleep_bytes != known:
            self._put(replace(slot, asleep_bytes=known))

    def observe(
        self,
        foreign: Mapping[str, tuple[ForeignProcess, ...]],
        free_bytes: Mapping[str, int],
        asleep_bytes: Mapping[str, int | None] = MappingProxyType({}),
    ) -> None:
        """Sets the foreign processes on the GPUs, and their free memory.

        Args:
            foreign: Foreign processes by GPU. A GPU that NVML can't read is missing here, and keeps
                its last value.
            free_bytes: Free memory by GPU; missing likewise.
            asleep_bytes: Memory of all sleeping workloads, by GPU; missing likewise. None: unknown, which
                counts as all of the GPU's memory.
        """
        self._free_bytes = free_bytes
        for gpu_uuid, kept in asleep_bytes.items():
            self._set_asleep(gpu_uuid, kept)
        for gpu_uuid, processes in foreign.items():
            if gpu_uuid in self._slots and self._slots[gpu_uuid].foreign != processes:
                self._put(replace(self._slots[gpu_uuid], foreign=processes))
        self._serve()

    def choose(
        self, request: GpuRequest, freed: Collection[str], taken: Collection[str]
    ) -> tuple[str, ...] | None:
        """The GPUs that a request would get if some leased ones were free. None: too few.

        GPUs without a sleeping workload come first.

        Args:
            request: The request.
            freed: Leased GPUs that count as free.
            taken: GPUs that count as taken.
        """
        free = [
            self._by_uuid[slot.gpu_uuid]
            for slot in sorted(self._slots.values(), key=lambda slot: slot.asleep_bytes > 0)
            if (slot.lease is None or slot.gpu_uuid in freed)
            and slot.may_serve(request)
            and slot.gpu_uuid not in taken
        ]
        return choose(free, request, self._free_bytes)

    def obtainable(self, request: GpuRequest) -> frozenset[str]:
        """The GPUs that a request could get if every lease ended. Empty: too few."""
        serving = [self._by_uuid[slot.gpu_uuid] for slot in self._slots.values() if slot.may_serve(request)]
        if choose(serving, request, {}) is None:
            return frozenset()
        return frozenset(gpu.uuid for gpu in serving if request.allows(gpu))

    def unleased(self) -> frozenset[str]:
        """The GPUs without a lease, cordoned and unhealthy ones included."""
        return frozenset(slot.gpu_uuid for slot in self._slots.values() if slot.lease is None)

    def free(self, *, allow_foreign: bool) -> list[str]:
        """The available GPUs, in slot order; those with foreign processes only if allowed."""
        usable = (FREE, FOREIGN) if allow_foreign else (FREE,)
        return [slot.gpu_uuid for slot in self._slots.values() if slot.state in usable]

    def what_lacks(self, request: GpuRequest) -> str:
        """The missing GPUs of a request, as text."""
        if self.worker_cordon is not None:
            return cordoned("the worker", self.worker_cordon).message
        return shortage(request, self.fitting(request))

    def fitting(self, request: GpuRequest) -> list[SlotLease]:
        """The slots with a matching GPU, leased or not."""
        return [slot for slot in self._slots.values() if request.allows(self._by_uuid[slot.gpu_uuid])]

    def check_free(
        self,
        gpu_uuids: Sequence[str],
        *,
        allow_foreign: bool = False,
        held: Collection[str] = (),
        is_asleep: bool = False,
    ) -> None:
        """Refuses GPUs that are not available.

        Args:
            gpu_uuids: The GPUs.
            allow_foreign: Whether GPUs with foreign processes are available.
            held: GPUs whose hold the caller takes.
            is_asleep: Whether the GPUs are for a workload that sleeps on them.

        Raises:
            OperationError: UNKNOWN_GPU, DUPLICATE_GPU, NO_FREE_GPU, CORDONED, GPU_UNHEALTHY or
                FOREIGN_PROCESS.
        """
        usable = (FREE, FOREIGN) if allow_foreign else (FREE,)
        if gpu_uuids:
            self.check_grants()
        for gpu_uuid in gpu_uuids:
            slot = self.get(gpu_uuid).without_lease if gpu_uuid in held else self.get(gpu_uuid)
            if slot.state not in usable:
                raise not_free(slot, is_asleep=is_asleep)
        if len(set(gpu_uuids)) != len(gpu_uuids):
            raise OperationError(errors_pb2.ERROR_REASON_DUPLICATE_GPU, "a GPU is named twice: name it once")

    def check_grants(self) -> None:
        """Refuses every GPU while the worker is cordoned.

        Raises:
            OperationError: CORDONED.
        """
        if self.worker_cordon is not None:
            raise cordoned("the worker", self.worker_cordon, remedy="uncordon it first")

    def check_named(self, gpu_uuids: Sequence[str], request: GpuRequest) -> None:
        """Refuses named GPUs that do not match a request. Leased ones may match.

        Raises:
            OperationError: INVALID_ARGUMENT: their number differs; UNKNOWN_GPU, or INCOMPATIBLE_GPU.
        """
        if len(gpu_uuids) != request.count:
            raise invalid(
                "gpu_uuids",
                f"the request names {len(gpu_uuids)} GPUs, and the workload needs {request.count}: "
                "name as many",
            )
        named = [self._by_uuid[self.get(gpu_uuid).gpu_uuid] for gpu_uuid in gpu_uuids]
        for gpu in named:
            if not request.allows(gpu):
                raise not_matching(gpu, request)
        if (units := sum(gpu.units for gpu in named)) < request.units:
            raise OperationError(
                errors_pb2.ERROR_REASON_INCOMPATIBLE_GPU,
                f"the named GPUs have {units} units, and the spec of the workload needs "
                f"{request.units}: choose other GPUs",
            )

    def check_possible(self, request: GpuRequest) -> None:
        """Refuses a request that could not be granted even if all GPUs were free.

        Raises:
            OperationError: NO_FREE_GPU; UNKNOWN_GPU if a named GPU is not of this worker.
        """
        for gpu_uuid in request.gpu_uuids:
            self.get(gpu_uuid)
        if request.count >= 1 and choose(self.gpus, request, {}) is not None:
            return
        units = sorted((gpu.units for gpu in self.gpus if request.allows(gpu)), reverse=True)
        field, remedy = "gpu_count", "ask for less"
        if 1 <= request.count <= len(units):
            most = sum(units[: request.count])
            field, remedy = "gpu_units", f"ask for {most} units at most, or for more GPUs"
        raise OperationError(
            errors_pb2.ERROR_REASON_NO_FREE_GPU,
            f"the request needs {wanted(request)}, and {len(units)} of this worker's "
            f"{len(self.gpus)} match: {remedy}",
            {"field": field},
        )

    def _stand(self, gpu_uuid: str, standing: Standing) -> None:
        if standing != self.get(gpu_uuid).standing:
            self._put(replace(self._slots[gpu_uuid], standing=standing))
            self._keep(gpu_uuid, standing)

    def _put(self, after: SlotLease) -> None:
        before = self._slots[after.gpu_uuid]
        moved = after.state != before.state
        self._slots[after.gpu_uuid] = replace(after, since=datetime.now(UTC)) if moved else after
        self.note_change()
