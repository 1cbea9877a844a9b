"""The findings of a plan: its checks, and their results."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

from leasehold.v1 import plan_pb2
from leasehold.v1.plan_pb2 import CheckResult

from leasehold_worker.errors import OperationError
from leasehold_worker.workloads.workload import Workload

PASSED: Final = plan_pb2.CHECK_RESULT_PASSED

WARNING: Final = plan_pb2.CHECK_RESULT_WARNING

REFUSED: Final = plan_pb2.CHECK_RESULT_REFUSED

NOT_CHECKED: Final = plan_pb2.CHECK_RESULT_NOT_CHECKED


@dataclass(frozen=True, slots=True)
class Check:
    """One condition.

    Attributes:
        name: The object of the check.
        result: Its result.
        detail: The finding, with the remedy.
        workload_id: The workload of the check. Empty: all of the plan.
    """

    name: str
    result: CheckResult.ValueType
    detail: str
    workload_id: str = ""


@dataclass(slots=True)
class Findings:
    """The checks of one plan, in order."""

    checks: list[Check] = field(default_factory=list)
    refusals: list[OperationError] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    excused: list[OperationError] = field(default_factory=list)
    workload_id: str = ""
    """The workload that the checks are about. Empty: all of the plan."""

    @contextmanager
    def about(self, workload: Workload) -> Iterator[None]:
        """Binds the conditions in the context to one workload."""
        self.workload_id = workload.workload_id
        try:
            yield
        finally:
            self.workload_id = ""

    @contextmanager
    def check(self, name: str, detail: str) -> Iterator[None]:
        """Adds a condition: passed, with the detail, or refused, with the error that the context raises."""
        try:
            yield
        except OperationError as error:
            self.refuse(name, error)
        else:
            self.passed(name, detail)

    def passed(self, name: str, detail: str) -> None:
        """Adds a condition that holds."""
        self._add(name, PASSED, detail)

    def refuse(self, name: str, error: OperationError) -> None:
        """Adds a condition that forbids the operation."""
        self.refusals.append(error)
        self._add(name, REFUSED, error.message)

    def warn(self, name: str, detail: str) -> None:
        """Adds a condition that deserves attention."""
        self.warnings.append(detail)
        self._add(name, WARNING, detail)

    def excuse(self, refusal: OperationError, detail: str) -> None:
        """Turns a refusal into a warning, since another step resolves it first."""
        self.refusals.remove(refusal)
        self.excused.append(refusal)
        self.checks = [
            replace(check, result=WARNING, detail=detail) if check.detail == refusal.message else check
            for check in self.checks
        ]

    def skip(self, name: str, detail: str) -> None:
        """Adds a condition that could not be checked."""
        self._add(name, NOT_CHECKED, detail)

    def _add(self, name: str, result: CheckResult.ValueType, detail: str) -> None:
        self.checks.append(Check(name, result, detail, self.workload_id))
