"""Whether what an operation says is what is: the simulated driver is looked at, not the worker's word."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from leasehold.v1 import lease_pb2, workload_pb2
from leasehold.v1.errors_pb2 import ErrorReason
from leasehold.v1.workload_pb2 import MemberState
from leasehold_simgpu import ProcessState
from leasehold_worker.driver.members import CHECKPOINTED, FAILED, GONE, LOCKED, RUNNING, UNKNOWN, WEDGED
from leasehold_worker.host.processes import is_alive
from leasehold_worker.workloads.invariants import violations
from leasehold_worker.workloads.states import ENDED

from .arena import Actor, Arena, Outcome, Stage
from .cases import CaseFault, Kind
from .reasons import may_be_unknown, may_be_wedged, reasons_of_all

W_RUNNING: Final = workload_pb2.WORKLOAD_STATE_RUNNING
W_SUSPENDED: Final = workload_pb2.WORKLOAD_STATE_SUSPENDED
W_WEDGED: Final = workload_pb2.WORKLOAD_STATE_WEDGED
W_UNKNOWN: Final = workload_pb2.WORKLOAD_STATE_UNKNOWN

NAMES: Final = {
    ProcessState.RUNNING: RUNNING,
    ProcessState.LOCKED: LOCKED,
    ProcessState.CHECKPOINTED: CHECKPOINTED,
    ProcessState.FAILED: FAILED,
    ProcessState.CHECKPOINTING: workload_pb2.MEMBER_STATE_CHECKPOINTING,
    ProcessState.RESTORING: workload_pb2.MEMBER_STATE_RESTORING,
}


def name_of(outcome: Outcome, stage: Stage) -> str:
    """One word for how a case ended."""
    states = {actor.running.state for actor in stage.actors}
    if outcome.error is None:
        return "done"
    if states & ENDED:
        return "ended"
    if W_WEDGED in states:
        return "wedged"
    if W_UNKNOWN in states:
        return "unknown"
    if W_SUSPENDED in states:
        return "parked"
    return "undone" if any(o.phases for _, o in outcome.progress.outcomes) else "refused"


Hit = Mapping[CaseFault, frozenset[int]]
"""The faults that were in the way, with the processes that each was for."""


def wrong(
    arena: Arena,
    stage: Stage,
    kind: Kind,
    outcome: Outcome,
    hit: Hit,
    given_up: Collection[int] = (),
    *,
    may_fail: bool,
) -> Iterator[str]:
    """Everything that is not as it should be, or not as it was said.

    Args:
        arena: Where it happened.
        stage: The workloads.
        kind: What was asked for.
        outcome: What was said.
        hit: What was in the way. Members that were killed may have died after they were last looked at.
        given_up: Processes of workloads that were UNKNOWN or WEDGED before.
        may_fail: Whether it may have been refused although nothing was in the way.
    """
    deadly = any(fault.is_deadly for fault in hit)
    yield from wrong_places(arena, stage)
    yield from _wrong_members(arena, outcome, deadly=deadly)
    yield from given_up_wrongly(stage, outcome, hit, given_up)
    if outcome.error is None:
        yield from _not_done(arena, stage, kind, deadly=deadly)
    elif not may_fail:
        yield from mistold(outcome, hit)
    for actor in stage.actors:
        assert actor.members is not None
        if any(actor.members.corrupt(member) for member in range(actor.size)):
            yield f"corrupt: {actor.members.describe()}"


def wrong_places(arena: Arena, stage: Stage) -> Iterator[str]:
    """What is not as state and lease of a workload say."""
    for actor in stage.actors:
        yield from _wrong_state(arena, actor)
        yield from _wrong_leases(arena, actor, [other for other in stage.actors if other is not actor])


def given_up(stage: Stage) -> frozenset[int]:
    """The processes of workloads that are UNKNOWN or WEDGED."""
    lost = [actor for actor in stage.actors if actor.running.state in (W_UNKNOWN, W_WEDGED)]
    return frozenset(pid for actor in lost for pid in actor.pids)


def concerned(stage: Stage, kind: Kind) -> Sequence[Actor]:
    """The actors that an operation is about."""
    return stage.actors if kind in (Kind.REMAP, Kind.SWAP) else stage.actors[:1]


def locked(arena: Arena, stage: Stage) -> list[int]:
    """Live members that are left LOCKED."""
    return [
        process.pid
        for actor in stage.actors
        for process in arena.live(actor)
        if process.state is ProcessState.LOCKED
    ]


def _wrong_state(arena: Arena, actor: Actor) -> Iterator[str]:
    workload = actor.running
    states = {process.state for process in arena.live(actor)}
    if workload.state == W_RUNNING and states - {ProcessState.RUNNING}:
        yield f"{actor.name} is said to run, and its members are {states}"
    if workload.state == W_SUSPENDED and states - {ProcessState.CHECKPOINTED}:
        yield f"{actor.name} is said to be parked, and its members are {states}"
    yield from violations(workload)
    if workload.state not in {W_RUNNING, W_SUSPENDED, W_UNKNOWN, W_WEDGED, *ENDED}:
        yield f"{actor.name} was left in state {workload.state}"


def _wrong_leases(arena: Arena, actor: Actor, others: Sequence[Actor]) -> Iterator[str]:
    """Memory on GPUs that are not leased; a member that was given up may be left with the other of a swap."""
    workload = actor.running
    slots = arena.pool.slots.snapshot().slots
    mine = {slot.gpu_uuid for slot in slots if slot.lease and slot.lease.workload_id == workload.workload_id}
    held = set(workload.lease.gpu_uuids) if workload.lease else set()
    if mine != held:
        yield f"{actor.name} holds {held}, and the pool says {mine}"
    for slot in slots:
        if slot.gpu_uuid in mine and slot.state != lease_pb2.SLOT_STATE_LEASED:
            yield f"{slot.gpu_uuid} was left {lease_pb2.SlotState.Name(slot.state)}"
    allowed = set(mine)
    if workload.state in (W_UNKNOWN, W_WEDGED):
        allowed |= {uuid for other in others if other.running.lease for uuid in other.running.lease.gpu_uuids}
    for process in arena.live(actor):
        if process.resident and (used := set(process.gpu_bytes)) - allowed:
            yield f"process {process.pid} of {actor.name} is on {used}, and leased are {mine}"


def _wrong_members(arena: Arena, outcome: Outcome, *, deadly: bool) -> Iterator[str]:
    """Members that are not where their outcome says."""
    for _, member in outcome.progress.outcomes:
        pid = member.member.identity.pid
        process = arena.host.process(pid)
        if process is None:
            if member.state_after != GONE and not deadly:
                yield f"member {pid} is gone, and said to be {member.state_after}"
        elif member.state_after not in (UNKNOWN, WEDGED, NAMES.get(process.state)):
            yield f"member {pid} is {process.state.name}, and said to be {member.state_after}"


def given_up_wrongly(stage: Stage, outcome: Outcome, hit: Hit, before: Collection[int]) -> Iterator[str]:
    """Members and workloads that are called UNKNOWN or WEDGED, which no fault of theirs accounts for."""
    excused: dict[int, set[int]] = {UNKNOWN: set(before), WEDGED: set(before)}
    for fault, pids in hit.items():
        excused[UNKNOWN] |= pids if may_be_unknown(fault) else set()
        excused[WEDGED] |= pids if may_be_wedged(fault) else set()
    for _, member in outcome.progress.outcomes:
        pid, state = member.member.identity.pid, member.state_after
        if state in excused and pid not in excused[state]:
            yield f"member {pid} is given up as {MemberState.Name(state)} without a fault that explains it"
    concerned_pids = frozenset(before).union(*hit.values())
    for actor in stage.actors:
        if actor.running.state in (W_UNKNOWN, W_WEDGED) and concerned_pids.isdisjoint(actor.pids):
            yield f"{actor.name} is given up in state {actor.running.state}, and nothing was wrong with it"


def mistold(outcome: Outcome, hit: Hit) -> Iterator[str]:
    """Reasons that no fault accounts for."""
    allowed = reasons_of_all(hit)
    errors = [outcome.error, *(member.error for _, member in outcome.progress.outcomes)]
    for error in errors:
        if error is not None and error.reason not in allowed:
            yield f"told as {ErrorReason.Name(error.reason)}: {error.message}"


def _not_done(arena: Arena, stage: Stage, kind: Kind, *, deadly: bool) -> Iterator[str]:
    """What an operation that says it succeeded has not done."""
    wanted = W_SUSPENDED if kind is Kind.SUSPEND else W_RUNNING
    for actor in concerned(stage, kind):
        died_since = deadly and actor.running.state in ENDED and not is_alive(actor.running.root)
        if actor.running.state != wanted and not died_since:
            yield f"done, and {actor.name} is in state {actor.running.state}"
        for process in arena.live(actor):
            if process.resident == (kind is Kind.SUSPEND):
                yield f"done, and memory of process {process.pid} is in the wrong place"
