"""A worker in the coordinator's memory: its last hello and its last load."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NewType

from google.protobuf import timestamp_pb2
from leasehold.v1 import lease_pb2
from leasehold.v1.lease_pb2 import Cordon, GpuLease
from leasehold.v1.worker_pb2 import MachineResources
from leasehold.worker.v1.session_pb2 import Hello, WorkerLoad

from leasehold_coordinator.core.frame_pace import FramePace
from leasehold_coordinator.core.gpu_conditions import Conditions, seen_state
from leasehold_coordinator.timestamps import timestamp

SessionId = NewType("SessionId", str)

LOADS_TO_COME_BACK: Final = 2
"""Loads that end the state STALE after a silence within a session. One alone would make the state flap."""

OPEN: Final = (lease_pb2.SLOT_STATE_FREE, lease_pb2.SLOT_STATE_FOREIGN)
"""States of GPUs that may be leased."""


@dataclass(slots=True)
class KnownWorker:
    """A worker and its newest reports. Times are seconds of the monotonic clock.

    Attributes:
        hello: The last hello without its VOLATILE fields, of this or an earlier run of the coordinator.
        epoch: The highest epoch given to the worker.
        session_id: The live session. None: no session.
        is_encrypted: The live session has TLS.
        reported: The worker has reported since the coordinator started.
        left: The worker said goodbye, in this or an earlier run of the coordinator, and has no session since.
        last_seen: When the last frame came.
        last_seen_ns: When the last frame came, in nanoseconds of the Unix epoch. None: no frame has come.
        applied_ns: When the last frame came whose reports are stored, likewise. None: none has come.
        load_sequence: The sequence number of the last load.
        load_interval_s: The time between two loads, as the coordinator told the worker.
        loads_since_silence: Number of loads since the worker was last silent.
        leases: The lease entries of its GPUs, in slot order. They are part of the newest load.
        open_gpus: Number of GPUs that may be leased. A new workload can get no more. Each placement needs
            the number of each worker, so it is counted when the lease entries change.
        is_ahead: The result of a command has changed the lease entries since the newest load.
        load: The last load.
        resources: Total and free resources of its host. None: unknown.
        cordon: The cordon of the whole worker. None: not cordoned.
        refusal: Why its session was ended, since its credential is refused by now. Empty: it was not.
        pace: How fast its frames are read.
    """

    hello: Hello
    epoch: int
    session_id: SessionId | None = None
    is_encrypted: bool = True
    reported: bool = False
    left: bool = False
    last_seen: float = 0.0
    last_seen_ns: int | None = None
    applied_ns: int | None = None
    load_sequence: int = 0
    load_interval_s: float = 0.0
    loads_since_silence: int = LOADS_TO_COME_BACK
    leases: Sequence[GpuLease] = ()
    open_gpus: int = 0
    is_ahead: bool = False
    load: WorkerLoad = field(default_factory=WorkerLoad)
    resources: MachineResources | None = None
    cordon: Cordon | None = None
    refusal: str = ""
    pace: FramePace = field(default_factory=FramePace)

    @property
    def last_seen_time(self) -> timestamp_pb2.Timestamp | None:
        """When the last frame came, as clients see it. None: no frame has come."""
        return timestamp(self.last_seen_ns) if self.last_seen_ns is not None else None

    @property
    def applied_time(self) -> timestamp_pb2.Timestamp | None:
        """When the last frame came whose reports are stored, as clients see it. None: none has come."""
        return timestamp(self.applied_ns) if self.applied_ns is not None else None

    @property
    def free_gpu_uuids(self) -> list[str]:
        """UUIDs of the free GPUs, in slot order, as last reported."""
        if self.cordon is not None:
            return []
        return [lease.gpu_uuid for lease in self.leases if seen_state(lease) == lease_pb2.SLOT_STATE_FREE]

    @property
    def pending_claimers(self) -> int | None:
        """Number of claims that wait on the worker. None: no load has come since its last hello."""
        return self.load.pending_claimers if self.load.sequence else None

    @property
    def parked_workload_count(self) -> int | None:
        """Number of parked workloads. None: no load has come since the worker's last hello."""
        return len(self.load.parked) if self.load.sequence else None

    @property
    def conditions(self) -> Conditions:
        """The cordon and the GPU conditions that the worker last reported."""
        return Conditions(self.cordon, {lease.gpu_uuid: lease for lease in self.leases})

    def held_gpus(self, workload_id: str) -> int:
        """Number of GPUs that a workload holds, as last reported."""
        return sum(bool(workload_id) and lease.workload_id == workload_id for lease in self.leases)

    def take(self, load: WorkerLoad) -> None:
        """Applies a load. The load stays in memory while its parts are in use."""
        self.cordon = load.cordon if load.HasField("cordon") else None
        if load.HasField("resources"):
            self.resources = load.resources
        self.take_leases(load.gpu_leases)

    def take_leases(self, leases: Sequence[GpuLease]) -> None:
        """Applies lease entries of its GPUs, each once. Entries of other GPUs are ignored."""
        uuids = [gpu.uuid for gpu in self.hello.gpus]
        if [lease.gpu_uuid for lease in leases] != uuids:
            reported = {lease.gpu_uuid: lease for lease in leases}
            leases = WorkerLoad(gpu_leases=[reported[uuid] for uuid in uuids if uuid in reported]).gpu_leases
        self.leases = leases
        self.count_open_gpus()

    def count_open_gpus(self) -> None:
        """Counts the GPUs that may be leased anew, after a change of the lease entries."""
        self.open_gpus = sum(lease.state in OPEN for lease in self.leases)


def as_load(hello: Hello) -> WorkerLoad:
    """The volatile state in a hello. A copy, since a part would keep the whole hello in memory."""
    return WorkerLoad(
        gpu_leases=hello.gpu_leases,
        resources=hello.resources if hello.HasField("resources") else None,
        cordon=hello.cordon if hello.HasField("cordon") else None,
    )


def holdings(known: KnownWorker) -> tuple[object, ...]:
    """The parts of a load whose change is published. Clients poll samples and free memory instead."""
    slots = [
        (
            lease.state,
            lease.lease_id,
            lease.workload_id,
            lease.health,
            lease.health_reason,
            _key(lease.cordon if lease.HasField("cordon") else None),
            [process.pid for process in lease.foreign_processes],
            lease.hold.hold_id,
        )
        for lease in known.leases
    ]
    return (known.pending_claimers, known.parked_workload_count, _key(known.cordon), slots)


def _key(cordon: Cordon | None) -> tuple[str, str] | None:
    return (cordon.reason, cordon.cordoned_by) if cordon is not None else None
