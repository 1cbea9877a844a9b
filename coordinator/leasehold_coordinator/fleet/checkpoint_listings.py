"""Bounds of the listings of checkpoints that ask all workers. A listing has a task for each worker."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, final

from leasehold.v1.checkpoint_pb2 import Checkpoint

from leasehold_coordinator.fleet.callers import counted_caller
from leasehold_coordinator.fleet.fair_places import FairPlaces
from leasehold_coordinator.shared_runs import SharedRuns

WORKLOAD_LISTINGS: Final = 8
"""Most concurrent listings of single workloads. One caller has two of them. Further listings wait."""


@final
@dataclass(frozen=True, slots=True)
class Listed:
    """The answer of a worker, or those of several. Several callers may share them.

    Attributes:
        checkpoints: Newest first.
        unreachable: Ids of the workers that did not answer. Their checkpoints are unknown.
        truncated: Whether a worker has more checkpoints than its list may have.
    """

    checkpoints: tuple[Checkpoint, ...]
    unreachable: tuple[str, ...] = ()
    truncated: bool = False


@final
class CheckpointListings:
    """The listings that ask all workers.

    Callers share a listing of all checkpoints. So a worker that does not answer delays a caller by two
    listings at most. No caller gets a listing that began before its call: a checkpoint may have been made
    since then.
    """

    def __init__(self) -> None:
        self._whole: SharedRuns[Listed] = SharedRuns()
        self._places = FairPlaces(WORKLOAD_LISTINGS, WORKLOAD_LISTINGS // 4)

    async def whole(self, ask: Callable[[], Coroutine[Any, Any, Listed]]) -> Listed:
        """The checkpoints of all workers.

        Args:
            ask: Asks all workers, with a deadline.
        """
        return await self._whole.next(ask)

    async def of_workload(self, ask: Callable[[], Coroutine[Any, Any, Listed]]) -> Listed:
        """The checkpoints of one workload on all workers.

        Args:
            ask: Asks all workers for the checkpoints of the workload, with a deadline.
        """
        give_back = await self._places.take(counted_caller())
        try:
            return await ask()
        finally:
            give_back()
