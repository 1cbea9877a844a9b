"""Intents: the record of an operation's next step, stored before the step. Values only."""

import msgspec
from leasehold.v1.eviction_pb2 import EvictionPolicy

from leasehold_worker.driver.gpu_pairs import GpuPair
from leasehold_worker.driver.members import Member
from leasehold_worker.host.accounts import Account
from leasehold_worker.leasing.leases import Lease


class WorkloadIntent(msgspec.Struct, frozen=True):
    """A workload of an operation that is about to change it.

    Attributes:
        workload_id: The workload.
        members: Its CUDA processes, with their current state and memory.
        home: GPUs that it holds, or held before its suspend.
        destination: Its GPUs afterwards.
        parked: The workload was suspended when the operation began.
        full_bytes: Device memory that it needs while it runs, by GPU.
    """

    workload_id: str
    members: tuple[Member, ...]
    home: tuple[str, ...]
    destination: tuple[str, ...]
    parked: bool
    full_bytes: dict[str, int] = {}


class Intent(msgspec.Struct, frozen=True):
    """The next step of an operation, which recovery must know after a crash.

    Attributes:
        phase: run, hooks, lock, checkpoint, restore, image, resume, save, end, ending, start or stop.
        targets: The workloads.
        pairs: GPU pairs of the restore.
        reserved: GPUs reserved for the operation, besides the leases.
        policy: Policy of the suspend. None: there is none.
        checkpoint_id: Checkpoint that is written or restored.
        disk_bytes: Its size.
        account: The Unix user of the program of a run. None: the worker's.
    """

    phase: str
    targets: tuple[WorkloadIntent, ...]
    pairs: tuple[GpuPair, ...] = ()
    reserved: tuple[Lease, ...] = ()
    policy: EvictionPolicy | None = None
    checkpoint_id: str = ""
    disk_bytes: int = 0
    account: Account | None = None
