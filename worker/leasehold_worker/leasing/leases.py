"""Leases and the slots of a pool, as values."""

from dataclasses import dataclass, replace
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
    """An exclusive lease of GPUs.

    Attributes:
        lease_id: Unique, and never reused.
        workload_id: The holder.
        gpu_uuids: Its GPUs, in the holder's order.
        grant_time: Time of the grant.
        fencing_token: Greater than that of every earlier lease of this worker.
    """

    lease_id: LeaseId
    workload_id: str
    gpu_uuids: tuple[str, ...]
    grant_time: datetime
    fencing_token: int


@dataclass(frozen=True, slots=True)
class Hold:
    """GPUs that a suspend has freed, reserved for the operation that names the hold.

    Attributes:
        hold_id: The id of the suspend's command, or of the command that preempts.
        workload_ids: The suspended workloads.
        gpu_uuids: The freed GPUs.
        create_time: Time of their release.
        expire_time: Time at which the GPUs become free.
        held_by: Name of its owner, for people. Empty: unknown.
    """

    hold_id: str
    workload_ids: tuple[str, ...]
    gpu_uuids: tuple[str, ...]
    create_time: datetime
    expire_time: datetime
    held_by: str = ""


@dataclass(frozen=True, slots=True)
class Cordon:
    """An operator's ban on new leases of a GPU, or of the worker."""

    reason: str
    cordoned_by: str
    cordon_time: datetime


@dataclass(frozen=True, slots=True)
class ForeignProcess:
    """A process on a GPU, of no workload with a lease of it. Names are those of ``lease.proto``."""

    pid: int
    user: str
    command: str
    device_memory_bytes: int | None
    workload_id: str = ""
    workload_name: str = ""


@dataclass(frozen=True, slots=True)
class Standing:
    """The cordon and health verdict of a GPU or of the worker, which survive a restart of the worker."""

    cordon: Cordon | None = None
    health: GpuHealth.ValueType = OK
    health_reason: str = ""


@dataclass(frozen=True, slots=True)
class SlotLease:
    """The state of one slot of the pool."""

    gpu_uuid: str
    slot: int
    since: datetime | None = None
    """Time of the last change of state or lease. None: before the worker's start."""
    lease: Lease | None = None
    reserved: bool = False
    standing: Standing = Standing()
    foreign: tuple[ForeignProcess, ...] = ()
    memory_bytes: int | None = None
    """Memory of the GPU. None: unknown."""
    asleep_bytes: int = 0
    """Memory that sleeping workloads keep on the GPU without a lease."""
    hold: Hold | None = None
    """The hold that reserves the GPU. ``lease`` then names no workload."""

    @property
    def state(self) -> SlotState.ValueType:
        """The state of the slot. A cordon or verdict shows only while the slot is not leased."""
        if self.lease is not None:
            return RESERVED if self.reserved else LEASED
        if excludes(self.standing.health):
            return UNHEALTHY
        if self.standing.cordon is not None:
            return CORDONED
        return FOREIGN if self.foreign else FREE

    @property
    def without_lease(self) -> "SlotLease":
        """The slot as it would be without its lease or hold."""
        return replace(self, lease=None, reserved=False, hold=None)

    def has_memory_for(self, request: GpuRequest) -> bool:
        """Whether the memory beside that of sleeping workloads suffices. Unknown memory does not."""
        if not request.memory_bytes:
            return True
        return self.memory_bytes is not None and self.memory_bytes - self.asleep_bytes >= request.memory_bytes

    def may_serve(self, request: GpuRequest) -> bool:
        """Whether a request could get the GPU once it is not leased."""
        ours = request.allow_foreign or not self.foreign
        in_service = self.standing.cordon is None and not excludes(self.standing.health)
        return in_service and ours and self.has_memory_for(request)


@dataclass(frozen=True, slots=True)
class LeaseSnapshot:
    """All slots at one moment, in slot order, which is that of ``hello``.

    Attributes:
        revision: Grows with every change, so that the newer snapshot has the greater revision.
        slots: The slots.
    """

    revision: int
    slots: tuple[SlotLease, ...]
