"""Adopting processes that somebody else started, over the coordinator, and letting them go."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from leasehold.v1.workload_pb2 import WorkloadState

from .fleets import LEASEHOLD, Fleet
from .local_hosts import COUNTING, LocalHost

TREE = """
import os, subprocess, sys
children = [subprocess.Popen(sys.argv[2:], env={**os.environ, "CUDA_VISIBLE_DEVICES": uuid})
            for uuid in sys.argv[1].split(",")]
print(*(child.pid for child in children), file=sys.stderr, flush=True)
for child in children:
    child.wait()
"""


def start_counter(alpha: LocalHost, gpu: int) -> subprocess.Popen[str]:
    """Starts a counter that Leasehold knows nothing of, and waits until it counts."""
    assert alpha.simulated is not None
    counter = alpha.start(*COUNTING, CUDA_VISIBLE_DEVICES=alpha.simulated.gpus[gpu].uuid)
    alpha.wait_counting(counter)
    return counter


def adopt(fleet: Fleet, process: subprocess.Popen[str], name: str) -> None:
    fleet.cli("adopt", "--worker", "alpha", "--pid", str(process.pid), "--name", name)


def refuse(fleet: Fleet, pid: int, match: str) -> None:
    fleet.refuse("adopt", "--worker", "alpha", "--pid", str(pid), code=1, match=match)


@pytest.mark.long
def test_an_adopted_process_is_suspended_restored_moved_and_let_go_unharmed(
    fleet: Fleet, alpha: LocalHost
) -> None:
    counter = start_counter(alpha, 1)
    adopt(fleet, counter, "stray")
    fleet.wait(lambda: fleet.leases() == {"alpha/1": "stray"})
    workload = alpha.workloads()["stray"]
    assert (workload.status.root_pid, workload.user) == (counter.pid, Path("/proc/self").owner())
    assert list(workload.spec.arguments) == COUNTING
    assert alpha.states() == ["FREE", "LEASED", "FREE", "FREE"]
    assert not alpha.look().gpus[1].foreign_processes
    fleet.cli("suspend", "stray")
    fleet.refuse("release", "stray", code=1, match="is SUSPENDED.*restore it first.*WRONG_STATE")
    fleet.cli("restore", "stray", "--to", "alpha/3")
    fleet.cli("remap", "stray", "--to", "alpha/0")
    gpus = [gpu.gpu_uuid for gpu in alpha.look().gpus]
    report = alpha.wait_counting(counter)
    assert list(report.gpu_uuids) == [gpus[1], gpus[3], gpus[0]]
    fleet.cli("release", "stray")
    assert alpha.states() == ["FOREIGN", "FREE", "FREE", "FREE"]
    assert "stray" not in alpha.workloads()
    alpha.wait_counting(counter)
    adopt(fleet, counter, "again")
    fleet.wait(lambda: fleet.leases() == {"alpha/0": "again"})
    released = alpha.start(*LEASEHOLD, "local", "release", "again")
    assert alpha.end(released) == "again: released\n"
    assert alpha.states()[0] == "FOREIGN"
    adopt(fleet, counter, "once-more")
    fleet.cli("stop", "once-more")
    alpha.end(counter)
    fleet.wait(lambda: not fleet.leases())


@pytest.mark.long
def test_a_tree_is_adopted_with_all_its_gpus(fleet: Fleet, alpha: LocalHost) -> None:
    assert alpha.simulated is not None
    gpus = [gpu.uuid for gpu in alpha.simulated.gpus]
    tree = alpha.python(TREE, ",".join(gpus[2:]), *COUNTING)
    fleet.wait(lambda: all(gpu in alpha.out(tree) for gpu in gpus[2:]))  # both children count
    adopt(fleet, tree, "tree")
    fleet.wait(lambda: fleet.leases() == {"alpha/2": "tree", "alpha/3": "tree"})
    child = int(alpha.err(tree).split()[0])
    refuse(fleet, child, "already belongs to workload tree.*ALREADY_REGISTERED")
    fleet.cli("suspend", "tree")
    fleet.wait(lambda: not fleet.leases())
    fleet.cli("restore", "tree", "--to", "alpha/0,alpha/1")
    assert WorkloadState.Name(alpha.workloads()["tree"].status.state) == "WORKLOAD_STATE_RUNNING"
    tree.kill()  # its children are not ours to end
    alpha.wait(lambda: alpha.states() == ["FOREIGN", "FOREIGN", "FREE", "FREE"])


@pytest.mark.long
def test_what_can_not_be_adopted_is_refused_with_the_reason(fleet: Fleet, alpha: LocalHost) -> None:
    assert alpha.simulated is not None
    refuse(fleet, 2**22 - 1, "it has ended.*UNKNOWN_PROCESS")
    worker = fleet.processes["alpha"].pid
    refuse(fleet, worker, "belongs to the system or the worker.*UNKNOWN_PROCESS")
    assert parent(parent(worker)) == os.getpid()
    refuse(fleet, parent(worker), "belongs to the system or the worker.*UNKNOWN_PROCESS")
    refuse(fleet, os.getpid(), "the worker itself is among its descendants.*UNKNOWN_PROCESS")
    sleeper = alpha.start("sleep", "1000")
    refuse(fleet, sleeper.pid, "neither process .* uses a GPU.*NOT_A_CUDA_PROCESS")

    counter = start_counter(alpha, 0)
    alpha.simulated.set_readings(0, mig_enabled=True)
    refuse(fleet, counter.pid, "MIG is on.*UNSUPPORTED_STATE")
    alpha.simulated.set_readings(0, mig_enabled=False)
    alpha.simulated.set_mps_client(counter.pid)
    refuse(fleet, counter.pid, "through MPS.*UNSUPPORTED_STATE")
    alpha.simulated.set_mps_client(counter.pid, enabled=False)
    counter.send_signal(signal.SIGSTOP)
    refuse(fleet, counter.pid, "stopped by a signal.*TARGET_NOT_RUNNABLE")
    counter.send_signal(signal.SIGCONT)

    fleet.run_counter("leased")
    (slot,) = fleet.leases()
    intruder = start_counter(alpha, int(slot[-1]))
    refuse(fleet, intruder.pid, "is leased for workload.*NO_FREE_GPU")
    leased = alpha.workloads()["leased"]
    refuse(fleet, leased.status.root_pid, "already belongs to workload leased.*ALREADY_REGISTERED")
    fleet.cli("stop", "leased")
    adopt(fleet, counter, "counter")
    refuse(fleet, counter.pid, "already belongs to workload counter.*ALREADY_REGISTERED")
    alpha.wait_counting(counter)
    alpha.wait_counting(intruder)


def parent(pid: int) -> int:
    """Who started a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of other users")
def test_processes_of_other_users_are_adopted_where_the_settings_say_so(
    fleet: Fleet, alpha: LocalHost
) -> None:
    assert alpha.simulated is not None
    fleet.end("alpha", signal.SIGTERM)
    fleet.start_worker("alpha", settings='adopt_users = ["1", "nobody"]\n')
    counter = start_counter(alpha, 0)
    refuse(fleet, counter.pid, "runs as root, and only processes of .*1, nobody may.*NOT_PERMITTED")
    # The first process is one that may be adopted, and the one that uses a GPU is not.
    as_nobody = "import os, sys\nif not os.fork():\n    os.execv(sys.argv[1], sys.argv[1:])\n"
    as_nobody += "os.setresuid(65534, 65534, 65534); os.wait()"
    uuid = alpha.simulated.gpus[1].uuid
    mixed = alpha.start(sys.executable, "-c", as_nobody, *COUNTING, CUDA_VISIBLE_DEVICES=uuid)
    alpha.wait_counting(mixed)
    refuse(fleet, mixed.pid, "runs as root, and only processes of.*NOT_PERMITTED")


@pytest.mark.long
def test_an_adopted_process_goes_on_when_its_worker_restarts(fleet: Fleet, alpha: LocalHost) -> None:
    counter = start_counter(alpha, 1)
    adopt(fleet, counter, "stray")
    before = alpha.workloads()["stray"]
    fleet.end("alpha")
    alpha.wait_counting(counter)
    fleet.start_worker("alpha")
    after = alpha.workloads()["stray"]
    assert after.status.lease.lease_id == before.status.lease.lease_id
    assert (after.origin, after.user) == (before.origin, before.user)
    assert alpha.states()[1] == "LEASED"
    fleet.cli("remap", "stray", "--to", "alpha/2")
    alpha.wait_counting(counter)
    counter.kill()
    alpha.wait(lambda: alpha.states() == ["FREE", "FREE", "FREE", "FREE"])
