"""The memory tiers of suspended workloads: host memory first, then disk.

When a tier is full, the workload that was suspended in it longest ago moves down, if its policy allows that.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final, final

from leasehold.v1 import errors_pb2
from leasehold.v1.eviction_pb2 import EvictionPolicy, ProcessStrategy
from leasehold.v1.plan_pb2 import Tier

from leasehold_worker.planning.plan import MoveDown, Plan
from leasehold_worker.workloads.eviction import (
    CHECKPOINT,
    DISK,
    HOST,
    STOP,
    is_allowed_by_ladder,
)
from leasehold_worker.workloads.registry import Workloads
from leasehold_worker.workloads.states import CHECKPOINTED, SLEEPING, SUSPENDED
from leasehold_worker.workloads.workload import Workload, parked_bytes

SHORTAGES: Final = {
    errors_pb2.ERROR_REASON_INSUFFICIENT_HOST_MEMORY: HOST,
    errors_pb2.ERROR_REASON_INSUFFICIENT_DISK: DISK,
}
"""Refusals that moves of other workloads can resolve, with the full tier."""


def choose(
    workloads: Iterable[Workload], tier: Tier.ValueType, missing_bytes: int, *, images: bool
) -> list[MoveDown] | None:
    """The workloads to move down, the longest suspended first, as few as suffice. None: too few.

    Args:
        workloads: All workloads of the worker.
        tier: The full tier.
        missing_bytes: Bytes that it lacks.
        images: Whether processes can be moved to disk here.
    """
    states, first = ((SLEEPING, SUSPENDED), CHECKPOINT) if tier == HOST else ((CHECKPOINTED,), STOP)
    steps = [step for step in (CHECKPOINT, STOP) if step >= first and (images or step != CHECKPOINT)]
    parked = [each for each in workloads if each.state in states and each.parked is not None]
    chosen: list[MoveDown] = []
    for workload in sorted(parked, key=lambda each: each.parked.since if each.parked else each.start_time):
        if missing_bytes <= 0:
            break
        move = _move_down(workload, steps, tier)
        if move is not None and move.freed_bytes:
            chosen.append(move)
            missing_bytes -= move.freed_bytes
    return chosen if missing_bytes <= 0 else None


def _move_down(
    workload: Workload, steps: Sequence[ProcessStrategy.ValueType], tier: Tier.ValueType
) -> MoveDown | None:
    if workload.parked is None:
        return None
    policy = workload.parked.policy
    for step in steps:
        if is_allowed_by_ladder(policy, step):
            stronger = EvictionPolicy(
                weight_strategy=policy.weight_strategy, process_strategy=step, escalate_to=policy.escalate_to
            )
            freed = parked_bytes(workload) if tier == HOST else workload.parked.disk_bytes
            return MoveDown(workload.workload_id, workload.name, stronger, freed, workload.generation)
    return None


@final
class Tiers:
    """Chooses the suspended workloads that move to a lower tier, so that another one can be suspended.

    Args:
        workloads: The registry.
        has_images: Whether processes can be moved to disk here.
    """

    def __init__(self, workloads: Workloads, has_images: Callable[[], bool]) -> None:
        self._workloads = workloads
        self._has_images = has_images

    def excuse(self, plan: Plan) -> None:
        """Turns the refusals of a plan into moves of other workloads, where these make enough room."""
        for refusal in list(plan.findings.refusals):
            tier = SHORTAGES.get(refusal.reason)
            if tier is None:
                continue
            others = [each for each in self._workloads.all() if each is not plan.target.workload]
            missing = _missing(plan, tier)
            moves = choose(others, tier, missing, images=self._has_images()) if missing > 0 else None
            if moves:
                plan.findings.excuse(refusal, "; ".join(move.text for move in moves))
                plan.moves_down += moves


def _missing(plan: Plan, tier: Tier.ValueType) -> int:
    """Bytes that a plan lacks in a tier. 0: unknown."""
    if tier == HOST:
        need = plan.host_memory
        if need is None or need.available_bytes is None:
            return 0
        return need.needed_bytes - need.available_bytes
    wanted = [each for each in plan.tiers if each.tier == tier]
    if not wanted or wanted[0].needed_bytes is None or wanted[0].available_bytes is None:
        return 0
    return wanted[0].needed_bytes - wanted[0].available_bytes
