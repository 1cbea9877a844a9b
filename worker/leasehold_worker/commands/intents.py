"""What an operation writes down before it does it. Values only."""

import msgspec
from leasehold.v1.workload_pb2 import EvictionPolicy

from leasehold_worker.driver.gpu_pairs import GpuPair
from leasehold_worker.driver.members import Member
from leasehold_worker.leasing.leases import Lease


class WorkloadIntent(msgspec.Struct, frozen=True):
    """A workload of an operation that is about to change something.

    Attributes:
        workload_id: The workload.
        members: Its CUDA processes, with the state and the memory that they have now.
        home: GPUs that it holds, or was parked from.
        destination: GPUs that it is to have afterwards.
        parked: It was parked when the operation began.
        full_bytes: What it needs on its GPUs once it is awake, by GPU.
    """

    workload_id: str
    members: tuple[Member, ...]
    home: tuple[str, ...]
    destination: tuple[str, ...]
    parked: bool
    full_bytes: dict[str, int] = {}


class Intent(msgspec.Struct, frozen=True):
    """What an operation is about to do that can't be taken back by forgetting it.

    Attributes:
        phase: run, hooks, lock, checkpoint, restore, image, resume, save, end, ending, start or stop.
        targets: The workloads.
        pairs: What the driver will get at a restore.
        reserved: What is held for the operation, besides the leases.
        policy: How the workload is being parked. None: it isn't.
        checkpoint_id: What is written to disk, or restored from it.
        disk_bytes: Its size.
    """

    phase: str
    targets: tuple[WorkloadIntent, ...]
    pairs: tuple[GpuPair, ...] = ()
    reserved: tuple[Lease, ...] = ()
    policy: EvictionPolicy | None = None
    checkpoint_id: str = ""
    disk_bytes: int = 0
