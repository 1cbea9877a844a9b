"""Eviction policies: every combination of weight strategy and process strategy, in one table.

The weight strategy comes first: the weights that the framework frees. Then the process strategy: the fate of
the processes. The module is pure: it describes the effects of a policy, and executes nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from leasehold.v1 import errors_pb2, eviction_pb2, plan_pb2
from leasehold.v1.eviction_pb2 import EvictionPolicy, ProcessStrategy, WeightStrategy
from leasehold.v1.plan_pb2 import Tier

from leasehold_worker.errors import invalid

RETAIN: Final = eviction_pb2.WEIGHT_STRATEGY_RETAIN
OFFLOAD: Final = eviction_pb2.WEIGHT_STRATEGY_OFFLOAD
DISCARD: Final = eviction_pb2.WEIGHT_STRATEGY_DISCARD

KEEP_RUNNING: Final = eviction_pb2.PROCESS_STRATEGY_KEEP_RUNNING
CUDA_SUSPEND: Final = eviction_pb2.PROCESS_STRATEGY_CUDA_SUSPEND
CHECKPOINT: Final = eviction_pb2.PROCESS_STRATEGY_CHECKPOINT
STOP: Final = eviction_pb2.PROCESS_STRATEGY_STOP

WEIGHTS: Final = (RETAIN, OFFLOAD, DISCARD)
STRENGTHS: Final = (KEEP_RUNNING, CUDA_SUSPEND, CHECKPOINT, STOP)
"""Process strategies, the weakest first: each frees more than the one before."""

DEVICE: Final = plan_pb2.TIER_DEVICE
HOST: Final = plan_pb2.TIER_HOST
DISK: Final = plan_pb2.TIER_DISK


class Step(Enum):
    """A step of a suspend, with its reverse on a restore."""

    HOOKS = ("the workload's hooks are called", "its hooks are called again, after the restore")
    OFFLOAD = ("its framework moves the weights to host memory", "its framework takes the weights back")
    DISCARD = ("its framework drops the weights", "its framework loads the weights again")
    SUSPEND = ("the driver moves device memory to host memory", "the driver moves it back, on any GPUs alike")
    IMAGE = ("CRIU writes the processes to disk, and they end", "CRIU brings them back from disk")
    SAVE = (
        "its application saves itself, if it is checkpointable",
        "its application loads its save, if any",
    )
    END = ("its processes are ended", "its program is started again")

    def __init__(self, down: str, up: str) -> None:
        self.down = down
        self.up = up


@dataclass(frozen=True, slots=True)
class Strategy:
    """One combination.

    Attributes:
        steps: Steps of a suspend, in order. A restore undoes them in reverse.
        tiers: Memory tiers that hold the bytes.
        refusal: Reason of its refusal without force. UNSPECIFIED: it is permitted.
    """

    steps: tuple[Step, ...]
    tiers: tuple[Tier.ValueType, ...]
    refusal: errors_pb2.ErrorReason.ValueType = errors_pb2.ERROR_REASON_UNSPECIFIED


_NOTHING_FREED: Final = errors_pb2.ERROR_REASON_NOTHING_FREED
_ENDED: Final = Strategy((Step.SAVE, Step.END), (DISK,), errors_pb2.ERROR_REASON_STATE_WOULD_BE_LOST)
"""Weights need no step if the processes end."""

TABLE: Final[Mapping[tuple[WeightStrategy.ValueType, ProcessStrategy.ValueType], Strategy]] = {
    (RETAIN, KEEP_RUNNING): Strategy((Step.HOOKS,), (DEVICE,), _NOTHING_FREED),
    (RETAIN, CUDA_SUSPEND): Strategy((Step.HOOKS, Step.SUSPEND), (HOST,)),
    (RETAIN, CHECKPOINT): Strategy((Step.HOOKS, Step.SUSPEND, Step.IMAGE), (DISK,)),
    (RETAIN, STOP): _ENDED,
    (OFFLOAD, KEEP_RUNNING): Strategy((Step.HOOKS, Step.OFFLOAD), (DEVICE, HOST)),
    (OFFLOAD, CUDA_SUSPEND): Strategy((Step.HOOKS, Step.OFFLOAD, Step.SUSPEND), (HOST,)),
    (OFFLOAD, CHECKPOINT): Strategy((Step.HOOKS, Step.OFFLOAD, Step.SUSPEND, Step.IMAGE), (DISK,)),
    (OFFLOAD, STOP): _ENDED,
    (DISCARD, KEEP_RUNNING): Strategy((Step.HOOKS, Step.DISCARD), (DEVICE,)),
    (DISCARD, CUDA_SUSPEND): Strategy((Step.HOOKS, Step.DISCARD, Step.SUSPEND), (HOST,)),
    (DISCARD, CHECKPOINT): Strategy((Step.HOOKS, Step.DISCARD, Step.SUSPEND, Step.IMAGE), (DISK,)),
    (DISCARD, STOP): _ENDED,
}


def resolve(asked: EvictionPolicy | None, declared: EvictionPolicy) -> EvictionPolicy:
    """The effective policy, with all fields set: the requested one, or else the declared one of the workload.

    Raises:
        OperationError: INVALID_ARGUMENT, a value is unknown, or the escalation leads to a weaker strategy.
    """
    chosen = asked if asked is not None else declared
    policy = EvictionPolicy(
        weight_strategy=chosen.weight_strategy or RETAIN,
        process_strategy=chosen.process_strategy or CUDA_SUSPEND,
        escalate_to=chosen.escalate_to,
    )
    if policy.weight_strategy not in WEIGHTS or policy.process_strategy not in STRENGTHS:
        raise invalid("policy", "the policy names a strategy unknown to this worker: update the worker")
    if policy.escalate_to and (
        policy.escalate_to not in STRENGTHS or is_weaker(policy.escalate_to, policy.process_strategy)
    ):
        raise invalid(
            "policy.escalate_to",
            f"the ladder leads up from {process_text(policy.process_strategy)}: escalate to a stronger of "
            f"{', '.join(process_text(strategy) for strategy in STRENGTHS)}",
        )
    return policy


def strategy_of(policy: EvictionPolicy) -> Strategy:
    """The table's row of a policy that :func:`resolve` made."""
    return TABLE[policy.weight_strategy, policy.process_strategy]


def hook_steps(policy: EvictionPolicy) -> list[Step]:
    """The steps of a policy that hooks perform."""
    return [step for step in strategy_of(policy).steps if step in (Step.HOOKS, Step.OFFLOAD, Step.DISCARD)]


def is_weaker(first: ProcessStrategy.ValueType, second: ProcessStrategy.ValueType) -> bool:
    """Whether a process strategy frees less than another."""
    return STRENGTHS.index(first) < STRENGTHS.index(second)


def ladder(policy: EvictionPolicy) -> list[EvictionPolicy]:
    """The policy, followed by those of its escalation, in order."""
    rungs = [policy]
    if policy.escalate_to:
        first, last = STRENGTHS.index(policy.process_strategy), STRENGTHS.index(policy.escalate_to)
        for stronger in STRENGTHS[first + 1 : last + 1]:
            rung = EvictionPolicy(
                weight_strategy=policy.weight_strategy,
                process_strategy=stronger,
                escalate_to=policy.escalate_to,
            )
            rungs.append(rung)
    return rungs


def escalated(before: EvictionPolicy, wanted: EvictionPolicy) -> EvictionPolicy:
    """The new policy of a workload that is suspended already: its weight strategy stays."""
    return EvictionPolicy(
        weight_strategy=before.weight_strategy,
        process_strategy=wanted.process_strategy,
        escalate_to=wanted.escalate_to or before.escalate_to,
    )


def is_allowed_by_ladder(policy: EvictionPolicy, process: ProcessStrategy.ValueType) -> bool:
    """Whether a policy allows a stronger process strategy than its own."""
    return bool(policy.escalate_to) and not is_weaker(policy.escalate_to, process)


def weights_text(strategy: WeightStrategy.ValueType) -> str:
    """A weight strategy as on the command line."""
    return WeightStrategy.Name(strategy).removeprefix("WEIGHT_STRATEGY_").lower()


def process_text(strategy: ProcessStrategy.ValueType) -> str:
    """A process strategy as on the command line."""
    return ProcessStrategy.Name(strategy).removeprefix("PROCESS_STRATEGY_").lower()


def policy_text(policy: EvictionPolicy) -> str:
    """A policy as on the command line, such as "offload+cuda_suspend"."""
    return f"{weights_text(policy.weight_strategy)}+{process_text(policy.process_strategy)}"


def forced_command(name: str, asked: EvictionPolicy | None) -> str:
    """The command that forces a refused suspend.

    Args:
        name: The workload.
        asked: The resolved policy of the request. None: the request names none.
    """
    words = ["leasehold", "suspend", name]
    if asked is not None:
        if asked.weight_strategy != RETAIN:
            words += ["--weights", weights_text(asked.weight_strategy)]
        words += ["--process", process_text(asked.process_strategy)]
        if asked.escalate_to:
            words += ["--escalate-to", process_text(asked.escalate_to)]
    return " ".join([*words, "--force"])
