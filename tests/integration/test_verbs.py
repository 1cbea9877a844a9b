"""Every verb of the command line, on a real fleet."""

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from leasehold.v1.errors_pb2 import ERROR_REASON_NOT_READY as NOT_READY

from .fleets import COUNTER, Fleet


@pytest.mark.long
def test_the_caller_is_whom_the_credentials_name(fleet: Fleet, is_mutual: bool) -> None:
    caller = "user/tester" if is_mutual else f"local/{Path('/proc/self').owner()}"
    assert fleet.cli("whoami").stdout == f"{caller}: admin\n"
    fleet.run_counter("one")
    assert fleet.client.workload("one").owner == caller
    (worker,) = fleet.client.workers()
    assert worker.session_encrypted
    fleet.cli("stop", "one")


@pytest.mark.usefixtures("executed")
def test_the_whole_way_by_hand(fleet: Fleet) -> None:
    uuids = [gpu.uuid for gpu in fleet.hosts["alpha"].gpus]
    fleet.run_counter("one")
    assert fleet.leases() == {"alpha/0": "one"}

    suspended = fleet.cli("suspend", "one").stdout
    assert "released alpha/0" in suspended
    ended = r" (command=\S+ workload=\S+)\] suspend SUCCEEDED after \d+\.\d{3} s\n"
    by_worker = re.search(r"\[session=\S+ epoch=1" + ended, fleet.log("alpha"))
    by_coordinator = re.search(r"\[session=\S+ worker=alpha" + ended, fleet.log("coordinator"))
    assert by_worker is not None
    assert by_coordinator is not None
    assert by_worker[1] == by_coordinator[1], "one story in two logs"
    assert "checkpoint" in suspended
    fleet.wait(lambda: fleet.leases() == {})
    assert "nothing to do" in fleet.cli("suspend", "one").stdout

    fleet.run_counter("two")
    fleet.wait(lambda: fleet.leases() == {"alpha/0": "two"})
    restored = fleet.cli("restore", "one").stdout
    assert "pair alpha/0 -> alpha/1" in restored
    fleet.wait(lambda: fleet.leases() == {"alpha/0": "two", "alpha/1": "one"})
    assert fleet.wait_counting("one").gpu_uuids == (uuids[0], uuids[1])

    fleet.cli("remap", "one", "--pair", "alpha/1=alpha/3")
    fleet.cli("remap", "two", "--to", uuids[2][:20])
    fleet.wait(lambda: fleet.leases() == {"alpha/2": "two", "alpha/3": "one"})
    assert fleet.wait_counting("two").gpu_uuids == (uuids[0], uuids[2])

    fleet.cli("suspend", "two")
    fleet.cli("restore", "two", "--to", "alpha/0")
    assert fleet.wait_counting("two").gpu_uuids[-1] == uuids[0]
    fleet.cli("stop", "one")
    fleet.cli("stop", "two")
    fleet.wait(lambda: fleet.leases() == {})
    assert "EXITED(0)" in fleet.cli("get", "workloads", "--all").stdout


LATE = """
import os, runpy, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
del sys.argv[:2]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""A counter that begins to use CUDA once a file is there."""


@pytest.mark.long
def test_a_suspend_right_after_a_run_waits_until_the_workload_is_ready(fleet: Fleet, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    program = [sys.executable, "-c", LATE, str(gate), str(COUNTER), "--bytes", "1MiB"]
    fleet.cli("run", "--gpus", "1", "--name", "one", "--", *program)
    assert "RUNNING(not ready)" in fleet.cli("get", "workloads").stdout
    assert "NOT_READY" in fleet.cli("suspend", "one", "--dry-run", code=1).stderr
    assert fleet.cli("wait", "one", "--timeout", "0.1", code=4).stdout == ""
    with ThreadPoolExecutor(1) as pool:
        suspended = pool.submit(fleet.cli, "suspend", "one")
        fleet.wait(lambda: any(command.error.reason == NOT_READY for command in fleet.client.commands()))
        gate.touch()
        done = suspended.result(60)
    assert "released alpha/0" in done.stdout
    waiting, why = done.stderr.splitlines()
    assert waiting == "leasehold: workload one is not ready: waiting"
    assert why.startswith("  workload one is not ready (")
    fleet.cli("restore", "one")
    assert fleet.cli("wait", "one", "--for", "ready").stdout == "one: ready\n"
    assert "workload one is RUNNING and ready" in fleet.cli("get", "events", "one").stdout


@pytest.mark.long
def test_a_workload_of_several_gpus_moves_as_one(fleet: Fleet) -> None:
    fleet.run_counter("pair", gpus=2)
    fleet.cli("remap", "pair", "--to", "alpha/2,alpha/3")
    fleet.wait(lambda: fleet.leases() == {"alpha/2": "pair", "alpha/3": "pair"})
    fleet.cli("remap", "pair", "--to", "alpha/3,alpha/2")
    held = fleet.json("get", "workloads", "pair")["status"]["lease"]["gpu_uuids"]
    uuids = [gpu.uuid for gpu in fleet.hosts["alpha"].gpus]
    assert held == [uuids[3], uuids[2]]
    assert fleet.wait_counting("pair").gpu_uuids == (uuids[0], uuids[2], uuids[3])


@pytest.mark.long
def test_all_that_holds_gpus_of_a_worker_is_suspended_by_one_call(fleet: Fleet) -> None:
    for name in ("one", "two"):
        fleet.run_counter(name)
    lines = fleet.cli("suspend", "--worker", "alpha").stdout.splitlines()
    assert [line.split(":")[0] for line in lines if not line.startswith(" ")] == ["one", "two"]
    assert fleet.leases() == {}
    assert fleet.cli("suspend", "--worker", "alpha").stdout == "", "nothing is left to park"
    for name in ("one", "two"):
        fleet.cli("wake", name)
        fleet.wait_counting(name)


@pytest.mark.long
def test_json_has_the_names_of_the_protos(fleet: Fleet) -> None:
    fleet.run_counter("one")
    command = fleet.json("suspend", "one")
    assert command["state"] == "COMMAND_STATE_SUCCEEDED"
    assert command["result"]["members"][0]["state_after"] == "MEMBER_STATE_CHECKPOINTED"
    workload = fleet.json("get", "workloads", "one")
    assert workload["status"]["state"] == "WORKLOAD_STATE_SUSPENDED"
    worker = fleet.json("get", "workers", "alpha")
    assert worker["gpu_count"] == 4
    assert len(fleet.json("get", "commands")["commands"]) == 2
    assert fleet.json("get", "gpus", "alpha/1")["gpu"]["slot"] == 1


@pytest.mark.long
def test_no_wait_returns_the_command(fleet: Fleet) -> None:
    fleet.run_counter("one")
    command_id = fleet.json("suspend", "--no-wait", "one")["command_id"]
    state = f"get commands {command_id}".split()
    fleet.wait(lambda: fleet.json(*state)["state"] == "COMMAND_STATE_SUCCEEDED")


def test_run_passes_arguments_and_variables(fleet: Fleet) -> None:
    script = "import os, sys; print(sys.argv[1:], os.environ['WORD'], os.environ['CUDA_VISIBLE_DEVICES'])"
    fleet.cli("run", "--name", "args", "--env", "WORD=a=b", "--", sys.executable, "-c", script, "--gpus", "x")
    assert fleet.cli("logs", "-f", "args").stdout == "['--gpus', 'x'] a=b -1\n"


@pytest.mark.long
def test_logs_follow_until_the_end_and_survive_a_new_coordinator(fleet: Fleet) -> None:
    fleet.run_counter("one")
    with fleet.start_verb("logs", "-f", "one") as logs:
        assert logs.stdout is not None
        first = logs.stdout.readline()
        fleet.kill_coordinator()
        fleet.start_coordinator()
        fleet.wait(lambda: fleet.worker_state("alpha") == "WORKER_STATE_CONNECTED")
        fleet.wait_counting("one")
        fleet.cli("stop", "one")
        rest = logs.stdout.read()
        assert logs.wait(30) == 0
    assert first + rest == fleet.cli("logs", "one").stdout


@pytest.mark.long
def test_a_command_goes_on_while_the_coordinator_is_replaced(fleet: Fleet) -> None:
    fleet.run_counter("one")
    root_pid = fleet.json("get", "workloads", "one")["status"]["root_pid"]
    fault = fleet.hosts["alpha"].set_fault("checkpoint", root_pid, hang=True, times=1)
    with fleet.start_verb("suspend", "-o", "json", "one") as suspend:
        fleet.wait(lambda: fleet.json("get", "commands")["commands"][0].get("phase") == "checkpoint")
        fleet.kill_coordinator()
        fleet.start_coordinator()
        fleet.hosts["alpha"].clear_faults(fault_id=fault.id)
        output, _ = suspend.communicate(timeout=30)
    assert suspend.returncode == 0
    assert json.loads(output)["state"] == "COMMAND_STATE_SUCCEEDED"
    states = [command["state"] for command in fleet.json("get", "commands")["commands"]]
    assert states == ["COMMAND_STATE_SUCCEEDED"] * 2
    fleet.cli("restore", "one")
    fleet.wait_counting("one")


@pytest.mark.long
def test_the_worker_with_the_most_free_gpus_is_chosen(fleet: Fleet) -> None:
    fleet.start_worker("beta", gpus=2)
    counter = [sys.executable, str(COUNTER), "--bytes", "1MiB"]
    for name in ("a", "b", "c", "d"):
        fleet.cli("run", "--gpus", "1", "--name", name, "--", *counter)
    fleet.wait(lambda: fleet.leases() == {"alpha/0": "a", "alpha/1": "b", "alpha/2": "c", "beta/0": "d"})


@pytest.mark.long
def test_a_workload_goes_on_while_its_worker_is_dead(fleet: Fleet) -> None:
    fleet.run_counter("one")
    fleet.run_counter("two")
    fleet.cli("suspend", "two")
    leases = fleet.leases()
    worker = fleet.processes.pop("alpha")
    worker.kill()
    worker.wait(30)
    assert worker.stdout is not None
    worker.stdout.close()
    fleet.start_worker("alpha")
    fleet.wait_counting("one")
    assert fleet.leases() == leases
    fleet.cli("restore", "two")
    fleet.wait_counting("two")


@pytest.mark.long
def test_a_worker_that_leaves_and_comes_back(fleet: Fleet) -> None:
    fleet.run_counter("one")
    worker = fleet.processes.pop("alpha")
    worker.terminate()
    worker.wait(30)
    assert worker.stdout is not None
    worker.stdout.close()
    fleet.wait(lambda: fleet.worker_state("alpha") == "WORKER_STATE_DISCONNECTED")
    fleet.refuse("run", "--worker", "alpha", "--", "true", code=1, match="DISCONNECTED.*WORKER_UNAVAILABLE")
    assert fleet.json("get", "workloads", "one")["status"]["state"] == "WORKLOAD_STATE_EXITED"
    fleet.start_worker("alpha")
    assert fleet.leases() == {}
    fleet.run_counter("one")
