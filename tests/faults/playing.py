"""One case from its beginning to its verdict."""

from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Final

import trio
from leasehold.v1 import errors_pb2, workload_pb2
from leasehold_worker.host.processes import identify
from leasehold_worker.workloads.states import RUNNING, SUSPENDED, UNKNOWN

from .arena import Actor, Arena, Stage
from .calls import counts, miscounted
from .cases import SIZES, Case, CaseFault, Kind
from .injection import inject
from .verdict import given_up, locked, name_of, wrong, wrong_places

DEATH_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Act:
    """What came of one operation.

    Attributes:
        name: How it ended.
        succeeded: Whether it said so.
        problems: What is wrong.
        left_locked: Members that were left LOCKED.
        miscounted: The driver was called more or less often than the operation says.
        misplaced: The driver may have another GPU in mind than it said: see `CaseFault.misplaces`.
        lost_by_driver: So two workloads may have overwritten each other.
    """

    name: str
    succeeded: bool
    problems: list[str]
    left_locked: list[int]
    miscounted: bool
    misplaced: bool = False
    lost_by_driver: bool = False


@dataclass(slots=True)
class Tally:
    """What came of many cases: how they ended, and everything that must not have happened.

    Attributes:
        outcomes: How they ended.
        done_once: Operations that succeeded, and called the driver as often as they say.
        left_locked: Members that were left LOCKED.
        corrupt: Workloads whose memory was not what they had written.
        problems: Everything that is wrong.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    done_once: int = 0
    left_locked: int = 0
    corrupt: int = 0
    problems: list[str] = field(default_factory=list)

    def add(self, case: object, act: Act) -> None:
        """Counts one case."""
        self.outcomes[act.name] += 1
        self.done_once += act.succeeded and not act.miscounted
        self.left_locked += len(act.left_locked)
        self.corrupt += sum("corrupt" in problem for problem in act.problems)
        self.problems += [f"{case}: {problem}" for problem in act.problems]
        self.problems += [f"{case}: process {pid} was left LOCKED" for pid in act.left_locked]


def make_stages(gpu_uuids: Sequence[str]) -> dict[tuple[Kind, int], Stage]:
    """The stages of an arena by operation and size. They share no GPU; 16 are needed."""
    left = iter(gpu_uuids)
    stages: dict[tuple[Kind, int], Stage] = {}
    for size in SIZES:
        width = min(size, 2)
        home, spare = ([next(left) for _ in range(width)] for _ in range(2))
        alone = Stage([Actor(f"alone{size}", size, home)], spare)
        stages |= {(kind, size): alone for kind in (Kind.SUSPEND, Kind.RESTORE, Kind.REMAP)}
        first, second = Actor(f"first{size}", size, [next(left)]), Actor(f"second{size}", 1, [next(left)])
        stages[Kind.SWAP, size] = Stage([first, second])
    return stages


async def play(arena: Arena, stage: Stage, case: Case, tally: Tally) -> None:
    """Plays one case on a stage, and counts what came of it."""
    await arena.bring_home(stage)
    set_order(stage, sequential=case.sequential)
    if case.kind is Kind.RESTORE:
        parked = await act(arena, stage, Kind.SUSPEND, [])
        if not parked.succeeded:
            problems = [f"{problem}; {describe(arena, stage)}" for problem in parked.problems]
            tally.add(case, replace(parked, problems=problems))
            return
    done = await act(arena, stage, case.kind, [(case.fault, case.position)])
    tally.add(case, await recovered(arena, stage, case.kind, done))


def set_order(stage: Stage, *, sequential: bool) -> None:
    """Says how the members of a stage's workloads are called from now on."""
    order = workload_pb2.MEMBER_ORDER_SEQUENTIAL if sequential else workload_pb2.MEMBER_ORDER_PARALLEL
    for actor in stage.actors:
        actor.running.spec.member_order = order


async def act(
    arena: Arena,
    stage: Stage,
    kind: Kind,
    faults: Sequence[tuple[CaseFault, int]],
    *,
    may_fail: bool = False,
) -> Act:
    """Does an operation with faults in its way, each on one member, and looks at what is left.

    Args:
        arena: Where.
        stage: The workloads.
        kind: What to do.
        faults: What goes wrong, and on which member.
        may_fail: Whether it may be refused although nothing goes wrong.
    """
    deadly = any(fault.is_deadly for fault, _ in faults)
    called, lost = counts(arena, stage), given_up(stage)
    hit: dict[CaseFault, frozenset[int]] = {}
    async with AsyncExitStack() as stack:
        for fault, position in faults:
            pids = await stack.enter_async_context(inject(arena, kind, fault, stage, position))
            hit[fault] = hit.get(fault, frozenset()) | pids
        outcome = await arena.perform(kind, stage)
        called_after = counts(arena, stage)
    if deadly:
        await _wait_deaths(stage)
    problems = list(wrong(arena, stage, kind, outcome, hit, lost, may_fail=may_fail))
    whole = not may_fail and outcome.error is None and all(fault.is_harmless(kind) for fault, _ in faults)
    doubled = list(miscounted(called, called_after, kind, outcome, whole=whole))
    problems += doubled
    if outcome.error is not None and not may_fail and all(fault.is_harmless(kind) for fault, _ in faults):
        problems.append(f"failed although nothing was wrong: {outcome.error}")
    misplaced = any(fault.misplaces for fault, _ in faults)
    lost_by_driver = misplaced and len(stage.actors) > 1
    if lost_by_driver:
        problems = _but_for_bytes(problems)
    return Act(
        name_of(outcome, stage),
        outcome.error is None,
        problems,
        locked(arena, stage),
        miscounted=bool(doubled),
        misplaced=misplaced,
        lost_by_driver=lost_by_driver,
    )


async def recovered(arena: Arena, stage: Stage, kind: Kind, done: Act) -> Act:
    """The same act, and what is wrong with workloads that could not be woken or do not count on after it."""
    problems = list(done.problems)
    for actor in stage.actors:
        is_parked_as_wanted = kind is Kind.SUSPEND and done.succeeded
        if not is_parked_as_wanted and (
            problem := await _not_recovered(arena, actor, misplaced=done.misplaced)
        ):
            problems.append(f"{problem}; {describe(arena, stage)}")
    problems += wrong_places(arena, stage)
    return replace(done, problems=_but_for_bytes(problems) if done.lost_by_driver else problems)


def _but_for_bytes(problems: Sequence[str]) -> list[str]:
    return [problem for problem in problems if not problem.startswith("corrupt")]


def describe(arena: Arena, stage: Stage) -> str:
    """Every live member, with the calls that came for it."""
    live = [process for actor in stage.actors for process in arena.live(actor)]
    return "; ".join(f"{process.pid} {process.state.name} {dict(process.calls)}" for process in live)


async def _wait_deaths(stage: Stage) -> None:
    """Waits until a workload whose first process was killed has been cleared away."""
    for actor in stage.actors:
        if identify(actor.running.root.pid) != actor.running.root:
            with trio.move_on_after(DEATH_TIMEOUT_S):
                await actor.running.ended.wait()


async def _not_recovered(arena: Arena, actor: Actor, *, misplaced: bool) -> str | None:
    """Wakes what was left parked or unknown, now that nothing is in the way. What is wrong still, if so."""
    workload = actor.running
    if workload.state in (SUSPENDED, UNKNOWN) and workload.returncode is None:
        was = workload_pb2.WorkloadState.Name(workload.state)
        error = await arena.wake(actor)
        if misplaced and error is not None and error.reason == errors_pb2.ERROR_REASON_REMAP_NOT_APPLIED:
            # NVML has told by now where the driver restores it, so that the next attempt succeeds.
            error = await arena.wake(actor)
        if error is not None:
            return f"{actor.name} was {was} and can't be restored: {error}"
    if workload.state == RUNNING and workload.returncode is None and not await arena.progresses(actor):
        return f"{actor.name} runs and stands still: {actor.members and actor.members.describe()}"
    assert actor.members is not None
    corrupt = any(actor.members.corrupt(member) for member in range(actor.size))
    return f"corrupt: {actor.members.describe()}" if corrupt else None
