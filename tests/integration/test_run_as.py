"""A fleet whose worker is not root, and whose workloads run as the Unix users of their owners.

The owner is `local/root`, so the fleet uses local tokens. test_three_hosts.py plays the same over mutual TLS.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from leasehold.v1.command_pb2 import COMMAND_STATE_SUCCEEDED
from leasehold.v1.workload_pb2 import WorkloadSpec
from leasehold_simgpu import SimulatedHost, Timing
from leasehold_worker.host.accounts import account_of

from tests.integration.fleets import Fleet, make_fleet
from tests.worker.unix_users import (
    ALICE_UID,
    WORKER_UID,
    UserWorker,
    is_readable,
    needs_root,
    share,
)

pytestmark = needs_root

SETTINGS = f'run_as = {{ "local/root" = "{ALICE_UID}:{ALICE_UID}" }}\n'


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with make_fleet(tmp_path) as started:
        yield started


@pytest.fixture
def worker(fleet: Fleet, tmp_path: Path) -> Iterator[UserWorker]:
    if not is_readable():
        pytest.skip("other users can't read this checkout and its interpreter")
    host = SimulatedHost.create(tmp_path / "host", gpus=4, chip="H100", timing=Timing.instant())
    started = UserWorker(fleet.worker_address, tmp_path, share(host, tmp_path / "files"), SETTINGS)
    try:
        started.start()
        fleet.wait(lambda: fleet.worker_state("alpha") == "WORKER_STATE_CONNECTED")
        yield started
        started.stop()
    finally:
        started.clean_up()


def uid_of(fleet: Fleet, name: str) -> int | None:
    """The user of the first process of a workload."""
    account = account_of(fleet.client.workload(name).status.root_pid)
    return account.uid if account is not None else None


@pytest.mark.long
def test_a_workload_is_its_owners_from_the_run_to_the_deletion(fleet: Fleet, worker: UserWorker) -> None:
    fleet.run_counter("one")
    assert uid_of(fleet, "one") == ALICE_UID
    fleet.cli("suspend", "one")
    fleet.cli("restore", "one", "--to", "alpha/2")
    fleet.wait_counting("one")
    fleet.cli("remap", "one", "--to", "alpha/3")
    fleet.wait_counting("one")
    assert fleet.leases() == {"alpha/3": "one"}
    assert uid_of(fleet, "one") == ALICE_UID
    assert "count=" in fleet.cli("logs", "one").stdout
    fleet.cli("stop", "one")
    assert "count=" in fleet.cli("logs", "one").stdout
    fleet.cli("rm", "workload", "one")
    assert "Traceback" not in worker.log.read_text()


@pytest.mark.long
def test_a_program_without_a_journal_is_taken_back_as_its_user(fleet: Fleet, worker: UserWorker) -> None:
    fleet.run_counter("one")
    worker.process.kill()
    worker.process.wait(timeout=30)
    for path in worker.state.glob("journal*"):
        path.unlink()
    worker.start()
    fleet.wait(lambda: fleet.worker_state("alpha") == "WORKER_STATE_CONNECTED")
    fleet.wait_counting("one")
    assert fleet.client.workload("one").user == str(ALICE_UID)
    assert (worker.state / "users").stat().st_uid == WORKER_UID
    fleet.cli("suspend", "one")
    fleet.cli("restore", "one")
    fleet.wait_counting("one")
    fleet.cli("stop", "one")


@pytest.mark.long
def test_a_start_that_a_crash_interrupted_is_that_of_its_user(fleet: Fleet, worker: UserWorker) -> None:
    worker.process.kill()
    worker.process.wait(timeout=30)
    worker.start("program-started")
    fleet.wait(lambda: fleet.worker_state("alpha") == "WORKER_STATE_CONNECTED")
    spec = WorkloadSpec(arguments=["sleep", "1000"])
    _, command = fleet.client.run(spec, name="one")
    worker.process.wait(timeout=30)
    worker.start()
    assert fleet.client.wait(command).state == COMMAND_STATE_SUCCEEDED
    assert uid_of(fleet, "one") == ALICE_UID
    assert fleet.client.workload("one").user == str(ALICE_UID)
    fleet.cli("stop", "one")
