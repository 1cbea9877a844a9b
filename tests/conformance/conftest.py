"""The hosts that the driver's contract is checked on: a simulated one, and a real GPU where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from leasehold_simgpu import SimulatedHost

ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = [sys.executable, "-u", "-m", "tests.conformance.scenarios"]
KILL_AFTER_S = 90.0
"""A driver call can block for ever, and no signal but SIGKILL ends it."""
TARGETS_END_S = 10.0
SKIPPED = 77


@dataclass(frozen=True, slots=True)
class DriverHost:
    """A host with GPUs. The libraries are loaded in its scenarios only, never in the test runner."""

    environment: Mapping[str, str]

    def run(self, scenario: str) -> None:
        """Runs a scenario in a process group of its own, and passes, fails or skips as it does."""
        child = subprocess.Popen(
            [*SCENARIOS, scenario],
            cwd=ROOT,
            env={**os.environ, **self.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = child.communicate(timeout=KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            # Not its targets, which end with their input. A killed restored process was seen to hang a host
            # (NVIDIA/cuda-checkpoint issue 53).
            child.kill()
            output = read_left(child)
            pytest.fail(f"{scenario} did not end within {KILL_AFTER_S:.0f} s:\n{output}")
        if child.returncode == SKIPPED:
            pytest.skip(output.strip())
        assert child.returncode == 0, output


def read_left(child: subprocess.Popen[str]) -> str:
    """What a killed scenario has written. Its targets may hold its output open a little longer."""
    try:
        return child.communicate(timeout=TARGETS_END_S)[0]
    except subprocess.TimeoutExpired as error:
        return f"a target does not end; {error.output or ''}"


def why_no_gpu() -> str | None:
    """Why nothing can run on a real GPU here; None if it can."""
    done = subprocess.run(
        [*SCENARIOS, "probe"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    return None if done.returncode == 0 else done.stdout.strip() or "the driver cannot be loaded"


@pytest.fixture(scope="session", params=["simgpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def driver_host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DriverHost:
    """A host of two or more GPUs where there are so many."""
    if request.param == "simgpu":
        host = SimulatedHost.create(tmp_path_factory.mktemp("conformance") / "host", gpus=4)
        return DriverHost(host.environment())
    if reason := why_no_gpu():
        pytest.skip(f"no real GPU: {reason}")
    return DriverHost({})
