"""Capabilities that a worker drops at its start, and what it can still do with the rest."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from leasehold.v1.operation_pb2 import (
    AdoptOperation,
    RestoreOperation,
    RunOperation,
    StopOperation,
    SuspendOperation,
)
from leasehold.v1.workload_pb2 import WorkloadSpec
from leasehold_simgpu import SimulatedHost, Timing
from leasehold_worker.criu.obstacles import obstacles
from leasehold_worker.host.capabilities import CHOWN, FOR_MAPPED_USERS, NEEDED, NOT_NEEDED_BY_ROOT
from leasehold_worker.host.process_files import Pid, read_status
from leasehold_worker.host.processes import identify

from tests.worker.counters import counter_run, read_output, wait_counting
from tests.worker.criu_cases import program, real_criu
from tests.worker.local_api.test_unix_socket import GROUP
from tests.worker.scripted_coordinator import ScriptedCoordinator, Session
from tests.worker.stories.test_membership import wait_until
from tests.worker.stories.test_run_as import bobs_counter, run_for, succeeded
from tests.worker.unix_users import CAPABILITIES, RUN_AS, needs_root, user_worker

pytestmark = needs_root

MORE = (*CAPABILITIES, "dac_override", "sys_admin", "net_raw")
ADOPTING = 'adopt_users = ["*"]\n'


def mask(pid: int, name: str) -> int:
    """A capability set of a process."""
    return int(read_status(pid)[name], 16)


def capabilities_of(pid: int, name: str = "CapEff") -> set[int]:
    """A capability set of a process, by numbers."""
    return {number for number in range(64) if mask(pid, name) >> number & 1}


@pytest.fixture
def host(tmp_path: Path) -> SimulatedHost:
    return SimulatedHost.create(tmp_path / "host", gpus=4, chip="H100", timing=Timing.instant())


@pytest.mark.long
def test_a_worker_without_root_drops_what_it_does_not_need(
    host: SimulatedHost, coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    """With run_as: test_run_as."""
    with user_worker(host, coordinator, tmp_path, settings=ADOPTING, capabilities=MORE) as worker:
        for name in ("CapEff", "CapPrm", "CapInh", "CapAmb"):
            assert capabilities_of(worker.process.pid, name) == NEEDED - FOR_MAPPED_USERS
        session = worker.session
        with bobs_counter(worker, host, tmp_path) as bobs:
            succeeded(session.run("c1", "w1", adopt=AdoptOperation(name="bobs", pid=bobs.pid)))
            succeeded(session.run("c2", "w1", suspend=SuspendOperation()))
            succeeded(session.run("c3", "w1", restore=RestoreOperation()))
            succeeded(session.run("c4", "w1", stop=StopOperation()))
        worker.stop()
        (worker.state / "users").mkdir()  # as an earlier run_as leaves it: its folders are other users'
        worker.start()
        assert capabilities_of(worker.process.pid) == NEEDED


@pytest.mark.long
def test_a_worker_without_root_may_give_its_socket_to_a_group_of_others(
    host: SimulatedHost, coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    settings = f'socket_group = "{GROUP}"\n'
    with user_worker(host, coordinator, tmp_path, settings=settings, capabilities=MORE) as worker:
        (listening,) = (path for path in worker.state.rglob("*") if path.is_socket())
        assert listening.stat().st_gid == 1
        assert capabilities_of(worker.process.pid) == NEEDED - FOR_MAPPED_USERS | {CHOWN}


def status_of_program(session: Session, owner: str) -> dict[str, str]:
    """The kernel's report of a program that runs for an owner."""
    spec = WorkloadSpec(arguments=["grep", "^Cap", "/proc/self/status"])
    run = RunOperation(name="status", spec=spec)
    succeeded(run_for(owner, session, "status-c", "status-w", run=run))
    wait_until(lambda: "CapAmb" in read_output(session, "status-w"), "the program ends")
    return dict(line.split(":\t") for line in read_output(session, "status-w").splitlines())


@pytest.mark.long
def test_a_worker_of_root_gives_up_what_no_part_of_it_needs(
    host: SimulatedHost, coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    with user_worker(host, coordinator, tmp_path, settings=RUN_AS, uid=0) as worker:
        for name in ("CapEff", "CapPrm", "CapBnd"):
            kept = capabilities_of(os.getpid(), name) - NOT_NEEDED_BY_ROOT.keys()
            assert capabilities_of(worker.process.pid, name) == kept
        session = worker.session
        assert int(status_of_program(session, "user/alice")["CapPrm"], 16) == 0
        succeeded(run_for("user/alice", session, "c1", "w1", run=counter_run("w1")))
        wait_counting(session, "w1")
        succeeded(session.run("c2", "w1", suspend=SuspendOperation()))
        succeeded(session.run("c3", "w1", restore=RestoreOperation()))
        wait_counting(session, "w1")
        succeeded(session.run("c4", "w1", stop=StopOperation()))


@pytest.mark.long
def test_programs_of_root_keep_the_rights_of_their_callers_without_run_as(
    host: SimulatedHost, coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    with user_worker(host, coordinator, tmp_path, settings="", uid=0) as worker:
        told = status_of_program(worker.session, "local/root")
        for name in ("CapEff", "CapPrm", "CapBnd"):
            assert int(told[name], 16) == mask(worker.process.pid, name) == mask(os.getpid(), name)


REDUCED = """
import sys
from pathlib import Path
from leasehold_worker.host.capabilities import give_up_unneeded
give_up_unneeded(Path("/nowhere"), has_run_as=True)
"""

OBSTACLES = f"""{REDUCED}
from leasehold_worker.criu.obstacles import obstacles
from leasehold_worker.host.processes import identify
print(obstacles([identify(int(sys.argv[1]))]))
"""

CHECK = f"""{REDUCED}
import trio
from leasehold_worker.criu.installation import probe
print(trio.run(probe, sys.argv[1]))
"""


def say(code: str, argument: str) -> str:
    """What Python code with fewer capabilities prints."""
    done = subprocess.run([sys.executable, "-c", code, argument], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.long
def test_an_image_of_a_process_with_more_capabilities_is_refused(tmp_path: Path) -> None:
    """A process from before run_as was set has all of root, which CRIU could not restore any more."""
    with program(tmp_path) as identity:
        assert "capabilities" not in " ".join(obstacles([identity]))
        assert "has capabilities that the worker gave up" in say(OBSTACLES, str(identity.pid))
    given_up = ",".join(f"-{name.removeprefix('CAP_').lower()}" for name in NOT_NEEDED_BY_ROOT.values())
    command = ["setpriv", f"--bounding-set={given_up}", "--", "sleep", "1000"]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            wait_until(lambda: "sleep" in read_status(Pid(process.pid))["Name"], "it runs")
            assert identify(process.pid) is not None
            assert "capabilities" not in say(OBSTACLES, str(process.pid))
        finally:
            process.kill()


def test_criu_works_with_the_rest() -> None:
    criu = real_criu()
    if isinstance(criu, str):
        pytest.skip(criu)
    assert say(CHECK, str(criu.path)).startswith("CriuFacts(")
