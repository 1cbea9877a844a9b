"""Readiness of workloads: their readiness probes have succeeded, or else they use CUDA.

A ready workload stays ready until its program is started again. Readiness marks the end of the start, and is
no measure of health.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final, final

import trio

from leasehold_worker.errors import OperationError
from leasehold_worker.workloads.foreign_processes import ForeignWatch
from leasehold_worker.workloads.registry import Workloads
from leasehold_worker.workloads.workload import Workload

logger = logging.getLogger(__name__)

LEAST_PAUSE_S: Final = 0.1
MOST_PAUSE_S: Final = 5.0
"""Longest time between two probes of a workload. The pause grows with the age of the start."""

AGE_FRACTION: Final = 0.25
"""The pause as a fraction of that age: readiness is noticed at most a quarter of the age late."""


@final
class Readiness:
    """Detects when the workloads of one worker become ready.

    Args:
        workloads: The registry, which records readiness.
        foreign: Lists the processes on the GPUs, and reports workloads that use CUDA to the registry.
        probe: Calls the readiness probes of a workload once; raises OperationError if it is not ready.
    """

    def __init__(
        self, workloads: Workloads, foreign: ForeignWatch, probe: Callable[[Workload], Awaitable[None]]
    ) -> None:
        self._workloads = workloads
        self._foreign = foreign
        self._probe = probe
        self._probed: set[str] = set()

    async def run(self) -> None:
        """Probes workloads until they are ready, until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                awaiting = [each for each in self._workloads.all() if each.awaits_readiness]
                for workload in awaiting:
                    if workload.has_probe:
                        self._begin_probing(workload, nursery)
                    elif workload.lease is None and not workload.lost_gpu_uuids:  # ready at once
                        self._workloads.set_ready(workload)
                by_cuda = [each for each in awaiting if each.awaits_readiness and not each.has_probe]
                with trio.move_on_after(min(map(_pause_s, by_cuda), default=float("inf"))):
                    await self._workloads.wait_changed()
                    continue
                await self._foreign.look(self._workloads)

    def _begin_probing(self, workload: Workload, nursery: trio.Nursery) -> None:
        if workload.workload_id not in self._probed:
            self._probed.add(workload.workload_id)
            nursery.start_soon(self._probe_until_ready, workload)

    async def _probe_until_ready(self, workload: Workload) -> None:
        try:
            while workload.awaits_readiness:
                root = workload.root
                try:
                    await self._probe(workload)
                except OperationError as error:
                    if not workload.unready:
                        logger.info("workload %s is not ready: %s", workload.name, error.message)
                    workload.unready = error.message
                except Exception:
                    logger.exception("a defect stopped the readiness probe of workload %s", workload.name)
                    workload.unready = (
                        "its readiness probe failed because of a defect of the worker: see the worker's log"
                    )
                else:
                    if workload.root == root:  # otherwise the probe answered for another start of the program
                        self._workloads.set_ready(workload)
                        return
                await trio.sleep(_pause_s(workload))
        finally:
            self._probed.discard(workload.workload_id)


def _pause_s(workload: Workload) -> float:
    age_s = time.monotonic() - workload.begun_s
    return min(max(LEAST_PAUSE_S, AGE_FRACTION * age_s), MOST_PAUSE_S)
