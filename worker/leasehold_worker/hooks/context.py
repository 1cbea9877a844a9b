"""The context of one operation's hooks: their input, and their results."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final, Protocol, final

from leasehold.v1 import eviction_pb2, hook_pb2
from leasehold.v1.eviction_pb2 import WeightStrategy

from leasehold_worker.host.accounts import Account
from leasehold_worker.host.process_files import Pid
from leasehold_worker.host.processes import ProcessIdentity
from leasehold_worker.timestamps import seconds
from leasehold_worker.workloads.eviction import policy_text, resolve
from leasehold_worker.workloads.probes import is_probe

DEFAULT_TIMEOUT_S: Final = 30.0
"""Timeout of a hook by default."""

FRAMEWORK_TIMEOUT_S: Final = 120.0
"""Timeout of vllm and sglang by default: moving hundreds of gigabytes of weights takes time."""

_TWO_WAY: Final = frozenset({"vllm", "sglang", "kernel"})
_FRAMEWORKS: Final = frozenset({"vllm", "sglang"})


class Phase(StrEnum):
    """The direction of an operation, as templates and commands see it."""

    BEFORE_SUSPEND = "before_suspend"
    AFTER_RESTORE = "after_restore"
    ROLLBACK = "rollback"
    READINESS = "readiness"


class HookFailedError(Exception):
    """A hook failed: its text has the call, the answer, and a remedy."""


class KernelSide(Protocol):
    """The application as the kernel hook calls it. Both methods raise OperationError after a failure."""

    async def prepare(self, timeout_s: float) -> None:
        """Makes the application quiescent."""

    async def cancel(self, timeout_s: float) -> None:
        """Lets the application continue; does nothing if it was not quiescent."""


@final
class HookRecord:
    """The progress of hooks before a suspend, so that a rollback undoes exactly that.

    Every step is recorded before it is made. A caller that stores the notes beyond a crash gives ``save``,
    and passes them to the later rollback.
    """

    def __init__(
        self,
        notes: Iterable[str] | None = (),
        save: Callable[[frozenset[str]], Awaitable[None]] | None = None,
    ) -> None:
        """Begins a record.

        Args:
            notes: Earlier notes. None: steps may have been made, but are unknown.
            save: Stores the notes, or raises OperationError, and the step is not made.
        """
        self.known = notes is not None
        self._notes = set(notes or ())
        self._save = save

    @property
    def notes(self) -> frozenset[str]:
        """The notes: begun hooks, failed ones after the restore, and steps that can't be queried later."""
        return frozenset(self._notes)

    def holds(self, note: str) -> bool:
        """Whether a step may have been made."""
        return not self.known or note in self._notes

    def begin(self) -> None:
        """Begins the hooks before a suspend. The record is complete unless an older one remains."""
        self.known = True

    async def add(self, note: str) -> None:
        """Records a step before it is made."""
        if note not in self._notes:
            self._notes.add(note)
            try:
                await self._keep()
            except BaseException:  # also if cancelled: the step is not made then
                self._notes.remove(note)
                raise

    async def remove(self, note: str) -> None:
        """Removes a note: the step was certainly not made, or it was undone."""
        if note in self._notes:
            self._notes.remove(note)
            await self._keep()

    async def _keep(self) -> None:
        if self._save is not None:
            await self._save(self.notes)


@dataclass(frozen=True, slots=True)
class HookContext:
    """The input of one operation's hooks.

    Attributes:
        workload_id: The workload's id.
        workload_name: Its name.
        root: Its first process.
        hooks: Its hooks, which :func:`leasehold_worker.hooks.validation.check_hooks` accepts.
        policy: Policy of the suspend. A restore needs the same one.
        member_pids: Its CUDA processes.
        environment: Environment of commands, besides the variables of hooks.
        working_directory: Working directory of commands.
        measure: Device bytes that NVML lists for the members now. None: unknown.
        wait_kernel: Waits for the checkpointable application, for some seconds at most.
        account: The Unix user of the workload, for commands and files. None: the worker's own.
        kernel: The checkpointable application. None: there is none.
        record: Progress of the hooks before the suspend.
        warnings: Receives further failures beside the raised error.
    """

    workload_id: str
    workload_name: str
    root: ProcessIdentity
    hooks: Sequence[hook_pb2.Hook]
    policy: eviction_pb2.EvictionPolicy
    member_pids: Sequence[Pid]
    environment: Mapping[str, str]
    working_directory: Path
    measure: Callable[[], Awaitable[int | None]]
    wait_kernel: Callable[[float], Awaitable[KernelSide]]
    account: Account | None = None
    kernel: KernelSide | None = None
    record: HookRecord = field(default_factory=lambda: HookRecord(None))
    warnings: list[str] = field(default_factory=list)

    @property
    def weight_strategy(self) -> WeightStrategy.ValueType:
        """The weight strategy; never UNSPECIFIED."""
        return self.policy.weight_strategy or eviction_pb2.WEIGHT_STRATEGY_RETAIN

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
    """The call of one hook, in one direction.

    Attributes:
        hook: The hook.
        context: The context.
        phase: The direction.
        doing: Its current step, for the message of a timeout.
        warnings: Failures that are not fatal.
    """

    hook: hook_pb2.Hook
    context: HookContext
    phase: Phase
    doing: str = "the call had no answer yet"
    warnings: list[str] = field(default_factory=list)


def kind(hook: hook_pb2.Hook) -> str:
    """The name of a hook's action. Empty: it has none."""
    return hook.WhichOneof("action") or ""


def is_two_way(hook: hook_pb2.Hook) -> bool:
    """Whether a hook has both directions, and so no phase."""
    return kind(hook) in _TWO_WAY


def goes_down(hook: hook_pb2.Hook) -> bool:
    """Whether a hook is called before a suspend."""
    return is_two_way(hook) or hook.phase == hook_pb2.HOOK_PHASE_BEFORE_SUSPEND


def calls(hooks: Iterable[hook_pb2.Hook]) -> list[hook_pb2.Hook]:
    """The hooks that a suspend or restore calls, in their order: all but readiness probes."""
    return [hook for hook in hooks if not is_probe(hook)]


def concerns(hook: hook_pb2.Hook, weight_strategy: WeightStrategy.ValueType) -> bool:
    """Whether a hook is called for a weight strategy."""
    return not hook.weight_strategies or weight_strategy in hook.weight_strategies


def claims_memory(hook: hook_pb2.Hook, weight_strategy: WeightStrategy.ValueType) -> bool:
    """Whether a hook is to make the workload free device memory before a suspend."""
    if not goes_down(hook):
        return False
    if kind(hook) in _FRAMEWORKS:
        return weight_strategy in (
            eviction_pb2.WEIGHT_STRATEGY_OFFLOAD,
            eviction_pb2.WEIGHT_STRATEGY_DISCARD,
        )
    return hook.frees_memory


def timeout_s(hook: hook_pb2.Hook) -> float:
    """Timeout of one call of a hook, in seconds."""
    if hook.HasField("timeout"):
        return seconds(hook.timeout)
    return FRAMEWORK_TIMEOUT_S if kind(hook) in _FRAMEWORKS else DEFAULT_TIMEOUT_S
