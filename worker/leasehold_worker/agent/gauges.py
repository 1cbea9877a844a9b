"""The worker's gauges, read from their owners at each scrape."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Final, final

from leasehold.v1.gpu_pb2 import GpuHealth
from leasehold.v1.lease_pb2 import SlotState
from leasehold.v1.workload_pb2 import MemberState, WorkloadState
from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from leasehold_worker import __version__
from leasehold_worker.agent.assembly import Parts
from leasehold_worker.commands.executor import Commands
from leasehold_worker.commands.journal import Journal
from leasehold_worker.host.clock_offset import ClockOffset
from leasehold_worker.host.processes import is_alive
from leasehold_worker.leasing.leases import CORDONED, FREE
from leasehold_worker.metrics import GAUGES
from leasehold_worker.session.renewal import Renewal
from leasehold_worker.session.reporter import WorkerIdentity
from leasehold_worker.session.session import CoordinatorSession
from leasehold_worker.workloads.states import ENDED
from leasehold_worker.workloads.workload import parked_bytes


def _names(names: list[str], prefix: str) -> tuple[str, ...]:
    """The values of an enum without its unspecified one, as labels."""
    return tuple(name.removeprefix(prefix) for name in names if not name.endswith("_UNSPECIFIED"))


SLOT_STATES: Final = _names(SlotState.keys(), "SLOT_STATE_")
HEALTHS: Final = _names(GpuHealth.keys(), "GPU_HEALTH_")
WORKLOAD_STATES: Final = tuple(
    WorkloadState.Name(state).removeprefix("WORKLOAD_STATE_")
    for state in WorkloadState.values()
    if state and state not in ENDED
)
MEMBER_STATES: Final = _names(MemberState.keys(), "MEMBER_STATE_")


@final
class WorkerGauges:
    """Reads the gauges.

    Args:
        identity: The worker.
        parts: The parts that operate on GPUs.
        commands: The commands.
        journal: The journal.
        session: The session with the coordinator.
        renewal: Knows the certificate.
        clock: The offset of the coordinator's clock.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        parts: Parts,
        commands: Commands,
        journal: Journal,
        session: CoordinatorSession,
        renewal: Renewal,
        clock: ClockOffset,
    ) -> None:
        self._identity = identity
        self._parts = parts
        self._commands = commands
        self._journal = journal
        self._session = session
        self._renewal = renewal
        self._clock = clock

    def read(self) -> list[Metric]:
        """Every gauge with a known value. For trio's thread: nothing here waits."""
        families = {
            name: GaugeMetricFamily(name, each.help, labels=each.labels) for name, each in GAUGES.items()
        }
        for readings in (self._facts(), self._gpus(), self._claims(), self._workloads(), self._daemon()):
            for name, labels, value in readings:
                if value is not None:
                    families[name].add_metric(labels, value)
        return [family for family in families.values() if family.samples]

    def _facts(self) -> Iterator[tuple[str, tuple[str, ...], float | None]]:
        identity, versions = self._identity, self._parts.inventory.versions
        labels = (identity.name, identity.worker_id, __version__, versions.driver_version or "")
        yield "leasehold_worker_info", labels, 1
        for slot, gpu in enumerate(self._parts.inventory.gpus):
            yield "leasehold_gpu_info", (gpu.uuid, identity.name, str(slot), gpu.name), 1
            yield "leasehold_gpu_memory_total_bytes", (gpu.uuid,), gpu.memory_total_bytes

    def _gpus(self) -> Iterator[tuple[str, tuple[str, ...], float | None]]:
        worker_cordon = self._parts.pool.slots.worker_cordon
        for slot in self._parts.pool.slots.snapshot().slots:
            uuid = slot.gpu_uuid
            # Clients see a free GPU of a cordoned worker as cordoned.
            is_barred = worker_cordon is not None and slot.state == FREE
            state = SlotState.Name(CORDONED if is_barred else slot.state).removeprefix("SLOT_STATE_")
            health = GpuHealth.Name(slot.standing.health).removeprefix("GPU_HEALTH_")
            for name in SLOT_STATES:
                yield "leasehold_gpu_lease_state", (uuid, name), name == state
            for name in HEALTHS:
                yield "leasehold_gpu_health", (uuid, name), name == health
            is_cordoned = slot.standing.cordon is not None or worker_cordon is not None
            yield "leasehold_gpu_cordoned", (uuid,), is_cordoned
            yield "leasehold_gpu_foreign_processes", (uuid,), len(slot.foreign)

    def _claims(self) -> Iterator[tuple[str, tuple[str, ...], float | None]]:
        waiting = self._parts.pool.waiting
        claims = [waiter for waiter in waiting if not waiter.helper]
        yield "leasehold_worker_claims_waiting", ("claim",), len(claims)
        yield "leasehold_worker_claims_waiting", ("preemptible",), len(waiting) - len(claims)
        oldest_s = max((time.monotonic() - waiter.since_s for waiter in claims), default=0.0)
        yield "leasehold_worker_claim_wait_oldest_seconds", (), oldest_s

    def _workloads(self) -> Iterator[tuple[str, tuple[str, ...], float | None]]:
        living = [workload for workload in self._parts.workloads.all() if workload.state not in ENDED]
        states = Counter(WorkloadState.Name(one.state).removeprefix("WORKLOAD_STATE_") for one in living)
        members = Counter(
            MemberState.Name(member.state).removeprefix("MEMBER_STATE_")
            for workload in living
            for member in workload.members
            if is_alive(member.identity)  # a killed member stays listed until the next operation
        )
        yield from _counts("leasehold_worker_workloads", WORKLOAD_STATES, states)
        yield from _counts("leasehold_worker_members", MEMBER_STATES, members)
        parked = [workload.parked for workload in living if workload.parked is not None]
        tiers = {
            "host_memory": sum(map(parked_bytes, living)),
            "disk": sum(record.disk_bytes for record in parked),
        }
        yield from _counts("leasehold_worker_parked_bytes", tuple(tiers), tiers)
        now = datetime.now(UTC)
        ages_s = [(now - record.since).total_seconds() for record in parked]
        yield "leasehold_worker_parked_oldest_seconds", (), max(ages_s, default=0.0)

    def _daemon(self) -> Iterator[tuple[str, tuple[str, ...], float | None]]:
        commands, journal, session = self._commands, self._journal, self._session
        driver = self._parts.driver
        yield "leasehold_worker_commands_open", (), len(commands.open_entries)
        yield "leasehold_worker_commands_unacknowledged", (), len(commands.unacknowledged)
        yield "leasehold_worker_driver_available", (), driver.unavailable_reason is None
        idle, busy = driver.helpers
        yield "leasehold_worker_driver_helpers", ("idle",), idle
        yield "leasehold_worker_driver_helpers", ("busy",), busy
        yield "leasehold_worker_session_connected", (), session.is_connected
        yield "leasehold_worker_session_silence_seconds", (), session.silence_s
        yield "leasehold_worker_session_frames_waiting", (), session.frames_waiting
        yield "leasehold_worker_clock_offset_seconds", (), self._clock.offset_s
        yield "leasehold_worker_journal_writable", (), journal.refusal is None
        yield "leasehold_worker_journal_writes_waiting", (), journal.waiting
        begin_s, end_s = session.certificate_validity_s or self._renewal.validity_s or (None, None)
        yield "leasehold_worker_certificate_not_before_timestamp_seconds", (), begin_s
        yield "leasehold_worker_certificate_expiry_timestamp_seconds", (), end_s


def _counts(
    name: str, labels: tuple[str, ...], counts: Mapping[str, int]
) -> Iterator[tuple[str, tuple[str, ...], float]]:
    for label in labels:
        yield name, (label,), counts.get(label, 0)
