"""Targets that the worker may not trace, or that lack the device node of their destination.

The worker is started as a process of its own, with fewer rights or with its own files in `/dev`. The tests
need root, and are skipped elsewhere.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from leasehold.v1 import command_pb2, errors_pb2
from leasehold.v1.operation_pb2 import SuspendOperation
from leasehold_simgpu import SimulatedHost, Timing
from leasehold_worker.host.processes import user_id

from tests import environment
from tests.worker.conftest import end_leftovers
from tests.worker.counters import counter_run, counters, read_output, wait_counting
from tests.worker.operations.test_handler import plan_of
from tests.worker.planning.test_driver_checks import reasons, remap_to
from tests.worker.scripted_coordinator import ScriptedCoordinator, Session
from tests.worker.stories.test_membership import wait_until
from tests.worker.unix_users import needs_root, user_worker

StartUnder = Callable[..., Session]
UNTRACEABLE = """
import ctypes, runpy, sys
PR_SET_DUMPABLE = 4
ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
DEVICES = """
set -e
mount -t tmpfs none "$1"
for node in null zero random urandom; do touch "$1/$node"; mount --bind "/dev/$node" "$1/$node"; done
"""


@pytest.fixture
def host(tmp_path: Path) -> SimulatedHost:
    return SimulatedHost.create(tmp_path / "host", gpus=4, chip="H100", timing=Timing.instant())


@pytest.fixture
def start_under(
    host: SimulatedHost, coordinator: ScriptedCoordinator, tmp_path: Path
) -> Iterator[StartUnder]:
    """Starts a worker under a command that changes its rights or its files."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a worker fewer rights, or devices of its own")
    started: list[subprocess.Popen[bytes]] = []

    def start_worker(*wrapper: str) -> Session:
        options = {
            "coordinator": coordinator.address,
            "state-dir": str(tmp_path / "state"),
            "name": "alpha",
            "stop-workloads": "stop",
        }
        arguments = [f"--{name}={value}" for name, value in options.items()]
        code = "from leasehold_worker.agent.cli import command; command()"
        started.append(
            subprocess.Popen(
                [*wrapper, sys.executable, "-c", code, *arguments], env={**os.environ, **host.environment()}
            )
        )
        return coordinator.next_session()

    yield start_worker
    for worker in started:
        worker.send_signal(signal.SIGTERM)
        worker.wait(timeout=30)
    end_leftovers(tmp_path / "state")


def require(*command: str) -> None:
    """Skips the test where a command can't be run."""
    if shutil.which(command[0]) is None or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip(f"{shlex.join(command)} does not work here")


@pytest.mark.long
def test_a_target_that_the_worker_may_not_trace(start_under: StartUnder, host: SimulatedHost) -> None:
    """One that is not dumpable, for a worker without CAP_SYS_PTRACE."""
    wrapper = ("setpriv", "--bounding-set=-sys_ptrace")
    require(*wrapper, "true")
    session = start_under(*wrapper)
    run = counter_run("w1")
    run.spec.arguments[1:2] = ["-c", UNTRACEABLE, run.spec.arguments[1]]
    session.run("c1", "w1", run=run)
    wait_counting(session, "w1")
    plan = plan_of(session, "w1", suspend=SuspendOperation())
    assert reasons(plan) == ["PERMISSION_OR_OS"]
    assert "CAP_SYS_PTRACE" in plan.refusals[0].message
    refused = session.run("c2", "w1", suspend=SuspendOperation())
    assert refused.state == command_pb2.COMMAND_STATE_REJECTED
    (process,) = (found for found in host.processes() if found.gpu_bytes)
    assert process.calls["lock"] == 0


CAP_SETGID, CAP_SETUID = 6, 7


def make_privileged_setpriv(folder: Path) -> str:
    """A setpriv with capabilities of its own: a program has none of its worker's."""
    program = folder / "setpriv"
    shutil.copy(shutil.which("setpriv") or "setpriv", program)
    program.chmod(0o755)
    permitted = 1 << CAP_SETGID | 1 << CAP_SETUID
    # struct vfs_cap_data, revision 2, with the effective bit (linux/capability.h).
    os.setxattr(program, "security.capability", struct.pack("<5I", 0x02000001, permitted, 0, 0, 0))
    run_folder = Path(os.environ[environment.MARK])
    for part in (folder, *folder.parents):
        if part.is_relative_to(run_folder):
            part.chmod(part.stat().st_mode | 0o011)
    return str(program)


@contextmanager
def started_beside(
    host: SimulatedHost, coordinator: ScriptedCoordinator, folder: Path, other: str
) -> Iterator[tuple[Session, int]]:
    """A workload with a process of user id 65533, for a worker of user id 65534 without CAP_SYS_PTRACE.

    Args:
        host: The simulated host.
        coordinator: The coordinator.
        folder: A folder for the worker and a program.
        other: The command of the other user, as text for a shell. ``"$@"`` is the command of the workload.
    """
    capabilities = "+setgid,+setuid"
    granted = (f"--inh-caps={capabilities}", f"--ambient-caps={capabilities}")
    require("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *granted, "true")
    with user_worker(host, coordinator, folder, "", capabilities=("setuid",), uid=65534) as worker:
        run = counter_run("w1")
        script = f"setpriv --reuid=65533 --regid=65533 --clear-groups {other} & echo $!; "
        script += 'exec setpriv --inh-caps=-all --ambient-caps=-all "$@"'
        # The loader removes the variable from the environment of a program that gains capabilities.
        library_path = f"LD_LIBRARY_PATH={worker.variables['LD_LIBRARY_PATH']}"
        privileged = [make_privileged_setpriv(folder), *granted, "env", library_path]
        run.spec.arguments[:] = [*privileged, "/bin/sh", "-c", script, "sh", *run.spec.arguments]
        worker.session.run("c1", "w1", run=run)
        wait_counting(worker.session, "w1")
        closed = int(read_output(worker.session, "w1").splitlines()[0])
        try:
            wait_until(lambda: user_id(closed) == 65533, "the process is another user's")
            yield worker.session, closed
        finally:
            os.kill(closed, signal.SIGKILL)  # the worker may not


@pytest.mark.long
@needs_root
def test_a_cuda_process_of_another_user_stops_the_operation_of_a_worker_without_the_right(
    host: SimulatedHost, coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    """A CUDA process that the worker may not control, whether NVML lists it or not."""
    with started_beside(host, coordinator, tmp_path, '"$@"') as (session, closed):
        wait_until(lambda: len(counters(host)) == 2, "both processes use CUDA")
        for listed in (True, False):
            if not listed:
                host.set_fault("nvmlDeviceGetComputeRunningProcesses", error=999)
            plan = plan_of(session, "w1", suspend=SuspendOperation())
            assert reasons(plan) == ["PERMISSION_OR_OS"]
            message = plan.refusals[0].message
            assert f"process {closed} " in message
            assert "tracing it is not permitted" in message
            assert "run the worker as root or with CAP_SYS_PTRACE" in message
            refused = session.run(f"c2-{listed}", "w1", suspend=SuspendOperation())
            assert refused.state == command_pb2.COMMAND_STATE_REJECTED
            assert refused.error.reason == errors_pb2.ERROR_REASON_PERMISSION_OR_OS
        assert [process.calls["lock"] for process in counters(host)] == [0, 0]


@pytest.mark.long
@needs_root
def test_a_process_of_another_user_without_cuda_is_no_member(
    host: SimulatedHost, coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    """NVML is not needed for that: the driver tells everybody which processes use CUDA."""
    with started_beside(host, coordinator, tmp_path, "sleep 1000") as (session, _):
        host.set_fault("nvmlDeviceGetComputeRunningProcesses", error=999)
        unlisted = plan_of(session, "w1", suspend=SuspendOperation())
        assert reasons(unlisted) == ["INSUFFICIENT_HOST_MEMORY"], "the size of the member is unknown"
        host.clear_faults()
        assert reasons(plan_of(session, "w1", suspend=SuspendOperation())) == []
        suspended = session.run("c2", "w1", suspend=SuspendOperation())
        assert suspended.state == command_pb2.COMMAND_STATE_SUCCEEDED


@pytest.mark.long
def test_a_destination_whose_device_node_the_container_lacks(
    start_under: StartUnder, host: SimulatedHost, tmp_path: Path
) -> None:
    """The worker sees the nodes of all GPUs, and the workload those of two."""
    require("unshare", "--mount", "true")
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for folder in (inside, outside):
        folder.mkdir()
    script = "\n".join(
        [
            "make() {" + DEVICES + "}",
            f"make {inside}; touch {inside}/nvidia0 {inside}/nvidia2",
            f"make {outside}; touch {outside}/nvidia0 {outside}/nvidia1 {outside}/nvidia2 {outside}/nvidia3",
            f'mount --rbind {outside} /dev; exec "$@"',
        ]
    )
    session = start_under("unshare", "--mount", "sh", "-c", script, "sh")
    run = counter_run("w1")
    container = ["unshare", "--mount", "sh", "-c", f'mount --rbind {inside} /dev; exec "$@"', "sh"]
    run.spec.arguments[:] = [*container, *run.spec.arguments]
    started = session.run("c1", "w1", run=run)
    assert started.state == command_pb2.COMMAND_STATE_SUCCEEDED, started
    wait_counting(session, "w1")
    plan = plan_of(session, "", remap=remap_to(host, 1))
    assert reasons(plan) == ["DEVICE_NODE_MISSING"]
    assert "/dev/nvidia1" in plan.refusals[0].message
    refused = session.run("c2", "w1", remap=remap_to(host, 1))
    assert refused.state == command_pb2.COMMAND_STATE_REJECTED
    assert reasons(plan_of(session, "", remap=remap_to(host, 2))) == []
