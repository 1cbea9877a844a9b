"""The table of policies: what it says of every combination, and what follows from a policy."""

import pytest
from leasehold.v1 import errors_pb2, eviction_pb2
from leasehold.v1.eviction_pb2 import EvictionPolicy
from leasehold_worker.errors import OperationError
from leasehold_worker.workloads.eviction import (
    CHECKPOINT,
    CUDA_SUSPEND,
    DEVICE,
    DISCARD,
    DISK,
    HOST,
    KEEP_RUNNING,
    OFFLOAD,
    RETAIN,
    STOP,
    STRENGTHS,
    TABLE,
    WEIGHTS,
    Step,
    escalated,
    is_weaker,
    ladder,
    policy_text,
    resolve,
    strategy_of,
)
from leasehold_worker.workloads.states import AWAY, PARKED, PARKED_BY


def policy(weights: int = 0, process: int = 0, escalate_to: int = 0) -> EvictionPolicy:
    """A policy, also one of values that nobody knows."""
    made = EvictionPolicy()
    made.weight_strategy = weights  # type: ignore[assignment]
    made.process_strategy = process  # type: ignore[assignment]
    made.escalate_to = escalate_to  # type: ignore[assignment]
    return made


def test_every_combination_is_in_the_table() -> None:
    assert set(TABLE) == {(weights, process) for weights in WEIGHTS for process in STRENGTHS}
    known = {*eviction_pb2.WeightStrategy.values()} - {0}
    assert set(WEIGHTS) == known
    assert set(STRENGTHS) == {*eviction_pb2.ProcessStrategy.values()} - {0}


def test_every_parked_state_comes_from_the_table() -> None:
    assert set(PARKED_BY) == PARKED
    assert set(PARKED_BY.values()) == set(STRENGTHS)
    ending = {Step.IMAGE, Step.END}
    gone = {process for (_, process), strategy in TABLE.items() if set(strategy.steps) & ending}
    assert gone == {PARKED_BY[state] for state in AWAY}


@pytest.mark.parametrize("weights", WEIGHTS)
def test_only_what_keeps_running_leaves_memory_on_the_gpu(weights: int) -> None:
    for process in STRENGTHS:
        strategy = strategy_of(policy(weights, process))
        assert (DEVICE in strategy.tiers) == (process == KEEP_RUNNING)
        assert (DISK in strategy.tiers) == (process in (CHECKPOINT, STOP))


def test_offloaded_weights_are_in_host_memory_while_the_processes_are() -> None:
    for process in (KEEP_RUNNING, CUDA_SUSPEND):
        assert HOST in strategy_of(policy(OFFLOAD, process)).tiers
    assert HOST not in strategy_of(policy(DISCARD, KEEP_RUNNING)).tiers


def test_what_is_refused_is_what_frees_nothing_or_loses_state() -> None:
    refused = {key: strategy.refusal for key, strategy in TABLE.items() if strategy.refusal}
    lost = errors_pb2.ERROR_REASON_STATE_WOULD_BE_LOST
    expected = {(weights, STOP): lost for weights in WEIGHTS}
    assert refused == {**expected, (RETAIN, KEEP_RUNNING): errors_pb2.ERROR_REASON_NOTHING_FREED}


def test_weights_come_before_processes() -> None:
    order = [Step.HOOKS, Step.OFFLOAD, Step.DISCARD, Step.SUSPEND, Step.IMAGE, Step.SAVE, Step.END]
    for strategy in TABLE.values():
        assert list(strategy.steps) == sorted(strategy.steps, key=order.index)


def test_what_is_left_open_is_retain_and_cuda_suspend() -> None:
    assert policy_text(resolve(None, EvictionPolicy())) == "retain+cuda_suspend"
    asked = resolve(policy(process=STOP), policy(OFFLOAD, CHECKPOINT))
    assert policy_text(asked) == "retain+stop", "what is asked for is not mixed with what is declared"
    assert policy_text(resolve(None, policy(OFFLOAD, CHECKPOINT))) == "offload+checkpoint"


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (policy(weights=9), "policy"),
        (policy(process=9), "policy"),
        (policy(process=CHECKPOINT, escalate_to=CUDA_SUSPEND), "policy.escalate_to"),
        (policy(escalate_to=9), "policy.escalate_to"),
    ],
)
def test_what_makes_no_sense_is_refused(asked: EvictionPolicy, field: str) -> None:
    with pytest.raises(OperationError) as refused:
        resolve(asked, EvictionPolicy())
    assert refused.value.reason == errors_pb2.ERROR_REASON_INVALID_ARGUMENT
    assert refused.value.metadata["field"] == field


def test_the_ladder_leads_up_to_what_is_allowed_and_no_further() -> None:
    rungs = ladder(resolve(policy(OFFLOAD, KEEP_RUNNING, CHECKPOINT), EvictionPolicy()))
    assert [policy_text(rung) for rung in rungs] == [
        "offload+keep_running",
        "offload+cuda_suspend",
        "offload+checkpoint",
    ]
    assert ladder(resolve(policy(RETAIN, CUDA_SUSPEND), EvictionPolicy()))[1:] == []


def test_who_is_escalated_keeps_what_was_done_with_its_weights() -> None:
    before = policy(DISCARD, KEEP_RUNNING, STOP)
    after = escalated(before, policy(RETAIN, CUDA_SUSPEND))
    assert policy_text(after) == "discard+cuda_suspend"
    assert after.escalate_to == STOP
    assert is_weaker(before.process_strategy, after.process_strategy)
