"""The restore of members: driver calls, verification by NVML, and the rollback after a failure."""

from collections.abc import Sequence
from typing import final

from leasehold.v1 import errors_pb2

from leasehold_worker.driver.gpu_pairs import GpuPair, complete_pairs
from leasehold_worker.driver.group import Group
from leasehold_worker.driver.members import RUNNING, are_unlisted
from leasehold_worker.driver.verification import Verification, placed
from leasehold_worker.errors import OperationError
from leasehold_worker.gpus.inventory import Inventory
from leasehold_worker.moves.move import Move


@final
class MemberRestore:
    """Restores members on GPUs.

    Args:
        inventory: The GPUs of this host.
        verification: Verification of members by NVML.
    """

    def __init__(self, inventory: Inventory, verification: Verification) -> None:
        self._inventory = inventory
        self._verification = verification

    async def restore(self, move: Move, pairs: tuple[GpuPair, ...]) -> None:
        """Restores and verifies members, then calls the hooks after a restore; or rolls all of that back.

        Args:
            move: The move.
            pairs: Complete pairs for the driver; none if all stay.

        Raises:
            OperationError: The operation failed and was rolled back, unless the outcomes report otherwise.
        """
        await self._restore(move, pairs)
        if not move.hooks.is_needed:
            return
        move.progress.enter("hooks")
        try:
            await move.hooks.up()
        except OperationError:
            await move.hooks.down_again()
            await move.group.roll_back()
            raise

    async def _restore(self, move: Move, pairs: tuple[GpuPair, ...]) -> None:
        """Restores and verifies. If members turn up on unexpected GPUs, it tries once more."""
        before = [outcome.displacement for outcome in move.group.outcomes]
        try:
            await self._restore_once(move, pairs)
        except OperationError as error:
            if error.reason != errors_pb2.ERROR_REASON_REMAP_NOT_APPLIED:
                raise
            surprising = await self._find_places(move.group, before)
            await move.group.roll_back()
            if not surprising:
                raise
            await self._restore_once(move, pairs)

    async def _restore_once(self, move: Move, pairs: tuple[GpuPair, ...]) -> None:
        group, progress = move.group, move.progress
        await group.restore(pairs)
        progress.enter("verify")
        if are_unlisted([outcome.member for outcome in group.outcomes]):
            progress.warnings.append("NVML lists no member on a GPU, so their location is not verified")
        await self._verification.prove_placed([outcome.member for outcome in group.outcomes], pairs)

    async def _find_places(self, group: Group, before: Sequence[tuple[GpuPair, ...]]) -> bool:
        """Records where NVML lists each member. True: a member is neither on its old nor on its new GPUs.

        In that case an earlier restore had moved it and reported the opposite.
        """
        surprising = False
        for outcome, displacement in zip(group.outcomes, before, strict=True):
            actual = await self._verification.listed_gpus([outcome.member])
            if actual == placed(outcome.member, displacement):
                outcome.displacement = displacement
            elif actual != placed(outcome.member, outcome.displacement) and len(actual) == 1:
                moved = map(GpuPair, outcome.member.gpu_uuids, actual)
                outcome.displacement = complete_pairs(moved, self._inventory.chips)
                surprising = True
        return surprising

    async def restore_or_return(self, move: Move) -> None:
        """Restores members on their new GPUs, or else on the old ones, or else leaves them suspended.

        Raises:
            OperationError: The members are not on the new GPUs. MEMBER_WEDGED: one can't be restored at all.
        """
        try:
            await move.intend("restore")
            await self.restore(move, move.plan.pairs)
        except OperationError as error:
            if move.plan.astray:
                raise  # the members were on different GPUs, and not all of those are leased
            stranded = [
                outcome.member.identity.pid
                for outcome in move.group.outcomes
                if outcome.state_after == RUNNING
            ]
            if stranded:
                pids = ", ".join(map(str, stranded))
                move.progress.warnings.append(
                    f"process {pids} can't be suspended again and keeps running: the others stay suspended"
                )
                raise
            try:
                await self.restore(move, ())
            except OperationError as returned:
                if returned.reason == errors_pb2.ERROR_REASON_MEMBER_WEDGED:
                    move.progress.warnings.append(f"the restore on the new GPUs failed: {error.message}")
                    raise returned from error
                move.progress.warnings.append(f"the return to the old GPUs failed too: {returned.message}")
            else:
                move.progress.warnings.append(
                    "the restore on the new GPUs failed, so the workload returned to the old ones"
                )
            raise
