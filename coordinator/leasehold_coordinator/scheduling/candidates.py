"""The planner's view of workers for a new workload. Pure.

The planner knows only what workers last reported. The chosen worker may still refuse the workload.
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
        gpu: The facts of NVML about the GPU.
        state: The state of its slot.
        lease: Its last reported lease entry.
        awaited: An unfinished command will take the GPU by name.
        lent: A preemptible workload leases the GPU, and yields on request.
    """

    gpu: Gpu
    state: SlotState.ValueType
    lease: GpuLease = field(default_factory=GpuLease)
    awaited: bool = False
    lent: bool = False

    def is_open_to(self, resources: Resources) -> bool:
        """Whether a workload with these resources may get the GPU now."""
        in_reach = self.state == FREE or (self.state == FOREIGN and resources.allow_foreign)
        return in_reach and not self.awaited and not self.is_crowded_for(resources)

    def is_crowded_for(self, resources: Resources) -> bool:
        """Whether sleeping workloads leave too little of the GPU's memory."""
        wanted_bytes = resources.gpu_memory_bytes
        kept_bytes = self.lease.asleep_bytes if wanted_bytes else 0
        return kept_bytes > 0 and self.gpu.memory_total_bytes - kept_bytes < wanted_bytes


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker in contact.

    Attributes:
        worker_id: Its id.
        name: Its name.
        gpus: Its GPUs by UUID, in slot order.
        promised: Number of free GPUs that unfinished commands may still take without naming them.
        cordon: The cordon of the worker. None: not cordoned.
        machine: Total and free resources of its host. None: unknown.
        most: Most free GPUs of this and of all later candidates. None: the candidates are unordered.
    """

    worker_id: str
    name: str
    gpus: Mapping[str, CandidateGpu] = field(default_factory=dict)
    promised: int = 0
    cordon: Cordon | None = None
    machine: MachineResources | None = None
    most: int | None = None

    def suitable(self, resources: Resources) -> list[CandidateGpu]:
        """The GPUs that match the request, free or not."""
        return [one for one in self.gpus.values() if suits(one.gpu, resources)]

    def open_gpus(self, resources: Resources) -> list[CandidateGpu]:
        """The GPUs of any kind that a workload may get, including those of preemptible workloads."""
        return [one for one in self.gpus.values() if one.lent or one.is_open_to(resources)]

    def room(self, resources: Resources) -> int:
        """Most GPUs that a new workload can get, including those of preemptible workloads."""
        is_open = self.open_gpus(resources)
        suitable_open = sum(suits(one.gpu, resources) for one in is_open)
        return max(0, min(suitable_open, len(is_open) - self.promised))

    def spare(self, resources: Resources) -> int:
        """Most GPUs that a new workload can get without preemption."""
        lent = sum(one.lent and suits(one.gpu, resources) for one in self.gpus.values())
        return max(0, self.room(resources) - lent)

    def units(self, resources: Resources) -> int | None:
        """Most units that a new workload can get. None: a matching GPU has no units."""
        units = [one.gpu.units for one in self.open_gpus(resources) if suits(one.gpu, resources)]
        if not all(units):
            return None
        return sum(sorted(units, reverse=True)[: resources.gpu_count or self.room(resources)])


def suits(gpu: Gpu, resources: Resources) -> bool:
    """Whether a GPU matches the request. An unknown property counts as a match."""
    if resources.gpu_uuids and gpu.uuid not in resources.gpu_uuids:
        return False
    if resources.gpu_name and gpu.name != resources.gpu_name:
        return False
    if gpu.HasField("memory_total_bytes") and gpu.memory_total_bytes < resources.gpu_memory_bytes:
        return False
    units = resources.acceptable_gpu_units
    return not units or not gpu.units or gpu.units in units


def least_gpus(resources: Resources) -> int:
    """The fewest GPUs that can satisfy a request."""
    return max(resources.gpu_count, 1 if resources.gpu_units else 0)
