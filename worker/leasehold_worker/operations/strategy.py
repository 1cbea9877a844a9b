"""The process strategies of eviction policies, as one protocol."""

from collections.abc import Sequence
from typing import Protocol

from leasehold_worker.commands.progress import Progress
from leasehold_worker.leasing.leases import Lease
from leasehold_worker.planning.plan import Plan


class Strategy(Protocol):
    """How the processes of a workload give their GPUs up, and get GPUs again.

    Either call rolls back if it is cancelled before its point of no return, which each strategy names.
    """

    async def suspend(self, plan: Plan, progress: Progress) -> None:
        """Has the workload of a plan give up its GPUs.

        Raises:
            OperationError: It failed, and the workload is as before as far as the progress says.
        """

    async def restore(self, plan: Plan, reserved: Sequence[Lease], progress: Progress) -> None:
        """Gives the workload of a plan its new GPUs, and undoes what suspended it.

        Args:
            plan: The plan.
            reserved: Leases of these GPUs. What the workload does not get is released by the caller.
            progress: Gets what is done.

        Raises:
            OperationError: It failed, and the workload is suspended as before as far as the progress says.
        """
