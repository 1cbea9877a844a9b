"""Workloads under every order of operations, losses and ends that hypothesis finds in the table of states."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from leasehold.v1 import errors_pb2
from leasehold.v1.eviction_pb2 import EvictionPolicy
from leasehold.v1.workload_pb2 import WorkloadSpec, WorkloadState
from leasehold_worker.errors import OperationError
from leasehold_worker.host.process_files import Pid
from leasehold_worker.host.processes import ProcessIdentity
from leasehold_worker.leasing.gpu_selection import PoolGpu
from leasehold_worker.leasing.pool import GpuPool
from leasehold_worker.workloads.eviction import RETAIN
from leasehold_worker.workloads.invariants import violations
from leasehold_worker.workloads.registry import Workloads
from leasehold_worker.workloads.states import (
    AWAY,
    CHECKPOINTED,
    ENDED,
    EXITED,
    IN_OPERATION,
    LOST,
    PARKED,
    PARKED_BY,
    RUNNING,
    TRANSITIONS,
    state_text,
)
from leasehold_worker.workloads.workload import Parked, Workload

from tests import environment

NOW = datetime(2026, 1, 1, tzinfo=UTC)
GPU = "GPU-0"
LOST_ERROR = OperationError(errors_pb2.ERROR_REASON_DRIVER_ERROR, "lost")


class World:
    """A registry with one workload on one GPU."""

    def __init__(self) -> None:
        self.pool = GpuPool([PoolGpu(GPU)])
        self.told: list[tuple[WorkloadState.ValueType, int]] = []
        self.workloads = Workloads(
            self.pool, Path("workloads"), lambda w: self.told.append((w.state, w.generation))
        )
        root = ProcessIdentity(Pid(2**22 + 1), 1)
        lease = self.pool.claim_gpus("w", [GPU])
        self.workload = Workload("w", "job", WorkloadSpec(), root, Path("output"), NOW, lease)
        self.workloads.add(self.workload)


def parked(state: WorkloadState.ValueType) -> Parked:
    policy = EvictionPolicy(weight_strategy=RETAIN, process_strategy=PARKED_BY[state])
    return Parked((GPU,), {}, policy, NOW, checkpoint_id="c" if state == CHECKPOINTED else "")


def test_a_transition_that_is_not_in_the_table_is_refused_and_changes_nothing() -> None:
    world = World()
    with pytest.raises(ValueError, match="from RUNNING to CHECKPOINTED"):
        world.workloads.set_state(world.workload, CHECKPOINTED)
    assert (world.workload.state, world.workload.absent) == (RUNNING, False)
    assert world.told == [(RUNNING, 1)]


def test_a_settlement_with_a_transition_that_is_not_in_the_table_changes_nothing() -> None:
    world = World()
    world.workload.home = (GPU,)
    with pytest.raises(ValueError, match="from RUNNING to CHECKPOINTED"):
        world.workloads.settle(world.workload, CHECKPOINTED, (), parked(CHECKPOINTED))
    assert (world.workload.parked, world.workload.home) == (None, (GPU,))
    assert world.told == [(RUNNING, 1)]


def test_an_ended_workload_stays_ended() -> None:
    world = World()
    world.workloads.end(world.workload, EXITED)
    told = list(world.told)
    world.workloads.set_state(world.workload, RUNNING)
    world.workloads.lose(world.workload, LOST_ERROR)
    world.workloads.report(world.workload)
    assert world.told == told == [(RUNNING, 1), (EXITED, 2)]


class WorkloadLife(RuleBasedStateMachine):
    """A workload under every order of operations, losses and ends that the table allows."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.workload, self.workloads = self.world.workload, self.world.workloads

    def is_open(self, *states: WorkloadState.ValueType) -> bool:
        return bool(TRANSITIONS.get(self.workload.state, frozenset()) & set(states))

    @precondition(lambda self: self.is_open(*IN_OPERATION))
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        allowed = sorted(TRANSITIONS[self.workload.state] & IN_OPERATION)
        self.workloads.set_state(self.workload, data.draw(st.sampled_from(allowed)))

    @precondition(lambda self: self.workload.state in IN_OPERATION and self.is_open(*PARKED))
    @rule(data=st.data())
    def park(self, data: st.DataObject) -> None:
        state = data.draw(st.sampled_from(sorted(TRANSITIONS[self.workload.state] & PARKED)))
        if state not in AWAY:
            self.come_back()
        self.workloads.release_lease(self.workload)
        self.workloads.settle(self.workload, state, (), parked(state))

    @precondition(lambda self: self.workload.state in IN_OPERATION)
    @rule()
    def wake(self) -> None:
        self.come_back()
        lease = self.workload.lease or self.world.pool.claim_gpus("w", [GPU])
        self.workloads.wake(self.workload, lease)

    @precondition(lambda self: self.workload.state in IN_OPERATION)
    @rule(state=st.sampled_from(sorted(LOST)))
    def settle_lost(self, state: WorkloadState.ValueType) -> None:
        self.come_back()
        self.workloads.settle(self.workload, state, (), self.workload.parked, home=(GPU,), error=LOST_ERROR)

    def come_back(self) -> None:
        if self.workload.absent:
            self.workloads.begin_again(self.workload, ProcessIdentity(Pid(2**22 + 2), 2))

    @precondition(lambda self: self.workload.state not in AWAY and not self.workload.absent)
    @rule()
    def lose(self) -> None:
        self.workloads.lose(self.workload, LOST_ERROR)

    @rule(state=st.sampled_from(sorted(ENDED)), chance=st.integers(0, 9))
    def end(self, state: WorkloadState.ValueType, chance: int) -> None:
        if not chance and self.workload.state not in ENDED:
            self.workloads.end(self.workload, state)

    @invariant()
    def nothing_is_violated_between_operations(self) -> None:
        if self.workload.state not in IN_OPERATION:
            assert not list(violations(self.workload)), state_text(self.workload.state)

    @invariant()
    def the_pool_agrees(self) -> None:
        leased = [slot.lease for slot in self.world.pool.slots.snapshot().slots if slot.lease]
        assert leased == ([self.workload.lease] if self.workload.lease else [])

    @invariant()
    def each_change_was_told_once_and_in_order(self) -> None:
        told = self.world.told
        assert told[-1] == (self.workload.state, self.workload.generation)
        assert [generation for _, generation in told] == list(range(1, len(told) + 1))


SETTINGS = settings(
    max_examples=60,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.long
def test_the_registry_agrees_with_its_model() -> None:
    run_machine(WorkloadLife, settings=SETTINGS)


@pytest.mark.long
def test_the_registry_agrees_with_its_model_in_a_large_sample() -> None:
    run_machine(seed(environment.seed())(WorkloadLife), settings=settings(SETTINGS, max_examples=1500))
