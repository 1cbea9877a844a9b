"""A group of members that one operation suspends or restores, all or nothing.

A process moves along one line of states, RUNNING, LOCKED, CHECKPOINTED, one driver call per step. A group
takes each step with all its members before the next: lock all, checkpoint all; restore all, unlock all. When
a member fails, every member returns along the line to its former state, past further failures. Only a member
that the driver can't move any more becomes WEDGED or UNKNOWN.

Members are called in parallel, because a call on one NCCL rank blocks while another is locked
(NVIDIA/cuda-checkpoint issue 30). Members that share memory by CUDA IPC are called one after the other.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Final, final

import trio
from leasehold.v1 import errors_pb2
from leasehold.v1.workload_pb2 import MemberState

from leasehold_worker.driver.device_memory import check_memory
from leasehold_worker.driver.gpu_pairs import GpuPair
from leasehold_worker.driver.helper_pool import Driver
from leasehold_worker.driver.helper_protocol import DriverCall
from leasehold_worker.driver.member_calls import TRANSFERS, CallNotMadeError, DriverStep, MemberCaller
from leasehold_worker.driver.members import (
    CHECKPOINTED,
    GONE,
    LOCKED,
    PARALLEL_LIMIT,
    RUNNING,
    UNKNOWN,
    Member,
    MemberOutcome,
    needed_by_gpu,
    next_call,
    state_name,
)
from leasehold_worker.driver.oom_watch import OomWatch
from leasehold_worker.driver.transfer_rates import Rates
from leasehold_worker.errors import OperationError, defect
from leasehold_worker.gpus.inventory import Inventory
from leasehold_worker.host.processes import memory_bytes
from leasehold_worker.threads import run_in_thread

logger = logging.getLogger(__name__)

PAUSE_S: Final = 1.0
"""Wait of a rollback before it repeats calls that could not be made at first."""

_WAYS_BACK: Final = (DriverCall.RESTORE, DriverCall.UNLOCK, DriverCall.LOCK, DriverCall.CHECKPOINT)
"""The order of calls that leads every member from any state on the line to any other."""


@final
class Group:
    """The members of one operation.

    A remap suspends and then restores them; ``outcomes`` cover both.

    Args:
        driver: The driver.
        inventory: NVML, which reports free device memory before a restore.
        rates: Measured transfer rates, which learn from this group.
        lanes: The members. Lanes run in parallel, the members of a lane one after the other.
        on_phase: Receives each phase.
    """

    def __init__(
        self,
        driver: Driver,
        inventory: Inventory,
        rates: Rates,
        lanes: Sequence[Sequence[Member]],
        on_phase: Callable[[str], None],
    ) -> None:
        self._inventory = inventory
        self._rates = rates
        self._member_caller = MemberCaller(driver, inventory, rates)
        self._on_phase = on_phase
        self._lanes = [[MemberOutcome.of(member) for member in lane] for lane in lanes]
        self.outcomes = [outcome for lane in self._lanes for outcome in lane]
        self._at_begin: dict[int, tuple[MemberState.ValueType, tuple[GpuPair, ...]]] = {}
        """State and displacement of each member when the last operation began."""
        self._oom_watch = OomWatch()
        self._uncalled: set[int] = set()
        """Members that the driver could not be asked about in this round of a rollback."""

    async def suspend(self, lock_timeout_s: float, rescan: Callable[[], Awaitable[Sequence[Member]]]) -> None:
        """Locks and checkpoints every member, or rolls all back.

        A cancellation before the first checkpoint rolls back; a later one comes too late. A cancellation
        during the lock waits for its end. Members that are checkpointed already stay so.

        Args:
            lock_timeout_s: Time for submitted work to finish.
            rescan: Finds the members again once all are locked.

        Raises:
            OperationError: The first error; ``outcomes`` have the others.
        """
        self._begin()
        try:
            with trio.CancelScope(shield=True):
                await self._watch_memory()
                await self._step(DriverStep(DriverCall.LOCK, lock_timeout_s), RUNNING)
                self.refuse_newcomers(await rescan(), "locked")
            await trio.lowlevel.checkpoint_if_cancelled()
            with trio.CancelScope(shield=True):
                await self._step(DriverStep(DriverCall.CHECKPOINT), LOCKED)
                self._require_all(CHECKPOINTED)
        except BaseException:
            await self.roll_back()
            raise

    async def restore(self, gpu_pairs: tuple[GpuPair, ...]) -> None:
        """Restores and unlocks every member on the GPUs of the pairs, or rolls all back.

        The restore is finished before a cancellation is delivered.

        Raises:
            OperationError: The first error; ``outcomes`` have the others.
        """
        self._begin()
        try:
            with trio.CancelScope(shield=True):
                await self._watch_memory()
                await self._step(DriverStep(DriverCall.RESTORE, gpu_pairs=gpu_pairs), CHECKPOINTED)
                await self._step(DriverStep(DriverCall.UNLOCK), LOCKED)
                self._require_all(RUNNING)
        except BaseException:
            await self.roll_back()
            raise

    async def roll_back(self) -> None:
        """Returns every member to its state before the last operation, past failures.

        A member that can't be suspended again is unlocked: in a LOCKED process every CUDA call hangs for
        ever. A rollback can't be cancelled. It ends, because each member gets a few calls, each with its own
        deadline.

        Raises:
            OperationError: TARGET_CRASHED, a member has ended, which explains all other errors.
        """
        self._on_phase("rollback")
        moved: set[int] = set()
        self._uncalled.clear()
        with trio.CancelScope(shield=True):
            # Now: the end of a workload removes its control group.
            await self._oom_watch.explain(self.outcomes)
            left = self.outcomes
            while left:
                for call in _WAYS_BACK:
                    concerned = [o for o in left if next_call(o.standing, self._target(o)) is call]
                    await self._take_back(call, concerned)
                    moved |= {id(outcome) for outcome in concerned}
                # Errors of earlier calls may have been wrong. Only members in a wrong state, and members
                # without a call so far, get more calls.
                left = await self._left_behind(held_up=bool(moved)) if left is self.outcomes else []
            stranded = [o for o in self.outcomes if (o.standing, self._target(o)) == (LOCKED, CHECKPOINTED)]
            await self._take_back(DriverCall.UNLOCK, stranded)
            async with trio.open_nursery() as nursery:
                for outcome in self.outcomes:
                    nursery.start_soon(self._member_caller.find_death, outcome)
            await self._oom_watch.explain(self.outcomes)
        for outcome in self.outcomes:
            back = outcome.state_after == self._target(outcome)
            outcome.rolled_back = back if id(outcome) in moved or not back else None
        for outcome in self.outcomes:
            if outcome.state_after == GONE and outcome.error is not None:
                raise outcome.error

    async def _take_back(self, call: DriverCall, concerned: Sequence[MemberOutcome]) -> None:
        """Makes one call of a rollback. A restore leads to the member's former GPUs."""
        if call is not DriverCall.RESTORE:
            await self._take(DriverStep(call, rollback=True), concerned)
            return
        places = {id(outcome): self._at_begin[id(outcome)][1] for outcome in concerned}
        for pairs in dict.fromkeys(places.values()):
            there = [outcome for outcome in concerned if places[id(outcome)] == pairs]
            await self._take(DriverStep(call, gpu_pairs=pairs, rollback=True), there)

    async def _left_behind(self, *, held_up: bool) -> list[MemberOutcome]:
        """Members that need another round of a rollback.

        Args:
            held_up: Members whose call may have waited for another member, which has moved since
                (NVIDIA/cuda-checkpoint issue 30). So the driver is asked about them again.
        """
        left: set[int] = set()
        limit = trio.CapacityLimiter(PARALLEL_LIMIT)

        async def look(outcome: MemberOutcome) -> None:
            async with limit:
                if await self._is_left_behind(outcome):
                    left.add(id(outcome))

        async with trio.open_nursery() as nursery:
            for outcome in self.outcomes:
                if held_up or outcome.standing != UNKNOWN:
                    nursery.start_soon(look, outcome)
        if self._uncalled:
            await trio.sleep(PAUSE_S)
        return [outcome for outcome in self.outcomes if id(outcome) in left]

    async def _is_left_behind(self, outcome: MemberOutcome) -> bool:
        try:
            surprised = await self._member_caller.look_again(outcome)
        except Exception as error:  # noqa: BLE001 - what was read last stands
            logger.warning("process %d can't be queried again: %s", outcome.member.identity.pid, error)
            surprised = False
        return surprised or id(outcome) in self._uncalled

    def _require_all(self, state: MemberState.ValueType) -> None:
        """Fails if a member is in a state from which no call leads on."""
        for outcome in self.outcomes:
            if outcome.state_after != state:
                pid, seen = outcome.member.identity.pid, state_name(outcome.state_after)
                error = OperationError(
                    errors_pb2.ERROR_REASON_WRONG_STATE,
                    f"process {pid} is {seen}, and no driver call leads from there to "
                    f"{state_name(state)}: stop it",
                    {"pid": str(pid), "observed_state": seen},
                )
                outcome.error = outcome.error or error
                raise error

    def _begin(self) -> None:
        self._at_begin = {id(o): (o.state_after, o.displacement) for o in self.outcomes}
        for outcome in self.outcomes:
            outcome.rolled_back = None

    async def _watch_memory(self) -> None:
        await self._oom_watch.begin([outcome.member.identity for outcome in self.outcomes])

    def _target(self, outcome: MemberOutcome) -> MemberState.ValueType:
        return self._at_begin[id(outcome)][0]

    def refuse_newcomers(self, found: Sequence[Member], step: str) -> None:
        """Refuses members that are not of this group, with MEMBERS_CHANGED.

        Args:
            found: The current members of the workloads.
            step: The step of the group meanwhile, as text.
        """
        known = {outcome.member.identity for outcome in self.outcomes}
        for member in found:
            if member.identity not in known:
                raise OperationError(
                    errors_pb2.ERROR_REASON_MEMBERS_CHANGED,
                    f"process {member.identity.pid} began to use CUDA while the workload was "
                    f"being {step}: try again",
                    {"pid": str(member.identity.pid)},
                )

    async def _step(self, step: DriverStep, source: MemberState.ValueType) -> None:
        self._on_phase(str(step.call))
        failures = await self._take(step, [o for o in self.outcomes if o.state_after == source])
        if failures:
            raise failures[0]

    async def _take(self, step: DriverStep, concerned: Sequence[MemberOutcome]) -> list[OperationError]:
        """Makes one call on some members. After a failure no further call begins, except in a rollback.

        A failure of one member must not cancel the calls on the others.
        """
        failures: list[OperationError] = []
        chosen = {id(outcome) for outcome in concerned}
        limit = trio.CapacityLimiter(PARALLEL_LIMIT)
        try:
            ready = await self._prepared(step, concerned)
        except Exception as error:  # noqa: BLE001 - told, and a rollback goes on
            failures.append(_told(error))
            for outcome in concerned:
                outcome.error = outcome.error or failures[0]
            return failures

        async def go(lane: Sequence[MemberOutcome]) -> None:
            async with limit:
                for outcome in lane:
                    if failures and not step.rollback:
                        return
                    before = outcome.state_after
                    try:
                        await self._member_caller.take(ready, outcome)
                    except Exception as error:  # noqa: BLE001 - told, and the others are called
                        failures.append(_told(error))
                        outcome.note_error(failures[-1])
                        if isinstance(error, CallNotMadeError):
                            self._uncalled.add(id(outcome))
                        elif not isinstance(error, OperationError) and outcome.state_after == before:
                            outcome.assumed, outcome.state_after = outcome.standing, UNKNOWN

        async with trio.open_nursery() as nursery:
            for lane in self._lanes:
                mine = [outcome for outcome in lane if id(outcome) in chosen]
                nursery.start_soon(go, mine[::-1] if step.rollback else mine)
        return failures

    async def _prepared(self, step: DriverStep, concerned: Sequence[MemberOutcome]) -> DriverStep:
        """The step with a timeout for its bytes, after a check of device memory.

        Raises:
            OperationError: INSUFFICIENT_DEVICE_MEMORY: the driver would wedge the members forever.
        """
        if step.call not in TRANSFERS or not concerned:
            return step
        members = [outcome.member for outcome in concerned]
        needed = needed_by_gpu(members, ())
        if step.call is DriverCall.RESTORE:
            moves = {pair.old_uuid: pair.new_uuid for pair in step.gpu_pairs}
            places = dict.fromkeys([*needed, *(uuid for member in members for uuid in member.gpu_uuids)])
            wanted = tuple(GpuPair(uuid, moves.get(uuid, uuid)) for uuid in places)
            pids = {outcome.member.identity.pid for outcome in self.outcomes}
            check_memory(wanted, await run_in_thread(self._inventory.room, pids), needed)
        if not all(member.device_memory_bytes for member in members):
            # Upper bound for unknown sizes: parked bytes fit into the host's memory.
            most = memory_bytes("MemTotal") or 0
            needed = {gpu.uuid: gpu.memory_total_bytes or most for gpu in self._inventory.gpus}
        # Concurrent calls share the host's memory bandwidth, so each may take the time of all.
        chip = self._inventory.chips.get(next(iter(needed), ""), "")
        return replace(step, extra_s=self._rates.extra_s(chip, step.call, sum(needed.values())))


def _told(error: Exception) -> OperationError:
    """The error to report. An unforeseen one is a defect, and is logged."""
    if isinstance(error, OperationError):
        return error
    logger.error("a driver call failed because of a defect", exc_info=error)
    return defect()
