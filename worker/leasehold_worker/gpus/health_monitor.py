"""Monitors the health of this host's GPUs, periodically and as soon as the driver reports an Xid."""

import logging
import random
from collections.abc import Callable
from typing import Final, final

import trio
from leasehold.v1.gpu_pb2 import GpuHealth

from leasehold_worker.gpus.health import HARMLESS_XIDS, judge, judge_xid
from leasehold_worker.gpus.inventory import Inventory, XidWait
from leasehold_worker.threads import run_in_thread

logger = logging.getLogger(__name__)

JITTER: Final = 0.1
"""Relative jitter of pauses, so that hosts that started together drift apart."""

_XID_WAIT_S: Final = 5.0
"""Time that one thread waits for Xids. It is abandoned at a shutdown, and ends by itself by then."""

_XID_PAUSE_S: Final = 1.0
"""Pause after Xids: a broken GPU may report them without end."""

_FIRST_RETRY_S: Final = 1.0
"""Pause after Xids became unavailable. The next ones double, up to the interval of readings."""


@final
class HealthMonitor:
    """Reports the health of every GPU repeatedly.

    A report has the current verdict, good or bad; an Xid is reported once. The receiver decides which
    verdicts last. Failures of NVML are logged once, and end nothing.
    """

    def __init__(
        self,
        inventory: Inventory,
        report: Callable[[str, GpuHealth.ValueType, str], None],
        *,
        interval_s: float = 30.0,
    ) -> None:
        """Prepares a monitor that does nothing yet.

        Args:
            inventory: The GPUs.
            report: Receives UUID, health and reason of a GPU, in trio's thread. The reason is empty only if
                the GPU is healthy.
            interval_s: Interval of readings, give or take JITTER.
        """
        self._inventory = inventory
        self._report = report
        self._interval_s = interval_s
        self._told: set[str] = set()
        """Values missing in the readings that have been logged."""
        self._limiter = trio.CapacityLimiter(1)

    async def run(self) -> None:
        """Reads at once, and then repeatedly until cancelled. Returns at once on a host without GPUs.

        On cancellation, a thread that waits for NVML is abandoned.
        """
        self._tell_lacks()
        if not self._inventory.gpus:
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_xids)
            while True:
                await self.look()
                await trio.sleep(_jittered(self._interval_s))

    async def look(self) -> None:
        """Reads and reports every GPU's health. A GPU without an answer in time is left out.

        On cancellation nothing is reported, nor if no thread can be started.
        """
        try:
            readings = await run_in_thread(self._inventory.read_health, abandon_on_cancel=True)
        except OSError as error:
            logger.warning("the health of the GPUs can't be read for now: %s", error)
            return
        self._tell_lacks()
        for gpu_uuid, reading in readings.items():
            verdict = judge(reading)
            self._report(gpu_uuid, verdict.health, verdict.reason)

    async def _watch_xids(self) -> None:
        retry_s = _FIRST_RETRY_S
        while True:
            try:
                found = await run_in_thread(
                    self._inventory.wait_xids, _XID_WAIT_S, abandon_on_cancel=True, limiter=self._limiter
                )
            except OSError as error:
                found = XidWait(unavailable_reason=str(error))
            self._tell_lacks()
            self._report_xids(found)
            if not found.unavailable_reason:
                retry_s = _FIRST_RETRY_S
                if found.xids:
                    await self.look()
                    await trio.sleep(_XID_PAUSE_S)
                continue
            logger.debug("Xids can't be read for now: %s", found.unavailable_reason)
            if retry_s == _FIRST_RETRY_S:
                await self.look()  # a GPU may have been lost just now
            await trio.sleep(_jittered(retry_s))
            retry_s = min(2 * retry_s, max(self._interval_s, _FIRST_RETRY_S))

    def _report_xids(self, found: XidWait) -> None:
        for gpu_uuid, xid in dict.fromkeys(found.xids):
            verdict = judge_xid(xid)
            if verdict is not None:
                logger.error("GPU %s: %s", gpu_uuid, verdict.reason)
                self._report(gpu_uuid, verdict.health, verdict.reason)
            else:
                meaning = HARMLESS_XIDS.get(xid, "an unknown error")
                logger.warning("GPU %s: Xid %d, %s: the GPU stays in use", gpu_uuid, xid, meaning)

    def _tell_lacks(self) -> None:
        for lack in self._inventory.health_lacks:
            if lack not in self._told:
                self._told.add(lack)
                logger.warning("the health of GPUs is monitored without %s", lack)


def _jittered(seconds: float) -> float:
    return seconds * random.uniform(1 - JITTER, 1 + JITTER)
