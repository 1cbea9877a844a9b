"""Looks after the health of this host's GPUs: from time to time, and as soon as the driver reports an Xid."""

import logging
import random
from collections.abc import Callable
from typing import Final, final

import trio
from leasehold.v1.gpu_pb2 import GpuHealth

from leasehold_worker.gpus.health import HARMLESS_XIDS, judge, judge_xid
from leasehold_worker.gpus.inventory import Inventory, XidWait

logger = logging.getLogger(__name__)

JITTER: Final = 0.1
"""By which share of itself a pause may be shorter or longer: hosts that started together part."""

_XID_WAIT_S: Final = 5.0
"""How long one thread waits for Xids. It is left behind at a shutdown, and ends by itself by then."""

_XID_PAUSE_S: Final = 1.0
"""The pause after Xids came: a GPU that is broken may tell of it without end."""

_FIRST_RETRY_S: Final = 1.0
"""The pause after Xids became unavailable; the next ones double, up to the interval of the looks."""


@final
class HealthMonitor:
    """Reports the health of every GPU, again and again.

    A report says what was found at that moment, also that all is well; an Xid is reported once. Whoever takes
    the reports decides what stays. Failures of NVML end nothing: what it can't say is logged, once.
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
            report: Takes UUID, health and reason of a GPU, in trio's thread. The reason is empty only if the
                GPU is healthy.
            interval_s: Between two looks, give or take JITTER.
        """
        self._inventory = inventory
        self._report = report
        self._interval_s = interval_s
        self._told: set[str] = set()
        """What has been logged as lacking."""
        self._limiter = trio.CapacityLimiter(1)

    async def run(self) -> None:
        """Looks at once, and then until it is cancelled. Returns at once on a host without GPUs.

        A thread that waits for NVML is left behind on cancellation.
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
        """Reads every GPU's health, and reports it. A GPU of which NVML says nothing in time is not reported.

        On cancellation nothing is reported.
        """
        readings = await trio.to_thread.run_sync(self._inventory.read_health, abandon_on_cancel=True)
        self._tell_lacks()
        for gpu_uuid, reading in readings.items():
            verdict = judge(reading)
            self._report(gpu_uuid, verdict.health, verdict.reason)

    async def _watch_xids(self) -> None:
        retry_s = _FIRST_RETRY_S
        while True:
            found = await trio.to_thread.run_sync(
                self._inventory.wait_xids, _XID_WAIT_S, abandon_on_cancel=True, limiter=self._limiter
            )
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
