"""What the hooks of one operation are called with, and what they leave to tell."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final, Protocol, final

from leasehold.v1 import workload_pb2
from leasehold.v1.workload_pb2 import WeightStrategy

from leasehold_worker.host.process_files import Pid
from leasehold_worker.host.processes import ProcessIdentity
from leasehold_worker.timestamps import seconds
from leasehold_worker.workloads.eviction import policy_text, resolve
from leasehold_worker.workloads.probes import is_probe

DEFAULT_TIMEOUT_S: Final = 30.0
"""How long a hook may take where it does not say."""

FRAMEWORK_TIMEOUT_S: Final = 120.0
"""The same of vllm and sglang: weights of a hundred gigabytes take their time to host memory."""

_TWO_WAY: Final = frozenset({"vllm", "sglang", "kernel"})
_FRAMEWORKS: Final = frozenset({"vllm", "sglang"})


class Phase(StrEnum):
    """Which way things go, as templates and commands are told it."""

    BEFORE_SUSPEND = "before_suspend"
    AFTER_RESTORE = "after_restore"
    ROLLBACK = "rollback"
    READINESS = "readiness"


class HookFailedError(Exception):
    """A hook failed: its text says what it did, what came back, and what would help."""


class KernelSide(Protocol):
    """The application's own kernel, as the kernel hook calls it. Both raise OperationError where it fails."""

    async def prepare(self, timeout_s: float) -> None:
        """Makes it quiescent."""

    async def cancel(self, timeout_s: float) -> None:
        """Lets it go on as before; does nothing where it was not quiescent."""


@final
class HookRecord:
    """How far a way down went, so that the way back undoes that and nothing else.

    Every step is noted before it is made. Who keeps the notes beyond a crash gives ``save``, and a record
    with the notes as found to the rollback that follows.
    """

    def __init__(
        self,
        notes: Iterable[str] | None = (),
        save: Callable[[frozenset[str]], Awaitable[None]] | None = None,
    ) -> None:
        """Begins a record.

        Args:
            notes: What was noted before. None: something may have been done, and nobody knows what.
            save: Keeps the notes; it raises OperationError where it can't, and the step is not made.
        """
        self.known = notes is not None
        self._notes = set(notes or ())
        self._save = save

    @property
    def notes(self) -> frozenset[str]:
        """What was noted: hooks that were begun, and steps of them that can't be asked about later."""
        return frozenset(self._notes)

    def holds(self, note: str) -> bool:
        """Whether a step may have been made."""
        return not self.known or note in self._notes

    def begin(self) -> None:
        """A way down begins: from here on it is known how far it went, one before that was not undone too."""
        self.known = True

    async def add(self, note: str) -> None:
        """Notes a step that is about to be made."""
        if note not in self._notes:
            self._notes.add(note)
            try:
                await self._keep()
            except BaseException:  # a cancellation too: then the step is not made
                self._notes.remove(note)
                raise

    async def remove(self, note: str) -> None:
        """Takes a note back: the step was certainly not made, or it was undone."""
        if note in self._notes:
            self._notes.remove(note)
            await self._keep()

    async def _keep(self) -> None:
        if self._save is not None:
            await self._save(self.notes)


@dataclass(frozen=True, slots=True)
class HookContext:
    """What the hooks of one operation are called with.

    Attributes:
        workload_id: The workload's id.
        workload_name: Its name.
        root: Its first process.
        hooks: Its hooks, which :func:`leasehold_worker.hooks.validation.check_hooks` accepts.
        policy: What it is parked by, or was. On the way up it must be the policy of the way down.
        member_pids: Its CUDA processes.
        environment: What commands find in their environment, besides the variables of hooks.
        working_directory: Where commands run.
        measure: Device bytes that NVML lists for the members now. None: it can't say.
        kernel: The kernel that the application serves. None: it serves none.
        record: How far the way down went. Without one nobody knows.
        warnings: Where what else went wrong is told, when an error tells of one thing.
    """

    workload_id: str
    workload_name: str
    root: ProcessIdentity
    hooks: Sequence[workload_pb2.Hook]
    policy: workload_pb2.EvictionPolicy
    member_pids: Sequence[Pid]
    environment: Mapping[str, str]
    working_directory: Path
    measure: Callable[[], Awaitable[int | None]]
    kernel: KernelSide | None = None
    record: HookRecord = field(default_factory=lambda: HookRecord(None))
    warnings: list[str] = field(default_factory=list)

    @property
    def weight_strategy(self) -> WeightStrategy.ValueType:
        """What becomes of the weights; never UNSPECIFIED."""
        return self.policy.weight_strategy or workload_pb2.WEIGHT_STRATEGY_RETAIN

    def values(self, phase: Phase) -> dict[str, str]:
        """The values of templates."""
        return {
            "workload": self.workload_name,
            "workload_id": self.workload_id,
            "phase": str(phase),
            "policy": policy_text(resolve(None, self.policy)),
            "members": ",".join(str(pid) for pid in self.member_pids),
        }


@dataclass(slots=True)
class Turn:
    """One hook, as it is called one way.

    Attributes:
        hook: Which.
        context: What with.
        phase: Which way.
        doing: What it does just now, for who has to say where it got stuck.
        warnings: What went wrong and is not fatal.
    """

    hook: workload_pb2.Hook
    context: HookContext
    phase: Phase
    doing: str = "the call had no answer yet"
    warnings: list[str] = field(default_factory=list)


def kind(hook: workload_pb2.Hook) -> str:
    """What a hook does: the name of its action. Empty: it has none."""
    return hook.WhichOneof("action") or ""


def is_two_way(hook: workload_pb2.Hook) -> bool:
    """Whether a hook knows both ways, and so has no phase."""
    return kind(hook) in _TWO_WAY


def goes_down(hook: workload_pb2.Hook) -> bool:
    """Whether a hook is called on the way down."""
    return is_two_way(hook) or hook.phase == workload_pb2.HOOK_PHASE_BEFORE_SUSPEND


def calls(hooks: Iterable[workload_pb2.Hook]) -> list[workload_pb2.Hook]:
    """The hooks that a way down or up calls, in their order: all but readiness probes."""
    return [hook for hook in hooks if not is_probe(hook)]


def concerns(hook: workload_pb2.Hook, weight_strategy: WeightStrategy.ValueType) -> bool:
    """Whether a hook is called for a weight strategy."""
    return not hook.weight_strategies or weight_strategy in hook.weight_strategies


def claims_memory(hook: workload_pb2.Hook, weight_strategy: WeightStrategy.ValueType) -> bool:
    """Whether a hook makes the workload free device memory on the way down."""
    if not goes_down(hook):
        return False
    if kind(hook) in _FRAMEWORKS:
        return weight_strategy in (
            workload_pb2.WEIGHT_STRATEGY_OFFLOAD,
            workload_pb2.WEIGHT_STRATEGY_DISCARD,
        )
    return hook.frees_memory


def timeout_s(hook: workload_pb2.Hook) -> float:
    """How long one call of a hook may take, in seconds."""
    if hook.HasField("timeout"):
        return seconds(hook.timeout)
    return FRAMEWORK_TIMEOUT_S if kind(hook) in _FRAMEWORKS else DEFAULT_TIMEOUT_S
