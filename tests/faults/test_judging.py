"""The judge of the fault suite, before doctored outcomes."""

from collections.abc import Mapping

import pytest
from leasehold.v1 import errors_pb2
from leasehold_worker.commands.progress import Progress
from leasehold_worker.driver.helper_protocol import DriverCall
from leasehold_worker.driver.members import RUNNING, UNKNOWN, WEDGED, Member, MemberOutcome, Phase
from leasehold_worker.errors import OperationError
from leasehold_worker.host.process_files import Pid
from leasehold_worker.host.processes import ProcessIdentity

from .arena import Outcome, Stage
from .calls import miscounted
from .cases import STEPS, CaseFault, Condition, Kind, all_faults
from .reasons import reasons_of
from .verdict import given_up_wrongly, mistold

PID = 4242
HANG = CaseFault("get_state", hang=True)
OUT_OF_MEMORY = CaseFault("restore", error=2)
NOBODY = Stage([])


def outcome(member: MemberOutcome, reason: errors_pb2.ErrorReason.ValueType | None = None) -> Outcome:
    progress = Progress.unheard()
    progress.outcomes.append(("w", member))
    return Outcome(progress, None if reason is None else OperationError(reason, "it failed"))


def member(*calls: DriverCall, state: int = RUNNING) -> MemberOutcome:
    found = MemberOutcome.of(Member(ProcessIdentity(Pid(PID), 1), RUNNING))
    found.phases = [Phase(call, 0.0) for call in calls]
    found.state_after = state  # type: ignore[assignment]
    return found


def counts(*calls: str) -> Mapping[int, Mapping[str, int]]:
    return {PID: {call: calls.count(call) for call in STEPS}}


def test_calls_that_are_made_as_told_are_right() -> None:
    told = outcome(member(DriverCall.LOCK, DriverCall.CHECKPOINT))
    assert not list(miscounted(counts(), counts("lock", "checkpoint"), Kind.SUSPEND, told, whole=True))


@pytest.mark.parametrize("made", ["lock", "lock checkpoint checkpoint", "lock lock checkpoint"])
def test_calls_that_are_made_more_or_less_often_than_told_are_seen(made: str) -> None:
    told = outcome(member(DriverCall.LOCK, DriverCall.CHECKPOINT))
    assert list(miscounted(counts(), counts(*made.split()), Kind.SUSPEND, told, whole=False))


def test_a_call_without_need_is_seen_though_it_is_told() -> None:
    calls = (DriverCall.LOCK, DriverCall.CHECKPOINT, DriverCall.RESTORE)
    made = counts("lock", "checkpoint", "restore")
    assert not list(miscounted(counts(), made, Kind.SUSPEND, outcome(member(*calls)), whole=False))
    assert list(miscounted(counts(), made, Kind.SUSPEND, outcome(member(*calls)), whole=True))


@pytest.mark.parametrize(("state", "fault"), [(UNKNOWN, HANG), (WEDGED, OUT_OF_MEMORY)])
def test_only_a_member_that_was_hit_is_given_up(state: int, fault: CaseFault) -> None:
    told = outcome(member(state=state))
    other = OUT_OF_MEMORY if fault is HANG else HANG
    assert not list(given_up_wrongly(NOBODY, told, {fault: frozenset({PID})}, ()))
    assert list(given_up_wrongly(NOBODY, told, {fault: frozenset({PID + 1})}, ()))
    assert list(given_up_wrongly(NOBODY, told, {other: frozenset({PID})}, ()))


def test_a_reason_that_no_fault_accounts_for_is_seen() -> None:
    told = outcome(member(), errors_pb2.ERROR_REASON_LOCK_TIMEOUT)
    busy = CaseFault("", condition=Condition.BUSY)
    assert not list(mistold(told, {busy: frozenset({PID})}))
    assert list(mistold(told, {OUT_OF_MEMORY: frozenset({PID})}))


def test_every_fault_that_does_harm_has_a_reason() -> None:
    for kind in Kind:
        for fault in all_faults(kind):
            assert reasons_of(fault) or fault.is_harmless(kind), fault
