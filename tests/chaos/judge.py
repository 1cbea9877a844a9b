"""What must be true when everything has come to rest. Values only, so that the judge can be judged."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from leasehold.v1 import command_pb2, workload_pb2

SUCCEEDED = command_pb2.COMMAND_STATE_SUCCEEDED
ENDED = frozenset(
    {
        SUCCEEDED,
        command_pb2.COMMAND_STATE_FAILED,
        command_pb2.COMMAND_STATE_REJECTED,
        command_pb2.COMMAND_STATE_CANCELLED,
        command_pb2.COMMAND_STATE_EXPIRED,
    }
)
RUNNING, SUSPENDED = workload_pb2.WORKLOAD_STATE_RUNNING, workload_pb2.WORKLOAD_STATE_SUSPENDED
GONE = frozenset({workload_pb2.WORKLOAD_STATE_EXITED, workload_pb2.WORKLOAD_STATE_FAILED})
AFTER = {"run": RUNNING, "suspend": SUSPENDED, "restore": RUNNING, "remap": RUNNING, "swap": RUNNING}
"""The state in which an operation that succeeded leaves its workload."""


UNDONE = ENDED - {SUCCEEDED, command_pb2.COMMAND_STATE_REJECTED}
"""How commands end that may have begun."""

STEPS = ("lock", "checkpoint", "restore", "unlock")
MOVES = {
    ("suspend", RUNNING): STEPS[:2],
    ("restore", SUSPENDED): STEPS[2:],
    ("remap", RUNNING): STEPS,
    ("swap", RUNNING): STEPS,
}
"""The calls of the driver that a command makes, once each, on a workload in a state. Others make none."""

CALLS_OF_WHAT_FAILS = 3
"""How often a command that did not succeed makes one call at most: there, back, and back again."""


@dataclass(frozen=True)
class Asked:
    """A command that was asked for, and how it ended.

    Attributes:
        kind: run, suspend, restore, remap, swap (which is one command of two workloads) or stop.
        command_ids: Every command that requests with this id were answered with: one.
        state: As the coordinator has it at the end.
        reason: Why it did not succeed; 0 where it did.
        ended_at: When it ended, by the coordinator's clock; one after the other for one workload.
    """

    kind: str
    command_ids: frozenset[str]
    state: int
    reason: int = 0
    ended_at: int = 0


@dataclass(frozen=True)
class Seen:
    """A workload, as each of those who know of it has it.

    Attributes:
        name: Its name.
        asked: Its commands, in order.
        state: Of the workload, as the coordinator has it.
        lease: GPUs of its lease, as its status has it.
        listed: GPUs whose lease names it, in the coordinator's list.
        starts: How often its program began.
        driver_state: What the driver says of its process. Empty: it is gone.
        memory: GPUs on which the driver has its memory.
        counts: What it has printed.
        last_gpu: The GPU that it printed last.
        calls: How often each call of the checkpoint API came for its process. None: it is gone.
        worker_starts: How often its worker was started anew meanwhile.
    """

    name: str
    asked: Sequence[Asked]
    state: int
    lease: frozenset[str] = frozenset()
    listed: frozenset[str] = frozenset()
    starts: int = 1
    driver_state: str = ""
    memory: frozenset[str] = frozenset()
    counts: Sequence[int] = ()
    last_gpu: str = ""
    calls: Mapping[str, int] | None = None
    worker_starts: int = 0


@dataclass
class Verdict:
    """What was found.

    Attributes:
        asked: Commands that were asked for.
        done_once: Those that ended once, and agree with the world.
        refused: Those that were refused, or failed, and nothing was done.
        unknown_at_end: Those that have not ended.
        lost: Those whose outcome disagrees with the world, or that nobody knows.
        doubled: Programs that were started twice, and requests that made two commands.
        wrong: Everything that is not as it must be, in words.
    """

    asked: int = 0
    done_once: int = 0
    refused: int = 0
    unknown_at_end: int = 0
    lost: int = 0
    doubled: int = 0
    wrong: list[str] = field(default_factory=list)


def judge(workloads: Sequence[Seen]) -> Verdict:
    """Compares what each side says."""
    verdict = Verdict()
    for seen in workloads:
        _judge_commands(seen, verdict)
        _judge_calls(seen, verdict)
        _judge_world(seen, verdict)
    return verdict


def _judge_commands(seen: Seen, verdict: Verdict) -> None:
    for asked in seen.asked:
        verdict.asked += 1
        if len(asked.command_ids) > 1:
            verdict.doubled += 1
            verdict.wrong.append(f"{seen.name}: {asked.kind} became {sorted(asked.command_ids)}")
        elif asked.state not in ENDED:
            verdict.unknown_at_end += 1
            verdict.wrong.append(f"{seen.name}: {asked.kind} has not ended")
        elif asked.state == SUCCEEDED:
            verdict.done_once += 1
        else:
            verdict.refused += 1
    started = any(asked.kind == "run" and asked.state == SUCCEEDED for asked in seen.asked)
    # A run that was cancelled or took too long is undone: its program may have begun, and is gone.
    undone = seen.state in GONE and any(a.kind == "run" and a.state in UNDONE for a in seen.asked)
    if seen.starts > 1:
        verdict.doubled += 1
        verdict.wrong.append(f"{seen.name}: its program began {seen.starts} times")
    if started != bool(seen.starts) and not undone:
        verdict.lost += 1
        told = "SUCCEEDED" if started else "not done"
        verdict.wrong.append(f"{seen.name}: run is {told}, and its program began {seen.starts} times")
    last = max(seen.asked, key=lambda asked: asked.ended_at, default=None)
    if last is not None and last.state == SUCCEEDED:
        wanted = {AFTER[last.kind]} if last.kind in AFTER else GONE
        if seen.state not in wanted:
            verdict.lost += 1
            state = workload_pb2.WorkloadState.Name(workload_pb2.WorkloadState.ValueType(seen.state))
            verdict.wrong.append(f"{seen.name}: {last.kind} SUCCEEDED, and it is {state}")


def _judge_calls(seen: Seen, verdict: Verdict) -> None:
    """Compares the driver's calls with the commands: those that succeeded account for each of them.

    A command that was undone or interrupted may have made calls too, and some more on the way back. A worker
    that died in a call makes it again when it settles the command, which may succeed.
    """
    if seen.calls is None:
        return
    needed, spare, state = Counter[str](), seen.worker_starts, RUNNING
    for asked in sorted(seen.asked, key=lambda asked: asked.ended_at):
        if asked.state != SUCCEEDED:
            spare += CALLS_OF_WHAT_FAILS if asked.state in UNDONE else 0
            continue
        if (asked.kind, state) in MOVES:
            needed.update(MOVES[asked.kind, state])
            state = AFTER[asked.kind]
    for call in STEPS:
        made = seen.calls[call]
        if made < needed[call]:
            verdict.lost += 1
            verdict.wrong.append(
                f"{seen.name}: {needed[call]} calls of {call} are told, and {made} were made"
            )
        elif made > needed[call] + spare:
            verdict.doubled += 1
            verdict.wrong.append(
                f"{seen.name}: {made} calls of {call}, and {needed[call]} to {needed[call] + spare} are told"
            )


def _judge_world(seen: Seen, verdict: Verdict) -> None:
    def expect(holds: bool, what: str) -> None:
        if not holds:
            verdict.wrong.append(f"{seen.name}: {what}")

    expect(seen.lease == seen.listed, f"its lease is {set(seen.lease)}, and listed {set(seen.listed)}")
    expect(seen.driver_state != "LOCKED", "it is left LOCKED")
    wanted = list(range(seen.counts[0], seen.counts[0] + len(seen.counts))) if seen.counts else []
    expect(list(seen.counts) == wanted, "counts are missing")
    match seen.state:
        case workload_pb2.WORKLOAD_STATE_RUNNING:
            expect(seen.driver_state in ("RUNNING", "-"), f"it runs, and the driver says {seen.driver_state}")
            expect(seen.memory <= seen.lease, f"it has memory on {set(seen.memory)}, and not a lease there")
            expect(bool(seen.lease), "it runs without a lease")
            expect({seen.last_gpu} <= seen.lease, f"it counts on {seen.last_gpu}, and has {set(seen.lease)}")
        case workload_pb2.WORKLOAD_STATE_SUSPENDED:
            expect(seen.driver_state == "CHECKPOINTED", f"it is parked, and {seen.driver_state}")
            expect(not seen.lease, "it is parked, and has a lease")
        case state if state in GONE:
            expect(not seen.driver_state, f"it has ended, and its process is {seen.driver_state}")
            expect(not seen.lease, "it has ended, and has a lease")
        case _:
            name = workload_pb2.WorkloadState.Name(workload_pb2.WorkloadState.ValueType(seen.state))
            expect(False, f"it is {name}")
