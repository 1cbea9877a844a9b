"""Checkpoints of a real fleet from the command line, and policies that workloads were run with."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from leasehold.v1.workload_pb2 import WORKLOAD_STATE_RUNNING
from leasehold_client.arguments.policies import parse_policy

from tests.environment import CRIU

from .fleets import Fleet, make_fleet
from .local_hosts import CLAIMING_COUNTER, COUNTING, LocalHost, local_side
from .models import WORKER, Model, images_are_local, reason, require_images

GATED_CRIU = """#!/bin/sh
# The criu of `make criu`. While the gate is there, it begins only once it may write no files any more.
while [ -e {gate} ] && [ "$(ulimit -f)" != 0 ]; do : > {gate}.waits; sleep 0.02; done
exec {criu} "$@"
"""
"""A cancellation takes the right to write files away: so there is time for one in the middle of a dump."""

UNWRITABLE = """
import pty, socket, sys, time
host, port = sys.argv[1].rsplit(":", 1)
client = socket.create_connection((host, int(port)))
pty.openpty()
print("connected", flush=True)
time.sleep(1000)
"""
"""Has TCP connection to another program and a terminal, which no image holds."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, is_mutual: bool) -> Iterator[Fleet]:
    """One fleet for all tests here, whose CRIU can be kept waiting."""
    with make_fleet(tmp_path_factory.mktemp("checkpoints"), is_mutual=is_mutual) as started:
        wrapper = started.folder / "criu"
        if CRIU.exists():
            wrapper.write_text(GATED_CRIU.format(gate=started.folder / "gate", criu=CRIU))
            wrapper.chmod(0o755)
        started.start_worker(WORKER, settings=f'criu = "{wrapper}"\n')
        yield started


@pytest.fixture(autouse=True)
def nothing_is_left(fleet: Fleet) -> Iterator[None]:
    """Ends the workloads of a test."""
    yield
    for workload in fleet.client.workloads():
        fleet.client.wait(fleet.client.stop(workload.name, grace_s=0), check=False)
    fleet.wait(lambda: not fleet.leases())


@pytest.fixture
def local(fleet: Fleet, tmp_path: Path) -> Iterator[LocalHost]:
    """The local side of the worker."""
    host = local_side(fleet, WORKER, tmp_path / "local")
    yield host
    host.close()


def listed(fleet: Fleet, name: str) -> dict[str, bool]:
    """Its checkpoints in the order in which they are listed, and whether each is in use."""
    found = fleet.json("get", "checkpoints", name)["checkpoints"]
    return {each["checkpoint_id"]: each.get("in_use", False) for each in found}


def files(model: Model) -> set[str]:
    """What of it is on disk."""
    folder = model.images / model.workload.workload_id
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def result(fleet: Fleet, *arguments: str) -> Any:
    """What came of a verb."""
    return fleet.json(*arguments)["result"]


@pytest.mark.long
def test_an_application_is_woken_from_the_checkpoint_that_is_named(fleet: Fleet) -> None:
    model = Model(fleet, "saver", kernel=True)
    model.start("--keep-checkpoints", "2")

    plan = fleet.json("checkpoint", model.name, "--dry-run")
    (tier,) = plan["tiers"]
    assert (tier["tier"], tier["needed_bytes"]) == ("TIER_DISK", "64"), "as the application estimates"
    assert plan["steps"] == [
        "its application saves itself, if it is checkpointable",
        "the application continues",
    ]
    assert "on disk  64 B needed" in fleet.cli("checkpoint", model.name, "--dry-run").stdout
    assert not plan.get("released_gpu_uuids"), "it goes on where it is"
    assert files(model) == set(), "a plan saves nothing"
    (gpu_uuid,) = model.gpus
    made = []
    for _ in range(3):
        model.generate()
        made.append(result(fleet, "checkpoint", model.name)["checkpoint_id"])
    assert list(listed(fleet, model.name)) == [made[2], made[1]], "the newest two"
    assert files(model) == {f"{each}.checkpoint" for each in made[1:]}
    model.require_running()

    at_end = result(fleet, "suspend", model.name, "--process", "stop")["checkpoint_id"]
    model.require_parked("stop")
    assert listed(fleet, model.name) == {at_end: True, made[2]: False}
    plan = fleet.json("wake", model.name, "--checkpoint", made[2], "--dry-run")
    size = (model.images / model.workload.workload_id / f"{made[2]}.checkpoint").stat().st_size
    assert plan["tiers"] == [{"tier": "TIER_DISK", "needed_bytes": str(size)}]
    assert plan["steps"] == ["its program is started again", "its application loads its save, if any"]
    assert [each["gpu_uuid"] for each in plan["destinations"]] == [gpu_uuid]
    told = fleet.cli("wake", model.name, "--checkpoint", made[2], "--dry-run").stdout
    assert f"would move 64.0 KiB; it takes {WORKER}/" in told
    fleet.cli("wake", model.name, "--checkpoint", made[2])
    model.wait_served()
    model.requests = 3
    model.require_running()

    # The newest is the default; where the application can't be restored from it, the one before serves.
    newest = result(fleet, "suspend", model.name, "--process", "stop")["checkpoint_id"]
    assert list(listed(fleet, model.name)) == [newest, at_end]
    model.fail_at("kernel.restore", "raise")
    woken = result(fleet, "wake", model.name)
    assert woken["checkpoint_id"] == at_end
    assert "restore was told to" in woken["warnings"][0]
    model.wait_served()
    model.requests = 4
    model.require_running()


@pytest.mark.long
def test_a_checkpoint_that_is_needed_is_not_deleted_and_another_one_is(fleet: Fleet) -> None:
    model = Model(fleet, "saver", kernel=True)
    model.start()
    spare = result(fleet, "checkpoint", model.name)["checkpoint_id"]
    needed = result(fleet, "suspend", model.name, "--process", "stop")["checkpoint_id"]
    both = {f"{needed}.checkpoint", f"{spare}.checkpoint"}

    for dry_run in ([], ["--dry-run"]):
        refused = fleet.cli("rm", "checkpoint", needed, *dry_run, code=1)
        assert "CHECKPOINT_IN_USE" in refused.stderr
        refused = fleet.cli("rm", "checkpoint", spare, needed, *dry_run, code=1)
        assert "CHECKPOINT_IN_USE" in refused.stderr
    assert files(model) == both, "all of them or none"
    size = (model.images / model.workload.workload_id / f"{spare}.checkpoint").stat().st_size
    assert "would free 64.0 KiB on disk" in fleet.cli("rm", "checkpoint", spare, "--dry-run").stdout
    planned = json.loads(fleet.cli("rm", "checkpoint", "-o", "json", spare, "--dry-run").stdout)
    assert planned["freed_bytes"] == str(size)
    assert files(model) == both, "a plan deletes nothing"
    fleet.cli("rm", "checkpoint", spare)
    assert files(model) == {f"{needed}.checkpoint"}
    assert listed(fleet, model.name) == {needed: True}
    fleet.cli("wake", model.name)
    model.wait_served()
    model.require_running()
    fleet.cli("rm", "checkpoint", needed)
    assert files(model) == set(), "it runs, and needs none"


@pytest.mark.long
def test_a_workload_whose_checkpoint_was_deleted_by_force_says_so(fleet: Fleet) -> None:
    model = Model(fleet, "lost", kernel=True)
    model.start()
    needed = result(fleet, "suspend", model.name, "--process", "stop")["checkpoint_id"]
    fleet.cli("rm", "checkpoint", needed, "--force", "--yes")
    fleet.wait(lambda: "0 B on disk" in fleet.cli("get", "workload", model.name).stdout)
    told = fleet.cli("describe", "workload", model.name).stdout
    assert f"checkpoint {needed} of workload lost was deleted: stop the workload, or restore it" in told
    refused = fleet.cli("restore", model.name, "--dry-run", code=1)
    assert f"checkpoint {needed} of workload lost is no longer in the image directory" in refused.stderr
    fleet.cli("stop", model.name)
    assert "EXITED" in fleet.cli("get", "workload", model.name).stdout


@pytest.mark.long
def test_a_bare_suspend_is_by_the_policy_and_the_ladder_that_were_declared(fleet: Fleet) -> None:
    model = Model(fleet, "declared")
    model.start("--evict", "offload+cuda_suspend", "--escalate-to", "stop")
    declared = {
        "weight_strategy": "WEIGHT_STRATEGY_OFFLOAD",
        "process_strategy": "PROCESS_STRATEGY_CUDA_SUSPEND",
        "escalate_to": "PROCESS_STRATEGY_STOP",
    }
    assert result(fleet, "suspend", model.name)["policy"] == declared
    model.require_parked("cuda_suspend")
    fleet.cli("wake", model.name)
    model.require_running()

    model.host.set_fault("checkpoint", model.pid, error=801)
    refused = fleet.cli("suspend", model.name, "--process", "cuda_suspend", code=1)
    assert "UNSUPPORTED_STATE" in refused.stderr
    model.require_running()
    parked = result(fleet, "suspend", model.name)
    assert parked["policy"] == {**declared, "process_strategy": "PROCESS_STRATEGY_STOP"}
    assert "offload+cuda_suspend failed and was rolled back" in " ".join(parked["warnings"])
    model.require_parked("stop")
    model.clear_faults()
    fleet.cli("wake", model.name)
    model.requests = 0
    model.wait_served()
    model.require_running()


@pytest.mark.long
@images_are_local
def test_what_an_image_can_not_hold_is_said_beforehand(fleet: Fleet) -> None:
    run = ["run", "--name", "connected", "--worker", WORKER, "--gpus", "0"]
    fleet.cli(*run, "--", sys.executable, "-c", UNWRITABLE, fleet.address)
    fleet.wait(lambda: b"connected" in b"".join(fleet.client.output("connected")))
    refused = fleet.cli("suspend", "connected", "--process", "checkpoint", "--dry-run", code=1)
    assert "connected: suspend would be REFUSED" in refused.stdout
    assert "TCP connection to 127.0.0.1 port" in refused.stderr
    assert "/dev/pts/" in refused.stderr
    assert "is a terminal" in refused.stderr
    assert refused.stderr.count("(UNSUPPORTED_STATE)") == 3, "the connection, and two ends of the terminal"
    assert fleet.client.workload("connected").status.state == WORKLOAD_STATE_RUNNING


@pytest.mark.long
@images_are_local
def test_a_cancelled_image_leaves_the_workload_as_it_was(fleet: Fleet) -> None:
    require_images(fleet)
    model = Model(fleet, "chat")
    model.start()
    model.generate()
    gate = fleet.folder / "gate"
    gate.touch()
    try:
        begun = fleet.json("suspend", model.name, "--process", "checkpoint", "--no-wait")
        fleet.wait((fleet.folder / "gate.waits").exists)
        assert [name for name in files(model) if name.endswith(".partial")], "it is on its way"
        assert "is CANCELLED" in fleet.cli("cancel", begun["command_id"]).stdout
    finally:
        gate.unlink()
    model.require_running()
    assert model.state()["pid"] == model.pid
    assert files(model) == set()


@pytest.mark.long
def test_what_a_worker_has_not_started_it_does_not_end(fleet: Fleet, local: LocalHost) -> None:
    guests = {
        "executed": local.exec("--name", "executed", "--", *COUNTING),
        "claiming": local.python(CLAIMING_COUNTER, "claiming"),
    }
    fleet.wait(lambda: sorted(fleet.leases().values()) == sorted(guests))
    # At once: what stands against an image is given time to pass, for each.
    images = [fleet.client.suspend(each, policy=parse_policy("checkpoint"), force=True) for each in guests]
    for image in images:
        ended = fleet.client.wait(image, check=False)
        assert reason(ended) == "UNSUPPORTED_STATE"
        assert "was not started by a worker" in ended.error.message
    for name, counter in guests.items():
        for option in ("--force", "--dry-run"):
            refused = fleet.cli("suspend", name, "--process", "stop", option, code=1)
            assert "was not started by a worker" in refused.stderr
            assert "(UNSUPPORTED_STATE)" in refused.stderr
        local.wait_counting(counter)
        fleet.cli("suspend", name)
        fleet.cli("wake", name)
        local.wait_counting(counter)
