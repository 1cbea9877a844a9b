"""Durations of the phases of a suspend or restore beside the driver's copies, assumed or measured.

The duration of a phase of hooks or of the application is remembered per workload: only its last time predicts
how long a framework loads its weights. The rates of CRIU are remembered per host. All are lost when the agent
ends.
"""

from collections import OrderedDict
from collections.abc import Iterator
from enum import StrEnum
from typing import Final, final

from leasehold.v1.eviction_pb2 import EvictionPolicy, WeightStrategy

from leasehold_worker.byte_sizes import size_text
from leasehold_worker.commands.progress import OperationPhase, Progress
from leasehold_worker.driver.transfer_rates import Estimate
from leasehold_worker.hooks.context import calls
from leasehold_worker.planning.plan import Plan
from leasehold_worker.workloads.eviction import CHECKPOINT, DISCARD, DISK, OFFLOAD, RETAIN, STOP

REMEMBERED_LIMIT: Final = 4096
"""Number of remembered phases; the oldest go first."""


class Way(StrEnum):
    """The direction of an operation."""

    DOWN = "down"
    UP = "up"


HOOKS, SAVE, TERMINATE, IMAGE, RESUME, START, LOAD = (
    *("hooks", "save", "terminate", "image", "resume", "start", "load"),
)

ASSUMED: Final = {
    (Way.DOWN, HOOKS, RETAIN): (0.1, 0.0),
    (Way.DOWN, HOOKS, OFFLOAD): (0.5, 2e9),
    (Way.DOWN, HOOKS, DISCARD): (1.0, 0.0),
    (Way.UP, HOOKS, RETAIN): (0.1, 0.0),
    (Way.UP, HOOKS, OFFLOAD): (0.5, 4e9),
    (Way.UP, HOOKS, DISCARD): (1.0, 1e9),
    (Way.DOWN, SAVE, RETAIN): (1.0, 1e9),
    (Way.DOWN, TERMINATE, RETAIN): (1.0, 0.0),
    (Way.DOWN, IMAGE, RETAIN): (0.5, 0.5e9),
    (Way.UP, RESUME, RETAIN): (0.5, 0.5e9),
    (Way.UP, START, RETAIN): (1.0, 0.0),
    (Way.UP, LOAD, RETAIN): (10.0, 1e9),
}
"""Seconds, and bytes per second or 0 if the size makes no difference. Weights move as fast as the driver
moves memory, and are loaded as fast as a good disk reads. A program registers its application in ten seconds.
"""

HOST_WIDE: Final = frozenset({IMAGE, RESUME})
LEAST_BYTES: Final = 2**24
"""Smallest image that serves to measure the rate of the disk."""

_NEWEST_WEIGHT: Final = 0.3
_SAME: Final = {"verify": RESUME}
"""Phases whose bytes count for another one: an image is verified before it is restored."""

_Key = tuple[str, Way, str, WeightStrategy.ValueType]


@final
class Durations:
    """Measured durations of the phases of this host's workloads."""

    def __init__(self) -> None:
        self._seen_s = OrderedDict[_Key, float]()
        self._rates: dict[str, float] = {}

    def learn(self, workload_id: str, policy: EvictionPolicy | None, way: Way, progress: Progress) -> None:
        """Learns from the phases of a successful operation.

        Args:
            workload_id: The workload.
            policy: Policy of its suspend. None: it was not suspended.
            way: The direction of the operation.
            progress: The report of the operation. The call closes it.
        """
        progress.close(failed=False)
        if policy is None or any(phase.failed or phase.rollback for phase in progress.phases):
            return
        for name, seconds in _by_name(progress.phases).items():
            weights = _weights(name, policy)
            if (way, name, weights) not in ASSUMED:
                continue
            if name not in HOST_WIDE:
                key = (workload_id, way, name, weights)
                self._seen_s[key] = seconds
                self._seen_s.move_to_end(key)
            elif progress.disk_bytes >= LEAST_BYTES:
                rate = progress.disk_bytes / max(seconds, 0.001)
                known = self._rates.get(name, rate)
                self._rates[name] = (1 - _NEWEST_WEIGHT) * known + _NEWEST_WEIGHT * rate
        while len(self._seen_s) > REMEMBERED_LIMIT:
            self._seen_s.popitem(last=False)

    def complete(self, plan: Plan, way: Way) -> None:
        """Adds the phases other than the driver's to a plan's estimate, unless it was refused early."""
        if plan.already_there or plan.policy is None or (plan.refused and plan.estimate is None):
            return
        parts = [self._part(plan, way, name, size) for name, size in _phases(plan, way)]
        if not parts and plan.estimate is None:
            return
        drivers = [plan.estimate] if plan.estimate is not None else []
        every = [*drivers, *parts] if way is Way.DOWN else [*parts, *drivers]
        plan.estimate = Estimate(
            sum(part.duration_s for part in every), "; ".join(part.basis for part in every if part.basis)
        )

    def complete_save(self, plan: Plan) -> None:
        """Adds the duration of a save to the plan of a checkpoint."""
        if not plan.refused:
            plan.estimate = self._part(plan, Way.DOWN, SAVE, _on_disk(plan))

    def _part(self, plan: Plan, way: Way, name: str, size: int) -> Estimate:
        policy = plan.policy or EvictionPolicy()
        weights = _weights(name, policy)
        seen_s = self._seen_s.get((plan.target.workload.workload_id, way, name, weights))
        if seen_s is not None:
            return Estimate(seen_s, f"{name} {seen_s:.1f} s (last time)")
        if (seen_rate := self._rates.get(name)) is not None:  # the observed rate includes all overheads
            return Estimate(size / seen_rate, f"{name} at {size_text(int(seen_rate))}/s (as seen here)")
        fixed_s, rate = ASSUMED[way, name, weights]
        if not rate:
            return Estimate(fixed_s, f"{name} {fixed_s:.1f} s (assumed)")
        text = f"{name} {fixed_s:.1f} s and {size_text(int(rate))}/s (assumed)"
        return Estimate(fixed_s + size / rate, text)


def _phases(plan: Plan, way: Way) -> Iterator[tuple[str, int]]:
    """The phases of a plan other than the driver's, in order, with the bytes that each moves."""
    policy, workload = plan.policy, plan.target.workload
    if policy is None:
        return
    stops = policy.process_strategy == STOP
    on_disk = _on_disk(plan)
    moved = sum(member.total_bytes for member in plan.members) or sum(plan.target.full_bytes.values())
    if way is Way.DOWN:
        if calls(workload.spec.hooks) and workload.parked is None and not stops:
            yield HOOKS, moved
        if stops and plan.saves:
            yield SAVE, on_disk
        if stops:
            yield TERMINATE, 0
        elif policy.process_strategy == CHECKPOINT:
            yield IMAGE, on_disk
        return
    if stops:
        yield START, 0
        if plan.checkpoint_id:
            yield LOAD, on_disk
        return
    if policy.process_strategy == CHECKPOINT:
        yield RESUME, on_disk
    if calls(workload.spec.hooks):
        yield HOOKS, max(moved, sum(plan.target.full_bytes.values()))


def _on_disk(plan: Plan) -> int:
    """Bytes written or read. 0: unknown, since only the application knows its size."""
    return next((need.needed_bytes for need in plan.tiers if need.tier == DISK), None) or 0


def _weights(name: str, policy: EvictionPolicy) -> WeightStrategy.ValueType:
    """Only hooks depend on the weight strategy."""
    return (policy.weight_strategy or RETAIN) if name == HOOKS else RETAIN


def _by_name(phases: list[OperationPhase]) -> dict[str, float]:
    found: dict[str, float] = {}
    for phase in phases:
        name = _SAME.get(phase.name, phase.name)
        found[name] = found.get(name, 0.0) + phase.duration_s
    return found
