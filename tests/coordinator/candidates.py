"""Workers for the planner to choose from."""

from leasehold.v1 import lease_pb2
from leasehold.v1.gpu_pb2 import Gpu
from leasehold.v1.lease_pb2 import Cordon, GpuLease
from leasehold.v1.worker_pb2 import MachineResources
from leasehold_coordinator.scheduling.candidates import Candidate, CandidateGpu

FREE, LEASED = lease_pb2.SLOT_STATE_FREE, lease_pb2.SLOT_STATE_LEASED


def candidate(
    name: str,
    *free: bool,
    promised: int = 0,
    cordon: Cordon | None = None,
    machine: MachineResources | None = None,
) -> Candidate:
    """A worker with so many GPUs, of which some are free and the others leased."""
    states = [FREE if is_free else LEASED for is_free in free]
    return of_gpus(
        name,
        *(one_gpu(f"GPU-{name}{slot}", state) for slot, state in enumerate(states)),
        promised=promised,
        cordon=cordon,
        machine=machine,
    )


def of_gpus(
    name: str,
    *gpus: CandidateGpu,
    promised: int = 0,
    cordon: Cordon | None = None,
    machine: MachineResources | None = None,
) -> Candidate:
    """A worker with these GPUs."""
    return Candidate(f"worker-{name}", name, {one.gpu.uuid: one for one in gpus}, promised, cordon, machine)


def one_gpu(
    uuid: str,
    state: lease_pb2.SlotState.ValueType = FREE,
    *,
    name: str = "H100",
    memory_gib: int = 80,
    units: int = 0,
    lease: GpuLease | None = None,
    awaited: bool = False,
    lent: bool = False,
) -> CandidateGpu:
    """A GPU in some state."""
    gpu = Gpu(uuid=uuid, name=name, memory_total_bytes=memory_gib * 2**30, units=units)
    return CandidateGpu(gpu, state, lease or GpuLease(), awaited, lent)
