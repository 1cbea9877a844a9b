"""Recovery of members that an interrupted remap left suspended.

Their workloads ran before the remap and have to run after it: on the new GPUs if the restore had begun, else
on the old ones. The pool reserves both meanwhile.
"""

import logging
from collections.abc import Sequence
from typing import Final, final

import trio
from leasehold.v1 import errors_pb2

from leasehold_worker.driver.gpu_pairs import GpuPair, moved
from leasehold_worker.driver.group import Group
from leasehold_worker.driver.members import CHECKPOINTED, GONE
from leasehold_worker.driver.verification import Verification, placed
from leasehold_worker.errors import OperationError

logger = logging.getLogger(__name__)

ATTEMPTS: Final = 3
"""Attempts per destination: a refusal may pass after a moment."""

RETRY_S: Final = 1.0

Pairs = tuple[GpuPair, ...]


@final
class RemapRecovery:
    """Restores suspended members, and verifies their GPUs.

    Args:
        proof: NVML.
        group: The members, all suspended.
    """

    def __init__(self, verification: Verification, group: Group) -> None:
        self._verification = verification
        self._group = group

    async def restore(self, pairs: Pairs) -> None:
        """Restores the members on the GPUs of the pairs, or else on the old ones.

        Args:
            pairs: Complete pairs to the new GPUs. Empty: the restore there had not begun.

        Raises:
            OperationError: The members stay suspended, or one is FAILED.
        """
        attempts = [each for each in dict.fromkeys((pairs, ())) for _ in range(ATTEMPTS)]
        for left, destination in zip(reversed(range(len(attempts))), attempts, strict=True):
            try:
                await self._restore_proved(destination, pairs)
            except OperationError as error:
                states = {outcome.state_after for outcome in self._group.outcomes} - {GONE}
                if states != {CHECKPOINTED} or not left:
                    raise
                logger.warning("members of an interrupted remap stay suspended for now: %s", error.message)
                await trio.sleep(RETRY_S)
            else:
                return

    async def _restore_proved(self, destination: Pairs, pairs: Pairs) -> None:
        """Restores once. Members that turn up elsewhere are suspended again, and moved from there.

        A restore to the new GPUs that was rolled back before the crash has left the members there, suspended:
        pairs begin at the current GPUs of a process.
        """
        group = self._group
        await group.restore(destination)
        try:
            await self._verification.prove_placed([outcome.member for outcome in group.outcomes], destination)
        except OperationError as error:
            if error.reason == errors_pb2.ERROR_REASON_REMAP_NOT_APPLIED:
                for outcome in group.outcomes:
                    actual = await self._verification.listed_gpus([outcome.member])
                    for candidate in ((), pairs, _chained(pairs, destination)):
                        if actual == placed(outcome.member, candidate):
                            outcome.displacement = candidate
            await group.roll_back()
            raise


def _chained(first: Pairs, then: Sequence[GpuPair]) -> Pairs:
    """The pairs that lead from the old GPUs of the first ones to the new GPUs of the second."""
    return tuple(
        GpuPair(pair.old_uuid, new_uuid)
        for pair, new_uuid in zip(first, moved((pair.new_uuid for pair in first), then), strict=True)
    )
