"""The coordinator's gauges, read from the fleet at each scrape in short turns of the event loop."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Final, final

from google.protobuf.descriptor import EnumDescriptor
from leasehold.v1 import lease_pb2
from leasehold.v1.command_pb2 import CommandState
from leasehold.v1.lease_pb2 import SlotState
from leasehold.v1.worker_pb2 import WorkerState
from leasehold.v1.workload_pb2 import Workload, WorkloadState
from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from leasehold_coordinator import __version__
from leasehold_coordinator.core.gpu_conditions import seen_state
from leasehold_coordinator.core.known_worker import KnownWorker
from leasehold_coordinator.fleet.fleet import Fleet
from leasehold_coordinator.metrics import GAUGES

TURN_WORKERS: Final = 50
"""Workers that are read before other tasks have their turn: about a millisecond."""

FRESH_S: Final = 1.0
"""Age up to which a reading serves further scrapes, so that many scrapes cost little more than one."""

COMMAND_STATES: Final = ("PENDING", "DISPATCHED", "ACCEPTED", "RUNNING", "UNKNOWN")
WORKER_STATES: Final = ("CONNECTED", "STALE", "LOST", "UNCONFIRMED", "DISCONNECTED")


@final
class FleetGauges:
    """Reads the gauges.

    Args:
        fleet: The known state.
        validities: The times between which each certificate is valid, in seconds of the Unix epoch.
    """

    def __init__(self, fleet: Fleet, validities: Callable[[], dict[str, tuple[float, float]]]) -> None:
        self._fleet = fleet
        self._validities = validities
        self._reading = asyncio.Lock()
        self._read_s = float("-inf")
        self._families: list[Metric] = []

    async def read(self) -> list[Metric]:
        """Every gauge with a known value, at most a second old."""
        async with self._reading:
            if time.monotonic() - self._read_s > FRESH_S:
                self._families = await self._read()
                self._read_s = time.monotonic()
            return self._families

    async def _read(self) -> list[Metric]:
        families = {
            name: GaugeMetricFamily(name, each.help, labels=each.labels) for name, each in GAUGES.items()
        }

        def add(name: str, value: float, *labels: str) -> None:
            families[name].add_metric(labels, value)

        self._read_daemon(add)
        named: dict[str, KnownWorker] = {}
        for number, known in enumerate(list(self._fleet.registry)):
            if number % TURN_WORKERS == 0:
                await asyncio.sleep(0)
            name = known.hello.name
            named[name] = max(named.get(name, known), known, key=_contact)
        states: Counter[str] = Counter()
        for number, (name, known) in enumerate(named.items()):
            if number % TURN_WORKERS == 0:
                await asyncio.sleep(0)
            state = self._state(known)
            states[state] += 1
            self._read_worker(add, name, known, state)
        for state in WORKER_STATES:
            add("leasehold_fleet_workers", states[state], state)
        return [family for family in families.values() if family.samples]

    def _read_daemon(self, add: "Add") -> None:
        store = self._fleet.store
        add("leasehold_coordinator_info", 1, __version__)
        commands = Counter(
            CommandState.Name(stored.command.state).removeprefix("COMMAND_STATE_")
            for stored in self._fleet.ledger.commands.values()
        )
        for state in COMMAND_STATES:
            add("leasehold_coordinator_commands_open", commands[state], state)
        add("leasehold_coordinator_sessions_open", len(self._fleet.sessions))
        add("leasehold_coordinator_store_writable", store.health.is_serving)
        add("leasehold_coordinator_store_writes_waiting", store.writes_waiting)
        for certificate, (begin_s, end_s) in self._validities().items():
            add("leasehold_coordinator_certificate_not_before_timestamp_seconds", begin_s, certificate)
            add("leasehold_coordinator_certificate_expiry_timestamp_seconds", end_s, certificate)

    def _read_worker(self, add: "Add", name: str, known: KnownWorker, state: str) -> None:
        add("leasehold_fleet_worker_state", 1, name, state)
        if known.last_seen_ns is not None:
            add("leasehold_fleet_worker_last_frame_timestamp_seconds", known.last_seen_ns / 1e9, name)
        if not known.reported or state in ("LOST", "DISCONNECTED"):
            return
        gpus = Counter(seen_state(lease) for lease in known.leases)
        if known.cordon is not None and (free := gpus.pop(lease_pb2.SLOT_STATE_FREE, 0)):
            gpus[lease_pb2.SLOT_STATE_CORDONED] += free  # as clients see these GPUs
        for slot_state, number in gpus.items():
            add("leasehold_fleet_gpus", number, name, _name(SlotState.DESCRIPTOR, slot_state, "SLOT_STATE_"))
        if (waiting := known.pending_claimers) is not None:
            add("leasehold_fleet_claims_waiting", waiting, name)
        workloads = self._fleet.workloads.of_worker(known.hello.worker_id)
        parked_bytes = sum(workload.status.parked_bytes for workload in workloads)
        add("leasehold_fleet_parked_bytes", parked_bytes, name, "host_memory")
        add("leasehold_fleet_parked_bytes", sum(one.status.disk_bytes for one in workloads), name, "disk")
        counts = Counter(workload.status.state for workload in workloads)
        for workload_state, number in counts.items():
            add(
                "leasehold_fleet_workloads",
                number,
                name,
                _name(WorkloadState.DESCRIPTOR, workload_state, "WORKLOAD_STATE_"),
            )
        ages_s = [_parked_s(workload) for workload in workloads if workload.status.HasField("park_time")]
        if ages_s:
            add("leasehold_fleet_parked_oldest_seconds", max(0.0, *ages_s), name)

    def _state(self, known: KnownWorker) -> str:
        state = self._fleet.registry.state(known, time.monotonic())
        return WorkerState.Name(state).removeprefix("WORKER_STATE_")


Add = Callable[..., None]


def _contact(known: KnownWorker) -> tuple[bool, int]:
    """The sort key among workers of one name: the one in contact, or else the one that was seen last."""
    return known.session_id is not None, known.last_seen_ns or 0


def _parked_s(workload: Workload) -> float:
    return time.time() - workload.status.park_time.ToNanoseconds() / 1e9


def _name(enum: EnumDescriptor, number: int, prefix: str) -> str:
    """A state as a label. A newer worker may send a state that this coordinator does not know."""
    value = enum.values_by_number.get(number)
    return value.name.removeprefix(prefix) if value is not None else "OTHER"
