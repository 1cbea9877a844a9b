"""The process strategies of eviction policies, as one protocol."""

from collections.abc import Sequence
from typing import Protocol

from leasehold_worker.commands.progress import Progress
from leasehold_worker.leasing.leases import Lease
from leasehold_worker.planning.plan import Plan


class Strategy(Protocol):
    """The way in which the processes of a workload release their GPUs, and get GPUs again.

    Either call rolls back if it is cancelled before its point of no return, which each strategy names.
    """

    async def suspend(self, plan: Plan, progress: Progress) -> None:
        """Has the workload of a plan release its GPUs.

        Raises:
            OperationError: The operation failed and was rolled back, unless the progress reports otherwise.
        """

    async def restore(self, plan: Plan, reserved: Sequence[Lease], progress: Progress) -> None:
        """Gives the workload of a plan its new GPUs, and undoes the suspend.

        Args:
            plan: The plan.
            reserved: Leases of these GPUs. The caller releases those that the workload does not get.
            progress: Receives the outcomes.

        Raises:
            OperationError: The operation failed and was rolled back, unless the progress reports otherwise.
        """
