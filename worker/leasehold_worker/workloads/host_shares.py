"""The host resources of workloads other than GPUs: reservations and control groups."""

import logging
import os
from pathlib import Path
from typing import final

from leasehold_worker.errors import OperationError
from leasehold_worker.host.cgroup_limits import ResourceLimits
from leasehold_worker.host.cgroups import is_limited_below
from leasehold_worker.leasing.host_reservations import HostRequest, HostReservations
from leasehold_worker.workloads.workload import Workload, parked_bytes

logger = logging.getLogger(__name__)


@final
class HostShares:
    """The shares of one host's workloads.

    Args:
        ledger: The reservations.
        limits: The control groups.
    """

    def __init__(self, ledger: HostReservations, limits: ResourceLimits) -> None:
        self._ledger = ledger
        self._limits = limits

    def give_back(self, workload: Workload) -> None:
        """Releases the host resources other than GPUs that a workload holds."""
        if workload.host is not None:
            self._ledger.release(workload.host)
            workload.host = None
        group = self._limits.find(workload.workload_id)
        if group is not None:
            self._limits.remove(group)

    def enforce(self, workload: Workload) -> None:
        """Has the kernel enforce the limits of a program that the worker did not start.

        A worker that isn't root may not move a foreign process: then only the ledger enforces the
        reservation. So it does for a process with limits that the worker does not have: a move would lift
        them, such as those of its user's slice.
        """
        promised, group = workload.spec.resources, None
        if not (promised.cpu_millicores or promised.memory_bytes):
            return
        if is_limited_below(workload.root.pid, os.getpid()):
            logger.warning(
                "workload %s stays under the limits of its control group: its reservation is not enforced",
                workload.name,
            )
            return
        try:
            group = self.group_of(workload)
            if group is not None:
                self._limits.add(group, workload.root.pid)
        except (OperationError, OSError) as error:
            logger.warning("the limits of workload %s are not enforced: %s", workload.name, error)
            if group is not None:
                self._limits.remove(group)

    def group_of(self, workload: Workload) -> Path | None:
        """The control group of a workload's processes, limited to its reservation. None: the worker's."""
        wanted = workload.spec.resources
        return self._limits.create(workload.workload_id, wanted.cpu_millicores, wanted.memory_bytes)

    def take(self, workload: Workload) -> None:
        """Reserves the host resources other than GPUs that a workload needs.

        Raises:
            OperationError: INSUFFICIENT_RESOURCES.
        """
        workload.host = self._ledger.reserve(workload.workload_id, _needed(workload))

    def take_back(self, workload: Workload) -> None:
        """Restores the reservation of a workload after a restart of the worker."""
        workload.host = self._ledger.take_back(workload.workload_id, _needed(workload))

    def limit_memory(self, workload: Workload, coming_bytes: int = 0) -> None:
        """Limits a workload's memory to its reservation and its suspended memory.

        The limit is enforced as far as the kernel permits. An operation never fails because of it.

        Args:
            workload: The workload.
            coming_bytes: Device memory that an operation moves to host memory.
        """
        promised = workload.spec.resources.memory_bytes
        group = self._limits.find(workload.workload_id) if promised else None
        if group is not None:
            try:
                self._limits.set_memory(group, promised + parked_bytes(workload) + coming_bytes)
            except OperationError as error:
                logger.warning("workload %s: %s", workload.name, error.message)


def _needed(workload: Workload) -> HostRequest:
    wanted = workload.spec.resources
    return HostRequest(wanted.cpu_millicores, wanted.memory_bytes, wanted.disk_bytes)
