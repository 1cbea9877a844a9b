"""Every metric of both daemons: its name, type, labels and meaning, as the code defines them."""

from collections.abc import Iterator
from typing import NamedTuple

import leasehold_coordinator.metrics
import leasehold_worker.metrics
from prometheus_client import CollectorRegistry, Counter, Histogram


class MetricEntry(NamedTuple):
    """A metric.

    Attributes:
        name: The name, of a counter with ``_total``.
        kind: gauge, counter or histogram.
        labels: Names of its labels.
        help: Its meaning.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str

    @property
    def series(self) -> frozenset[str]:
        """The names of its samples."""
        if self.kind == "histogram":
            return frozenset(f"{self.name}_{part}" for part in ("bucket", "count", "sum"))
        return frozenset({self.name})


def worker_metrics() -> list[MetricEntry]:
    """The metrics of a worker, without those of its process."""
    gauges = leasehold_worker.metrics.GAUGES.items()
    tables = [MetricEntry(name, "gauge", gauge.labels, gauge.help) for name, gauge in gauges]
    return [*tables, *_ended(leasehold_worker.metrics.REGISTRY)]


def coordinator_metrics() -> list[MetricEntry]:
    """The metrics of a coordinator, without those of its process."""
    gauges = leasehold_coordinator.metrics.GAUGES.items()
    tables = [MetricEntry(name, "gauge", gauge.labels, gauge.help) for name, gauge in gauges]
    return [*tables, *_ended(leasehold_coordinator.metrics.REGISTRY)]


def _ended(registry: CollectorRegistry) -> Iterator[MetricEntry]:
    for collector in registry._collector_to_names:
        if isinstance(collector, Counter):
            yield MetricEntry(
                f"{collector._name}_total", "counter", collector._labelnames, collector._documentation
            )
        elif isinstance(collector, Histogram):
            yield MetricEntry(collector._name, "histogram", collector._labelnames, collector._documentation)
