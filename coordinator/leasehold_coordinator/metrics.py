"""The coordinator's metrics: counters and histograms that advance when something ends, and the gauges' table.

Gauges are read from the fleet at each scrape: :mod:`leasehold_coordinator.server.fleet_gauges`. Labels have
values of bounded sets only: enums of the protos, this module's own names, and the names of workers. No label
names a workload, a user or a request. ``docs/metrics.md`` lists every metric, and a test compares both.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, disable_created_metrics

# Otherwise each counter has a further series with its start, which nothing here needs.
disable_created_metrics()  # type: ignore[no-untyped-call]

REGISTRY: Final = CollectorRegistry()
"""The counters and histograms of this process."""

COMMAND_BUCKETS_S: Final = (0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3600)
DISK_BUCKETS_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)

COMMAND_SECONDS: Final = Histogram(
    "leasehold_coordinator_command_duration_seconds",
    "Times from the creation of commands to their stored outcomes.",
    ("verb", "outcome"),
    buckets=COMMAND_BUCKETS_S,
    registry=REGISTRY,
)
COMMIT_SECONDS: Final = Histogram(
    "leasehold_coordinator_store_commit_duration_seconds",
    "Durations of the store's commits, also failed ones.",
    buckets=DISK_BUCKETS_S,
    registry=REGISTRY,
)
COMMIT_ERRORS: Final = Counter(
    "leasehold_coordinator_store_commit_errors",
    "Commits that failed.",
    registry=REGISTRY,
)
READ_SECONDS: Final = Histogram(
    "leasehold_coordinator_store_read_duration_seconds",
    "Durations of the store's reads with the wait for a reader, also failed ones.",
    buckets=DISK_BUCKETS_S,
    registry=REGISTRY,
)
SESSIONS: Final = Counter(
    "leasehold_coordinator_sessions",
    "Sessions of workers that the coordinator has welcomed.",
    registry=REGISTRY,
)

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
    "leasehold_coordinator_info": Gauge("1. The version of the coordinator.", ("version",)),
    "leasehold_coordinator_commands_open": Gauge("Commands that have not ended, by state.", ("state",)),
    "leasehold_coordinator_sessions_open": Gauge("Workers with a session."),
    "leasehold_coordinator_store_writable": Gauge("Whether the store's disk took the last commit in time."),
    "leasehold_coordinator_store_writes_waiting": Gauge("Writes that wait for the store's disk."),
    "leasehold_coordinator_certificate_expiry_timestamp_seconds": Gauge(
        "When a certificate expires: that of the first authority to expire, or that of the server "
        "from a PKI of others.",
        ("certificate",),
    ),
    "leasehold_coordinator_certificate_not_before_timestamp_seconds": Gauge(
        "When the validity of the same certificate begins.", ("certificate",)
    ),
    "leasehold_fleet_workers": Gauge("Known workers, by state.", ("state",)),
    "leasehold_fleet_worker_state": Gauge(
        "1 for the present state of a worker. Other states have no series.", ("worker", "state")
    ),
    "leasehold_fleet_worker_last_frame_timestamp_seconds": Gauge(
        "When a worker's last frame came. Absent: none since the coordinator's start.", ("worker",)
    ),
    "leasehold_fleet_gpus": Gauge(
        "GPUs of a worker, by state. A state without a GPU has no series.", ("worker", "state")
    ),
    "leasehold_fleet_claims_waiting": Gauge(
        "Claims that wait on a worker, without preemptible ones, as last reported.", ("worker",)
    ),
    "leasehold_fleet_workloads": Gauge(
        "Workloads of a worker that have not ended, by state. A state without a workload has no series.",
        ("worker", "state"),
    ),
    "leasehold_fleet_parked_bytes": Gauge(
        "Device memory of parked workloads: in host memory, and in checkpoints on a disk. "
        "Unknown sizes count as 0.",
        ("worker", "tier"),
    ),
    "leasehold_fleet_parked_oldest_seconds": Gauge(
        "Age of the oldest parked workload of a worker. Absent: none is parked.", ("worker",)
    ),
}
"""The gauges, by name. Every value that is unknown is absent, never 0, but for sizes in a sum. Values of a
worker without contact are absent too, but for its state and its last frame."""
