"""The known workers and their newest reports. Pure: (frame, now) in, state out.

Leases and loads are soft state, rebuilt from hello and worker_load after a start of the coordinator. The GPUs
of a worker that has not reported are unknown.
"""

import heapq
from collections.abc import Collection, Iterator
from typing import Final, NewType, final

from leasehold.v1 import errors_pb2, lease_pb2, worker_pb2
from leasehold.v1.command_pb2 import CommandResult
from leasehold.v1.worker_pb2 import WorkerState
from leasehold.worker.v1.session_pb2 import Hello, WorkerLoad

from leasehold_coordinator.core.frame_pace import FramePace
from leasehold_coordinator.core.gpu_conditions import state_without_lease
from leasehold_coordinator.core.hello_rules import description
from leasehold_coordinator.core.known_worker import (
    LOADS_TO_COME_BACK,
    KnownWorker,
    SessionId,
    as_load,
    holdings,
)
from leasehold_coordinator.errors import FleetError

WorkerId = NewType("WorkerId", str)

LOADS_PER_S: Final = 200.0
"""Most loads per second of the whole fleet. The load interval grows with the number of workers."""

STALE_INTERVALS: Final = 2.5
LOST_INTERVALS: Final = 4.0
LOST_MIN_S: Final = 20.0

NAMED_LIMIT: Final = 8
"""Most workers that a refusal names. The trailers of a call carry the refusal, and hold 8 KiB."""

WORKER_LIMIT: Final = 10_000
"""Most known workers, in contact or not."""

EPOCH_JUMP_LIMIT: Final = 2**32
"""Most sessions of a worker that the store may have missed. The store may be an old copy."""

IN_USE: Final = (
    worker_pb2.WORKER_STATE_CONNECTED,
    worker_pb2.WORKER_STATE_STALE,
    worker_pb2.WORKER_STATE_UNCONFIRMED,
)
"""A worker in one of these states keeps its name and its GPUs, since it may reconnect soon."""


CONFIRM_WITHIN_S: Final = 60.0
"""How long workers may take to report after a start of the coordinator, before they count as lost."""


@final
class Registry:
    """All known workers, by id."""

    def __init__(self, load_interval_s: float, started: float) -> None:
        self._least_interval_s = load_interval_s
        self._started = started
        self._workers: dict[str, KnownWorker] = {}
        self._by_gpu: dict[str, str] = {}
        """The worker that advertised a GPU last, by the GPU's UUID."""
        self._by_name: dict[str, dict[str, KnownWorker]] = {}
        """The workers of each name, by id. An index, since thousands of hellos are checked after a start."""

    @property
    def load_interval_s(self) -> float:
        """Time between two loads of a worker, for the present number of workers."""
        return max(self._least_interval_s, len(self._workers) / LOADS_PER_S)

    def add_stored(self, hello: Hello, epoch: int, *, left: bool = False) -> None:
        """Adds a worker from the store, which has not reported yet."""
        self.add(KnownWorker(hello, epoch, left=left))

    def _drop(self, hello: Hello) -> None:
        """Removes a worker's hello from the indexes."""
        for gpu in hello.gpus:
            if self._by_gpu.get(gpu.uuid) == hello.worker_id:
                del self._by_gpu[gpu.uuid]
        named = self._by_name.get(hello.name, {})
        named.pop(hello.worker_id, None)
        if not named:
            self._by_name.pop(hello.name, None)

    def add(self, known: KnownWorker) -> None:
        """Adds or replaces a worker."""
        self.forget(known)
        hello = known.hello
        self._workers[hello.worker_id] = known
        self._by_name.setdefault(hello.name, {})[hello.worker_id] = known
        worker_id = hello.worker_id  # read once: protobuf makes a new string at each access
        self._by_gpu |= {gpu.uuid: worker_id for gpu in hello.gpus}

    def forget(self, known: KnownWorker) -> None:
        """Removes a worker."""
        before = self._workers.pop(known.hello.worker_id, None)
        if before is not None:
            self._drop(before.hello)

    def __iter__(self) -> Iterator[KnownWorker]:
        """Every worker, in no order."""
        return iter(self._workers.values())

    def all(self) -> list[KnownWorker]:
        """Every worker, by name and id."""
        return sorted(self._workers.values(), key=lambda known: (known.hello.name, known.hello.worker_id))

    def get(self, worker_id: str) -> KnownWorker | None:
        """The worker with this id."""
        return self._workers.get(worker_id)

    def owner(self, gpu_uuid: str) -> KnownWorker | None:
        """The worker that advertised a GPU last."""
        return self._workers.get(self._by_gpu.get(gpu_uuid, ""))

    def ids(self, id_or_name: str) -> frozenset[str]:
        """The worker with this id, or else all workers with this name. Empty: there are none."""
        if id_or_name in self._workers:
            return frozenset({id_or_name})
        return frozenset(self._by_name.get(id_or_name, ()))

    def find(self, id_or_name: str) -> KnownWorker:
        """The worker with this id or name. Of several workers with the name, the only connected one.

        Raises:
            FleetError: UNKNOWN_WORKER, no worker or no single worker fits.
        """
        known = self._workers.get(id_or_name)
        if known is not None:
            return known
        named = self._by_name.get(id_or_name, {}).values()
        connected = [known for known in named if known.session_id is not None]
        if len(found := connected or list(named)) == 1:
            return found[0]
        if named:
            ids = _some([known.hello.worker_id for known in named])
            message = f"{len(named)} workers are named {id_or_name!r}: give an id, one of {ids}"
        else:
            names = _some(self._by_name) or "none"
            message = f"no worker has the id or name {id_or_name[:64]!r}: the known workers are {names}"
        raise FleetError(errors_pb2.ERROR_REASON_UNKNOWN_WORKER, message, field="worker")

    def is_taken(self, hello: Hello, now: float) -> bool:
        """Whether another instance with the same worker id is connected and sends frames in time.

        Only one instance can run on a state directory. The other one runs on a copy, or was just killed.
        """
        known = self._workers.get(hello.worker_id)
        return (
            known is not None
            and known.session_id is not None
            and (_host(known.hello), known.hello.instance_id) != (_host(hello), hello.instance_id)
            and self.state(known, now) == worker_pb2.WORKER_STATE_CONNECTED
        )

    def check_newcomer(self, hello: Hello, now: float) -> None:
        """Refuses a worker with the id, the name or a GPU of another worker.

        Raises:
            FleetError: DUPLICATE_WORKER_ID, WORKER_CONNECTED, DUPLICATE_WORKER_NAME, DUPLICATE_WORKER_GPU,
                TOO_MANY_WORKERS, or PROTOCOL_VIOLATION for an impossible epoch.
        """
        known = self._workers.get(hello.worker_id)
        self._check_epoch(hello, known.epoch if known is not None else 0)
        if known is None:
            if len(self._workers) >= WORKER_LIMIT:
                raise FleetError(
                    errors_pb2.ERROR_REASON_TOO_MANY_WORKERS,
                    f"{WORKER_LIMIT} workers are known, which is the limit: delete old workers with "
                    "`leasehold rm worker`",
                )
        elif self.is_taken(hello, now) and _host(known.hello) == _host(hello):
            raise FleetError(
                errors_pb2.ERROR_REASON_WORKER_CONNECTED,
                f"another instance of worker {hello.worker_id} is connected: stop one of the two",
                worker=hello.worker_id,
            )
        elif self.is_taken(hello, now) or _has_other_gpus(known.hello, hello):
            host = known.hello.host.hostname[:64]
            raise FleetError(
                errors_pb2.ERROR_REASON_DUPLICATE_WORKER_ID,
                f"the id {hello.worker_id} belongs to another worker, on host {host}: give "
                f"{hello.host.hostname[:64]} a state directory of its own, not a copy; or, if all its GPUs "
                f"were replaced, `leasehold rm worker {hello.worker_id}`",
                worker=hello.worker_id,
            )
        self.check_unique(hello, now)

    def _check_epoch(self, hello: Hello, known_epoch: int) -> None:
        if hello.last_epoch > known_epoch + EPOCH_JUMP_LIMIT:
            raise FleetError(
                errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION,
                f"the coordinator never gave out epoch {hello.last_epoch} of hello: clear the worker's state "
                "directory",
            )

    def _namesakes(self, hello: Hello) -> list[KnownWorker]:
        """The other workers whose name or id equals the name or id in a hello."""
        found = self._by_name.get(hello.name, {}) | self._by_name.get(hello.worker_id, {})
        if (other := self._workers.get(hello.name)) is not None:
            found[hello.name] = other
        return [known for worker_id, known in found.items() if worker_id != hello.worker_id]

    def check_unique(self, hello: Hello, now: float) -> None:
        """Refuses the name or a GPU of another worker that is in contact or may return soon.

        Raises:
            FleetError: DUPLICATE_WORKER_NAME or DUPLICATE_WORKER_GPU.
        """
        for known in self._namesakes(hello):
            theirs = (known.hello.name, known.hello.worker_id)
            shared = hello.name if hello.name in theirs else hello.worker_id
            if known.reported and self._is_in_use(known, now):
                raise FleetError(
                    errors_pb2.ERROR_REASON_DUPLICATE_WORKER_NAME,
                    f"worker {known.hello.worker_id} on host {known.hello.host.hostname[:64]} has the name "
                    f"or id {shared} too: give this worker another name (`leasehold worker --name`), or "
                    f"`leasehold rm worker {known.hello.worker_id}` once that one has stopped",
                    worker=known.hello.worker_id,
                )
        for gpu in hello.gpus:
            owner = self.owner(gpu.uuid)
            if owner is None or owner.hello.worker_id == hello.worker_id or not self._is_in_use(owner, now):
                continue
            raise FleetError(
                errors_pb2.ERROR_REASON_DUPLICATE_WORKER_GPU,
                f"GPU {gpu.uuid} belongs to worker {owner.hello.name} ({owner.hello.worker_id}): run one "
                f"worker per host, or `leasehold rm worker {owner.hello.worker_id}` once that one has "
                "stopped",
                gpu_uuid=gpu.uuid,
                worker=owner.hello.worker_id,
            )

    def _is_in_use(self, known: KnownWorker, now: float) -> bool:
        return self.state(known, now) in IN_USE

    def take_gpus(self, hello: Hello) -> list[KnownWorker]:
        """Removes the GPUs of a hello from other workers, which are gone.

        Returns:
            The other workers. The store must forget their GPUs too, or they own them after the next start.
        """
        uuids = {gpu.uuid for gpu in hello.gpus}
        owners = {self._by_gpu.get(uuid, hello.worker_id) for uuid in uuids} - {hello.worker_id}
        robbed = [self._workers[worker_id] for worker_id in owners if worker_id in self._workers]
        for known in robbed:
            left = [gpu for gpu in known.hello.gpus if gpu.uuid not in uuids]
            known.hello = description(known.hello)
            del known.hello.gpus[:]
            known.hello.gpus.extend(left)
            known.take_leases(known.leases)
        return robbed

    def is_restored(self, hello: Hello) -> bool:
        """Whether a known worker remembers a later session than the store."""
        known = self._workers.get(hello.worker_id)
        return known is not None and hello.last_epoch > known.epoch

    def next_epoch(self, hello: Hello) -> int:
        """The epoch for a new session: above every epoch that either side remembers."""
        known = self._workers.get(hello.worker_id)
        return max(known.epoch if known else 0, hello.last_epoch) + 1

    def welcome(
        self,
        hello: Hello,
        epoch: int,
        session_id: SessionId,
        now: float,
        time_ns: int,
    ) -> KnownWorker:
        """Applies a worker's hello under its new session, which supersedes an older session."""
        before = self._workers.get(hello.worker_id)
        same_instance = before is not None and before.hello.instance_id == hello.instance_id
        known = KnownWorker(
            description(hello),
            epoch,
            session_id,
            reported=True,
            last_seen=now,
            last_seen_ns=time_ns,
            applied_ns=before.applied_ns if before else None,
            load_sequence=before.load_sequence if before and same_instance else 0,
            pace=before.pace if before else FramePace(),  # a new session is no new allowance
        )
        known.take(as_load(hello))
        self.add(known)
        known.load_interval_s = self.load_interval_s
        return known

    def describe(self, known: KnownWorker, hello: Hello) -> None:
        """Applies a later hello of the same session, with another inventory or other capabilities."""
        self._drop(known.hello)
        known.hello = description(hello)
        known.take(as_load(hello))
        self.add(known)

    def seen(self, known: KnownWorker, now: float, time_ns: int) -> None:
        """Notes that a frame came. Any frame proves that the worker is alive."""
        known.last_seen, known.last_seen_ns = now, time_ns

    def applied(self, known: KnownWorker) -> None:
        """Notes that the reports of the last frame are stored."""
        known.applied_ns = known.last_seen_ns

    def apply_load(self, known: KnownWorker, load: WorkerLoad) -> bool:
        """Applies a load, unless a newer load came before.

        Returns:
            Whether :func:`holdings` changed since the last load, which is published to watchers.
        """
        if load.sequence <= known.load_sequence:
            return False
        before = None if known.is_ahead else holdings(known)
        known.is_ahead = False
        known.load_sequence = load.sequence
        known.loads_since_silence += 1
        known.load = load
        known.take(load)
        return holdings(known) != before

    def apply_result(self, known: KnownWorker, result: CommandResult, workload_ids: Collection[str]) -> None:
        """Applies the GPUs that a command claimed, released and holds. The next load reports them later.

        A load may have come before, if the worker's disk was slow. So a GPU that another workload has by now
        stays leased.

        Args:
            known: The worker.
            result: The result of the command.
            workload_ids: The workloads of the command.
        """
        taken, freed = set(result.claimed_gpu_uuids), set(result.released_gpu_uuids)
        for lease in known.leases:
            if lease.gpu_uuid in taken:
                known.is_ahead = True
                lease.state = lease_pb2.SLOT_STATE_LEASED
            elif lease.gpu_uuid in freed and lease.workload_id in (*workload_ids, ""):
                known.is_ahead = True
                is_held = result.HasField("hold_id")
                lease.state = lease_pb2.SLOT_STATE_RESERVED if is_held else state_without_lease(lease)
                lease.ClearField("lease_id")
                lease.ClearField("workload_id")
        known.count_open_gpus()

    def disconnect(self, known: KnownWorker, session_id: SessionId, *, left: bool) -> bool:
        """Notes the end of a session. False: a newer session has taken over, and nothing changes."""
        if self._workers.get(known.hello.worker_id) is not known or known.session_id != session_id:
            return False
        known.session_id = None
        known.left = left
        return True

    def note_silence(self, known: KnownWorker) -> None:
        """Notes a silence. The worker is STALE until LOADS_TO_COME_BACK loads have come."""
        known.loads_since_silence = 0

    def state(self, known: KnownWorker, now: float) -> WorkerState.ValueType:
        """The state of a worker's contact at the time ``now``."""
        if known.left:
            return worker_pb2.WORKER_STATE_DISCONNECTED
        if not known.reported:
            confirming = now - self._started < CONFIRM_WITHIN_S
            return worker_pb2.WORKER_STATE_UNCONFIRMED if confirming else worker_pb2.WORKER_STATE_LOST
        silent_s = now - known.last_seen
        if silent_s > max(LOST_INTERVALS * known.load_interval_s, LOST_MIN_S):
            return worker_pb2.WORKER_STATE_LOST
        if known.session_id is None or silent_s > STALE_INTERVALS * known.load_interval_s:
            return worker_pb2.WORKER_STATE_STALE
        if known.loads_since_silence < LOADS_TO_COME_BACK:
            return worker_pb2.WORKER_STATE_STALE
        return worker_pb2.WORKER_STATE_CONNECTED


def _host(hello: Hello) -> tuple[str, str]:
    return hello.host.hostname, hello.boot_id


def _has_other_gpus(known: Hello, hello: Hello) -> bool:
    """Whether both hellos name GPUs and share none. They then come from two hosts. Host names may change."""
    before, now = ({gpu.uuid for gpu in one.gpus} for one in (known, hello))
    return bool(before and now) and not before & now


def _some(names: Collection[str]) -> str:
    """The first few names in order, and the number of the others. Never sorts all: a fleet may be large."""
    more = len(names) - NAMED_LIMIT
    return ", ".join(heapq.nsmallest(NAMED_LIMIT, names)) + (f" and {more} more" if more > 0 else "")
