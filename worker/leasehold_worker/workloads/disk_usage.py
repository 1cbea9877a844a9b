"""How much of their promised disk workloads have written, looked at again and again.

The volume has less room by what is written, so that the ledger must not count that part of a promise as well.
What lies in a workload's own folder counts: its output, and what its program writes unless the program was
told to work elsewhere. Of other folders nothing is known, and the whole promise is kept free.
"""

import logging
from typing import Final, final

import trio

from leasehold_worker.host.capacity import directory_bytes
from leasehold_worker.leasing.host_reservations import HostReservations
from leasehold_worker.workloads.registry import Workloads
from leasehold_worker.workloads.states import ENDED

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S: Final = 10.0
LOOK_TIMEOUT_S: Final = 60.0
"""How long a folder may take to be measured. After that, what was measured last counts."""


@final
class DiskUsage:
    """Tells the ledger of one worker what its workloads have written."""

    def __init__(self, workloads: Workloads, ledger: HostReservations) -> None:
        self._workloads = workloads
        self._ledger = ledger
        self._limiter = trio.CapacityLimiter(1)
        """Held by the measurement under way, for good by one that hangs."""

    async def run(self) -> None:
        """Looks until it is cancelled."""
        while True:
            await self.look()
            await trio.sleep(LOOK_INTERVAL_S)

    async def look(self) -> None:
        """Measures the folder of every workload that was promised disk."""
        for workload in self._workloads.all():
            host = workload.host
            if workload.state in ENDED or host is None or not host.request.disk_bytes:
                continue
            folder = self._workloads.folder(workload.workload_id)
            with trio.move_on_after(LOOK_TIMEOUT_S) as scope:
                written = await trio.to_thread.run_sync(
                    directory_bytes, folder, abandon_on_cancel=True, limiter=self._limiter
                )
                self._ledger.set_written(host, written)
            if scope.cancelled_caught:
                logger.warning("workload %s: its disk usage can't be measured", workload.name)
