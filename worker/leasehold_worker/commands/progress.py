"""What an operation tells while it runs, and what it leaves to tell: the fields of CommandResult."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from leasehold.v1.workload_pb2 import EvictionPolicy

from leasehold_worker.byte_sizes import size_text
from leasehold_worker.commands.intents import Intent
from leasehold_worker.driver.gpu_pairs import GpuPair
from leasehold_worker.driver.members import MemberOutcome

TELL_INTERVAL_S: Final = 0.5
"""Between two words on how far a phase is."""


@dataclass(frozen=True, slots=True)
class OperationPhase:
    """A phase of a whole operation. ``failed`` says that the next one was the way back, or none."""

    name: str
    duration_s: float
    failed: bool = False
    rollback: bool = False


async def _forget(_: Intent) -> None:
    """Keeps nothing: nobody would settle the operation after a crash."""


@dataclass(slots=True)
class Progress:
    """The report of one operation.

    Attributes:
        observer: Told each phase as it begins.
        intend: Keeps what is about to be done, before it is done. It raises OperationError where it can't.
        already_there: There was nothing to do.
        outcomes: What was done with each member, with its workload's id.
        applied_pairs: What the driver got.
        released_gpu_uuids: GPUs that were given up.
        claimed_gpu_uuids: GPUs that were taken.
        warnings: Things that succeeded and still deserve attention.
        phases: What it went through, in order.
        policy: How the workload was parked. None: it wasn't.
        checkpoint_id: The checkpoint that was made or restored. Empty: none.
        disk_bytes: Bytes that were written to disk or read from it.
    """

    observer: Callable[[str], None]
    intend: Callable[[Intent], Awaitable[None]] = _forget
    already_there: bool = False
    outcomes: list[tuple[str, MemberOutcome]] = field(default_factory=list)
    applied_pairs: tuple[GpuPair, ...] = ()
    released_gpu_uuids: tuple[str, ...] = ()
    claimed_gpu_uuids: tuple[str, ...] = ()
    warnings: list[str] = field(default_factory=list)
    phases: list[OperationPhase] = field(default_factory=list)
    policy: EvictionPolicy | None = None
    checkpoint_id: str = ""
    disk_bytes: int = 0
    _current: tuple[str, float] | None = None
    _going_back: bool = False
    _told_s: float = 0.0

    def enter(self, phase: str) -> None:
        """Begins a phase, which ends the one before."""
        self._leave(failed=phase == "rollback" and not self._going_back)
        self._going_back = phase == "rollback"
        self._current = (phase, time.monotonic())
        self.observer(phase)

    def tell_bytes(self, phase: str, size_bytes: int) -> None:
        """Tells how far a phase is, and not too often."""
        now = time.monotonic()
        if size_bytes and now - self._told_s >= TELL_INTERVAL_S:
            self._told_s = now
            self.observer(f"{phase}, {size_text(size_bytes)}")

    def close(self, *, failed: bool) -> None:
        """Ends the last phase."""
        self._leave(failed=failed and not self._going_back)

    def _leave(self, *, failed: bool) -> None:
        if self._current is not None:
            name, began = self._current
            elapsed_s = time.monotonic() - began
            self.phases.append(OperationPhase(name, elapsed_s, failed, rollback=self._going_back))
            self._current = None
