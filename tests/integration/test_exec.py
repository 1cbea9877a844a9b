"""``leasehold exec``: real commands, signals and restarts."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from leasehold.local.v1.local_service_pb2 import ClaimWaiting
from leasehold.v1 import workload_pb2
from leasehold.v1.workload_pb2 import WorkloadState
from leasehold_client.cli import exec_wait

from tests.fork_chain import CHAIN

from .fleets import LEASEHOLD, Fleet
from .local_hosts import COUNTING, LocalHost

PRINT_ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)), flush=True); input()"
PRINT_SIGNALS = "grep -E '^Sig(Blk|Ign)' /proc/self/status; ls /proc/self/fd"


def hold(host: LocalHost, *options: str) -> subprocess.Popen[str]:
    """Starts a command that holds what it gets, and waits until it does."""
    process = host.exec(*options, "--", "sh", "-c", "echo holding; exec sleep 1000")
    host.wait_line(process, "holding")
    return process


def queue(host: LocalHost, *options: str) -> subprocess.Popen[str]:
    """Starts one that has to wait, and waits until it does."""
    process = host.exec(*options, "--", "sh", "-c", "echo holding; exec sleep 1000")
    host.wait_line(process, "waiting", "err")
    return process


@pytest.mark.long
def test_the_environment_names_gpus_and_replaces_what_was_inherited(local_host: LocalHost) -> None:
    inherited = {"CUDA_VISIBLE_DEVICES": "7", "NVIDIA_VISIBLE_DEVICES": "all", "LEASEHOLD_WORKLOAD_ID": ""}
    command = ["--", sys.executable, "-c", PRINT_ENVIRONMENT]
    both = local_host.exec("--gpus", "2", "--name", "both", *command, **inherited)
    none = local_host.exec("--gpus", "0", "--name", "none", *command, **inherited)
    local_host.wait_line(both, "}")
    local_host.wait_line(none, "}")
    workloads = local_host.workloads()
    lease = workloads["both"].status.lease
    gpu_uuids = ",".join(gpu.gpu_uuid for gpu in local_host.look().gpus)
    expected = {
        "CUDA_VISIBLE_DEVICES": gpu_uuids,
        "NVIDIA_VISIBLE_DEVICES": gpu_uuids,
        "LEASEHOLD_LEASE_ID": lease.lease_id,
        "LEASEHOLD_WORKLOAD": "both",
        "LEASEHOLD_WORKLOAD_ID": workloads["both"].workload_id,
        "LEASEHOLD_SOCKET": str(local_host.socket),
        "LEASEHOLD_RESTORE": "",
    }
    assert json.loads(local_host.out(both)) == {**local_host.environment, **expected}
    expected |= {
        "CUDA_VISIBLE_DEVICES": "-1",
        "NVIDIA_VISIBLE_DEVICES": "-1",
        "LEASEHOLD_LEASE_ID": "",
        "LEASEHOLD_WORKLOAD": "none",
        "LEASEHOLD_WORKLOAD_ID": workloads["none"].workload_id,
    }
    assert json.loads(local_host.out(none)) == {**local_host.environment, **expected}
    assert lease.gpu_uuids == gpu_uuids.split(",")


@pytest.mark.long
def test_the_command_gets_signals_and_its_exit_code_is_ours(local_host: LocalHost) -> None:
    assert local_host.run("--", "sh", "-c", "exit 7", code=7) == ""
    local_host.run("--", "sh", "-c", "kill -SEGV $$", code=-signal.SIGSEGV)
    caught = local_host.exec(
        "--", "sh", "-c", "trap 'echo int' INT; trap 'exit 3' TERM; echo ready; while :; do sleep 0.01; done"
    )
    local_host.wait_line(caught, "ready")
    caught.send_signal(signal.SIGINT)
    local_host.wait_line(caught, "int")
    caught.send_signal(signal.SIGTERM)
    assert local_host.end(caught, 3) == "ready\nint\n"
    default = hold(local_host)
    default.send_signal(signal.SIGINT)
    local_host.end(default, -signal.SIGINT)
    local_host.wait(lambda: local_host.states() == ["FREE", "FREE"])


def test_the_command_inherits_no_signal_and_no_descriptor_of_ours(local_host: LocalHost) -> None:
    direct = local_host.end(local_host.start("sh", "-c", PRINT_SIGNALS))
    assert local_host.run("--", "sh", "-c", PRINT_SIGNALS) == direct


@pytest.mark.long
def test_the_command_inherits_no_locale_of_python(local_host: LocalHost) -> None:
    """Which Python sets for itself where there is none."""
    unset = ["-u", "LANG", "-u", "LC_ALL", "-u", "LC_CTYPE"]
    found = local_host.end(local_host.start("env", *unset, *LEASEHOLD, "exec", "--", "env"))
    assert "LEASEHOLD_LEASE_ID" in found
    assert "LC_CTYPE" not in found
    kept = local_host.end(local_host.start("env", "LC_CTYPE=C.UTF-8", *LEASEHOLD, "exec", "--", "env"))
    assert "LC_CTYPE=C.UTF-8" in kept


@pytest.mark.long
def test_arguments_of_any_length_and_bytes_reach_the_command(local_host: LocalHost) -> None:
    many = ["x" * 1000] * 1000
    assert local_host.run("--", "sh", "-c", 'echo "$#"', "sh", *many) == "1000\n"
    odd = os.fsdecode(b"\xff")
    assert local_host.run("--", "sh", "-c", 'printf %s "$1" | od -An -tx1', "sh", odd) == " ff\n"


def test_the_socket_is_named_in_full(new_host: Callable[[int], LocalHost]) -> None:
    host = new_host(0)
    host.state.mkdir()
    host.patch = f"import os; os.chdir({str(host.state)!r})"
    host.start_worker('socket = "worker.sock"')
    assert host.run("--gpus", "0", "--", "printenv", "LEASEHOLD_SOCKET") == f"{host.socket}\n"


def test_one_gpu_is_the_default(local_host: LocalHost) -> None:
    process = hold(local_host, "--name", "default")
    assert len(local_host.workloads()["default"].status.lease.gpu_uuids) == 1
    assert local_host.workloads()["default"].origin == workload_pb2.WORKLOAD_ORIGIN_EXEC
    process.kill()


def test_kill_9_frees_the_gpus_and_ends_what_the_command_left(local_host: LocalHost) -> None:
    script = "setsid sleep 1000 & echo left $!; echo holding; exec sleep 1000"
    process = local_host.exec("--gpus", "2", "--", "sh", "-c", script)
    local_host.wait_line(process, "holding")
    left = int(local_host.out(process).split()[1])
    process.kill()
    local_host.wait(lambda: local_host.states() == ["FREE", "FREE"])
    assert not Path(f"/proc/{left}").exists() or "Z" in Path(f"/proc/{left}/stat").read_text().split()[2]
    assert not local_host.look().workloads


def test_who_waits_is_told_its_place_and_goes_by_priority_and_in_order(local_host: LocalHost) -> None:
    holders = [hold(local_host), hold(local_host)]
    large = queue(local_host, "--gpus", "2", "--name", "large")
    small = queue(local_host, "--name", "small")
    dead = queue(local_host, "--name", "dead")
    urgent = queue(local_host, "--name", "urgent", "--priority", "5")
    local_host.wait(lambda: len(local_host.err(large).splitlines()) == 2)
    found = local_host.look()
    assert [(claim.name, claim.gpu_count, claim.priority) for claim in found.waiting] == [
        ("urgent", 1, 5),
        ("large", 2, 0),
        ("small", 1, 0),
        ("dead", 1, 0),
    ]
    assert [claim.pid for claim in found.waiting] == [p.pid for p in (urgent, large, small, dead)]
    dead.kill()
    local_host.wait(lambda: len(local_host.look().waiting) == 3)
    holders[0].kill()
    local_host.wait_line(urgent, "holding")
    local_host.wait_line(large, "1 of 2 in the queue", "err")
    holders[1].kill()  # one is free now, and kept for the large one, which came first
    local_host.wait(lambda: "FREE" in local_host.states())
    assert [claim.name for claim in local_host.look().waiting] == ["large", "small"]
    urgent.kill()
    local_host.wait_line(large, "holding")
    assert local_host.out(small) == ""
    large.kill()
    local_host.wait_line(small, "holding")
    told = local_host.err(large).splitlines()
    lacks = "2 GPUs needed: 2 match, 0 free (2 leased)"
    assert told[0] == f"leasehold: waiting, 1 of 1 in the queue: {lacks}"
    places = [line.partition(" in the queue: ")[0].removeprefix("leasehold: waiting, ") for line in told]
    assert places[:3] == ["1 of 1", "2 of 4", "1 of 2"]
    assert set(places[3:]) <= {"1 of 2"}  # another reason


@pytest.mark.long
def test_what_is_not_granted_in_time_is_refused(local_host: LocalHost) -> None:
    holder = hold(local_host, "--gpus", "2")
    lacks = "1 GPU needed: 2 match, 0 free (2 leased)"
    refused = local_host.run("--wait", "0", "--", "true", code=125)
    assert refused == f"leasehold: {lacks}: suspend or stop a workload, or wait (NO_FREE_GPU)\n"
    told, refused = local_host.run("--wait", "0.2", "--", "true", code=125).splitlines()
    assert told == f"leasehold: waiting, 1 of 1 in the queue: {lacks}"
    way_out = "suspend or stop a workload, or wait (NO_FREE_GPU)"
    assert refused == f"leasehold: not granted in time: {lacks}: {way_out}"
    holder.kill()
    local_host.wait(lambda: local_host.states() == ["FREE", "FREE"])
    assert local_host.run("--gpus", "2", "--wait", "0", "--", "echo", "done") == "done\n"


@pytest.mark.long
def test_a_command_that_forks_and_exits_all_the_time_is_ended(local_host: LocalHost, tmp_path: Path) -> None:
    forks = tmp_path / "forks"
    forking = local_host.exec("--gpus", "1", "--", sys.executable, "-c", CHAIN, str(forks))
    local_host.end(forking, 0)
    local_host.wait(lambda: forks.exists() and "LEASED" not in local_host.states())
    left = forks.stat().st_size
    time.sleep(0.3)
    assert forks.stat().st_size == left, "it forks on"


def test_disk_is_had_before_the_first_run(local_host: LocalHost) -> None:
    assert local_host.run("--gpus", "0", "--disk", "1MB", "--", "echo", "done") == "done\n"


@pytest.mark.long
def test_who_waits_for_memory_keeps_no_more_than_it_asks_for(new_host: Callable[[int], LocalHost]) -> None:
    host = new_host(2)
    host.start_worker('memory_limit = "1GiB"')
    memory = hold(host, "--gpus", "0", "--memory", "768MiB")
    waiting = queue(host, "--memory", "512MiB")
    assert host.run("--gpus", "1", "--wait", "0", "--", "echo", "done") == "done\n"
    refused = host.run("--gpus", "2", "--wait", "0", "--", "true", code=125)
    assert "2 GPUs needed: 2 match, 2 free, reserved for earlier claims" in refused
    refused = host.run("--gpus", "0", "--memory", "256MiB", "--", "true", code=125)
    assert "256 MiB of 1 GiB are free, with 512 MiB reserved for waiting claims" in refused
    memory.kill()
    host.wait_line(waiting, "holding")


@pytest.mark.long
def test_who_waits_for_memory_is_told_so(new_host: Callable[[int], LocalHost]) -> None:
    host = new_host(1)
    host.start_worker('memory_limit = "1GiB"')
    gpu = hold(host)
    memory = hold(host, "--gpus", "0", "--memory", "768MiB")
    waiting = queue(host, "--memory", "512MiB")
    assert "0 free (1 leased)" in host.err(waiting)
    gpu.kill()
    lacks = "the request needs 512 MiB of host memory, and 256 MiB of 1 GiB are free"
    host.wait_line(waiting, f"waiting, 1 of 1 in the queue: {lacks}", "err")
    assert lacks in host.look().waiting[0].reason
    refused = host.run("--wait", "0.2", "--memory", "512MiB", "--", "true", code=125).splitlines()[-1]
    assert refused.startswith(f"leasehold: not granted in time: {lacks}")
    assert refused.endswith("(INSUFFICIENT_RESOURCES)")
    memory.kill()
    host.wait_line(waiting, "holding")


class Clock:
    """The time and the timers of a module: they pass when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.timers: list[tuple[float, Timer]] = []
        monkeypatch.setattr(exec_wait, "time", SimpleNamespace(monotonic=lambda: self.now))
        timer = partial(Timer, self)
        monkeypatch.setattr(exec_wait, "threading", SimpleNamespace(Lock=threading.Lock, Timer=timer))

    def advance(self, seconds: float) -> None:
        """Lets time pass, and calls what is due then."""
        self.now += seconds
        due = [timer for at, timer in self.timers if at <= self.now]
        self.timers = [(at, timer) for at, timer in self.timers if at > self.now]
        for timer in due:
            timer.function()


class Timer:
    """As one of ``threading``, by such a clock."""

    def __init__(self, clock: Clock, interval: float, function: Callable[[], None]) -> None:
        self.clock, self.interval, self.function = clock, interval, function
        self.daemon = False

    def start(self) -> None:
        self.clock.timers.append((self.clock.now + self.interval, self))

    def cancel(self) -> None:
        self.clock.timers = [(at, timer) for at, timer in self.clock.timers if timer is not self]

    def join(self) -> None:
        assert self not in [timer for _, timer in self.clock.timers], "it was cancelled, or it never ends"


def show(lines: exec_wait.StatusLines, position: int, pending: int, reason: int) -> None:
    lines.show(ClaimWaiting(position=position, pending_claimers=pending, reason=f"reason {reason}"))


def test_lines_about_the_wait_come_slowly_and_end_with_the_newest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    lines = exec_wait.StatusLines()
    for number in range(100):
        show(lines, 1 + number % 3, 5, number)
        clock.advance(exec_wait.LINE_INTERVAL_S / 40)
    clock.advance(exec_wait.LINE_INTERVAL_S)
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "leasehold: waiting, 1 of 5 in the queue: reason 0"
    assert told[-1] == "leasehold: waiting, 1 of 5 in the queue: reason 99"
    assert len(told) == 4, "at once, twice while they come, and at the end"
    assert not clock.timers
    clock.advance(2 * exec_wait.LINE_INTERVAL_S)
    show(lines, 1, 9, 99)
    assert capsys.readouterr().err == ""
    show(lines, 2, 9, 99)
    show(lines, 3, 9, 99)
    lines.close()
    clock.advance(2 * exec_wait.LINE_INTERVAL_S)
    assert capsys.readouterr().err.splitlines() == ["leasehold: waiting, 2 of 9 in the queue: reason 99"]


def test_the_newest_line_about_the_wait_comes_by_itself(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exec_wait, "LINE_INTERVAL_S", 0.05)
    lines = exec_wait.StatusLines()
    show(lines, 2, 2, 0)
    show(lines, 1, 2, 0)
    told = ""
    deadline = time.monotonic() + 30
    while "1 of 2" not in told:
        assert time.monotonic() < deadline
        told += capsys.readouterr().err
        time.sleep(0.01)
    lines.close()


def test_an_interrupt_while_a_line_is_put_off_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = exec_wait.StatusLines()
    show(lines, 2, 2, 0)

    def interrupted(timer: threading.Timer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Timer, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        show(lines, 1, 2, 0)
    lines.close()


@pytest.mark.long
def test_a_claim_that_does_not_wait_passes_nobody(local_host: LocalHost) -> None:
    holder = hold(local_host)
    large = queue(local_host, "--gpus", "2")
    refused = local_host.run("--wait", "0", "--", "true", code=125)
    assert "1 claim waits" in refused
    refused = local_host.run("--wait", "0", "--helper", "stop", "--", "true", code=125)
    assert "(NO_FREE_GPU)" in refused
    assert local_host.run("--wait", "0", "--priority", "1", "--", "echo", "done") == "done\n"
    holder.kill()
    local_host.wait_line(large, "holding")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--gpus", "3"], "the request needs 3 GPUs, and 2 of this worker's 2 match.*NO_FREE_GPU"),
        (
            ["--gpus", "0", "--gpu-memory", "1GiB"],
            "the request describes GPUs, but needs none: request 1 or more.*INVALID_ARG",
        ),
        (["--name", "/"], "invalid name '/'.*INVALID_ARGUMENT"),
        (["--memory", "900TiB"], "the request needs 900 TiB of host memory.*INSUFFICIENT_RESOURCES"),
        (
            ["--socket", "/nowhere/worker.sock"],
            r"no worker answers at /nowhere/worker.sock \(no such socket\): start",
        ),
    ],
    ids=["count", "nonsense", "name", "memory", "socket"],
)
def test_what_can_never_be_had_is_refused_at_once(
    local_host: LocalHost, options: list[str], text: str
) -> None:
    refused = local_host.run(*options, "--", "true", code=125)
    assert len(refused.splitlines()) == 1, refused
    assert re.search(text, refused), refused


@pytest.mark.long
def test_a_name_belongs_to_one_workload_that_has_not_ended(local_host: LocalHost) -> None:
    holders = [hold(local_host, "--name", "one"), hold(local_host)]
    waiting = queue(local_host, "--name", "two")
    for name in ("one", "two"):
        assert "(WORKLOAD_EXISTS)" in local_host.run("--name", name, "--", "true", code=125)
    holders[0].kill()
    local_host.wait_line(waiting, "holding")
    waiting.kill()
    holders[1].kill()
    assert local_host.run("--name", "one", "--", "echo", "again") == "again\n"


@pytest.mark.long
def test_what_is_no_command_waits_for_nothing(local_host: LocalHost, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("text")
    assert local_host.run("--", "no-such-command", code=127) == (
        "leasehold: the command 'no-such-command' was not found: give its path\n"
    )
    assert local_host.run("--", str(plain), code=126) == (
        f"leasehold: the command {str(plain)!r} is not executable: make it executable\n"
    )
    plain.chmod(plain.stat().st_mode | stat.S_IXUSR)
    assert "can't be executed: Exec format error" in local_host.run("--", str(plain), code=126)
    local_host.wait(lambda: not local_host.look().workloads)


@pytest.mark.long
def test_who_gives_up_waiting_leaves_the_queue(local_host: LocalHost) -> None:
    hold(local_host, "--gpus", "2")
    interrupted, terminated = queue(local_host), queue(local_host)
    interrupted.send_signal(signal.SIGINT)
    local_host.end(interrupted, 130)
    assert local_host.err(interrupted).splitlines()[-1] == "leasehold: interrupted; the claim is withdrawn"
    terminated.terminate()
    local_host.end(terminated, -signal.SIGTERM)
    local_host.wait(lambda: not local_host.look().waiting)


@pytest.mark.long
def test_an_executed_command_can_not_claim_for_itself(local_host: LocalHost) -> None:
    inner = [*LEASEHOLD, "exec", "--", "true"]
    refused = local_host.run("--", "sh", "-c", f"{' '.join(inner)}; echo $?")
    assert "belongs to workload" in refused
    assert "(ALREADY_REGISTERED)" in refused
    assert refused.startswith("125\n")
    assert "(ALREADY_REGISTERED)" in local_host.run("--", *inner, code=125)


@pytest.mark.parametrize("crash", [True, False], ids=["killed", "stopped"])
@pytest.mark.long
def test_a_command_outlives_its_worker_and_who_waits_goes_on_waiting(
    restarting_host: LocalHost, crash: bool
) -> None:
    counter = restarting_host.exec("--gpus", "2", "--name", "counter", "--", *COUNTING)
    restarting_host.wait_counting(counter)
    short = restarting_host.exec("--wait", "0.7", "--", "true")
    restarting_host.wait_line(short, "waiting", "err")
    waiting = queue(restarting_host, "--name", "waiting")
    before = restarting_host.workloads()["counter"]
    if crash:
        restarting_host.kill_worker()
    else:
        restarting_host.stop_worker()
    restarting_host.wait_counting(counter)
    restarting_host.wait_line(waiting, "the worker has ended or restarts; waiting again", "err")
    restarting_host.start_worker()
    after = restarting_host.workloads()["counter"]
    assert after.status.lease.lease_id == before.status.lease.lease_id
    assert after.status.state == workload_pb2.WORKLOAD_STATE_RUNNING
    assert restarting_host.states() == ["LEASED", "LEASED"]
    restarting_host.wait(lambda: "waiting" in [claim.name for claim in restarting_host.look().waiting])
    restarting_host.end(short, 125)
    counter.kill()
    restarting_host.wait_line(waiting, "holding")


@pytest.mark.long
def test_a_command_whose_first_thread_has_ended_keeps_its_gpus(restarting_host: LocalHost) -> None:
    threads = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(1000,)).start(); "
    program = f"{threads} print('up', flush=True); ctypes.CDLL(None).pthread_exit(None)"
    headless = restarting_host.exec("--gpus", "2", "--name", "headless", "--", sys.executable, "-c", program)
    restarting_host.wait_line(headless, "up")
    restarting_host.kill_worker()
    restarting_host.start_worker()
    assert "headless" in restarting_host.workloads()
    assert restarting_host.states() == ["LEASED", "LEASED"]
    headless.kill()
    restarting_host.wait(lambda: restarting_host.states() == ["FREE", "FREE"])


@pytest.mark.long
def test_a_command_that_ended_while_the_worker_was_away_holds_nothing(restarting_host: LocalHost) -> None:
    holder = hold(restarting_host, "--gpus", "2")
    restarting_host.kill_worker()
    holder.kill()
    holder.wait()
    restarting_host.start_worker()
    restarting_host.wait(lambda: restarting_host.states() == ["FREE", "FREE"])


@pytest.mark.long
def test_a_host_without_gpus_serves_commands_and_keeps_account(
    new_host: Callable[[int], LocalHost],
) -> None:
    host = new_host(0)
    host.start_worker('cpu_limit_millicores = 2000\nmemory_limit = "1GiB"')
    found = host.look()
    assert not found.gpus
    assert (found.resources.cpu_millicores_total, found.resources.memory_free_bytes) == (2000, 2**30)
    options = ["--gpus", "0", "--cpu", "1.5", "--memory", "768MiB"]
    holder = hold(host, *options, "--name", "holder")
    found = host.look()
    assert (found.resources.cpu_millicores_free, found.resources.memory_free_bytes) == (500, 2**28)
    refused = host.run(*options, "--", "true", code=125)
    assert "the request needs 1.5 cores of CPU time" in refused or "(INSUFFICIENT_RESOURCES)" in refused
    assert "of this worker's 0 match" in host.run("--", "true", code=125)
    host.kill_worker()
    host.start_worker('cpu_limit_millicores = 2000\nmemory_limit = "1GiB"')
    assert host.look().resources.cpu_millicores_free == 500
    holder.kill()
    host.wait(lambda: host.look().resources.cpu_millicores_free == 2000)
    assert host.run(*options, "--", "printenv", "CUDA_VISIBLE_DEVICES") == "-1\n"


@pytest.mark.long
def test_a_foreign_process_keeps_others_off_its_gpu(local_host: LocalHost) -> None:
    gpu_uuid = local_host.look().gpus[0].gpu_uuid
    foreign = local_host.start(*COUNTING, CUDA_VISIBLE_DEVICES=gpu_uuid)
    local_host.wait_counting(foreign)
    holder = hold(local_host, "--name", "holder")
    assert local_host.workloads()["holder"].status.lease.gpu_uuids != [gpu_uuid]
    gpu = local_host.look().gpus[0]
    (process,) = gpu.foreign_processes
    assert (process.pid, process.user) == (foreign.pid, Path(f"/proc/{foreign.pid}").owner())
    assert process.command == " ".join(COUNTING)[:200]
    assert process.device_memory_bytes >= 2**20
    assert local_host.states() == ["FOREIGN", "LEASED"]
    refused = local_host.run("--wait", "0", "--", "true", code=125)
    assert "(1 leased, 1 foreign)" in refused
    assert "(FOREIGN_PROCESS)" in refused
    asked = hold(local_host, "--wait", "0", "--allow-foreign", "--name", "asked")
    assert local_host.workloads()["asked"].status.lease.gpu_uuids == [gpu_uuid]
    asked.kill()
    holder.kill()
    local_host.wait(lambda: local_host.states() == ["FOREIGN", "FREE"])
    local_host.wait_counting(foreign)


@pytest.mark.long
def test_a_command_on_a_gpu_that_it_did_not_lease_is_foreign_there(local_host: LocalHost) -> None:
    other = local_host.look().gpus[1].gpu_uuid
    counter = local_host.exec("--", "env", f"CUDA_VISIBLE_DEVICES={other}", *COUNTING)
    local_host.wait_counting(counter)
    assert "(FOREIGN_PROCESS)" in local_host.run("--wait", "0", "--", "true", code=125)
    assert local_host.states() == ["LEASED", "FOREIGN"]
    assert local_host.look().gpus[1].foreign_processes[0].pid == counter.pid


def test_a_command_is_suspended_restored_and_moved_like_any_other(fleet: Fleet, alpha: LocalHost) -> None:
    host = alpha
    counter = host.exec("--name", "job", "--", *COUNTING)
    host.wait_counting(counter)
    fleet.wait(lambda: fleet.leases() == {"alpha/0": "job"})
    fleet.cli("suspend", "job")
    assert WorkloadState.Name(host.workloads()["job"].status.state) == "WORKLOAD_STATE_SUSPENDED"
    other = hold(host, "--name", "other")
    fleet.wait(lambda: fleet.leases() == {"alpha/0": "other"})
    fleet.cli("restore", "job")
    fleet.wait(lambda: fleet.leases() == {"alpha/0": "other", "alpha/1": "job"})
    host.wait_counting(counter)
    fleet.cli("remap", "job", "--to", "alpha/3")
    fleet.wait(lambda: fleet.leases() == {"alpha/0": "other", "alpha/3": "job"})
    gpus = [host.simulated.gpus[slot].uuid for slot in (0, 1, 3)] if host.simulated else []
    assert list(host.wait_counting(counter).gpu_uuids) == gpus
    fleet.refuse("release", "job", code=1, match="WRONG_STATE")
    fleet.cli("stop", "job")
    host.end(counter)
    other.kill()
    fleet.wait(lambda: not fleet.leases())
    fleet.wait(lambda: len(audited_of_host(fleet)) >= 4)
    first, second = (resource for method, resource in audited_of_host(fleet) if method == "host/exec")
    assert first != second
    expected = [(method, resource) for resource in (first, second) for method in ("host/exec", "host/end")]
    assert sorted(audited_of_host(fleet)) == sorted(expected), "each begins once and ends once"
    assert fleet.cli("audit", "verify").stdout.startswith("verified ")


def audited_of_host(fleet: Fleet) -> list[tuple[str, str]]:
    """Method and resource of the audit's entries of users of hosts."""
    found = fleet.json("get", "audit", "--filter", "method:host/")["audit"]
    assert all(entry["identity"].startswith("host/alpha/") for entry in found)
    return [(entry["method"], entry["resource"]) for entry in found]
