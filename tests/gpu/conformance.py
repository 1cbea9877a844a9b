"""Runs a part of the conformance suite on the GPUs of this host.

python -m tests.gpu.conformance EXPRESSION     as that of pytest -k
"""

from __future__ import annotations

import sys
from typing import Final

import pytest

from tests.gpu.steps import SKIPPED

SUITE: Final = "tests/conformance"


class Passed:
    """Counts the tests that passed. pytest itself is content where all are skipped."""

    count = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called by pytest for each phase of each test."""
        self.count += report.when == "call" and report.passed


def main(expression: str) -> int:
    """Runs the tests, in the environment that the report has set up and not in that of a test run."""
    passed = Passed()
    options = ["-m", "gpu", "-v", "--no-header", "-p", "no:cacheprovider", "-k", expression]
    status = int(pytest.main([*options, f"--confcutdir={SUITE}", SUITE], plugins=[passed]))
    return SKIPPED if status == 0 and passed.count == 0 else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
