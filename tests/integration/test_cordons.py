"""Cordons and the health of GPUs, on a real worker, and over its restarts."""

import signal
import subprocess

import pytest
from leasehold.local.v1.local_service_pb2 import ListResponse
from leasehold.v1 import gpu_pb2

from .fleets import LEASEHOLD, Fleet
from .local_hosts import COUNTING, LocalHost


def hold(host: LocalHost, *options: str) -> subprocess.Popen[str]:
    process = host.exec(*options, "--", "sh", "-c", "echo holding; exec sleep 1000")
    host.wait_line(process, "holding")
    return process


def restart(fleet: Fleet) -> None:
    fleet.end("alpha")
    fleet.start_worker("alpha")


@pytest.mark.long
def test_a_cordoned_gpu_stays_so_until_it_is_put_back(fleet: Fleet, alpha: LocalHost) -> None:
    holder = hold(alpha, "--name", "holder")
    fleet.cli("cordon", "alpha/0", "alpha/1", "--reason", "a fan")
    assert alpha.states() == ["LEASED", "CORDONED", "FREE", "FREE"]
    restart(fleet)
    assert alpha.states() == ["LEASED", "CORDONED", "FREE", "FREE"]
    found = alpha.look().gpus[1].cordon
    assert found.reason == "a fan"
    assert "@" in found.cordoned_by
    holder.kill()
    alpha.wait(lambda: alpha.states() == ["CORDONED", "CORDONED", "FREE", "FREE"])
    refused = alpha.run("--gpus", "3", "--wait", "0", "--", "true", code=125)
    assert "2 cordoned" in refused
    assert "(CORDONED)" in refused
    waiting = alpha.exec("--gpus", "3", "--", "echo", "granted")
    alpha.wait_line(waiting, "2 cordoned", "err")
    fleet.cli("uncordon", "alpha/0")
    assert alpha.end(waiting) == "granted\n"
    restart(fleet)
    alpha.wait(lambda: alpha.states() == ["FREE", "CORDONED", "FREE", "FREE"])
    fleet.cli("uncordon", "alpha/1")
    assert alpha.states() == ["FREE"] * 4


@pytest.mark.long
def test_a_cordoned_worker_grants_nothing_until_it_is_put_back(fleet: Fleet, alpha: LocalHost) -> None:
    fleet.cli("cordon", "alpha", "--reason", "to be moved")
    restart(fleet)
    assert alpha.look().cordon.reason == "to be moved"
    refused = alpha.run("--wait", "0", "--", "true", code=125)
    assert "the worker is cordoned by" in refused
    assert "(CORDONED)" in refused
    assert "(CORDONED)" in alpha.run("--gpus", "0", "--", "true", code=125)
    waiting = alpha.exec("--", "echo", "granted")
    alpha.wait_line(waiting, "to be moved", "err")
    listed = alpha.start(*LEASEHOLD, "local", "leases")
    assert "the worker is cordoned by" in alpha.end(listed)
    fleet.cli("uncordon", "alpha")
    assert alpha.end(waiting) == "granted\n"
    assert not alpha.look().HasField("cordon")


@pytest.mark.long
def test_a_swap_gives_no_cordoned_or_sick_gpu_to_another_workload(fleet: Fleet, alpha: LocalHost) -> None:
    assert alpha.simulated is not None
    for name in ("one", "two", "pair"):
        fleet.run_counter(name, gpus=2 if name == "pair" else 1)
    fleet.cli("cordon", "alpha/1", "alpha/3", "--reason", "a fan")
    for dry in ([], ["--dry-run"]):
        refused = fleet.cli("remap", "one", "two", "--swap", *dry, code=1)
        assert "alpha/1 is cordoned by" in refused.stdout + refused.stderr
    # It has both GPUs already.
    fleet.cli("remap", "pair", "--pair", "alpha/2=alpha/3", "--pair", "alpha/3=alpha/2")
    fleet.cli("uncordon", "alpha/1", "alpha/3")
    fleet.cli("cordon", "alpha", "--reason", "to be moved")
    fleet.refuse("remap", "one", "two", "--swap", code=1, match="the worker is cordoned by")
    fleet.cli("suspend", "one")
    fleet.refuse("restore", "one", code=1, match="the worker is cordoned by")
    fleet.cli("uncordon", "alpha")
    fleet.cli("restore", "one")
    alpha.simulated.raise_xid(0, 79)
    alpha.wait(lambda: bool(health(alpha.look(), 0)))
    fleet.refuse("remap", "one", "two", "--swap", code=1, match="GPU_UNHEALTHY")


@pytest.mark.long
def test_a_sick_gpu_is_given_to_nobody_until_its_health_is_reset(fleet: Fleet, alpha: LocalHost) -> None:
    assert alpha.simulated is not None
    counter = alpha.exec("--", *COUNTING)
    alpha.wait_counting(counter)
    alpha.simulated.set_readings(0, ecc_uncorrected=1)
    alpha.simulated.raise_xid(0, 48)
    alpha.simulated.set_readings(1, ecc_uncorrected=1)
    alpha.simulated.raise_xid(1, 48)
    alpha.wait(lambda: alpha.states() == ["LEASED", "UNHEALTHY", "FREE", "FREE"])
    alpha.wait(lambda: all(health(alpha.look(), slot) for slot in (0, 1)))
    alpha.wait_counting(counter)  # who holds it is told, and keeps it
    restart(fleet)
    assert alpha.states() == ["LEASED", "UNHEALTHY", "FREE", "FREE"]
    assert all(health(alpha.look(), slot) for slot in (0, 1))
    counter.kill()
    alpha.wait(lambda: alpha.states() == ["UNHEALTHY", "UNHEALTHY", "FREE", "FREE"])
    refused = alpha.run("--gpus", "3", "--wait", "0", "--", "true", code=125)
    assert "(GPU_UNHEALTHY)" in refused
    fleet.cli("gpu", "reset-health", "alpha/0")
    assert alpha.states()[0] == "UNHEALTHY"  # it was looked at again, and the error is still there
    alpha.simulated.set_readings(0, ecc_uncorrected=0)
    alpha.simulated.set_readings(1, ecc_uncorrected=0)
    fleet.cli("gpu", "reset-health", "alpha/0", "alpha/1")
    assert alpha.states() == ["FREE"] * 4
    assert not health(alpha.look(), 0)


def health(found: ListResponse, slot: int) -> str:
    """What is said against a GPU."""
    gpu = found.gpus[slot]
    assert (gpu.health == gpu_pb2.GPU_HEALTH_OK) == (not gpu.health_reason)
    return gpu.health_reason


@pytest.mark.long
def test_a_worker_that_parks_its_workloads_at_its_end_tells_that_they_hold_no_gpu(fleet: Fleet) -> None:
    fleet.end("alpha", signal.SIGTERM)
    fleet.start_worker("alpha", settings='stop_workloads = "park"\n')
    fleet.run_counter("one")
    fleet.end("alpha", signal.SIGTERM)
    fleet.wait(lambda: fleet.worker_state("alpha") == "WORKER_STATE_DISCONNECTED")
    states = [gpu["lease"]["state"] for gpu in fleet.json("get", "gpus")["gpus"]]
    assert states == ["SLOT_STATE_CORDONED"] * 4
    (workload,) = fleet.json("get", "workloads")["workloads"]
    assert workload["status"]["state"] == "WORKLOAD_STATE_SUSPENDED"
