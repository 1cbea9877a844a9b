"""The report of an operation while it runs and at its end: the fields of CommandResult."""

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from leasehold.v1.eviction_pb2 import EvictionPolicy

from leasehold_worker.byte_sizes import size_text
from leasehold_worker.commands.intents import Intent
from leasehold_worker.driver.gpu_pairs import GpuPair
from leasehold_worker.driver.members import MemberOutcome
from leasehold_worker.errors import OperationError

TELL_INTERVAL_S: Final = 0.5
"""Shortest time between two reports of a phase's progress."""


@dataclass(frozen=True, slots=True)
class OperationPhase:
    """A phase of a whole operation. ``failed``: the next phase is the rollback, or there is none."""

    name: str
    duration_s: float
    failed: bool = False
    rollback: bool = False
    began_s: float = 0.0
    """When it began, by the monotonic clock."""


async def _forget(_: Intent) -> None:
    """Stores nothing: the operation needs no recovery after a crash."""


@dataclass(slots=True)
class Progress:
    """The report of one operation.

    Attributes:
        observer: Receives each phase as it begins.
        intend: Stores the next step before it begins, or raises OperationError.
        already_there: There was nothing to do.
        outcomes: Outcome of each member, with its workload's id.
        applied_pairs: GPU pairs that the driver received.
        released_gpu_uuids: GPUs that were released.
        claimed_gpu_uuids: GPUs that were claimed.
        warnings: Warnings of a successful operation.
        phases: Its phases, in order.
        policy: Policy of the suspend. None: there was none.
        checkpoint_id: The checkpoint that was made or restored. Empty: none.
        disk_bytes: Bytes that were written to disk or read from it.
        hold_id: The hold on the released GPUs. Empty: none.
        preempted_workload_ids: Workloads that a preempt suspended, and that are suspended now.
        stays_changed: A rollback leaves something changed: a hook that could not be undone, or another
            workload that was moved to a lower tier. The warnings name it.
        refusal: The refusal that a wait could avert, and the error if the timeout ends this wait. None: the
            operation does not wait.
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
    hold_id: str = ""
    preempted_workload_ids: tuple[str, ...] = ()
    stays_changed: bool = False
    refusal: OperationError | None = None
    _current: tuple[str, float] | None = None
    _going_back: bool = False
    _told_s: float = 0.0

    @classmethod
    def unheard(cls) -> "Progress":
        """The report of an operation without an observer."""
        return cls(lambda _: None)

    def enter(self, phase: str) -> None:
        """Begins a phase, which ends the one before."""
        self._leave(failed=phase == "rollback" and not self._going_back)
        self._going_back = phase == "rollback"
        self._current = (phase, time.monotonic())
        self.observer(phase)

    def tell(self, what: str) -> None:
        """Reports what a phase waits for."""
        self.observer(f"{self._current[0]}, {what}" if self._current is not None else what)

    @contextmanager
    def wait(self, what: str, refusal: OperationError | None) -> Iterator[None]:
        """Reports what a phase waits for. A cancellation of the wait keeps the refusal for the outcome."""
        self.tell(what)
        self.refusal = refusal
        yield
        self.refusal = None

    def tell_bytes(self, phase: str, size_bytes: int) -> None:
        """Reports how far a phase is, at limited rate."""
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
            self.phases.append(OperationPhase(name, elapsed_s, failed, self._going_back, began))
            self._current = None
