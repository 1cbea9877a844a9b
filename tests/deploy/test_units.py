"""The units of deploy/systemd: what systemd says of them, and what they promise to the daemons."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from leasehold_worker.agent.agent import FINISH_TIMEOUT_S, SETTLE_TIMEOUT_S

from tests.worker.unix_users import CAPABILITIES

UNITS = Path(__file__).resolve().parents[2] / "deploy/systemd"
PROGRAM = "/opt/leasehold/bin/leasehold"
LATER_THAN_SYSTEMD_252 = "Unknown key 'DelegateSubgroup' in section [Service], ignoring."


def settings(name: str) -> dict[str, list[str]]:
    """The values of a unit's keys, in their order."""
    found: dict[str, list[str]] = {}
    for line in (UNITS / f"leasehold-{name}.service").read_text().splitlines():
        key, separator, value = line.partition("=")
        if separator and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("name", ["coordinator", "worker"])
def test_systemd_accepts_the_unit(name: str, tmp_path: Path) -> None:
    unit = tmp_path / f"leasehold-{name}.service"
    text = (UNITS / unit.name).read_text()
    assert PROGRAM in text
    unit.write_text(text.replace(PROGRAM, sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": "/usr/bin:/bin", "SYSTEMD_LOG_LEVEL": "warning"},
    )
    found = [line for line in done.stderr.splitlines() if unit.name in line]
    assert [line for line in found if LATER_THAN_SYSTEMD_252 not in line] == []


def test_the_worker_has_the_measured_capabilities_and_no_others() -> None:
    unit = settings("worker")
    expected = [" ".join(f"CAP_{name.upper()}" for name in CAPABILITIES)]
    assert (unit["AmbientCapabilities"], unit["CapabilityBoundingSet"]) == (expected, expected)


def test_workloads_outlive_the_worker() -> None:
    unit = settings("worker")
    assert (unit["KillMode"], unit["Delegate"], unit["DelegateSubgroup"]) == (["process"], ["yes"], ["agent"])
    assert int(unit["TimeoutStopSec"][0]) > FINISH_TIMEOUT_S + SETTLE_TIMEOUT_S


def test_processes_of_workloads_do_not_end_the_worker_for_good() -> None:
    unit, service = (UNITS / "leasehold-worker.service").read_text().split("[Service]")
    assert "\nTasksMax=infinity\n" in service
    assert "\nStartLimitIntervalSec=0\n" in unit


def test_the_worker_starts_after_what_its_driver_needs() -> None:
    (after,) = settings("worker")["After"]
    assert {"nvidia-persistenced.service", "nvidia-fabricmanager.service"} <= set(after.split())


@pytest.mark.parametrize("name", ["coordinator", "worker"])
def test_systemd_is_told_of_the_start_and_watches_the_daemon(name: str) -> None:
    unit = settings(name)
    assert unit["Type"] == ["notify"]
    assert int(unit["WatchdogSec"][0]) >= 10
    assert unit["Restart"] == ["on-failure"]
