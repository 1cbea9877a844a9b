"""The suspend of members: lock, checkpoint, and verification that their memory is freed."""

from functools import partial
from typing import NamedTuple, final

import trio

from leasehold_worker.driver.helper_pool import Driver
from leasehold_worker.driver.members import RUNNING, Member, find_members, members_after
from leasehold_worker.driver.verification import Before, Usage, Verification, freed_usage, sized
from leasehold_worker.leasing.suspend_memory import SuspendMemory
from leasehold_worker.moves.move import Move
from leasehold_worker.overlap import both


class _Found(NamedTuple):
    members: tuple[Member, ...]
    """The current members of the workloads."""
    pids: frozenset[int]
    """All processes of the workloads, at the search and now."""


@final
class MemberSuspend:
    """Suspends members, which frees their GPUs.

    Args:
        driver: The driver.
        verification: Verification of members by NVML.
        host_memory: The ledger of reserved host memory.
    """

    def __init__(self, driver: Driver, verification: Verification, host_memory: SuspendMemory) -> None:
        self._driver = driver
        self._verification = verification
        self._host_memory = host_memory

    async def suspend(self, move: Move) -> None:
        """Locks and checkpoints the members of a move, and verifies by NVML that their memory is free.

        Raises:
            OperationError: The operation failed and was rolled back, unless the outcomes report otherwise.
        """
        plan, group = move.plan, move.group
        usage: Usage = {}

        async def size() -> None:
            nonlocal usage
            # Members may have allocated memory since the plan. Locked members can't.
            usage = await self._verification.usage()
            if more := _size_again(move, usage):
                self._host_memory.need(more, parks=plan.stays_in_memory).check()
            await move.intend("checkpoint")

        async def rescan() -> tuple[Member, ...]:
            _, found = await both(size, partial(self._search, move))
            return found.members

        await move.intend("lock")
        await group.suspend(plan.lock_timeout_s, rescan)
        with trio.CancelScope(shield=True):
            move.progress.enter("verify")
            try:
                # Processes without CUDA run on during the checkpoint, which can take a minute.
                now, found = await both(self._verification.usage, partial(self._search, move))
                # NVML lists no checkpointed process, so each listed one is a newcomer.
                group.refuse_newcomers(found.members, "checkpointed")
                members = [outcome.member for outcome in group.outcomes]
                now = await self._verification.prove_freed(Before(members, found.pids, usage), now)
                _size_again(move, freed_usage(found.pids, usage, now))
            except BaseException:
                await group.roll_back()
                raise

    async def _search(self, move: Move) -> _Found:
        """The processes of the workloads at the search and now, with the driver's states of non-members.

        Members are skipped: the driver has just reported the state of each.

        Raises:
            OperationError: The driver can't be asked.
        """
        pids = {identity.pid for target in move.plan.targets for identity in target.processes}
        members: list[Member] = []
        for target in move.plan.targets:
            mine = members_after(move.outcomes[target.workload.workload_id])
            known = {member.identity for member in mine}
            processes = (await target.workload.find_tree(known=target.tree)).processes
            pids |= {identity.pid for identity in processes}
            new = await find_members(self._driver, [each for each in processes if each not in known])
            members += [*mine, *new]
        return _Found(tuple(members), frozenset(pids))


def _size_again(move: Move, usage: Usage) -> dict[int, int]:
    """Updates the sizes of members, and returns the growth by pid.

    A suspended member, or one that is not where its workload is, keeps its known size. So does a member for
    which NVML reports less than before.
    """
    more: dict[int, int] = {}
    for target in move.plan.targets:
        mine = [o for o in move.outcomes[target.workload.workload_id] if o.state_before == RUNNING]
        if any(outcome.displacement for outcome in mine):
            continue
        for outcome, member in zip(
            mine, sized([each.member for each in mine], usage, target.home), strict=True
        ):
            if outcome.member.device_memory_bytes.keys() <= member.device_memory_bytes.keys():
                if (grown_bytes := member.total_bytes - outcome.member.total_bytes) > 0:
                    more[member.identity.pid] = grown_bytes
                outcome.member = member
    return more
