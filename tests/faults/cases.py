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


QUERIES: Final = ("get_restore_thread_id", "get_state")
STEPS: Final = ("lock", "checkpoint", "restore", "unlock")
ERRORS: Final = (1, 2, 3, 304, 401, 600, 801, 999)
STATES: Final = (0, 1, 2, 3, 4, 5)
CHECKPOINTED: Final = 2
SIZES: Final = (1, 2, 8)
DELAY_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class CaseFault:
    """What goes wrong with a call on one member.

    Attributes:
        call: The driver's call, by the simulated driver's short name.
        error: What it answers instead of doing anything; 0: nothing.
        state: The state that it leaves. None: its own.
        hang: It does not return.
        crash: It kills the member.
        skip: It says success and does nothing.
        keep_memory: A checkpoint that leaves the memory in use.
        ignore_gpu_pairs: A restore that moves nothing.
        delay_s: It takes longer, and nothing is wrong.
        victim: Who is killed while it is under way.
        always: It goes wrong each time, not only once.
    """

    call: str
    error: int = 0
    state: int | None = None
    hang: bool = False
    crash: bool = False
    skip: bool = False
    keep_memory: bool = False
    ignore_gpu_pairs: bool = False
    delay_s: float = 0.0
    victim: Victim = Victim.NOBODY
    always: bool = False

    @property
    def is_harmless(self) -> bool:
        """Whether the operation must succeed nevertheless."""
        return self.delay_s > 0 and self.victim is Victim.NOBODY

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
        yield CaseFault(call, keep_memory=True)
        yield CaseFault(call, keep_memory=True, always=True)
    if call == "restore":
        yield CaseFault(call, ignore_gpu_pairs=True)
        yield CaseFault(call, ignore_gpu_pairs=True, always=True)


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
        for call in (*QUERIES, *STEPS)
        for fault in faults(call)
    ]


def sample(count: int, seed: int, kind: Kind | None = None) -> list[Case]:
    """So many cases of the grid, or all, in an order that the seed fixes; of one operation or of all."""
    cases = [case for case in grid() if kind in (None, case.kind)]
    random.Random(seed).shuffle(cases)
    return cases[:count]
