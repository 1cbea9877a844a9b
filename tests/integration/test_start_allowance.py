"""Users who begin workloads on a host in a loop: refused by the worker, whose session goes on."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from leasehold.v1 import fleet_service_pb2, worker_pb2

from tests.coordinator.conftest import CoordinatorProcess
from tests.worker.local_api.test_unix_socket import BECOME, GROUP
from tests.worker.unix_users import open_to_others

from .local_hosts import LocalHost

ALICE, BOB, ROOT = 2001, 2002, 0

COORDINATOR = """
from leasehold_coordinator.fleet import report_bounds as bounds
bounds.NEW_BURST, bounds.NEW_PER_S = 64, 1e-6
"""
WORKER = """
from leasehold_worker.local_api import claim_waiting as waiting
waiting.STARTS_BURST, waiting.STARTS_PER_S = 32, 1e-6
"""
"""Both bounds in their proportion, and so low that a test reaches them."""

FLOOD = f"""{BECOME}
count = 0
try:
    while count < 100:
        with local.claim(gpus=0, socket=path):
            count += 1
except LeaseholdError as error:
    print(count, error.reason, error.message)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_flood_of_claims_is_refused_and_the_session_goes_on(
    new_host: Callable[[int], LocalHost], tmp_path: Path
) -> None:
    coordinator = CoordinatorProcess(tmp_path, prelude=COORDINATOR)
    coordinator.start()
    host = new_host(0)
    open_to_others(host.folder)
    host.patch, host.coordinator = WORKER, coordinator.worker_address

    def flood(uid: int) -> str:
        program = host.start(sys.executable, "-c", FLOOD, str(host.socket), f"{uid},1", "")
        return host.end(program)

    def session() -> tuple[int, int]:
        (worker,) = coordinator.fleet.ListWorkers(fleet_service_pb2.ListWorkersRequest()).workers
        return worker.state, worker.epoch

    def is_connected() -> bool:
        workers = coordinator.fleet.ListWorkers(fleet_service_pb2.ListWorkersRequest()).workers
        return any(worker.state == worker_pb2.WORKER_STATE_CONNECTED for worker in workers)

    for _ in range(2):
        host.start_worker(f'socket_group = "{GROUP}"')
        host.wait(is_connected)
        before = session()
        told = [flood(uid) for uid in (ALICE, BOB, ROOT)]
        assert session() == before
        assert [text.split()[:2] for text in told] == [
            ["14", "INSUFFICIENT_RESOURCES"],
            ["7", "INSUFFICIENT_RESOURCES"],
            ["5", "INSUFFICIENT_RESOURCES"],
        ]
        assert "half of what other users leave" in told[0]
        assert "try again in" in told[0]
        assert flood(ALICE).startswith("0 ")
        assert session() == before
        host.stop_worker()
    assert f"(uid {ALICE}): user " in host.log
    assert "TOO_MANY_CALLS" not in host.log + coordinator.log()
    assert coordinator.end(signal.SIGTERM) == 0
