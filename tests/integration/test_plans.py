"""Dry runs, swaps and cancelled commands, on a real fleet."""

import os
import re
import threading
from typing import Any

import grpc
import pytest
from leasehold.v1 import hook_pb2
from leasehold.v1.hook_pb2 import Hook, SignalHook
from leasehold.v1.operation_pb2 import AdoptOperation
from leasehold.v1.workload_pb2 import Resources, WorkloadSpec
from leasehold.v1.workload_service_pb2 import (
    AdoptProcessRequest,
    CreateWorkloadRequest,
    CreateWorkloadResponse,
)
from leasehold.v1.workload_service_pb2_grpc import WorkloadServiceStub

from .fleets import Fleet


def test_a_dry_run_tells_and_changes_nothing(fleet: Fleet) -> None:
    fleet.run_counter("one")
    told = fleet.cli("suspend", "one", "--dry-run").stdout
    assert "one: suspend would move" in told
    assert "it releases alpha/0" in told
    assert "takes about" in told
    plan = fleet.json("remap", "one", "--to", "alpha/1", "--dry-run")
    assert len(plan["pairs"]) == 4
    assert not plan["refusals"]
    assert fleet.leases() == {"alpha/0": "one"}
    fleet.cli("suspend", "one")
    assert "alpha/2" in fleet.cli("restore", "one", "--to", "alpha/2", "--dry-run").stdout
    assert fleet.leases() == {}


@pytest.mark.long
def test_a_dry_run_names_all_that_is_in_the_way(fleet: Fleet) -> None:
    fleet.run_counter("one")
    fleet.run_counter("two")
    host = fleet.hosts["alpha"]
    host.hog(1, host.gpus[1].memory_bytes)
    refused = fleet.cli("remap", "one", "--to", "alpha/1", "--dry-run", code=1)
    assert "NO_FREE_GPU" in refused.stderr
    assert "INSUFFICIENT_DEVICE_MEMORY" in refused.stderr
    assert len(refused.stderr.splitlines()) == 2
    fleet.wait_counting("one")


@pytest.mark.long
def test_two_workloads_swap_their_gpus(fleet: Fleet) -> None:
    uuids = [gpu.uuid for gpu in fleet.hosts["alpha"].gpus]
    fleet.run_counter("one")
    fleet.run_counter("two")
    fleet.cli("remap", "one", "two", "--swap")
    (command,) = fleet.client.commands(filter="operation = remap", limit=1)
    for name in {"one", "two"} - {fleet.client.workload(command.workload_id).name}:
        events = fleet.cli("events", name).stdout
        assert re.search(f"workload {name} is RUNNING.*, by command {command.command_id}", events), events
    fleet.wait(lambda: fleet.leases() == {"alpha/0": "two", "alpha/1": "one"})
    assert fleet.wait_counting("one").gpu_uuids == (uuids[0], uuids[1])
    assert fleet.wait_counting("two").gpu_uuids == (uuids[1], uuids[0])


@pytest.mark.long
def test_a_command_is_cancelled_while_its_members_are_being_locked(fleet: Fleet) -> None:
    fleet.run_counter("one")
    pid = fleet.json("get", "workloads", "one")["status"]["root_pid"]
    fault = fleet.hosts["alpha"].set_fault("lock", pid, hang=True, times=1)
    command_id = fleet.json("suspend", "one", "--no-wait")["command_id"]
    fleet.wait(lambda: fleet.client.command(command_id).phase == "lock")
    assert "cancellation requested" in fleet.cli("cancel", "--no-wait", command_id).stdout
    fleet.cli("suspend", "one", "--dry-run", code=1)  # the worker reads it after the cancellation
    fleet.hosts["alpha"].clear_faults(fault_id=fault.id)
    assert "CANCELLED" in fleet.cli("cancel", command_id).stdout
    assert fleet.leases() == {"alpha/0": "one"}
    fleet.wait_counting("one")


@pytest.mark.long
def test_a_wedged_workload_holds_up_nobody_else(fleet: Fleet) -> None:
    fleet.run_counter("one")
    fleet.run_counter("two")
    fleet.cli("suspend", "one")
    pid = fleet.json("get", "workloads", "one")["status"]["root_pid"]
    fleet.hosts["alpha"].set_fault("restore", pid, error=2, times=1)
    assert "MEMBER_WEDGED" in fleet.cli("restore", "one", code=1).stderr
    fleet.wait(lambda: fleet.leases() == {"alpha/1": "two"})
    fleet.cli("suspend", "two")
    fleet.cli("restore", "two", "--to", "alpha/0")
    fleet.wait_counting("two")
    fleet.refuse("restore", "one", code=1, match="stop it, nothing else helps")
    fleet.cli("stop", "one")
    workloads = fleet.json("get", "workloads", "-a")["workloads"]
    assert [w["status"]["state"] for w in workloads if w["name"] == "one"] == ["WORKLOAD_STATE_EXITED"]


@pytest.mark.long
def test_a_command_that_hangs_holds_up_nobody_else(fleet: Fleet) -> None:
    fleet.run_counter("one")
    fleet.run_counter("two")
    pid = fleet.json("get", "workloads", "one")["status"]["root_pid"]
    host = fleet.hosts["alpha"]
    host.set_fault("checkpoint", pid, hang=True)
    hanging = threading.Thread(target=fleet.cli, args=("suspend", "one"))
    hanging.start()
    fleet.wait(lambda: (target := host.process(pid)) is not None and target.calls["checkpoint"] == 1)
    fleet.cli("suspend", "two")
    fleet.cli("restore", "two")
    fleet.wait_counting("two")
    host.clear_faults()
    hanging.join()
    fleet.wait(lambda: fleet.leases() == {"alpha/1": "two"})


@pytest.mark.long
def test_a_creation_is_validated_on_its_worker(fleet: Fleet) -> None:
    def create(*hooks: Hook, **fields: Any) -> CreateWorkloadResponse:
        spec = WorkloadSpec(arguments=["true"], resources=Resources(gpu_count=1), hooks=hooks)
        return stub.CreateWorkload(CreateWorkloadRequest(name="three", spec=spec, **fields), timeout=20)

    fleet.run_counter("one")
    flush = Hook(name="flush", signal=SignalHook(signal_number=10))
    with fleet.open_channel() as channel:
        stub = WorkloadServiceStub(channel)
        for validate_only in (True, False):
            with pytest.raises(grpc.RpcError, match="hook flush has no phase"):
                create(flush, validate_only=validate_only)
        flush.phase = hook_pb2.HOOK_PHASE_BEFORE_SUSPEND
        response = create(flush, validate_only=True)
        assert (response.workload.workload_id, response.workload.name) == ("", "three")
        with pytest.raises(grpc.RpcError, match="k-0"):
            create(validate_only=True, checkpoint_id="k-0", worker="alpha")
        request = AdoptProcessRequest(
            worker="alpha", operation=AdoptOperation(pid=os.getpid()), validate_only=True
        )
        with pytest.raises(grpc.RpcError, match="can't be adopted"):
            stub.AdoptProcess(request, timeout=20)
    assert [workload["name"] for workload in fleet.json("get", "workloads", "-a")["workloads"]] == ["one"]
