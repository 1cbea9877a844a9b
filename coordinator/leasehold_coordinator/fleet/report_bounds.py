"""How many unknown workloads one worker may report.

A worker chooses the ids of workloads that began on its host. Records of all workers share one history.
"""

import logging
import time
from collections.abc import Sequence
from typing import Final, final

from leasehold.v1 import errors_pb2
from leasehold.v1.workload_pb2 import Workload

from leasehold_coordinator.core.allowance import Allowances
from leasehold_coordinator.core.worker_registry import WORKER_LIMIT
from leasehold_coordinator.core.workload_reports import is_of_host
from leasehold_coordinator.core.workload_states import is_ended
from leasehold_coordinator.errors import FleetError

logger = logging.getLogger(__name__)

NEW_PER_S: Final = 1.0
NEW_BURST: Final = 8_192
"""New workloads of one worker per second in the long run, and at once. A host may run a short
`leasehold exec` every second, and an empty store learns up to 2,048 workloads from a hello."""

RECORD_BYTES: Final = 4_096
"""A record of more bytes counts as several workloads."""


@final
class ReportBounds:
    """The recent new workloads of each worker."""

    def __init__(self) -> None:
        self._new = Allowances(NEW_PER_S, NEW_BURST, 2 * WORKER_LIMIT)

    def admit(self, worker_id: str, new: Sequence[Workload]) -> list[Workload]:
        """The new workloads that may be stored: all that live, and those that have ended if there is room.

        A live workload may hold GPUs, so none is left out. The workloads count once they are stored.

        Args:
            worker_id: The worker.
            new: Records of unknown workloads.

        Raises:
            FleetError: TOO_MANY_CALLS, the live workloads are too many. None may be stored.
        """
        now = time.monotonic()
        allowance = self._new.of(worker_id, now)
        kept = [one for one in new if not is_ended(one.status.state)]
        amount = sum(map(_units, kept))
        if kept and (wait_s := allowance.wait_s(amount, now)):
            raise FleetError(
                errors_pb2.ERROR_REASON_TOO_MANY_CALLS,
                f"worker {worker_id} reported {len(kept)} unknown live workloads, after many others: "
                f"one worker may report {NEW_BURST} at once, and {NEW_PER_S:g} per second in the long run. "
                "Find out what starts them on its host",
                retry_after_s=wait_s,
                bound="worker_new_workloads",
            )
        left_out = 0
        for ended in (one for one in new if is_ended(one.status.state)):
            if allowance.wait_s(amount + _units(ended), now):
                left_out += 1
            else:
                amount += _units(ended)
                kept.append(ended)
        if left_out:
            logger.warning(
                "left out %d unknown workloads of worker %s that have ended: it reports too many",
                left_out,
                worker_id,
            )
        return kept

    def charge(self, before: Workload | None, stored: Workload) -> None:
        """Counts a stored workload that began on a host, if its record is new or larger than before."""
        if is_of_host(stored):
            growth = _units(stored) - (_units(before) if before is not None else 0)
            now = time.monotonic()
            self._new.of(stored.worker_id, now).charge(max(0.0, growth), now)


def _units(workload: Workload) -> float:
    return max(1.0, workload.ByteSize() / RECORD_BYTES)
