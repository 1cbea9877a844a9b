"""The workers that the coordinator knows, and what each last said. Pure: (frame, now) in, state out.

Leases and loads are soft state, rebuilt from hello and worker_load after a start of the coordinator. Until
a worker has reported, its GPUs are not known: that is not "none".
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NewType, final

from google.protobuf import timestamp_pb2
from leasehold.v1 import errors_pb2, fleet_pb2, lease_pb2
from leasehold.v1.command_pb2 import CommandResult
from leasehold.v1.fleet_pb2 import FleetGpu, Worker, WorkerState
from leasehold.v1.lease_pb2 import Cordon, GpuLease
from leasehold.v1.machine_pb2 import MachineResources
from leasehold.v1.worker_session_pb2 import Hello, WorkerLoad

from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.gpu_conditions import Conditions, seen_state, state_without_lease

WorkerId = NewType("WorkerId", str)
SessionId = NewType("SessionId", str)

STALE_INTERVALS: Final = 2.5
LOST_INTERVALS: Final = 4.0
LOST_MIN_S: Final = 20.0
LOADS_TO_COME_BACK: Final = 2
"""Loads after which one that was silent within a session is no longer STALE: it must not flap."""

CONFIRM_WITHIN_S: Final = 60.0
"""After a start, workers have this long to report before they count as lost."""


@dataclass(slots=True)
class KnownWorker:
    """A worker, and the newest of what it said. Times are seconds of the monotonic clock.

    Attributes:
        hello: The last hello, of this or an earlier run of the coordinator.
        epoch: The highest that was given out.
        session_id: The live session. None: there is none.
        reported: Whether it has reported since the coordinator started.
        left: Whether it said goodbye.
        last_seen: When the last frame came.
        last_seen_time: The same for people.
        loads_since_silence: Loads since it was last found silent.
        resources: What its host has and what of it is free. None: it did not say.
        cordon: It is out of service for new work. None: it isn't.
    """

    hello: Hello
    epoch: int
    session_id: SessionId | None = None
    reported: bool = False
    left: bool = False
    last_seen: float = 0.0
    last_seen_time: timestamp_pb2.Timestamp | None = None
    load_sequence: int = 0
    loads_since_silence: int = LOADS_TO_COME_BACK
    leases: list[GpuLease] = field(default_factory=list)
    load: WorkerLoad = field(default_factory=WorkerLoad)
    resources: MachineResources | None = None
    cordon: Cordon | None = None

    @property
    def free_gpu_uuids(self) -> list[str]:
        """UUIDs of the GPUs that may be claimed, in slot order, as last reported."""
        return [lease.gpu_uuid for lease in self.leases if seen_state(lease) == lease_pb2.SLOT_STATE_FREE]

    @property
    def conditions(self) -> Conditions:
        """What it last said against itself and its GPUs."""
        return Conditions(self.cordon, {lease.gpu_uuid: lease for lease in self.leases})

    def held_gpus(self, workload_id: str) -> int:
        """Number of GPUs that a workload holds, as last reported."""
        return sum(bool(workload_id) and lease.workload_id == workload_id for lease in self.leases)

    def take_machine(self, said: Hello | WorkerLoad) -> None:
        """Takes in what a frame says of the whole worker."""
        self.cordon = said.cordon if said.HasField("cordon") else None
        if said.HasField("resources"):
            self.resources = said.resources


@final
class Registry:
    """All known workers, by id."""

    def __init__(self, load_interval_s: float, started: float) -> None:
        self.load_interval_s = load_interval_s
        self._started = started
        self._workers: dict[str, KnownWorker] = {}

    def add_stored(self, hello: Hello, epoch: int) -> None:
        """Adds a worker from the store: known, and not heard of yet."""
        self._workers[hello.worker_id] = KnownWorker(hello, epoch)

    def __iter__(self) -> Iterator[KnownWorker]:
        """Every worker, in no order."""
        return iter(self._workers.values())

    def all(self) -> list[KnownWorker]:
        """Every worker, by name and id."""
        return sorted(self._workers.values(), key=lambda known: (known.hello.name, known.hello.worker_id))

    def get(self, worker_id: str) -> KnownWorker | None:
        """The worker with this id."""
        return self._workers.get(worker_id)

    def find(self, id_or_name: str) -> KnownWorker:
        """The worker with this id, or the only one with this name.

        Raises:
            FleetError: UNKNOWN_WORKER.
        """
        known = self._workers.get(id_or_name)
        if known is not None:
            return known
        named = [known for known in self._workers.values() if known.hello.name == id_or_name]
        if len(named) == 1:
            return named[0]
        if named:
            ids = ", ".join(sorted(known.hello.worker_id for known in named))
            message = f"{len(named)} workers are named {id_or_name!r}: name one by id, of {ids}"
        else:
            names = ", ".join(known.hello.name for known in self.all()) or "none"
            message = f"no worker has the id or name {id_or_name!r}: the known ones are {names}"
        raise FleetError(errors_pb2.ERROR_REASON_UNKNOWN_WORKER, message, field="worker")

    def check_newcomer(self, hello: Hello, now: float) -> None:
        """Refuses a worker that takes the id of another host's worker, which still ticks.

        Raises:
            FleetError: DUPLICATE_WORKER_ID.
        """
        known = self._workers.get(hello.worker_id)
        if known is None or known.session_id is None:
            return
        same_host = (known.hello.host.hostname, known.hello.boot_id) == (hello.host.hostname, hello.boot_id)
        if not same_host and self.state(known, now) == fleet_pb2.WORKER_STATE_CONNECTED:
            raise FleetError(
                errors_pb2.ERROR_REASON_DUPLICATE_WORKER_ID,
                f"worker {hello.worker_id} is connected from host {known.hello.host.hostname}: "
                f"give host {hello.host.hostname} a state directory of its own, not a copy",
            )

    def next_epoch(self, hello: Hello) -> int:
        """The epoch for a new session: above every one that either side remembers."""
        known = self._workers.get(hello.worker_id)
        return max(known.epoch if known else 0, hello.last_epoch) + 1

    def welcome(
        self,
        hello: Hello,
        epoch: int,
        session_id: SessionId,
        now: float,
        time: timestamp_pb2.Timestamp,
    ) -> KnownWorker:
        """Takes in a worker's hello under its new session; an older session is superseded by this."""
        before = self._workers.get(hello.worker_id)
        same_instance = before is not None and before.hello.instance_id == hello.instance_id
        known = KnownWorker(
            hello,
            epoch,
            session_id,
            reported=True,
            last_seen=now,
            last_seen_time=time,
            load_sequence=before.load_sequence if before and same_instance else 0,
            leases=list(hello.gpu_leases),
        )
        known.take_machine(hello)
        self._workers[hello.worker_id] = known
        return known

    def describe(self, known: KnownWorker, hello: Hello) -> None:
        """Takes in a hello that came again, with another inventory or other capabilities."""
        known.hello = hello
        known.leases = list(hello.gpu_leases)
        known.take_machine(hello)

    def seen(self, known: KnownWorker, now: float, time: timestamp_pb2.Timestamp) -> None:
        """Notes that a frame came: any is proof of life."""
        known.last_seen, known.last_seen_time = now, time

    def apply_load(self, known: KnownWorker, load: WorkerLoad) -> bool:
        """Takes in a load, unless it is older than one that came before.

        Returns:
            Whether watchers are to know: who holds what has changed, and not only how busy it is.
        """
        if load.sequence <= known.load_sequence:
            return False
        before = _holdings(known)
        known.load_sequence = load.sequence
        known.loads_since_silence += 1
        known.leases = list(load.gpu_pool)
        known.load = load
        known.take_machine(load)
        return _holdings(known) != before

    def apply_result(self, known: KnownWorker, result: CommandResult) -> None:
        """Takes in which GPUs a command gave up and took, since the load that will say so comes later."""
        taken, freed = set(result.claimed_gpu_uuids), set(result.released_gpu_uuids)
        for lease in known.leases:
            if lease.gpu_uuid in taken:
                lease.state = lease_pb2.SLOT_STATE_LEASED
            elif lease.gpu_uuid in freed:
                lease.state = state_without_lease(lease)
                lease.ClearField("lease_id")
                lease.ClearField("workload_id")

    def disconnect(self, known: KnownWorker, session_id: SessionId, *, left: bool) -> bool:
        """Notes the end of a session. False: a newer one has taken over, and nothing changes."""
        if self._workers.get(known.hello.worker_id) is not known or known.session_id != session_id:
            return False
        known.session_id = None
        known.left = left
        return True

    def note_silence(self, known: KnownWorker) -> None:
        """A worker was found silent: it has to come back by more than one frame."""
        known.loads_since_silence = 0

    def state(self, known: KnownWorker, now: float) -> WorkerState.ValueType:
        """Whether the worker is in contact."""
        if not known.reported:
            confirming = now - self._started < CONFIRM_WITHIN_S
            return fleet_pb2.WORKER_STATE_UNCONFIRMED if confirming else fleet_pb2.WORKER_STATE_LOST
        if known.left:
            return fleet_pb2.WORKER_STATE_DISCONNECTED
        silent_s = now - known.last_seen
        if silent_s > max(LOST_INTERVALS * self.load_interval_s, LOST_MIN_S):
            return fleet_pb2.WORKER_STATE_LOST
        if known.session_id is None or silent_s > STALE_INTERVALS * self.load_interval_s:
            return fleet_pb2.WORKER_STATE_STALE
        if known.loads_since_silence < LOADS_TO_COME_BACK:
            return fleet_pb2.WORKER_STATE_STALE
        return fleet_pb2.WORKER_STATE_CONNECTED

    def worker(self, known: KnownWorker, now: float) -> Worker:
        """The worker as clients see it."""
        hello = known.hello
        return Worker(
            worker_id=hello.worker_id,
            name=hello.name,
            state=self.state(known, now),
            epoch=known.epoch,
            agent_version=hello.agent_version,
            driver_version=hello.driver_version if hello.HasField("driver_version") else None,
            cuda_version=hello.cuda_version if hello.HasField("cuda_version") else None,
            host=hello.host,
            labels=hello.labels,
            capabilities=hello.capabilities,
            gpu_count=len(known.leases) if known.reported else None,
            free_gpu_count=len(known.free_gpu_uuids) if known.reported else None,
            pending_claimers=known.load.pending_claimers,
            parked_workload_count=len(known.load.parked),
            last_seen_time=known.last_seen_time,
            host_memory_available_bytes=(
                known.load.host_memory_available_bytes
                if known.load.HasField("host_memory_available_bytes")
                else None
            ),
            resources=known.resources,
            cordon=known.cordon,
        )

    def gpus(self, known: KnownWorker) -> Iterable[FleetGpu]:
        """The GPUs of a worker that has reported, in slot order."""
        if not known.reported:
            return
        leases = {lease.gpu_uuid: lease for lease in known.leases}
        for gpu in known.hello.gpu_pool:
            yield FleetGpu(
                worker_id=known.hello.worker_id,
                worker_name=known.hello.name,
                gpu=gpu,
                lease=leases.get(gpu.uuid),
                report_time=known.last_seen_time,
            )


def _holdings(known: KnownWorker) -> tuple[object, ...]:
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
        )
        for lease in known.leases
    ]
    return (known.load.pending_claimers, len(known.load.parked), _key(known.cordon), slots)


def _key(cordon: Cordon | None) -> tuple[str, str] | None:
    return (cordon.reason, cordon.cordoned_by) if cordon is not None else None
