"""The grid of the fault suite: each call of each operation, with each fault, on each position. Pure."""

import enum
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final


class Kind(enum.StrEnum):
    """An operation of the suite."""

    SUSPEND = "suspend"
    RESTORE = "restore"
    REMAP = "remap"
    SWAP = "swap"


class Victim(enum.StrEnum):
    """Who is killed while a call is under way, if anybody."""

    NOBODY = "nobody"
    HELPER = "helper"
    ROOT = "root"


class Condition(enum.StrEnum):
    """What a process or a GPU is in, rather than what one call answers."""

    BUSY = "busy"
    """The member has work that never drains."""
    MPS = "mps"
    """The member is a client of MPS."""
    MULTICAST = "multicast"
    """The member has a multicast group, at which its checkpoint hangs."""
    PARTIAL_PASSTHROUGH = "partial passthrough"
    """The member is in a container with some of the host's GPUs."""
    PROFILER = "profiler"
    """A profiler is attached to the member."""
    IPC_IMPORTER = "IPC importer"
    """The member has imported memory of another process, and its first restore wedges it."""
    FULL = "full"
    """Something that is no process of the host has taken the GPU's free memory."""
    LOST = "lost"
    """The GPU has fallen off the bus."""
    ECC = "ecc"
    """The GPU counts an uncorrectable memory error, of which no Xid tells. The worker has seen the count."""
    MIG = "mig"
    """The GPU is split into instances."""
    HIDDEN_MEMORY = "hidden memory"
    """NVML lists the GPU's processes, and not what they take."""


GPU_CONDITIONS: Final = frozenset(
    {Condition.FULL, Condition.LOST, Condition.ECC, Condition.MIG, Condition.HIDDEN_MEMORY}
)

QUERIES: Final = ("get_restore_thread_id", "get_state")
STEPS: Final = ("lock", "checkpoint", "restore", "unlock")
ERRORS: Final = (1, 2, 3, 304, 401, 600, 801, 999)
REFUSAL: Final = 801
"""What the driver answers for what it can't checkpoint; some drivers unlock the process, others don't."""

STATES: Final = (0, 1, 2, 3, 4, 5)
CHECKPOINTED: Final = 2
SIZES: Final = (1, 2, 8)
DELAY_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class CaseFault:
    """What goes wrong with a call on one member.

    Attributes:
        call: The driver's call, by the simulated driver's short name. A condition with a call begins while
            that call on the member is under way, one without a call begins before the operation.
        error: What it answers instead of doing anything; 0: nothing.
        state: The state that it leaves. None: its own.
        hang: It does not return.
        crash: It kills the member.
        dies_late: The member dies seconds after the call, rather than at once.
        skip: It says success and does nothing.
        keep_memory: A checkpoint that leaves the memory in use.
        ignore_gpu_pairs: A restore that moves nothing.
        delay_s: It takes longer, and nothing is wrong.
        victim: Who is killed while it is under way.
        always: It goes wrong each time, not only once.
        condition: What the member, or its GPU, is in until the operation has ended.
        destination: The condition is that of the GPU where the member is to go, rather than where it is.
    """

    call: str
    error: int = 0
    state: int | None = None
    hang: bool = False
    crash: bool = False
    dies_late: bool = False
    skip: bool = False
    keep_memory: bool = False
    ignore_gpu_pairs: bool = False
    delay_s: float = 0.0
    victim: Victim = Victim.NOBODY
    always: bool = False
    condition: Condition | None = None
    destination: bool = False

    def is_harmless(self, kind: Kind) -> bool:
        """Whether the operation must succeed nevertheless."""
        if self.condition is Condition.ECC:
            # A workload can always leave a GPU that is ill, but a swap would give the GPU to another one.
            return not self.destination and kind is not Kind.SWAP
        return self.condition is None and self.delay_s > 0 and self.victim is Victim.NOBODY

    @property
    def sort(self) -> str:
        """What goes wrong, whatever the number of the error or state."""
        if self.condition is not None:
            return f"{self.condition} {'there' if self.destination else 'here'}"
        if self.victim is not Victim.NOBODY:
            return f"kill {self.victim}"
        named = ("hang", "dies_late", "crash", "skip", "keep_memory", "ignore_gpu_pairs", "delay_s")
        found = [name for name in named if getattr(self, name)]
        unlocks = self.error and self.state is not None
        return (
            "refusal that unlocks" if unlocks else found[0] if found else "error" if self.error else "state"
        )

    @property
    def is_deadly(self) -> bool:
        """Whether a member may die of it."""
        return self.crash or self.victim is Victim.ROOT

    @property
    def misplaces(self) -> bool:
        """Whether the driver restores the member on another GPU than it was told, or denies a restore.

        In a swap that is the GPU of the other workload. The worker learns of it from NVML, after the bytes
        were overwritten: no call tells where a CHECKPOINTED process will go.
        """
        return self.call == "restore" and (self.ignore_gpu_pairs or self.state == CHECKPOINTED)


@dataclass(frozen=True, slots=True)
class Case:
    """One operation with one fault.

    Attributes:
        kind: The operation.
        size: Members of the first workload; a swap has a second one with one member.
        position: Which member the fault is for; ``size`` is that of the second workload.
        sequential: Whether members are called one after the other.
        fault: What goes wrong.
    """

    kind: Kind
    size: int
    position: int
    sequential: bool
    fault: CaseFault


def faults(call: str) -> Iterator[CaseFault]:
    """Every fault of one call."""
    for always in (False, True):
        for error in ERRORS:
            yield CaseFault(call, error=error, always=always)
        yield CaseFault(call, hang=True, always=always)
        yield CaseFault(call, delay_s=DELAY_S, always=always)
    yield CaseFault(call, crash=True)
    if call in STEPS:
        yield CaseFault(call, crash=True, dies_late=True)
    for victim in (Victim.HELPER, Victim.ROOT):
        yield CaseFault(call, delay_s=DELAY_S, victim=victim)
    # A query that always lies leaves nothing to go by.
    yield CaseFault(call, skip=True)
    if call in QUERIES:
        return
    yield CaseFault(call, skip=True, always=True)
    for state in STATES:
        yield CaseFault(call, state=state)
        yield CaseFault(call, state=state, always=True)
    if call == "checkpoint":
        yield CaseFault(call, error=REFUSAL, state=0)
        yield CaseFault(call, error=REFUSAL, state=0, always=True)
        yield CaseFault(call, keep_memory=True)
        yield CaseFault(call, keep_memory=True, always=True)
    if call == "restore":
        yield CaseFault(call, ignore_gpu_pairs=True)
        yield CaseFault(call, ignore_gpu_pairs=True, always=True)


def conditions(kind: Kind) -> Iterator[CaseFault]:
    """Every condition that an operation can meet: before it begins, and while a call is under way."""
    if kind is not Kind.RESTORE:
        yield CaseFault("", condition=Condition.BUSY)
        yield CaseFault("", condition=Condition.MPS)
        yield CaseFault("lock", condition=Condition.MPS)
        yield CaseFault("", condition=Condition.MULTICAST)
        yield CaseFault("", condition=Condition.PARTIAL_PASSTHROUGH)
        yield CaseFault("", condition=Condition.PROFILER)
        for condition in (Condition.LOST, Condition.ECC, Condition.MIG, Condition.HIDDEN_MEMORY):
            yield CaseFault("", condition=condition)
        for condition in (Condition.LOST, Condition.MIG):
            yield CaseFault("lock", condition=condition)
    if kind is not Kind.SUSPEND:
        yield CaseFault("", condition=Condition.IPC_IMPORTER)
        for condition in (
            Condition.FULL,
            Condition.LOST,
            Condition.ECC,
            Condition.MIG,
            Condition.HIDDEN_MEMORY,
        ):
            yield CaseFault("", condition=condition, destination=True)
        for condition in (Condition.FULL, Condition.LOST):
            yield CaseFault("restore", condition=condition, destination=True)


def all_faults(kind: Kind) -> Iterator[CaseFault]:
    """Everything that can go wrong with an operation."""
    for call in (*QUERIES, *STEPS):
        yield from faults(call)
    yield from conditions(kind)


def regressions() -> list[Case]:
    """A case for each defect of the worker that only large samples found."""
    lost = CaseFault("restore", condition=Condition.LOST, destination=True)
    gone = CaseFault("", condition=Condition.LOST)
    late = CaseFault("lock", crash=True, dies_late=True)
    lost_cases = [Case(kind, 2, 1, sequential=True, fault=lost) for kind in (Kind.RESTORE, Kind.SWAP)]
    return [*lost_cases, *(Case(Kind.SUSPEND, 1, 0, sequential=False, fault=fault) for fault in (gone, late))]


def positions(kind: Kind, size: int) -> list[int]:
    """First, middle and last member, and the other workload's."""
    chosen = sorted({0, size // 2, size - 1})
    return [*chosen, size] if kind is Kind.SWAP else chosen


def grid() -> list[Case]:
    """Every case, in a fixed order."""
    return [
        Case(kind, size, position, sequential, fault)
        for kind in Kind
        for size in SIZES
        for position in positions(kind, size)
        for sequential in (False, True)
        if size > 1 or not sequential
        for fault in all_faults(kind)
    ]


def one_of_each(seed: int) -> list[Case]:
    """One case for each sort of fault of each call, mostly of few members. The seed fixes cases and order."""
    chance = random.Random(seed)
    alike: dict[tuple[str, str], list[Case]] = {}
    for case in grid():
        alike.setdefault((case.fault.call, case.fault.sort), []).append(case)
    cases = [chance.choices(cases, [1 / case.size**2 for case in cases])[0] for cases in alike.values()]
    return chance.sample(cases, len(cases))


def sample(count: int, seed: int, kind: Kind | None = None) -> list[Case]:
    """So many cases of the grid, or all, in an order that the seed fixes; of one operation or of all."""
    cases = [case for case in grid() if kind in (None, case.kind)]
    random.Random(seed).shuffle(cases)
    return cases[:count]
