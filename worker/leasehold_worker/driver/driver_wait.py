"""The wait for a driver that was not usable when the worker started.

cuInit fails while the fabric manager of NVSwitch starts, while the kernel module loads, and for lack of
processes or threads. Each of these passes without a restart of the worker. So the worker probes again, with a
back-off, until cuInit succeeds.
"""

import logging
import random
from typing import Final

import trio

from leasehold_worker.driver.helper_pool import Driver

logger = logging.getLogger(__name__)

RETRY_MIN_S: Final = 2.0
RETRY_MAX_S: Final = 120.0
"""Longest time between two probes. Each probe starts a process, also on a host that never has a driver."""


async def wait_for_driver(driver: Driver) -> None:
    """Probes the driver repeatedly, and returns once it is usable. Failed probes are logged."""
    backoff_s = RETRY_MIN_S
    while (reason := driver.unavailable_reason) is not None:
        await trio.sleep(backoff_s * random.uniform(0.5, 1.0))
        backoff_s = min(2 * backoff_s, RETRY_MAX_S)
        if driver.has_stuck_probe:
            continue  # otherwise each probe would add a process that can't be killed
        try:
            await driver.probe()
        except Exception:  # a failed probe must not end the worker
            logger.exception("a probe of the CUDA driver failed because of a defect, and is repeated")
        if driver.unavailable_reason is None:
            logger.info("the CUDA driver is usable now, after: %s", reason)
        elif driver.unavailable_reason != reason:
            logger.warning("still no usable CUDA driver: %s", driver.unavailable_reason)
