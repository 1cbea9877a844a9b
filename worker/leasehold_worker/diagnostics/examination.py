"""The facts of a host for the checks of ``leasehold doctor``, and the results of a check.

A check is a function of the examination. It returns its finding if the condition holds, else it raises an
error of :func:`failed`, :func:`warning` or :func:`not_checked`.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from leasehold.v1.plan_pb2 import CheckResult

from leasehold_worker.agent.config import WorkerConfig
from leasehold_worker.criu.installation import CriuFacts
from leasehold_worker.diagnostics.installed_service import InstalledService
from leasehold_worker.driver.helper_pool import Driver
from leasehold_worker.gpus.inventory import GpuFacts, Inventory
from leasehold_worker.planning.findings import NOT_CHECKED, REFUSED, WARNING


class NotOkError(Exception):
    """A condition does not hold, or could not be checked.

    Attributes:
        result: The kind of the result.
    """

    def __init__(self, result: CheckResult.ValueType, detail: str) -> None:
        super().__init__(detail)
        self.result = result


def failed(detail: str) -> NotOkError:
    """A failure; the detail ends with the remedy."""
    return NotOkError(REFUSED, detail)


def warning(detail: str) -> NotOkError:
    """A warning; the detail ends with the remedy."""
    return NotOkError(WARNING, detail)


def not_checked(detail: str) -> NotOkError:
    """A check that could not be made; the detail has the reason."""
    return NotOkError(NOT_CHECKED, detail)


@dataclass(frozen=True, slots=True)
class Examination:
    """The facts of the host, collected before the checks.

    Attributes:
        config: The worker's configuration, or the default one if it is invalid.
        config_error: Why the configuration is invalid. None: it is valid.
        driver: The driver, with its version.
        inventory: NVML, opened. None: it does not answer.
        child_can_be_asked: Whether the driver helper could check a child of the doctor.
        trace_obstacle: Why the helper may not control that child, with the remedy. None: it may.
        criu: The working CRIU, or the reason why there is none.
        service: The installed service. None: the examination is without ``--host``.
    """

    config: WorkerConfig
    config_error: str | None
    driver: Driver
    inventory: Inventory | None
    child_can_be_asked: bool
    trace_obstacle: str | None
    criu: CriuFacts | str
    service: InstalledService | None = None

    @property
    def worker_uid(self) -> int:
        """The worker's user: that of its service if root examines it, and otherwise the doctor's."""
        uid = self.service.uid if self.service is not None else None
        return uid if uid is not None and os.geteuid() == 0 else os.geteuid()

    def nvml(self) -> Inventory:
        """NVML; without it, checks that need it are not made."""
        if self.inventory is None or self.inventory.unavailable_reason is not None:
            raise not_checked("NVML can't be used")
        return self.inventory

    def gpus(self) -> tuple[GpuFacts, ...]:
        """The GPUs; without any, checks that need one are not made."""
        if not self.nvml().gpus:
            raise not_checked("there is no GPU")
        return self.nvml().gpus


Look: TypeAlias = Callable[[Examination], str]
"""A check."""
