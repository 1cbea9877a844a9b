"""Workers that could take a new workload, as the planner sees them. Pure.

What is known here is necessary, and not enough: the worker has the last word.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from leasehold.v1 import lease_pb2
from leasehold.v1.gpu_pb2 import Gpu
from leasehold.v1.lease_pb2 import Cordon, GpuLease, SlotState
from leasehold.v1.worker_pb2 import MachineResources
from leasehold.v1.workload_pb2 import Resources

FREE: Final = lease_pb2.SLOT_STATE_FREE
FOREIGN: Final = lease_pb2.SLOT_STATE_FOREIGN


@dataclass(frozen=True, slots=True)
class CandidateGpu:
    """A GPU of a candidate.

    Attributes:
        gpu: What NVML says of it.
        state: What its slot is doing.
        lease: What its worker last reported of it.
        awaited: A command that has not ended names it as one to take.
        lent: A helper leases it, which gives it back to whoever comes.
    """

    gpu: Gpu
    state: SlotState.ValueType
    lease: GpuLease = field(default_factory=GpuLease)
    awaited: bool = False
    lent: bool = False

    def is_open_to(self, resources: Resources) -> bool:
        """Whether a workload with these needs may get it now."""
        in_reach = self.state == FREE or (self.state == FOREIGN and resources.allow_foreign)
        return in_reach and not self.awaited and not self.is_crowded_for(resources)

    def is_crowded_for(self, resources: Resources) -> bool:
        """Whether sleeping workloads leave too little of its memory."""
        wanted_bytes = resources.gpu_memory_bytes
        kept_bytes = self.lease.asleep_bytes if wanted_bytes else 0
        return kept_bytes > 0 and self.gpu.memory_total_bytes - kept_bytes < wanted_bytes


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker in contact.

    Attributes:
        worker_id: Its id.
        name: What people call it.
        gpus: Its GPUs by UUID, in slot order.
        promised: GPUs, of those that are free, that commands which have not ended may still take.
        cordon: It is out of service for new work. None: it isn't.
        machine: What of its host is free. None: it did not say.
        most: No candidate after this one has more free GPUs. None: the candidates are in no order.
    """

    worker_id: str
    name: str
    gpus: Mapping[str, CandidateGpu] = field(default_factory=dict)
    promised: int = 0
    cordon: Cordon | None = None
    machine: MachineResources | None = None
    most: int | None = None

    def suitable(self, resources: Resources) -> list[CandidateGpu]:
        """Its GPUs of the kind that is wanted, whoever has them."""
        return [one for one in self.gpus.values() if suits(one.gpu, resources)]

    def open_gpus(self, resources: Resources) -> list[CandidateGpu]:
        """Its GPUs that a workload with these needs may get, of any kind, those of helpers included."""
        return [one for one in self.gpus.values() if one.lent or one.is_open_to(resources)]

    def room(self, resources: Resources) -> int:
        """GPUs that a new workload with these needs can get at most, those of helpers included."""
        is_open = self.open_gpus(resources)
        suitable_open = sum(suits(one.gpu, resources) for one in is_open)
        return max(0, min(suitable_open, len(is_open) - self.promised))

    def spare(self, resources: Resources) -> int:
        """GPUs that it can get without a helper giving any back."""
        lent = sum(one.lent and suits(one.gpu, resources) for one in self.gpus.values())
        return max(0, self.room(resources) - lent)

    def units(self, resources: Resources) -> int | None:
        """Units that a new workload can get at most. None: the worker does not count its GPUs by units."""
        units = [one.gpu.units for one in self.open_gpus(resources) if suits(one.gpu, resources)]
        if not all(units):
            return None
        return sum(sorted(units, reverse=True)[: resources.gpu_count or self.room(resources)])


def suits(gpu: Gpu, resources: Resources) -> bool:
    """Whether a GPU is of the kind that is wanted. What is not known of it speaks for it."""
    if resources.gpu_uuids and gpu.uuid not in resources.gpu_uuids:
        return False
    if resources.gpu_name and gpu.name != resources.gpu_name:
        return False
    if gpu.HasField("memory_total_bytes") and gpu.memory_total_bytes < resources.gpu_memory_bytes:
        return False
    units = resources.acceptable_gpu_units
    return not units or not gpu.units or gpu.units in units


def least_gpus(resources: Resources) -> int:
    """The fewest GPUs that can satisfy these needs."""
    return max(resources.gpu_count, 1 if resources.gpu_units else 0)
