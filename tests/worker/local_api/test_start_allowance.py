"""The allowance for workloads that begin on a host: fair, and below the coordinator's bound in all."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from leasehold.v1 import errors_pb2
from leasehold.v1.workload_pb2 import Workload
from leasehold_coordinator.core.allowance import Allowance
from leasehold_coordinator.fleet import report_bounds
from leasehold_worker.errors import OperationError
from leasehold_worker.host.peers import Peer
from leasehold_worker.host.processes import identify
from leasehold_worker.local_api.start_allowance import STARTS_BURST, STARTS_PER_S, StartAllowance, units

FIRST_UID = os.geteuid() + 1


def peer(uid: int) -> Peer:
    identity = identify(os.getpid())
    assert identity is not None
    return Peer(identity, uid, f"user-{uid}")


PEERS = [peer(0), *map(peer, range(FIRST_UID, FIRST_UID + 9))]


def greedy(allowance: StartAllowance, who: Peer, now_s: float, amount: float = 1.0) -> tuple[int, float]:
    """Begins workloads until one is refused. Returns their number, and the told time in seconds."""
    for number in range(10**4):
        try:
            allowance.take(who, amount, now_s)
        except OperationError as refused:
            return number, float(refused.metadata["retry_after_s"])
    raise AssertionError("nothing was refused")


def test_each_user_gets_half_of_what_others_leave_and_root_has_a_part_of_its_own() -> None:
    allowance = StartAllowance(800, 1)
    assert [greedy(allowance, who, 0.0)[0] for who in PEERS[1:4]] == [350, 175, 87]
    assert greedy(allowance, PEERS[0], 0.0)[0] == 94, "half of 800 - 612"
    assert greedy(allowance, PEERS[4], 0.0)[0] == 0, "root has used the rest of the users' part"
    allowance = StartAllowance(800, 1)
    for who in PEERS[1:]:
        greedy(allowance, who, 0.0)
    assert greedy(allowance, PEERS[0], 0.0)[0] >= 50


def test_the_told_time_is_enough_and_debtors_share_the_rate() -> None:
    allowance = StartAllowance(80, 0.5)
    for who in PEERS[1:4]:
        greedy(allowance, who, 0.0)
    _, wait_s = greedy(allowance, PEERS[1], 0.0)
    with pytest.raises(OperationError, match=r"try again in \d+ s") as refused:
        allowance.take(PEERS[1], 1.0, 0.0)
    assert refused.value.reason == errors_pb2.ERROR_REASON_INSUFFICIENT_RESOURCES
    allowance.take(PEERS[1], 1.0, wait_s)
    shared = StartAllowance(80, 0.5)
    for who in PEERS[1:3]:
        greedy(shared, who, 0.0)
    got = [0, 0]
    for second in range(1, 2000):
        for index, who in enumerate(PEERS[1:3]):
            got[index] += greedy(shared, who, float(second))[0]
    assert abs(got[0] - got[1]) < 30
    assert sum(got) == pytest.approx(1000, abs=30)


def test_a_large_record_counts_as_several() -> None:
    assert units(0) == units(3000) == 1
    for size in (100, 4_096, 70_000):
        record = Workload(workload_id="w", name="x" * size)
        assert units(record.ByteSize()) >= report_bounds._units(record)


STEPS = st.lists(
    st.tuples(st.integers(0, len(PEERS) - 1), st.sampled_from([0.0, 1.0, 60.0, 3600.0, 86_400.0])),
    min_size=1,
    max_size=40,
)


@pytest.mark.long
@settings(deadline=None)
@given(steps=STEPS, restart=st.integers(0, 40), amount=st.sampled_from([1.0, 3.0, 17.5]))
def test_all_users_together_stay_below_the_coordinators_bound(
    steps: list[tuple[int, float]], restart: int, amount: float
) -> None:
    """Greedy users in any order and at any pace, and one restart of the worker, which forgets all debts."""
    coordinator = Allowance(report_bounds.NEW_PER_S, report_bounds.NEW_BURST)
    allowance, now_s = StartAllowance(STARTS_BURST, STARTS_PER_S), 0.0
    for number, (who, pause_s) in enumerate(steps):
        if number == restart:
            allowance = StartAllowance(STARTS_BURST, STARTS_PER_S)
        now_s += pause_s
        count, _ = greedy(allowance, PEERS[who], now_s, amount)
        assert not coordinator.take(count * amount, now_s), f"step {number}"
