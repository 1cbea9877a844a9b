"""What ``leasehold doctor`` finds out about a host before its checks, and how a check says what is not well.

A check is a function of the patient. It returns what it found where that is as it must be, else it raises
what :func:`failed`, :func:`warning` or :func:`not_checked` make.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from leasehold.v1.plan_pb2 import CheckResult

from leasehold_worker.agent.config import WorkerConfig
from leasehold_worker.criu.installation import CriuFacts
from leasehold_worker.driver.helper_pool import Driver
from leasehold_worker.gpus.inventory import GpuFacts, Inventory
from leasehold_worker.planning.findings import NOT_CHECKED, REFUSED, WARNING


class NotOkError(Exception):
    """A condition is not as it must be, or could not be looked at.

    Attributes:
        result: Which of these.
    """

    def __init__(self, result: CheckResult.ValueType, detail: str) -> None:
        super().__init__(detail)
        self.result = result


def failed(detail: str) -> NotOkError:
    """Something does not work here; the detail ends with the remedy."""
    return NotOkError(REFUSED, detail)


def warning(detail: str) -> NotOkError:
    """Something works, but less well than it could; the detail ends with the remedy."""
    return NotOkError(WARNING, detail)


def not_checked(detail: str) -> NotOkError:
    """It could not be looked at; the detail says why."""
    return NotOkError(NOT_CHECKED, detail)


@dataclass(frozen=True, slots=True)
class Examination:
    """What was found out about the host before the checks.

    Attributes:
        config: The worker's configuration; that of a worker that nobody configured where it is not valid.
        config_error: Why it is not valid. None: it is.
        driver: The driver, asked for what it is.
        inventory: NVML, opened. None: it does not answer.
        child_can_be_asked: Whether the driver helper could be asked about a child of the doctor's.
        trace_obstacle: Why the helper may not trace that child. None: it may.
        criu: The CRIU that works here, or why there is none.
    """

    config: WorkerConfig
    config_error: str | None
    driver: Driver
    inventory: Inventory | None
    child_can_be_asked: bool
    trace_obstacle: str | None
    criu: CriuFacts | str

    def nvml(self) -> Inventory:
        """NVML; a check that needs it is not made where there is none."""
        if self.inventory is None or self.inventory.unavailable_reason is not None:
            raise not_checked("NVML can't be used")
        return self.inventory

    def gpus(self) -> tuple[GpuFacts, ...]:
        """The GPUs; a check that needs one is not made where there is none."""
        if not self.nvml().gpus:
            raise not_checked("there is no GPU")
        return self.nvml().gpus


Look: TypeAlias = Callable[[Examination], str]
"""A check."""
