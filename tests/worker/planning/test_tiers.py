"""Who makes room when a tier is full: the longest parked, as few as serve, and only who allows it."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from leasehold.v1.eviction_pb2 import EvictionPolicy, ProcessStrategy
from leasehold.v1.plan_pb2 import Tier
from leasehold.v1.workload_pb2 import WorkloadSpec, WorkloadState
from leasehold_worker.host.process_files import Pid
from leasehold_worker.host.processes import ProcessIdentity
from leasehold_worker.planning.tiers import choose
from leasehold_worker.workloads.eviction import (
    CHECKPOINT,
    CUDA_SUSPEND,
    DISK,
    HOST,
    KEEP_RUNNING,
    RETAIN,
    STOP,
)
from leasehold_worker.workloads.states import CHECKPOINTED, RUNNING, SLEEPING, SUSPENDED
from leasehold_worker.workloads.workload import Parked, Workload

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
GIB = 2**30


def parked(
    name: str,
    minute: int,
    *,
    state: WorkloadState.ValueType = SUSPENDED,
    size: int = GIB,
    escalate_to: ProcessStrategy.ValueType = CHECKPOINT,
) -> Workload:
    """A workload that was parked at some minute."""
    process = {SUSPENDED: CUDA_SUSPEND, CHECKPOINTED: CHECKPOINT, SLEEPING: KEEP_RUNNING}[state]
    policy = EvictionPolicy(weight_strategy=RETAIN, process_strategy=process, escalate_to=escalate_to)
    on_disk = state == CHECKPOINTED
    return Workload(
        workload_id=f"w-{name}",
        name=name,
        spec=WorkloadSpec(),
        root=ProcessIdentity(Pid(1), 1),
        output_path=Path("output"),
        start_time=BEGIN,
        lease=None,
        state=state,
        parked=Parked(
            ("GPU-a",),
            {"GPU-a": size},
            policy,
            BEGIN + timedelta(minutes=minute),
            host_bytes=0 if on_disk else size,
            disk_bytes=size if on_disk else 0,
        ),
    )


def names(workloads: list[Workload], tier: Tier.ValueType, missing: int) -> list[str] | None:
    """Who would move down."""
    moves = choose(workloads, tier, missing, images=True)
    return None if moves is None else [move.name for move in moves]


def test_the_longest_parked_goes_first_and_as_few_as_serve() -> None:
    workloads = [parked("c", 3), parked("a", 1), parked("b", 2)]
    assert names(workloads, HOST, 1) == ["a"]
    assert names(workloads, HOST, GIB + 1) == ["a", "b"]
    assert names(workloads, HOST, 0) == []


def test_nobody_moves_where_all_together_would_not_do() -> None:
    assert names([parked("a", 1), parked("b", 2)], HOST, 2 * GIB + 1) is None
    assert names([], HOST, 1) is None


def test_nobody_moves_who_does_not_allow_it() -> None:
    workloads = [parked("a", 1, escalate_to=CUDA_SUSPEND), parked("b", 2)]
    assert names(workloads, HOST, 1) == ["b"]
    assert names(workloads[:1], HOST, 1) is None


def test_without_images_only_those_move_that_may_be_stopped() -> None:
    workloads = [parked("a", 1), parked("b", 2, escalate_to=STOP)]
    moves = choose(workloads, HOST, 1, images=False)
    assert moves is not None
    assert [(move.name, move.policy.process_strategy) for move in moves] == [("b", STOP)]


def test_only_what_is_in_the_tier_that_is_full_makes_room_in_it() -> None:
    on_disk = parked("d", 0, state=CHECKPOINTED, escalate_to=STOP)
    asleep = parked("s", 0, state=SLEEPING, size=0, escalate_to=STOP)
    in_host = parked("a", 1)
    running = parked("r", 0)
    running.state = RUNNING
    assert names([on_disk, asleep, running, in_host], HOST, 1) == ["a"]
    assert names([on_disk, asleep, running, in_host], DISK, 1) == ["d"]
    assert names([parked("d", 0, state=CHECKPOINTED)], DISK, 1) is None, "it may not be stopped"


def test_a_sleeper_makes_room_with_what_it_has_offloaded() -> None:
    sleeper = parked("s", 0, state=SLEEPING, escalate_to=CHECKPOINT)
    assert names([sleeper, parked("a", 1)], HOST, 1) == ["s"]
    assert names([sleeper], DISK, 1) is None


@pytest.mark.parametrize("size", [0])
def test_who_frees_nothing_is_left_alone(size: int) -> None:
    assert names([parked("a", 1, size=size), parked("b", 2)], HOST, 1) == ["b"]


def test_a_move_keeps_what_the_workload_allows() -> None:
    moves = choose([parked("a", 1, escalate_to=STOP)], HOST, 1, images=True)
    assert moves is not None
    assert (moves[0].policy.process_strategy, moves[0].policy.escalate_to) == (CHECKPOINT, STOP)
    assert "workload a is suspended by checkpoint first" in moves[0].text
