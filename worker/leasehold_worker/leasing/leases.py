"""Leases, and what the slots of a pool are doing, as values."""

from dataclasses import dataclass
from datetime import datetime
from typing import Final, NewType

from leasehold.v1 import gpu_pb2, lease_pb2
from leasehold.v1.gpu_pb2 import GpuHealth
from leasehold.v1.lease_pb2 import SlotState

from leasehold_worker.gpus.health import excludes
from leasehold_worker.leasing.gpu_selection import GpuRequest

LeaseId = NewType("LeaseId", str)

FREE: Final = lease_pb2.SLOT_STATE_FREE
RESERVED: Final = lease_pb2.SLOT_STATE_RESERVED
LEASED: Final = lease_pb2.SLOT_STATE_LEASED
CORDONED: Final = lease_pb2.SLOT_STATE_CORDONED
UNHEALTHY: Final = lease_pb2.SLOT_STATE_UNHEALTHY
FOREIGN: Final = lease_pb2.SLOT_STATE_FOREIGN

OK: Final = gpu_pb2.GPU_HEALTH_OK


@dataclass(frozen=True, slots=True)
class Lease:
    """An exclusive hold of GPUs.

    Attributes:
        lease_id: Unique, and never used again.
        workload_id: The holder.
        gpu_uuids: Its GPUs, in the order in which the holder sees them.
        grant_time: When it was granted.
        fencing_token: Greater than that of every earlier lease of this worker.
    """

    lease_id: LeaseId
    workload_id: str
    gpu_uuids: tuple[str, ...]
    grant_time: datetime
    fencing_token: int


@dataclass(frozen=True, slots=True)
class Cordon:
    """An operator's word that nobody is to get something from now on."""

    reason: str
    cordoned_by: str
    cordon_time: datetime


@dataclass(frozen=True, slots=True)
class ForeignProcess:
    """A process on a GPU, of no workload that leases the GPU. Field names are those of ``lease.proto``."""

    pid: int
    user: str
    command: str
    device_memory_bytes: int | None
    workload_id: str = ""
    workload_name: str = ""


@dataclass(frozen=True, slots=True)
class Standing:
    """What is held against a GPU, or against the whole worker, and outlives the worker's process."""

    cordon: Cordon | None = None
    health: GpuHealth.ValueType = OK
    health_reason: str = ""


@dataclass(frozen=True, slots=True)
class SlotLease:
    """What one slot of the pool is doing."""

    gpu_uuid: str
    slot: int
    since: datetime
    lease: Lease | None = None
    reserved: bool = False
    standing: Standing = Standing()
    foreign: tuple[ForeignProcess, ...] = ()
    memory_bytes: int | None = None
    """Memory of the GPU. None: unknown."""
    asleep_bytes: int = 0
    """Memory that sleeping workloads keep on the GPU while they hold no lease."""

    @property
    def state(self) -> SlotState.ValueType:
        """What it is doing; what is held against it shows once nobody holds it."""
        if self.lease is not None:
            return RESERVED if self.reserved else LEASED
        if excludes(self.standing.health):
            return UNHEALTHY
        if self.standing.cordon is not None:
            return CORDONED
        return FOREIGN if self.foreign else FREE

    def has_memory_for(self, request: GpuRequest) -> bool:
        """Whether the memory beside that of sleeping workloads is enough. Unknown memory is not enough."""
        if not request.memory_bytes:
            return True
        return self.memory_bytes is not None and self.memory_bytes - self.asleep_bytes >= request.memory_bytes

    def may_serve(self, request: GpuRequest) -> bool:
        """Whether a request could get it once nobody leases it."""
        ours = request.allow_foreign or not self.foreign
        in_service = self.standing.cordon is None and not excludes(self.standing.health)
        return in_service and ours and self.has_memory_for(request)


@dataclass(frozen=True, slots=True)
class LeaseSnapshot:
    """All slots at one moment, in slot order, which is that of ``hello``.

    Attributes:
        revision: Grows with every change, so that of two snapshots the greater is the newer.
        slots: The slots.
    """

    revision: int
    slots: tuple[SlotLease, ...]
