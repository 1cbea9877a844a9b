"""``leasehold_client.local.claim``: programs that claim GPUs for themselves, and what ends their leases."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from leasehold.v1 import workload_pb2
from leasehold.v1.workload_pb2 import WorkloadState
from leasehold_client.errors import LeaseholdError
from leasehold_client.local import LocalWorker

from .fleets import LEASEHOLD, Fleet
from .local_hosts import CLAIMING_COUNTER, LocalHost

HOLD = """
import json, os, sys
from leasehold_client import local
names = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "LEASEHOLD_LEASE_ID", "LEASEHOLD_WORKLOAD")
def show(*more):
    print(json.dumps([*more, [os.environ.get(name) for name in names]]), flush=True)
show("before")
def wait(_):
    print("waiting", flush=True)
with local.claim(gpus=int(sys.argv[2]), name=sys.argv[1], on_waiting=wait) as lease:
    show("held", lease.gpu_uuids, dict(lease.environment))
    for line in sys.stdin:
        if line == "end\\n":
            break
        show("now", lease.gpu_uuids, dict(lease.environment), lease.state, lease.ended.is_set())
show("after")
input()
"""
"""Holds a claim until it is told to end. Each other line that it gets makes it say what it has."""

IN_A_THREAD = """
import threading, time
from leasehold_client import local
def hold():
    with local.claim(name="thread"):
        print("held", flush=True)
        time.sleep(1000)
threading.Thread(target=hold).start()
"""

TWICE = """
import threading
from leasehold_client import local
from leasehold_client.errors import LeaseholdError
def claim(wait_s):
    try:
        with local.claim(wait_s=wait_s) as lease:
            print("granted", flush=True)
            return lease
    except LeaseholdError as error:
        print(error.reason, flush=True)
with local.claim() as outer:
    claim(10)
claim(10)
"""

TWO_WAIT = """
import sys, threading
from leasehold_client import local
from leasehold_client.errors import LeaseholdError
def claim(name, waiting):
    try:
        with local.claim(name=name, on_waiting=lambda _: waiting.set()):
            print(name, "granted", flush=True)
            sys.stdin.readline()
    except LeaseholdError as error:
        print(name, error.reason, flush=True)
waiting = threading.Event()
first = threading.Thread(target=claim, args=("first", waiting))
first.start()
waiting.wait()
claim("second", waiting)
first.join()
"""

KEEP_CONTEXT = """
import sys
from cuda.bindings import driver
from leasehold_client import local
with local.claim(name="keeper"):
    driver.cuInit(0)
    driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(driver.cuDeviceGet(0)[1])[1])
    driver.cuMemAlloc(2**20)
    print("held", flush=True)
    sys.stdin.readline()
print("given back", flush=True)
sys.stdin.readline()
"""


def say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def start(host: LocalHost, name: str, gpus: int = 1) -> subprocess.Popen[str]:
    """Starts a program that holds a claim, and waits until it does."""
    process = host.python(HOLD, name, str(gpus))
    host.wait_line(process, "held")
    return process


def now(host: LocalHost, process: subprocess.Popen[str]) -> list[object]:
    """What a program says of its claim now."""
    before = host.out(process).count("\n")
    say(process, "now")
    host.wait(lambda: host.out(process).count("\n") > before)
    found: list[object] = json.loads(host.out(process).splitlines()[-1])
    return found


def test_a_claim_holds_gpus_for_a_while_and_then_the_environment_is_as_before(local_host: LocalHost) -> None:
    process = start(local_host, "holder", gpus=2)
    workload = local_host.workloads()["holder"]
    assert workload.origin == workload_pb2.WORKLOAD_ORIGIN_CLAIM
    gpu_uuids = list(workload.status.lease.gpu_uuids)
    assert len(gpu_uuids) == 2
    say(process, "end")
    local_host.wait_line(process, "after")
    before, held, after = map(json.loads, local_host.out(process).splitlines())
    variables = [",".join(gpu_uuids), ",".join(gpu_uuids), workload.status.lease.lease_id, "holder"]
    assert held[:2] == ["held", gpu_uuids]
    assert held[3] == variables
    assert held[2]["LEASEHOLD_WORKLOAD_ID"] == workload.workload_id
    assert held[2]["LEASEHOLD_SOCKET"] == str(local_host.socket)
    assert before[1] == after[1]
    assert local_host.states() == ["FREE", "FREE"]
    assert process.poll() is None


def test_a_claim_in_a_thread_ends_with_its_process(local_host: LocalHost) -> None:
    process = local_host.python(IN_A_THREAD)
    local_host.wait_line(process, "held")
    assert "LEASED" in local_host.states()
    process.kill()
    local_host.wait(lambda: local_host.states() == ["FREE", "FREE"])


def test_a_process_has_one_claim_at_a_time(local_host: LocalHost) -> None:
    assert local_host.end(local_host.python(TWICE)) == "ALREADY_REGISTERED\ngranted\n"


def test_a_process_waits_for_one_claim_at_a_time(local_host: LocalHost) -> None:
    holder = start(local_host, "holder", gpus=2)
    two = local_host.python(TWO_WAIT)
    local_host.wait_line(two, "second ALREADY_REGISTERED")
    say(holder, "end")
    local_host.wait_line(two, "first granted")
    say(two, "")
    local_host.end(two)


@pytest.mark.long
def test_memory_that_is_kept_after_a_claim_keeps_the_next_one_waiting(local_host: LocalHost) -> None:
    keeper = local_host.python(KEEP_CONTEXT)
    local_host.wait_line(keeper, "held")
    other = start(local_host, "other")
    waiting = local_host.python(HOLD, "next", "1")
    local_host.wait_line(waiting, "waiting")
    say(keeper, "")
    local_host.wait_line(keeper, "given back")
    assert sorted(local_host.states()) == ["FOREIGN", "LEASED"]
    foreign = next(gpu for gpu in local_host.look().gpus if gpu.foreign_processes)
    assert foreign.foreign_processes[0].pid == keeper.pid
    assert "1 foreign" in local_host.look().waiting[0].reason
    say(keeper, "")
    local_host.end(keeper)
    local_host.wait_line(waiting, "held")
    assert other.poll() is None


def test_a_claim_within_a_command_that_has_gpus_is_refused(local_host: LocalHost) -> None:
    inner = "import os; os.setsid()\n" + TWICE.rpartition("with")[0] + "claim(0)"
    process = local_host.exec("--", "sh", "-c", '"$0" -c "$1"', sys.executable, inner)
    assert local_host.end(process) == "ALREADY_REGISTERED\n"


def test_a_claim_is_released_by_its_user_from_outside(local_host: LocalHost) -> None:
    process = start(local_host, "released")
    released = local_host.start(*LEASEHOLD, "local", "release", "released")
    assert local_host.end(released) == "released: released\n"
    local_host.wait(lambda: now(local_host, process)[4] is True)
    assert local_host.states() == ["FREE", "FREE"]
    with LocalWorker(local_host.socket) as worker, pytest.raises(LeaseholdError, match="has the id") as error:
        worker.release("released")
    assert error.value.reason == "UNKNOWN_WORKLOAD"
    say(process, "end")
    local_host.wait_line(process, "after")


@pytest.mark.parametrize("crash", [True, False], ids=["killed", "stopped"])
@pytest.mark.long
def test_a_claim_goes_on_with_the_next_start_of_the_worker(restarting_host: LocalHost, crash: bool) -> None:
    host = restarting_host
    counter = host.python(CLAIMING_COUNTER, "counter")
    host.wait_counting(counter)
    holder = start(host, "holder")
    waiting = host.python(HOLD, "next", "1")
    host.wait_line(waiting, "waiting")
    before = host.workloads()
    if crash:
        host.kill_worker()
    else:
        host.stop_worker()
    host.wait_counting(counter)
    host.start_worker()
    host.wait(lambda: [claim.name for claim in host.look().waiting] == ["next"])
    after = host.workloads()
    for name in ("counter", "holder"):
        assert after[name].status.lease.lease_id == before[name].status.lease.lease_id
    host.wait_counting(counter)
    say(holder, "end")
    host.wait_line(waiting, "held")
    counter.terminate()
    host.end(counter)
    host.wait(lambda: sorted(host.states()) == ["FREE", "LEASED"])


EXPECTED_UNTIL_TOLD = """
import trio
from pathlib import Path
from leasehold_worker.local_api import claims
expect = claims.LocalClaims._expect
async def expect_until_told(self, workload):
    while not Path(TIME_IS_OVER).exists():
        await trio.sleep(0.02)
    claims.RESUME_TIMEOUT_S = 0
    await expect(self, workload)
    print("nobody is expected any more", flush=True)
claims.LocalClaims._expect = expect_until_told
"""
"""Holders are expected until the file TIME_IS_OVER is there."""

NO_LISTS = f"""
import grpc
from leasehold_worker.local_api import service
resume = claims.LocalClaims._resume
async def say_and_resume(self, session, workload_id):
    print("a claim goes on", flush=True)
    await resume(self, session, workload_id)
claims.LocalClaims._resume = say_and_resume
ask = service.LocalService._ask
def refuse(self, context, question):
    if question == self._answers.list and self._socket.peer(context.peer()).identity.pid != {os.getpid()}:
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too long")
    return ask(self, context, question)
service.LocalService._ask = refuse
"""
"""Lists are for the test alone. It follows EXPECTED_UNTIL_TOLD."""


@pytest.mark.long
def test_a_claim_goes_on_where_the_list_is_not_to_be_had(new_host: Callable[[int], LocalHost]) -> None:
    host = new_host(1)
    over = host.folder / "over"
    host.patch = f"TIME_IS_OVER = {str(over)!r}\n{EXPECTED_UNTIL_TOLD}{NO_LISTS}"
    host.start_worker()
    holder = start(host, "holder")
    waiting = host.exec("--name", "next", "--", "echo", "done")
    host.wait_line(waiting, "waiting", "err")
    host.kill_worker()
    host.start_worker()
    host.wait(lambda: [claim.name for claim in host.look().waiting] == ["next"])
    host.wait(lambda: "a claim goes on" in host.log)
    over.touch()
    host.wait(lambda: "nobody is expected any more" in host.log)
    assert host.states() == ["LEASED"]
    assert now(host, holder)[4] is False
    say(holder, "end")
    host.end(waiting)


@pytest.mark.long
def test_a_claim_whose_holder_does_not_come_back_is_let_go(new_host: Callable[[int], LocalHost]) -> None:
    host = new_host(2)
    over = host.folder / "over"
    host.patch = f"TIME_IS_OVER = {str(over)!r}\n{EXPECTED_UNTIL_TOLD}"
    host.start_worker()
    holder = start(host, "holder")
    host.kill_worker()
    holder.send_signal(signal.SIGSTOP)
    host.start_worker()
    assert "holder" in host.workloads()
    over.touch()
    host.wait(lambda: host.states() == ["FREE", "FREE"])
    holder.send_signal(signal.SIGCONT)
    host.wait(lambda: now(host, holder)[4] is True)


@pytest.mark.long
def test_a_claim_that_ended_while_the_worker_was_away_holds_nothing(restarting_host: LocalHost) -> None:
    holder = start(restarting_host, "holder", gpus=2)
    restarting_host.kill_worker()
    holder.kill()
    holder.wait()
    restarting_host.start_worker()
    restarting_host.wait(lambda: restarting_host.states() == ["FREE", "FREE"])


@pytest.mark.long
def test_a_claim_is_suspended_restored_and_moved_like_any_other(fleet: Fleet, alpha: LocalHost) -> None:
    counter = alpha.python(CLAIMING_COUNTER, "job")
    alpha.wait_counting(counter)
    fleet.wait(lambda: fleet.leases() == {"alpha/0": "job"})
    fleet.cli("suspend", "job")
    other = start(alpha, "other")
    fleet.wait(lambda: fleet.leases() == {"alpha/0": "other"})
    fleet.cli("restore", "job")
    fleet.wait(lambda: fleet.leases() == {"alpha/0": "other", "alpha/1": "job"})
    alpha.wait_counting(counter)
    fleet.cli("remap", "job", "--to", "alpha/3")
    fleet.wait(lambda: fleet.leases() == {"alpha/0": "other", "alpha/3": "job"})
    gpus = [gpu.gpu_uuid for gpu in alpha.look().gpus]
    assert list(alpha.wait_counting(counter).gpu_uuids) == [gpus[0], gpus[1], gpus[3]]
    fleet.cli("release", "other")
    alpha.wait(lambda: now(alpha, other)[4] is True)
    counter.terminate()
    alpha.end(counter)
    fleet.wait(lambda: not fleet.leases())


MOVED = KEEP_CONTEXT.replace(
    "    sys.stdin.readline()\n",
    """
    for line in sys.stdin:
        if line == "end\\n":
            break
        print(lease.environment["CUDA_VISIBLE_DEVICES"], *lease.gpu_uuids, lease.state, flush=True)
""",
    1,
).replace('name="keeper")', 'name="keeper") as lease')


@pytest.mark.long
def test_a_claimant_is_told_of_its_moves(fleet: Fleet, alpha: LocalHost) -> None:
    keeper = alpha.python(MOVED)
    alpha.wait_line(keeper, "held")
    gpus = [gpu.gpu_uuid for gpu in alpha.look().gpus]

    def says(*words: str) -> bool:
        say(keeper, "now")
        return alpha.out(keeper).splitlines()[-1].split() == [*words]

    running, suspended = (
        str(state) for state in (workload_pb2.WORKLOAD_STATE_RUNNING, workload_pb2.WORKLOAD_STATE_SUSPENDED)
    )
    fleet.wait(lambda: fleet.leases() == {"alpha/0": "keeper"})
    fleet.cli("remap", "keeper", "--to", "alpha/2")
    alpha.wait(lambda: says(gpus[2], gpus[2], running))
    fleet.cli("suspend", "keeper")
    alpha.wait(lambda: says("-1", suspended))
    say(keeper, "end")
    alpha.wait_line(keeper, "given back")
    assert WorkloadState.Name(alpha.workloads()["keeper"].status.state) == "WORKLOAD_STATE_SUSPENDED"
    fleet.cli("restore", "keeper")
    fleet.wait(lambda: not fleet.leases())
    assert alpha.states() == ["FREE", "FREE", "FOREIGN", "FREE"]


CRASH_AT_THE_GRANT = """
import os
from leasehold_worker.workloads.program_start import ProgramStart
variables = ProgramStart.variables
def crash(self, workload_id, name, lease):
    return os._exit(9) if name == "waiting" else variables(self, workload_id, name, lease)
ProgramStart.variables = crash
"""


@pytest.mark.parametrize("by_exec", [True, False], ids=["exec", "claim"])
@pytest.mark.long
def test_a_grant_that_was_written_down_and_not_told_is_told_by_the_next_start(
    new_host: Callable[[int], LocalHost], by_exec: bool
) -> None:
    host = new_host(1)
    host.patch = CRASH_AT_THE_GRANT
    host.start_worker()
    holder = start(host, "holder")
    if by_exec:
        waiting = host.exec("--name", "waiting", "--", "sh", "-c", "echo held; exec sleep 1000")
    else:
        waiting = host.python(HOLD, "waiting", "1")
    host.wait(lambda: len(host.look().waiting) == 1)
    host.wait_line(waiting, "waiting", "err" if by_exec else "out")
    holder.kill()
    assert host.worker is not None
    host.worker.wait(30)
    host.patch = ""
    host.start_worker()
    host.wait_line(waiting, "held")
    assert list(host.workloads()) == ["waiting"]
    waiting.kill()
    host.wait(lambda: host.states() == ["FREE"])


@pytest.mark.long
def test_claims_leave_room_for_other_calls(new_host: Callable[[int], LocalHost]) -> None:
    host = new_host(0)
    host.patch = (
        "from leasehold_worker.local_api import service; service.CLAIMS_LIMIT = 2; "
        "service.OTHER_CALLS_LIMIT = 1"
    )
    host.start_worker()
    holders = [start(host, name, gpus=0) for name in ("one", "two")]
    assert "2 claims are open, the limit of a worker" in host.run("--gpus", "0", "--", "true", code=125)
    assert sorted(host.workloads()) == ["one", "two"]
    say(holders[0], "end")
    host.wait_line(holders[0], "after")
    assert host.run("--gpus", "0", "--", "echo", "done") == "done\n"


WAIT_S = 3

WAIT_AND_STAY = f"""
from leasehold_client import local
from leasehold_client.errors import LeaseholdError
try:
    with local.claim(wait_s={WAIT_S}, on_waiting=lambda _: print("waiting", flush=True)):
        print("granted", flush=True)
except LeaseholdError as error:
    print("refused:", error.message, flush=True)
input()
"""
"""A program that lives on after its claim."""


def wait_shortly(host: LocalHost, by_exec: bool) -> subprocess.Popen[str]:
    """Starts a program that waits for WAIT_S, and returns once it is in the queue."""
    if by_exec:
        waiting = host.exec("--wait", str(WAIT_S), "--", "echo", "granted")
    else:
        waiting = host.python(WAIT_AND_STAY)
    host.wait_line(waiting, "waiting", "err" if by_exec else "out")
    return waiting


def assert_refused(host: LocalHost, waiting: subprocess.Popen[str], by_exec: bool) -> None:
    if by_exec:
        host.end(waiting, 125)
    else:
        host.wait_line(waiting, "refused:")
    assert "granted" not in host.out(waiting)


by_both = pytest.mark.parametrize("by_exec", [True, False], ids=["exec", "claim"])


@by_both
@pytest.mark.long
def test_a_stopped_worker_ends_the_wait_and_keeps_nothing_for_it(
    restarting_host: LocalHost, by_exec: bool
) -> None:
    host = restarting_host
    holder = start(host, "holder", gpus=2)
    waiting = wait_shortly(host, by_exec)
    assert host.worker is not None
    host.worker.send_signal(signal.SIGSTOP)
    try:
        assert_refused(host, waiting, by_exec)
        holder.kill()
        holder.wait()
    finally:
        host.worker.send_signal(signal.SIGCONT)
    host.wait(lambda: host.states() == ["FREE", "FREE"])
    assert not host.look().waiting
    assert not host.workloads()


@by_both
@pytest.mark.long
def test_a_worker_that_starts_after_the_wait_grants_nothing(
    restarting_host: LocalHost, by_exec: bool
) -> None:
    host = restarting_host
    holder = start(host, "holder", gpus=2)
    waiting = wait_shortly(host, by_exec)
    host.kill_worker()
    holder.kill()
    holder.wait()
    time.sleep(WAIT_S)  # the wait is over by now, whatever the machine does
    host.start_worker()
    assert_refused(host, waiting, by_exec)
    host.wait(lambda: host.states() == ["FREE", "FREE"])


def test_who_waits_in_vain_is_refused_in_python_too(local_host: LocalHost) -> None:
    start(local_host, "holder", gpus=2)
    code = TWICE.rpartition("with")[0] + "claim(0.1)"
    assert local_host.end(local_host.python(code)) == "NO_FREE_GPU\n"


def test_a_claim_by_a_name_gets_what_it_had_before(local_host: LocalHost) -> None:
    code = """
from leasehold.v1 import workload_pb2
from leasehold_client import local
resources = workload_pb2.Resources(gpu_count=1, gpu_preference=workload_pb2.GPU_PREFERENCE_SAME_AS_BEFORE)
with local.claim(resources=resources, name="again") as lease:
    print(lease.gpu_uuids, flush=True)
"""
    other = start(local_host, "other")
    first = local_host.end(local_host.python(code))
    other.kill()
    local_host.wait(lambda: local_host.states() == ["FREE", "FREE"])
    assert local_host.end(local_host.python(code)) == first
