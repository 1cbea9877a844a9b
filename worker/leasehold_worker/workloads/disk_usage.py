"""Measurement of the disk space that workloads use of their reservations.

The volume has less free space by the written bytes, so the ledger must not count that part of a reservation
again. The workload's own folder is measured: its output, and the files of its program unless they are
elsewhere. For other folders the whole reservation stays free.
"""

import logging
from typing import Final, final

import trio

from leasehold_worker.files.folder_trees import directory_bytes
from leasehold_worker.leasing.host_reservations import HostReservation, HostReservations
from leasehold_worker.programs.user_files import UserFileError, measure_as
from leasehold_worker.threads import run_in_thread
from leasehold_worker.workloads.registry import Workloads
from leasehold_worker.workloads.states import ENDED
from leasehold_worker.workloads.workload import Workload

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S: Final = 10.0
LOOK_TIMEOUT_S: Final = 60.0
"""Time for measuring a folder. After that, the last measurement counts."""

AT_ONCE: Final = 4
"""Most measurements at once, and most of the folders that were not measured in time before."""


@final
class DiskUsage:
    """Reports the disk usage of one worker's workloads to its ledger.

    A folder on a volume that hangs delays the measurement of no other folder, except once by its timeout.
    """

    def __init__(self, workloads: Workloads, ledger: HostReservations) -> None:
        self._workloads = workloads
        self._ledger = ledger
        self._places = {is_late: trio.CapacityLimiter(AT_ONCE) for is_late in (False, True)}
        self._threads: dict[str, trio.CapacityLimiter] = {}
        """By workload id. Held by the thread that measures the worker's folder, forever if it hangs."""
        self._measuring: set[str] = set()
        """Ids of the workloads whose measurement is under way, or waits for its turn."""
        self._late: set[str] = set()
        """Ids of the workloads whose last measurement failed or took too long."""

    async def run(self) -> None:
        """Measures the folder of every workload with reserved disk, over and over, until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                reserved = self._reserved()
                for workload_id in self._threads.keys() - reserved.keys() - self._measuring:
                    del self._threads[workload_id]
                    self._late.discard(workload_id)
                for workload_id in reserved.keys() - self._measuring:
                    self._measuring.add(workload_id)
                    nursery.start_soon(self._look, *reserved[workload_id])
                await trio.sleep(LOOK_INTERVAL_S)

    def _reserved(self) -> dict[str, tuple[Workload, HostReservation]]:
        """The workloads with reserved disk, by id."""
        return {
            workload.workload_id: (workload, workload.host)
            for workload in self._workloads.all()
            if workload.state not in ENDED and workload.host is not None and workload.host.request.disk_bytes
        }

    async def _look(self, workload: Workload, host: HostReservation) -> None:
        """Measures the folder of a workload, once a place is free."""
        workload_id = workload.workload_id
        try:
            async with self._places[workload_id in self._late]:
                self._ledger.set_written(host, await self._measure(workload))
                self._late.discard(workload_id)
        except (OSError, UserFileError, trio.TooSlowError):
            self._late.add(workload_id)
            logger.warning("workload %s: its disk usage can't be measured", workload.name)
        finally:
            self._measuring.discard(workload_id)

    async def _measure(self, workload: Workload) -> int:
        folder = self._workloads.folder(workload.workload_id)
        limiter = self._threads.setdefault(workload.workload_id, trio.CapacityLimiter(1))
        with trio.fail_after(LOOK_TIMEOUT_S):
            written = await run_in_thread(directory_bytes, folder, abandon_on_cancel=True, limiter=limiter)
        if workload.account is None:
            return written
        user_folder = self._workloads.user_folder(workload.workload_id)
        return written + await measure_as(workload.account, user_folder, LOOK_TIMEOUT_S)
