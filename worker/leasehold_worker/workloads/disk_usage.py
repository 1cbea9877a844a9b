"""Measurement of the disk space that workloads use of their reservations.

The volume has less free space by the written bytes, so the ledger must not count that part of a reservation
again. The workload's own folder is measured: its output, and the files of its program unless they are
elsewhere. For other folders the whole reservation stays free.
"""

import logging
from typing import Final, final

import trio

from leasehold_worker.files.folder_trees import directory_bytes
from leasehold_worker.leasing.host_reservations import HostReservations
from leasehold_worker.programs.user_files import UserFileError, measure_as
from leasehold_worker.workloads.registry import Workloads
from leasehold_worker.workloads.states import ENDED
from leasehold_worker.workloads.workload import Workload

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S: Final = 10.0
LOOK_TIMEOUT_S: Final = 60.0
"""Time for measuring a folder. After that, the last measurement counts."""


@final
class DiskUsage:
    """Reports the disk usage of one worker's workloads to its ledger."""

    def __init__(self, workloads: Workloads, ledger: HostReservations) -> None:
        self._workloads = workloads
        self._ledger = ledger
        self._limiter = trio.CapacityLimiter(1)
        """Held by the running measurement, forever if it hangs."""

    async def run(self) -> None:
        """Measures until cancelled."""
        while True:
            await self.look()
            await trio.sleep(LOOK_INTERVAL_S)

    async def look(self) -> None:
        """Measures the folder of every workload with reserved disk."""
        for workload in self._workloads.all():
            host = workload.host
            if workload.state in ENDED or host is None or not host.request.disk_bytes:
                continue
            try:
                self._ledger.set_written(host, await self._measure(workload))
            except (UserFileError, trio.TooSlowError):
                logger.warning("workload %s: its disk usage can't be measured", workload.name)

    async def _measure(self, workload: Workload) -> int:
        folder = self._workloads.folder(workload.workload_id)
        with trio.fail_after(LOOK_TIMEOUT_S):
            written = await trio.to_thread.run_sync(
                directory_bytes, folder, abandon_on_cancel=True, limiter=self._limiter
            )
        if workload.account is None:
            return written
        user_folder = self._workloads.user_folder(workload.workload_id)
        return written + await measure_as(workload.account, user_folder, LOOK_TIMEOUT_S)
