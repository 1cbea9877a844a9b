"""The worker's metrics: counters and histograms that advance when something ends, and the table of gauges.

Gauges are read from their owners at each scrape: :mod:`leasehold_worker.agent.gauges`. Labels have values of
bounded sets only: enums of the protos, this module's own names, and the GPUs of this host. No label names a
workload, a user or a process. ``docs/metrics.md`` lists every metric, and a test compares both.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from leasehold.v1.operation_pb2 import Operation
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, disable_created_metrics

# Otherwise each counter has a further series with its start, which nothing here needs.
disable_created_metrics()  # type: ignore[no-untyped-call]

REGISTRY: Final = CollectorRegistry()
"""The counters and histograms of this process."""

OPERATION_BUCKETS_S: Final = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
"""From a suspend of an empty process to a checkpoint of a host's memory on a slow disk."""

DISK_BUCKETS_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)

WAIT_BUCKETS_S: Final = (0.1, 1, 10, 60, 300, 900, 3600, 4 * 3600, 24 * 3600)

OPERATION_SECONDS: Final = Histogram(
    "leasehold_worker_operation_duration_seconds",
    "Durations of operations that have ended, by outcome.",
    ("verb", "outcome"),
    buckets=OPERATION_BUCKETS_S,
    registry=REGISTRY,
)
OPERATION_ERRORS: Final = Counter(
    "leasehold_worker_operation_errors",
    "Operations that ended with an error, by its reason.",
    ("verb", "reason"),
    registry=REGISTRY,
)
PHASE_SECONDS: Final = Histogram(
    "leasehold_worker_operation_phase_duration_seconds",
    "Durations of the phases of operations. The outcome ROLLBACK is that of phases which undo others.",
    ("verb", "phase", "outcome"),
    buckets=OPERATION_BUCKETS_S,
    registry=REGISTRY,
)
OPERATION_BYTES: Final = Counter(
    "leasehold_worker_operation_bytes",
    "Bytes that operations moved between device memory and host memory, and to or from a disk.",
    ("verb", "medium"),
    registry=REGISTRY,
)
DRIVER_CALL_SECONDS: Final = Histogram(
    "leasehold_worker_driver_call_duration_seconds",
    "Durations of the driver's checkpoint calls on single processes, with reading the state afterwards.",
    ("call", "outcome"),
    buckets=OPERATION_BUCKETS_S,
    registry=REGISTRY,
)
DRIVER_CALL_BYTES: Final = Counter(
    "leasehold_worker_driver_call_bytes",
    "Device memory that driver calls moved.",
    ("call",),
    registry=REGISTRY,
)
SWITCHES: Final = Counter(
    "leasehold_worker_switches",
    "Suspends, restores and remaps that took or returned GPUs, also those that failed.",
    ("verb",),
    registry=REGISTRY,
)
SWITCH_GPU_SECONDS: Final = Counter(
    "leasehold_worker_switch_gpu_seconds",
    "Upper bound of the GPU time lost to switches: the duration of each, times the number of GPUs that it "
    "frees or takes.",
    ("verb",),
    registry=REGISTRY,
)
CLAIM_WAIT_SECONDS: Final = Histogram(
    "leasehold_worker_claim_wait_seconds",
    "Waits of claims in the queue: until the grant, or until the claimer gave up.",
    ("outcome",),
    buckets=WAIT_BUCKETS_S,
    registry=REGISTRY,
)
HELPER_STARTS: Final = Counter(
    "leasehold_worker_driver_helper_starts",
    "Driver helpers that were started.",
    registry=REGISTRY,
)
HELPER_LOSSES: Final = Counter(
    "leasehold_worker_driver_helper_losses",
    "Driver helpers that did not answer a call: killed after its deadline, or dead by themselves.",
    ("reason",),
    registry=REGISTRY,
)
JOURNAL_COMMIT_SECONDS: Final = Histogram(
    "leasehold_worker_journal_commit_duration_seconds",
    "Durations of the journal's commits, also failed ones.",
    buckets=DISK_BUCKETS_S,
    registry=REGISTRY,
)
JOURNAL_ERRORS: Final = Counter(
    "leasehold_worker_journal_errors",
    "Commits that the journal's disk refused.",
    registry=REGISTRY,
)
SESSIONS: Final = Counter(
    "leasehold_worker_sessions",
    "Sessions that the coordinator has welcomed.",
    registry=REGISTRY,
)

# Alerts apply increase() to these series, and increase() ignores the first value of a series. So each series
# has the value 0 before its first event.
for _field in Operation.DESCRIPTOR.oneofs_by_name["kind"].fields:
    OPERATION_SECONDS.labels(_field.name, "FAILED")
for _reason in ("expired", "died"):
    HELPER_LOSSES.labels(_reason)

ProcessCollector(registry=REGISTRY)


@dataclass(frozen=True, slots=True)
class Gauge:
    """A gauge of the table.

    Attributes:
        help: Its meaning.
        labels: Names of its labels.
    """

    help: str
    labels: tuple[str, ...] = ()


GAUGES: Final[Mapping[str, Gauge]] = {
    "leasehold_worker_info": Gauge(
        "1. The worker's name and id, and the versions of the agent and of the driver.",
        ("worker", "worker_id", "version", "driver_version"),
    ),
    "leasehold_gpu_info": Gauge(
        "1. A GPU of this worker. UUID is the label of dcgm-exporter.", ("UUID", "worker", "slot", "model")
    ),
    "leasehold_gpu_memory_total_bytes": Gauge("Memory of a GPU. Absent: unknown to NVML.", ("UUID",)),
    "leasehold_gpu_lease_state": Gauge("1 for the state of a GPU's slot, 0 for others.", ("UUID", "state")),
    "leasehold_gpu_health": Gauge("1 for the health verdict of a GPU, 0 for others.", ("UUID", "health")),
    "leasehold_gpu_cordoned": Gauge("Whether a cordon bans new leases of a GPU.", ("UUID",)),
    "leasehold_gpu_foreign_processes": Gauge(
        "Processes on a GPU that belong to no workload with a lease of it.", ("UUID",)
    ),
    "leasehold_worker_claims_waiting": Gauge(
        "Claims that wait in the queue. Preemptible ones wait behind all others.", ("kind",)
    ),
    "leasehold_worker_claim_wait_oldest_seconds": Gauge(
        "Age of the oldest waiting claim that is not preemptible. 0: none waits."
    ),
    "leasehold_worker_workloads": Gauge("Workloads that have not ended, by state.", ("state",)),
    "leasehold_worker_members": Gauge(
        "CUDA processes of workloads, by state after their last operation.", ("state",)
    ),
    "leasehold_worker_parked_bytes": Gauge(
        "Device memory of parked workloads: in host memory, and in checkpoints on a disk. "
        "Unknown sizes count as 0.",
        ("tier",),
    ),
    "leasehold_worker_parked_oldest_seconds": Gauge("Age of the oldest parked workload. 0: none is parked."),
    "leasehold_worker_commands_open": Gauge("Commands that have not ended."),
    "leasehold_worker_commands_unacknowledged": Gauge("Outcomes that the coordinator has not acknowledged."),
    "leasehold_worker_driver_available": Gauge("Whether driver calls can be made."),
    "leasehold_worker_driver_helpers": Gauge("Driver helpers that are alive, by use.", ("use",)),
    "leasehold_worker_session_connected": Gauge("Whether there is a session with the coordinator."),
    "leasehold_worker_session_silence_seconds": Gauge(
        "Time since the coordinator's last frame. Absent: no session."
    ),
    "leasehold_worker_session_frames_waiting": Gauge(
        "Frames that wait for the coordinator to read. Absent: no session."
    ),
    "leasehold_worker_clock_offset_seconds": Gauge(
        "How far the coordinator's clock is ahead of this host's. Absent: unknown."
    ),
    "leasehold_worker_journal_writable": Gauge("Whether the journal's disk took the last commit."),
    "leasehold_worker_journal_writes_waiting": Gauge("Writes that wait for the journal's disk."),
    "leasehold_worker_certificate_expiry_timestamp_seconds": Gauge(
        "When the worker's certificate expires. Absent: the worker has none."
    ),
    "leasehold_worker_certificate_not_before_timestamp_seconds": Gauge(
        "When the validity of the worker's certificate begins. Absent: the worker has none."
    ),
}
"""The gauges, by name. Every value that is unknown is absent, never 0, but for sizes in a sum."""
