"""The read model of the fleet: workers, workloads and commands, in memory and in the store."""

import time
from collections import Counter
from typing import Final, final

from leasehold.v1 import errors_pb2, worker_pb2
from leasehold.v1.command_pb2 import Command
from leasehold.v1.command_service_pb2 import WatchCommandsResponse
from leasehold.v1.event_service_pb2 import WatchEventsResponse
from leasehold.v1.fleet_service_pb2 import WatchFleetResponse
from leasehold.v1.worker_pb2 import FleetGpu, Worker
from leasehold.v1.workload_pb2 import Workload
from leasehold.v1.workload_service_pb2 import WatchWorkloadsResponse

from leasehold_coordinator.access.certificates import CertificateRegistry, why_blocked
from leasehold_coordinator.core.client_views import gpu_views, worker_view, workload_view
from leasehold_coordinator.core.command_ledger import CommandLedger
from leasehold_coordinator.core.known_worker import KnownWorker
from leasehold_coordinator.core.worker_registry import Registry
from leasehold_coordinator.core.workload_states import is_ended
from leasehold_coordinator.errors import LONG_AWAY_RETRY_S, FleetError
from leasehold_coordinator.fleet.callers import owner
from leasehold_coordinator.fleet.change_hub import Hub
from leasehold_coordinator.fleet.checkpoint_listings import CheckpointListings
from leasehold_coordinator.fleet.live_workloads import LiveWorkloads
from leasehold_coordinator.fleet.permissions import is_operator
from leasehold_coordinator.fleet.recent_commands import RecentCommands
from leasehold_coordinator.fleet.report_bounds import ReportBounds
from leasehold_coordinator.fleet.session import Session
from leasehold_coordinator.storage.store import Store

NAMED_LIMIT: Final = 8
"""Most ids that a refusal lists."""


LONG_AWAY: Final = ("LOST", "DISCONNECTED", "unknown")
"""States of a worker that does not come back by itself."""


@final
class FleetReader:
    """The read model of the fleet. Only :class:`~leasehold_coordinator.fleet.fleet.Fleet` changes workloads.

    Everything here runs on the event loop's thread.

    Args:
        store: The store.
        load_interval_s: Time between two loads of a worker, in a small fleet.
    """

    def __init__(self, store: Store, load_interval_s: float) -> None:
        self.store = store
        self.registry = Registry(load_interval_s, time.monotonic())
        self.sessions: dict[str, Session] = {}
        """Live sessions by worker id."""
        self.workloads = LiveWorkloads()
        self.ledger = CommandLedger()
        """Unfinished commands."""
        self.certificates = CertificateRegistry()
        """Client certificates, revocations and blocked identities."""
        self.recent = RecentCommands()
        self.report_bounds = ReportBounds()
        self.checkpoint_listings = CheckpointListings()
        self.output_readers: Counter[str] = Counter()
        """Number of readers of output, by worker id."""
        self.fleet_hub: Hub[WatchFleetResponse] = Hub()
        """Workers by id, and GPUs by UUID."""
        self.workload_hub: Hub[WatchWorkloadsResponse] = Hub()
        self.command_hub: Hub[WatchCommandsResponse] = Hub()
        self.event_hub: Hub[WatchEventsResponse] = Hub()

    def worker(self, known: KnownWorker) -> Worker:
        """A worker as clients see it."""
        return worker_view(known, self.registry.state(known, time.monotonic()), self.refusal(known))

    def refusal(self, known: KnownWorker) -> str:
        """Why a worker is refused: it is blocked, its last session ended so, or no session can be stored.

        Empty: it is not.
        """
        if known.session_id is None and not known.left and not self.store.health.is_serving:
            return "the coordinator's store can't be written: look at its disk"
        subject = f"worker/{known.hello.name}"
        why = why_blocked(subject)
        if self.certificates.is_revoked(subject):
            return why
        return "" if known.refusal == why else known.refusal  # it was unblocked, and connects soon

    def gpus(self, known: KnownWorker) -> list[FleetGpu]:
        """A worker's GPUs with the names of their holders."""
        found = list(gpu_views(known))
        for gpu in found:
            holder = self.workloads.get(gpu.lease.workload_id)
            if holder is not None and holder.worker_id == gpu.worker_id:
                gpu.workload_name = holder.name
        return found

    def view(self, workload: Workload) -> Workload:
        """A workload as clients see it."""
        known = self.registry.get(workload.worker_id)
        in_contact = self.is_in_contact(workload.worker_id)
        return workload_view(workload, in_contact=in_contact, seen=known.applied_time if known else None)

    def is_current(self, session: Session) -> bool:
        """Whether a session is live: neither ended nor superseded."""
        return self.sessions.get(session.hello.worker_id) is session

    def is_in_contact(self, worker_id: str) -> bool:
        """Whether the worker has a session whose loads come in time."""
        known = self.registry.get(worker_id)
        return (
            known is not None
            and worker_id in self.sessions
            and self.registry.state(known, time.monotonic()) == worker_pb2.WORKER_STATE_CONNECTED
        )

    def holders(self, known: KnownWorker) -> list[Workload]:
        """The workloads that hold GPUs of a worker, as it last reported, oldest first."""
        holder_ids = {lease.workload_id for lease in known.leases}
        named = (self.workloads.get(holder_id) for holder_id in holder_ids)
        found = [one for one in named if one is not None and one.worker_id == known.hello.worker_id]
        return sorted(found, key=lambda found: (found.create_time.ToNanoseconds(), found.workload_id))

    def contact(self, worker_id: str) -> Session:
        """The session of a worker that is in contact.

        Raises:
            FleetError: WORKER_UNAVAILABLE.
        """
        if self.is_in_contact(worker_id):
            return self.sessions[worker_id]
        known = self.registry.get(worker_id)
        name, state = worker_id, "unknown"
        if known is not None:
            name = known.hello.name
            state = worker_pb2.WorkerState.Name(self.registry.state(known, time.monotonic()))[13:]
        raise FleetError(
            errors_pb2.ERROR_REASON_WORKER_UNAVAILABLE,
            f"worker {name} is {state}: {self._remedy(known)}",
            retry_after_s=LONG_AWAY_RETRY_S if state in LONG_AWAY else None,
            worker=name,
        )

    def _remedy(self, known: KnownWorker | None) -> str:
        """The remedy for a worker out of contact. None: its record is gone."""
        if known is None:
            return "if its record was deleted, delete those of its workloads by `leasehold rm workload`, too"
        remedy = "start it again, or wait until it is connected"
        if refusal := self.refusal(known):
            return f"it is refused, since {refusal}"
        return f"{remedy}; `leasehold describe worker {known.hello.name}` has its last events"

    async def find_parents(self, worker: str, workload: str) -> tuple[str | None, str | None]:
        """The ids of the worker and the workload that a request names by id or name. None: not named.

        Raises:
            FleetError: UNKNOWN_WORKER or UNKNOWN_WORKLOAD.
        """
        worker_id = self.registry.find(worker).hello.worker_id if worker else None
        return worker_id, (await self.find_workload(workload)).workload_id if workload else None

    async def find_workload(self, id_or_name: str, field: str = "workload") -> Workload:
        """The workload with this id, or the newest with this name.

        Unfinished workloads go first, and the caller's own before others: the name of an own workload also
        goes before the id of another owner's, since workers choose ids. A user's own workload that has ended
        also goes before the unfinished workload of another owner.

        Args:
            id_or_name: The id or name.
            field: Field of the request that has it, for the error.

        Raises:
            FleetError: UNKNOWN_WORKLOAD, no workload fits, or several unfinished ones have the name. Workers
                choose names without asking the coordinator.
        """
        live = self.workloads.get(id_or_name)
        named = self.workloads.named(id_or_name)
        own = [workload for workload in named if workload.owner == owner()]
        if live is None or (own and live.owner != owner()):
            if named and not own and not is_operator():
                ended = await self.store.find_workload(id_or_name, owner())
                if ended is not None and ended.owner == owner():
                    return ended
            named = own or named
            if len(named) > 1:
                ids = sorted(workload.workload_id for workload in named)
                raise FleetError(
                    errors_pb2.ERROR_REASON_UNKNOWN_WORKLOAD,
                    f"{len(named)} workloads that have not ended are named {id_or_name!r}: "
                    f"give an id, one of {', '.join(ids[:NAMED_LIMIT])}",
                    field=field,
                )
            live = named[0] if named else None
        return live or await self._find_in_store(id_or_name, field)

    async def find_stored_workload(self, id_or_name: str) -> Workload:
        """As :meth:`find_workload`, but in its stored state. The disk may refuse a newer state.

        Waits while the workload is being stored for the first time.

        Raises:
            FleetError: As :meth:`find_workload`. UNKNOWN_WORKLOAD also if the workload could not be stored.
        """
        found = await self.find_workload(id_or_name)
        if is_ended(found.status.state):  # read from the store: memory has no ended ones
            return found
        if self.workloads.on_disk(found.workload_id) is None:
            await self.workloads.wait_stored(found.workload_id)
        return self.workloads.on_disk(found.workload_id) or await self._find_in_store(id_or_name, "workload")

    async def _find_in_store(self, id_or_name: str, field: str) -> Workload:
        found = await self.store.find_workload(id_or_name, owner())
        if found is None:
            raise FleetError(
                errors_pb2.ERROR_REASON_UNKNOWN_WORKLOAD,
                f"no workload has the id or name {id_or_name!r}: `leasehold get workloads` lists them",
                field=field,
            )
        return found

    async def find_command(self, command_id: str) -> Command | None:
        """The command with this id as last stored. A step that is not on disk yet is not shown."""
        stored = self.ledger.on_disk.get(command_id)
        found = stored.command if stored is not None else self.recent.get(command_id)
        return found if found is not None else await self.store.find_command(command_id)
