"""A worker that has lost its journal, as docs/troubleshooting.md has it, finds what it started."""

import shutil
from pathlib import Path

import pytest
from leasehold.v1.workload_pb2 import (
    WORKLOAD_STATE_EXITED,
    WORKLOAD_STATE_RUNNING,
    WORKLOAD_STATE_SUSPENDED,
)

from .fleets import Fleet


@pytest.mark.long
@pytest.mark.parametrize("attempt", range(2))  # the ids of workloads are random, and so is their order
def test_a_suspended_and_a_running_workload_are_told_apart(fleet: Fleet, attempt: int) -> None:
    fleet.run_counter("parked")
    for _ in range(2):
        fleet.cli("suspend", "parked")
        fleet.cli("restore", "parked")
    fleet.cli("suspend", "parked")
    fleet.run_counter("running")  # on the former GPU of the other one
    fleet.end("alpha")
    for path in (fleet.folder / "alpha").glob("journal.sqlite3*"):
        path.unlink()
    fleet.start_worker("alpha")
    fleet.wait(lambda: fleet.client.workload("parked").status.state == WORKLOAD_STATE_SUSPENDED)
    fleet.wait(lambda: "running" in fleet.leases().values() and "parked" not in fleet.leases().values())
    assert "workload running may be on" not in fleet.log("alpha")
    plan = fleet.cli("restore", "parked", "--dry-run").stdout
    assert "no device memory known" in plan  # unknown is not zero
    assert "0 B" not in plan
    fleet.cli("restore", "parked")
    assert fleet.client.workload("parked").status.state == WORKLOAD_STATE_RUNNING
    assert sorted(fleet.leases().values()) == ["parked", "running"]
    for name in ("parked", "running"):
        fleet.wait_counting(name)
        fleet.cli("stop", name)


@pytest.mark.long
def test_a_worker_with_an_old_copy_of_its_journal_is_believed(fleet: Fleet, tmp_path: Path) -> None:
    fleet.run_counter("one")
    fleet.end("alpha")
    copies = [shutil.copy2(path, tmp_path) for path in (fleet.folder / "alpha").glob("journal.sqlite3*")]
    fleet.start_worker("alpha")
    for _ in range(2):
        fleet.cli("suspend", "one")
        fleet.cli("restore", "one")
    fleet.end("alpha")
    for copy in copies:
        shutil.copy2(copy, fleet.folder / "alpha")
    fleet.start_worker("alpha")
    fleet.cli("stop", "one")
    fleet.wait(lambda: fleet.client.workload("one").status.state == WORKLOAD_STATE_EXITED)
