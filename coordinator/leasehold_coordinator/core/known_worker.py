"""A worker as the coordinator knows it: its last hello and its last load."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NewType

from google.protobuf import timestamp_pb2
from leasehold.v1 import lease_pb2
from leasehold.v1.lease_pb2 import Cordon, GpuLease
from leasehold.v1.worker_pb2 import MachineResources
from leasehold.worker.v1.session_pb2 import Hello, WorkerLoad

from leasehold_coordinator.core.gpu_conditions import Conditions, seen_state
from leasehold_coordinator.timestamps import timestamp

SessionId = NewType("SessionId", str)

LOADS_TO_COME_BACK: Final = 2
"""Loads after which one that was silent within a session is no longer STALE: it must not flap."""

OPEN: Final = (lease_pb2.SLOT_STATE_FREE, lease_pb2.SLOT_STATE_FOREIGN)
"""States of GPUs that may be leased anew."""


@dataclass(slots=True)
class KnownWorker:
    """A worker, and the newest of what it said. Times are seconds of the monotonic clock.

    Attributes:
        hello: What the last hello says of the worker, in this or an earlier run of the coordinator.
        epoch: The highest that was given out.
        session_id: The live session. None: there is none.
        reported: Whether it has reported since the coordinator started.
        left: Whether it said goodbye.
        last_seen: When the last frame came.
        last_seen_ns: The same for people, in nanoseconds of the Unix epoch. None: none has come.
        load_interval_s: The time between two loads that it was told.
        loads_since_silence: Loads since it was last found silent.
        leases: What its GPUs do, in slot order; part of the load that said so.
        load: The last load.
        resources: What its host has and what of it is free. None: it did not say.
        cordon: It is out of service for new work. None: it isn't.
    """

    hello: Hello
    epoch: int
    session_id: SessionId | None = None
    reported: bool = False
    left: bool = False
    last_seen: float = 0.0
    last_seen_ns: int | None = None
    load_sequence: int = 0
    load_interval_s: float = 0.0
    loads_since_silence: int = LOADS_TO_COME_BACK
    leases: Sequence[GpuLease] = ()
    load: WorkerLoad = field(default_factory=WorkerLoad)
    resources: MachineResources | None = None
    cordon: Cordon | None = None

    @property
    def last_seen_time(self) -> timestamp_pb2.Timestamp | None:
        """When the last frame came, as clients see it. None: none has come."""
        return timestamp(self.last_seen_ns) if self.last_seen_ns is not None else None

    @property
    def free_gpu_uuids(self) -> list[str]:
        """UUIDs of the GPUs that may be claimed, in slot order, as last reported."""
        if self.cordon is not None:
            return []
        return [lease.gpu_uuid for lease in self.leases if seen_state(lease) == lease_pb2.SLOT_STATE_FREE]

    @property
    def open_gpus(self) -> int:
        """Number of GPUs that nobody leases, as last reported. A new workload can get no more."""
        return sum(lease.state in OPEN for lease in self.leases)

    @property
    def conditions(self) -> Conditions:
        """The cordon and the GPU conditions that the worker last reported."""
        return Conditions(self.cordon, {lease.gpu_uuid: lease for lease in self.leases})

    def held_gpus(self, workload_id: str) -> int:
        """Number of GPUs that a workload holds, as last reported."""
        return sum(bool(workload_id) and lease.workload_id == workload_id for lease in self.leases)

    def take(self, load: WorkerLoad) -> None:
        """Takes in the worker's state from a load, which stays in memory as long as its parts are in use."""
        self.cordon = load.cordon if load.HasField("cordon") else None
        if load.HasField("resources"):
            self.resources = load.resources
        self.take_leases(load.gpu_leases)

    def take_leases(self, leases: Sequence[GpuLease]) -> None:
        """Takes in the leases of its GPUs, each once. Of other GPUs it has nothing to say."""
        uuids = [gpu.uuid for gpu in self.hello.gpus]
        if [lease.gpu_uuid for lease in leases] != uuids:
            reported = {lease.gpu_uuid: lease for lease in leases}
            leases = WorkerLoad(gpu_leases=[reported[uuid] for uuid in uuids if uuid in reported]).gpu_leases
        self.leases = leases


def as_load(hello: Hello) -> WorkerLoad:
    """What a hello says of the moment. A copy: a part would keep the whole hello in memory."""
    return WorkerLoad(
        gpu_leases=hello.gpu_leases,
        resources=hello.resources if hello.HasField("resources") else None,
        cordon=hello.cordon if hello.HasField("cordon") else None,
    )


def holdings(known: KnownWorker) -> tuple[object, ...]:
    """What of a load is a change. Samples and free memory change all the time, and can be asked for."""
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
    return (known.load.pending_claimers, len(known.load.parked), _key(known.cordon), slots)


def _key(cordon: Cordon | None) -> tuple[str, str] | None:
    return (cordon.reason, cordon.cordoned_by) if cordon is not None else None
