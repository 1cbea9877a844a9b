"""Helpers: they get GPUs that nobody waits for, and give them back once somebody does."""

import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
from leasehold.v1 import workload_pb2
from leasehold.v1.workload_pb2 import WorkloadState

from .local_hosts import COUNTING, LocalHost

YIELDING = """
import sys, time
from leasehold.v1.workload_pb2 import HelperTerms
from google.protobuf.duration_pb2 import Duration
from leasehold_client import local
with local.claim(gpus=2, name="helper", helper=HelperTerms(grace=Duration(seconds=30))) as lease:
    print("held", flush=True)
    lease.yield_requested.wait()
    print("asked", flush=True)
print("given back", flush=True)
"""

ON_SIGNAL = "trap 'echo asked; exit 0' USR1; echo held; while :; do sleep 0.01; done"


def hold(host: LocalHost, *options: str) -> subprocess.Popen[str]:
    process = host.exec(*options, "--", "sh", "-c", "echo holding; exec sleep 1000")
    host.wait_line(process, "holding")
    return process


def state(host: LocalHost, name: str) -> str:
    return WorkloadState.Name(host.workloads()[name].status.state).removeprefix("WORKLOAD_STATE_")


@pytest.mark.long
def test_a_helper_is_suspended_for_others_and_woken_afterwards(local_host: LocalHost) -> None:
    terms = ["--helper", "suspend", "--yield-grace", "0.1"]
    helper = local_host.exec("--gpus", "2", "--name", "helper", *terms, "--", *COUNTING)
    local_host.wait_counting(helper)
    other = hold(local_host, "--name", "other")
    workload = local_host.workloads()["helper"]
    assert workload.status.state == workload_pb2.WORKLOAD_STATE_SUSPENDED
    assert workload.status.yielded
    assert not workload.status.HasField("lease")
    second = local_host.exec("--name", "second", *terms, "--", *COUNTING)
    local_host.wait_counting(second)  # the GPU that the first one can do nothing with alone
    other.kill()
    second.kill()
    local_host.wait(lambda: state(local_host, "helper") == "RUNNING")
    assert local_host.states() == ["LEASED", "LEASED"]
    assert not local_host.workloads()["helper"].status.yielded
    local_host.wait_counting(helper)


@pytest.mark.long
def test_a_helper_is_stopped_for_others_if_it_said_so(local_host: LocalHost) -> None:
    terms = ["--helper", "stop", "--yield-grace", "0"]
    helper = local_host.exec("--gpus", "2", *terms, "--", *COUNTING)
    local_host.wait_counting(helper)
    hold(local_host)
    local_host.end(helper)


@pytest.mark.long
def test_a_helper_that_gives_back_when_it_is_asked_is_left_alone(local_host: LocalHost) -> None:
    terms = ["--gpus", "2", "--helper", "suspend", "--yield-grace", "30", "--yield-signal", "USR1"]
    for by_signal in (False, True):
        helper = (
            local_host.exec(*terms, "--", "sh", "-c", ON_SIGNAL) if by_signal else local_host.python(YIELDING)
        )
        local_host.wait_line(helper, "held")
        other = hold(local_host)
        assert local_host.end(helper).startswith("held\nasked\n")
        other.kill()
        local_host.wait(lambda: local_host.states() == ["FREE", "FREE"])


@pytest.mark.long
def test_a_helper_waits_behind_everybody(local_host: LocalHost) -> None:
    holders = [hold(local_host), hold(local_host)]
    helper = local_host.exec(
        "--helper",
        "stop",
        "--priority",
        "9",
        "--name",
        "helper",
        "--",
        "sh",
        "-c",
        "echo holding; sleep 1000",
    )
    local_host.wait_line(helper, "waiting, 1 of 1", "err")
    other = local_host.exec("--gpus", "2", "--", "sh", "-c", "echo holding; exec sleep 1000")
    local_host.wait_line(helper, "waiting, 2 of 2", "err")
    assert [claim.helper for claim in local_host.look().waiting] == [False, True]
    holders[0].kill()
    local_host.wait(lambda: "FREE" in local_host.states())
    assert "holding" not in local_host.out(helper)
    holders[1].kill()
    local_host.wait_line(other, "holding")
    other.kill()
    local_host.wait_line(helper, "holding")


@pytest.mark.long
def test_a_helper_that_can_not_be_restored_keeps_no_other_asleep(local_host: LocalHost) -> None:
    """The newest is suspended first, and has the first turn."""
    terms = ["--helper", "suspend", "--yield-grace", "0"]
    helpers = []
    for name in ("older", "newer"):
        helpers.append(local_host.exec("--name", name, *terms, "--", *COUNTING))
        local_host.wait_counting(helpers[-1])  # otherwise the other one may begin first
    older, newer = helpers
    holders = []
    for name in ("newer", "older"):
        holders.append(hold(local_host))
        local_host.wait(lambda name=name: state(local_host, name) == "SUSPENDED")  # type: ignore[misc]
    newer.send_signal(signal.SIGSTOP)
    holders[0].kill()
    local_host.wait(lambda: state(local_host, "older") == "RUNNING")
    assert state(local_host, "newer") == "SUSPENDED"
    newer.send_signal(signal.SIGCONT)
    holders[1].kill()
    local_host.wait(lambda: state(local_host, "newer") == "RUNNING")
    for helper in (older, newer):
        local_host.wait_counting(helper)


@pytest.mark.long
def test_a_suspended_helper_is_woken_by_the_next_start_of_the_worker_too(restarting_host: LocalHost) -> None:
    host = restarting_host
    helper = host.exec(
        *("--gpus", "2", "--name", "helper", "--helper", "suspend", "--yield-grace", "0", "--", *COUNTING)
    )
    host.wait_counting(helper)
    other = hold(host)
    host.wait(lambda: state(host, "helper") == "SUSPENDED")
    host.kill_worker()
    host.start_worker()
    assert state(host, "helper") == "SUSPENDED"
    assert host.workloads()["helper"].status.yielded
    other.kill()
    host.wait(lambda: state(host, "helper") == "RUNNING")
    host.wait_counting(helper)


TWICE = """
import sys, time
from cuda.bindings import driver
from google.protobuf.duration_pb2 import Duration
from leasehold.v1 import workload_pb2
from leasehold_client import local
terms = workload_pb2.HelperTerms(grace=Duration(nanos=10**7))
with local.claim(gpus=2, name="helper", helper=terms) as lease:
    driver.cuInit(0)
    driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(driver.cuDeviceGet(0)[1])[1])
    driver.cuMemAlloc(2**20)
    print("held", flush=True)
    for _ in range(2):
        lease.yield_requested.wait()
        print("asked", flush=True)
        while lease.yield_requested.is_set():
            time.sleep(0.01)
        print("woken", lease.state == workload_pb2.WORKLOAD_STATE_RUNNING, flush=True)
"""


@pytest.mark.long
def test_a_claim_is_asked_again_after_it_was_woken(local_host: LocalHost) -> None:
    helper = local_host.start(sys.executable, "-c", TWICE)
    local_host.wait_line(helper, "held")
    for asked in (1, 2):
        other = hold(local_host)
        local_host.wait(lambda asked=asked: local_host.out(helper).count("asked") == asked)  # type: ignore[misc]
        other.kill()
        local_host.wait(lambda asked=asked: local_host.out(helper).count("woken True") == asked)  # type: ignore[misc]
    local_host.end(helper)


UNNEEDED = """
from google.protobuf.duration_pb2 import Duration
from leasehold.v1.workload_pb2 import HelperTerms
from leasehold_client import local
with local.claim(gpus=2, name="helper", helper=HelperTerms(grace=Duration(seconds=1000))) as lease:
    print("held", flush=True)
    lease.yield_requested.wait()
    print("asked", flush=True)
    while lease.yield_requested.is_set():
        lease.ended.wait(0.01)
    print("keeps", len(lease.gpu_uuids), flush=True)
"""


@pytest.mark.long
def test_a_request_to_yield_is_withdrawn_with_the_claim_that_waits(local_host: LocalHost) -> None:
    helper = local_host.start(sys.executable, "-c", UNNEEDED)
    local_host.wait_line(helper, "held")
    other = local_host.exec("--", "true")
    local_host.wait_line(helper, "asked")
    other.send_signal(signal.SIGINT)
    local_host.wait_line(helper, "keeps 2")
    local_host.end(helper)


@pytest.mark.long
def test_one_that_can_not_be_suspended_does_not_keep_another_from_giving_way(local_host: LocalHost) -> None:
    terms = ["--helper", "suspend", "--yield-grace", "0"]
    good = local_host.exec("--name", "good", *terms, "--", *COUNTING)
    local_host.wait_counting(good)
    hold(local_host, "--name", "bad", *terms)  # it has no CUDA process, and it is the newer one
    other = hold(local_host, "--name", "other")
    assert state(local_host, "good") == "SUSPENDED"
    assert state(local_host, "bad") == "RUNNING"
    other.kill()
    local_host.wait(lambda: state(local_host, "good") == "RUNNING")


@pytest.mark.long
def test_who_waits_for_cpu_time_keeps_no_helper_asleep(new_host: Callable[[int], LocalHost]) -> None:
    host = new_host(1)
    host.start_worker("cpu_limit_millicores = 1000")
    terms = ["--helper", "suspend", "--yield-grace", "0", "--cpu", "1", "--name", "helper"]
    helper = host.exec(*terms, "--", *COUNTING)
    host.wait_counting(helper)
    other = hold(host)
    assert state(host, "helper") == "SUSPENDED"
    poor = host.exec("--cpu", "1", "--", "sh", "-c", "echo holding; exec sleep 1000")
    host.wait(lambda: len(host.look().waiting) == 1)
    other.kill()
    host.wait(lambda: state(host, "helper") == "RUNNING")
    host.wait_counting(helper)
    helper.kill()
    host.wait_line(poor, "holding")


@pytest.mark.long
def test_a_yield_that_the_worker_died_in_is_not_forgotten(restarting_host: LocalHost) -> None:
    host = restarting_host
    host.stop_worker()
    host.patch = "import os; os.environ['LEASEHOLD_CRASH_POINT'] = 'phase-preflight'"
    host.start_worker()
    terms = ["--gpus", "2", "--name", "helper", "--helper", "suspend", "--yield-grace", "1"]
    helper = host.exec(*terms, "--", *COUNTING)
    host.wait_counting(helper)
    other = host.exec("--", "sh", "-c", "echo holding; exec sleep 1000")
    host.wait_line(other, "waiting", "err")
    assert host.worker is not None
    host.worker.wait(60)
    host.patch = ""
    host.start_worker()
    host.wait_line(other, "holding")
    assert state(host, "helper") == "SUSPENDED"
    other.kill()
    host.wait(lambda: state(host, "helper") == "RUNNING")
    host.wait_counting(helper)
