"""Nothing that dies takes the host with it, and nobody who waits waits in vain."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pynvml
import pytest
from leasehold_simgpu import SimulatedHost
from leasehold_simgpu.errors import HostLockedError
from leasehold_simgpu.state_file import StateFile

from .conftest import StartProgram
from .programs import (
    COUNTER,
    MIB,
    NOT_INITIALIZED,
    OPERATING_SYSTEM,
    RUNNING,
    SUCCESS,
    Program,
    environment_of,
    wait_until,
)


@pytest.mark.long
def test_programs_killed_at_any_moment_leave_no_trace(host: SimulatedHost, controller: Program) -> None:
    source = (
        "import sys\n"
        "from cuda.bindings import driver\n"
        "driver.cuInit(0)\n"
        "driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(0)[1])\n"
        "print('up', flush=True)\n"
        "while True:\n"
        "    address = driver.cuMemAlloc(1 << 20)[1]\n"
        "    driver.cuMemFree(address)\n"
    )
    times = random.Random(7)
    environment = environment_of(host.environment())
    for _ in range(8):
        victims = [
            subprocess.Popen([sys.executable, "-c", source], env=environment, stdout=subprocess.PIPE)
            for _ in "ab"
        ]
        for victim in victims:
            assert victim.stdout is not None
            victim.stdout.readline()
        time.sleep(times.random() * 0.02)
        for victim in victims:
            victim.kill()
        for victim in victims:
            with victim:
                victim.wait()
    assert host.processes() == ()
    assert host.gpus[0].used_bytes == 0
    controller.set_up()
    assert controller.memory_info()[0] == host.gpus[0].memory_bytes


@pytest.fixture
def stopped_holder(host: SimulatedHost) -> Iterator[subprocess.Popen[bytes]]:
    """A process that was stopped while it held the lock of the host."""
    source = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from leasehold_simgpu.state_file import StateFile\n"
        "with StateFile.open(Path(sys.argv[1])).locked():\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    with subprocess.Popen([sys.executable, "-c", source, host.directory]) as holder:
        os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
        yield holder
        holder.kill()


@pytest.mark.long
def test_a_process_that_is_stopped_with_the_lock_fails_the_calls_of_others(
    host: SimulatedHost,
    target: Program,
    stopped_holder: subprocess.Popen[bytes],
    start_program: StartProgram,
    capfd: pytest.CaptureFixture[str],
) -> None:
    controller = start_program(host)
    assert target.allocate(MIB) == [OPERATING_SYSTEM, None]
    assert controller.init() == OPERATING_SYSTEM
    assert controller.get_state(target.pid)[0] == OPERATING_SYSTEM
    assert controller.nvml("nvmlDeviceGetMemoryInfo", 0) == pynvml.NVML_ERROR_UNKNOWN
    assert f"process {stopped_holder.pid} is stopped and holds the lock" in capfd.readouterr().err
    with pytest.raises(HostLockedError, match=f"process {stopped_holder.pid} is stopped"):
        host.processes()
    stopped_holder.send_signal(signal.SIGCONT)
    assert controller.init() == SUCCESS
    assert target.allocate(MIB)[0] == SUCCESS
    assert [process.pid for process in host.processes()] == sorted([controller.pid, target.pid])


@pytest.mark.long
def test_more_programs_over_time_than_there_are_records(host: SimulatedHost, controller: Program) -> None:
    source = "import ctypes\ncuda = ctypes.CDLL('libcuda.so.1')\nassert cuda.cuInit(0) == 0\n"
    environment = environment_of(host.environment())

    def start(_: int) -> int:
        return subprocess.run([sys.executable, "-S", "-c", source], env=environment, check=False).returncode

    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(start, range(300))) == {0}
    assert host.processes() == ()


@pytest.mark.long
def test_many_controllers_and_targets_at_once(host: SimulatedHost, start_program: StartProgram) -> None:
    targets = [start_program(host) for _ in range(4)]
    controllers = [start_program(host) for _ in range(4)]
    uuids = [gpu.uuid for gpu in host.gpus]
    turn = [[old, new] for old, new in zip(uuids, uuids[1:] + uuids[:1], strict=True)]
    addresses = []
    for ordinal, target in enumerate(targets):
        target.set_up(ordinal)
        addresses.append(target.allocate(MIB)[1])
        target.fill(addresses[-1], MIB, ordinal)
    for controller in controllers:
        controller.init()
    failures: list[str] = []

    def rotate(controller: Program, target: Program) -> None:
        for _ in range(20):
            results = [
                controller.lock(target.pid, 5000),
                controller.checkpoint(target.pid),
                controller.restore(target.pid, turn),
                controller.unlock(target.pid),
            ]
            if results != [SUCCESS] * 4:
                failures.append(str(results))

    pairs = zip(controllers, targets, strict=True)
    threads = [threading.Thread(target=rotate, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for ordinal, target in enumerate(targets):
        assert target.holds(addresses[ordinal], MIB, ordinal)
        assert target.device_uuids() == uuids, "20 turns of 4 GPUs lead home"
    assert [gpu.used_bytes for gpu in host.gpus] == [MIB] * 4


def has_more(lines: list[str], than: int) -> bool:
    return len(lines) > than


def test_a_counter_loses_no_count_to_suspends_and_moves(host: SimulatedHost, controller: Program) -> None:
    counter = subprocess.Popen(
        [sys.executable, str(COUNTER), "--bytes", "1MiB", "--interval-s", "0.001"],
        env=environment_of(host.environment()),
        stdout=subprocess.PIPE,
        text=True,
    )
    lines: list[str] = []
    assert counter.stdout is not None
    reader = threading.Thread(target=lambda: lines.extend(counter.stdout or ()))
    reader.start()
    controller.init()
    uuids = [gpu.uuid for gpu in host.gpus]
    turn = [[old, new] for old, new in zip(uuids, uuids[1:] + uuids[:1], strict=True)]
    for _ in range(20):
        wait_until(partial(has_more, lines, len(lines) + 2), "it counts on")
        assert controller.lock(counter.pid, 5000) == SUCCESS
        assert controller.checkpoint(counter.pid) == SUCCESS
        assert controller.restore(counter.pid, turn) == SUCCESS
        assert controller.unlock(counter.pid) == SUCCESS
    assert controller.get_state(counter.pid) == [SUCCESS, RUNNING]
    counter.terminate()
    assert counter.wait(timeout=30) == 0
    reader.join()
    counter.stdout.close()
    counts = [int(line.split()[0].removeprefix("count=")) for line in lines]
    assert counts == list(range(len(counts)))
    assert all(line.endswith(" ok\n") for line in lines)
    assert {line.split()[1].removeprefix("gpu=") for line in lines} == set(uuids)


def test_a_recycled_pid_is_another_process(host: SimulatedHost, controller: Program, target: Program) -> None:
    target.allocate(MIB)
    records = StateFile.open(host.directory).host.processes
    record = next(record for record in records if record.pid == target.pid)
    record.restore_tid = target.pid  # as if the record were of a process that had the pid before
    assert controller.get_state(target.pid) == [NOT_INITIALIZED, None]
    assert host.processes() == ()
    assert host.gpus[0].used_bytes == 0
    assert controller.nvml_processes()[host.gpus[0].uuid] == {}


def test_cuda_ends_at_an_exec(host: SimulatedHost, controller: Program) -> None:
    source = (
        "import os, sys\n"
        "from cuda.bindings import driver\n"
        "driver.cuInit(0)\n"
        "driver.cuDevicePrimaryCtxRetain(0)\n"
        "print('before', flush=True)\n"
        "sys.stdin.readline()\n"
        "os.execv('/bin/sh', ['sh', '-c', 'echo after; read line'])\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", source],
        env=environment_of(host.environment()),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        assert program.stdout.readline() == b"before\n"
        assert controller.get_state(program.pid) == [SUCCESS, RUNNING]
        program.stdin.write(b"\n")
        assert program.stdout.readline() == b"after\n"
        assert controller.get_state(program.pid) == [NOT_INITIALIZED, None]
        assert host.processes() == ()
        program.stdin.write(b"\n")
