"""CheckpointProcess over the helper process, on the simulated driver."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from leasehold_simgpu import SimulatedHost
from leasehold_worker.driver.errors import (
    ILLEGAL_STATE,
    NOT_INITIALIZED,
    NOT_READY,
    OPERATING_SYSTEM,
    DriverError,
)
from leasehold_worker.driver.gpu_pairs import GpuPair, complete_pairs
from leasehold_worker.driver.helper_pool import CALL_FLOOR_S, Driver, DriverCallUnansweredError, open_driver
from leasehold_worker.driver.helper_protocol import DriverCall, Request
from leasehold_worker.driver.process import (
    CheckpointProcess,
    LeftLockedError,
    LockResult,
    ProcessState,
    WaitTimeoutError,
    lock_timeout_ms,
)

from tests.worker.conftest import Counter
from tests.worker.operations.test_handler import calls_of

StartCounter = Callable[..., Counter]


async def test_full_cycle_keeps_the_data(driver: Driver, start_counter: StartCounter) -> None:
    counter = start_counter()
    await counter.wait_count()
    process = CheckpointProcess.from_pid(driver, counter.process.pid)
    assert await process.is_running()
    assert await process.restore_thread_id() > 0
    await process.lock()
    assert await process.is_locked()
    await process.checkpoint()
    assert await process.is_checkpointed()
    await process.restore()
    assert await process.state() is ProcessState.LOCKED
    await process.unlock()
    assert await process.state() is ProcessState.RUNNING
    await counter.wait_count()
    assert counter.counts() == list(range(counter.counts()[0], counter.counts()[-1] + 1))


@pytest.mark.long
async def test_a_restore_needs_no_persistence_mode(
    host: SimulatedHost, driver: Driver, start_counter: StartCounter
) -> None:
    """The helper has called cuInit. The simulated host has no persistence mode."""
    counter = start_counter()
    await counter.wait_count()
    process = CheckpointProcess(driver, counter.process.pid)
    await process.suspend()
    helpers = [found.pid for found in host.processes() if found.pid != counter.process.pid]
    assert helpers, "each helper that called cuInit is a CUDA process of the host"
    await process.resume()
    await counter.wait_count()


async def test_resume_elsewhere_shows_in_the_process(
    host: SimulatedHost, driver: Driver, start_counter: StartCounter
) -> None:
    counter = start_counter(gpu=0)
    await counter.wait_count()
    process = CheckpointProcess(driver, counter.process.pid)
    chips = {gpu.uuid: gpu.name for gpu in host.gpus}
    await process.suspend()
    await process.resume(complete_pairs([GpuPair(host.gpus[0].uuid, host.gpus[2].uuid)], chips))
    await counter.wait_count()
    assert host.gpus[2].uuid in counter.output.read_text().splitlines()[-1]


async def test_toggle_goes_both_ways_and_refuses_the_middle(
    driver: Driver, start_counter: StartCounter
) -> None:
    counter = start_counter()
    await counter.wait_count()
    process = CheckpointProcess(driver, counter.process.pid)
    assert await process.toggle() is ProcessState.CHECKPOINTED
    assert await process.toggle() is ProcessState.RUNNING
    await process.lock()
    with pytest.raises(DriverError) as error:
        await process.toggle()
    assert error.value.result == ILLEGAL_STATE
    assert await process.is_locked()


async def test_a_lock_that_times_out_leaves_it_running(
    host: SimulatedHost, driver: Driver, start_counter: StartCounter
) -> None:
    counter = start_counter()
    await counter.wait_count()
    process = CheckpointProcess(driver, counter.process.pid)
    host.set_busy(counter.process.pid)
    assert await process.try_lock(0.05) is LockResult.TIMED_OUT
    with pytest.raises(DriverError) as error:
        await process.lock(0.05)
    assert error.value.result == NOT_READY
    assert await process.is_running()


@pytest.mark.parametrize(
    ("timeout_s", "timeout_ms"), [(0.0011, 2), (0.0001, 1), (0.0005, 1), (1, 1000), (10.0, 10_000)]
)
def test_a_lock_timeout_is_never_zero_for_the_driver(timeout_s: float, timeout_ms: int) -> None:
    assert lock_timeout_ms(timeout_s) == timeout_ms


@pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), float("nan"), 2.0**32])
def test_a_lock_timeout_that_means_for_ever_is_refused(timeout_s: float) -> None:
    with pytest.raises(ValueError, match="lock timeout"):
        lock_timeout_ms(timeout_s)


async def test_suspend_unlocks_what_it_cannot_checkpoint(
    host: SimulatedHost, driver: Driver, start_counter: StartCounter
) -> None:
    counter = start_counter()
    await counter.wait_count()
    process = CheckpointProcess(driver, counter.process.pid)
    host.set_fault("checkpoint", counter.process.pid, error=801, times=1)
    with pytest.raises(DriverError):
        await process.suspend()
    assert await process.is_running()


async def test_a_suspend_that_is_cancelled_during_the_lock_leaves_it_running(
    host: SimulatedHost, driver: Driver, start_counter: StartCounter
) -> None:
    counter = start_counter()
    await counter.wait_count()
    process = CheckpointProcess(driver, counter.process.pid)
    fault = host.set_fault("lock", counter.process.pid, hang=True, times=1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(process.suspend)
        await until_called(host, counter, "lock")
        nursery.cancel_scope.cancel()
        host.clear_faults(fault_id=fault.id)
    assert await process.is_running()
    assert calls_of(host, process.pid)["checkpoint"] == 0
    await counter.wait_count()


@pytest.mark.parametrize("call", ["lock", pytest.param("checkpoint", marks=pytest.mark.long)])
async def test_a_suspend_past_its_deadline_leaves_it_running(
    host: SimulatedHost,
    driver: Driver,
    start_counter: StartCounter,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    monkeypatch.setattr(CheckpointProcess.checkpoint, "__defaults__", (0.0,))  # beyond the floor
    counter = start_counter()
    await counter.wait_count()
    process = CheckpointProcess(driver, counter.process.pid)
    host.set_fault(call, counter.process.pid, hang=True, times=1)
    driver.call_floor_s = 1.0
    with pytest.raises(DriverCallUnansweredError):
        await process.suspend(0.1)
    driver.call_floor_s = CALL_FLOOR_S
    assert await process.is_running()
    await counter.wait_count()


async def test_a_resume_that_is_cancelled_is_finished(
    host: SimulatedHost, driver: Driver, start_counter: StartCounter
) -> None:
    counter = start_counter()
    await counter.wait_count()
    process = CheckpointProcess(driver, counter.process.pid)
    await process.suspend()
    fault = host.set_fault("restore", counter.process.pid, hang=True, times=1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(process.resume)
        await until_called(host, counter, "restore")
        nursery.cancel_scope.cancel()
        host.clear_faults(fault_id=fault.id)
    assert await process.is_running()
    await counter.wait_count()


async def test_a_resume_unlocks_again_and_says_when_it_can_not(
    host: SimulatedHost, driver: Driver, start_counter: StartCounter
) -> None:
    counter = start_counter()
    await counter.wait_count()
    process = CheckpointProcess(driver, counter.process.pid)
    await process.suspend()
    host.set_fault("unlock", counter.process.pid, error=999, times=1)
    await process.resume()
    await counter.wait_count()
    await process.suspend()
    host.set_fault("unlock", counter.process.pid, error=999)
    with pytest.raises(LeftLockedError, match=r"is LOCKED, .* unlock it again"):
        await process.resume()
    host.clear_faults()
    await process.unlock()
    await counter.wait_count()


async def test_a_suspend_leaves_the_lock_of_somebody_else(
    driver: Driver, start_counter: StartCounter
) -> None:
    counter = start_counter()
    await counter.wait_count()
    process = CheckpointProcess(driver, counter.process.pid)
    await process.lock()
    with pytest.raises(DriverError):
        await process.suspend()
    assert await process.is_locked()


async def until_called(host: SimulatedHost, counter: Counter, call: str) -> None:
    with trio.fail_after(30):
        while not calls_of(host, counter.process.pid)[call]:  # noqa: ASYNC110 - simgpu tells by a file
            await trio.sleep(0.01)


async def test_who_is_no_cuda_process(driver: Driver) -> None:
    with pytest.raises(DriverError) as error:
        await CheckpointProcess(driver, os.getpid()).state()
    assert error.value.result == NOT_INITIALIZED
    with pytest.raises(DriverError) as error:
        await CheckpointProcess(driver, 2**22 + 1).is_running()
    assert (error.value.result, error.value.ended) == (OPERATING_SYSTEM, True)


async def test_waiting_for_a_state(driver: Driver, start_counter: StartCounter) -> None:
    counter = start_counter()
    await counter.wait_count()
    process = CheckpointProcess(driver, counter.process.pid)
    assert await process.wait_for_state(ProcessState.RUNNING, timeout_s=0) is ProcessState.RUNNING
    with pytest.raises(WaitTimeoutError, match="is RUNNING after"):
        await process.wait_for_state(ProcessState.LOCKED, timeout_s=0.03)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(process.wait_for_state, ProcessState.LOCKED, 10)
        await process.lock()


@pytest.mark.long
async def test_a_call_that_hangs_is_given_up_and_the_next_one_works(
    host: SimulatedHost, driver: Driver, start_counter: StartCounter
) -> None:
    hanging, other = start_counter(), start_counter(1)
    await hanging.wait_count()
    await other.wait_count()
    host.set_fault("lock", hanging.process.pid, hang=True)
    request = Request(DriverCall.LOCK, hanging.process.pid, lock_timeout_ms=10)
    driver.call_floor_s = 0.3
    with pytest.raises(DriverCallUnansweredError) as raised:
        await driver.call(request)
    assert raised.value.expired
    driver.call_floor_s = CALL_FLOOR_S
    assert await CheckpointProcess(driver, other.process.pid).is_running()


async def test_calls_on_one_process_wait_for_each_other(
    host: SimulatedHost, driver: Driver, start_counter: StartCounter
) -> None:
    counter = start_counter()
    await counter.wait_count()
    process = CheckpointProcess(driver, counter.process.pid)
    host.set_busy(counter.process.pid)
    results: list[str] = []

    async def lock() -> None:
        results.append((await process.try_lock(0.2)).name)

    async def ask() -> None:
        results.append((await process.state()).name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(lock)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(ask)
    assert results == ["TIMED_OUT", "RUNNING"]


async def test_the_helpers_end_with_the_driver(host: SimulatedHost) -> None:
    before = children()
    async with open_driver() as driver:
        assert driver.cuda_version == 13000
        assert children() - before
    assert children() == before


def test_a_helper_whose_worker_has_ended_ends_with_one_line(host: SimulatedHost) -> None:
    reads, writes = os.pipe()
    os.close(reads)  # nobody reads its replies, as if the worker had been killed while the helper started
    done = subprocess.run(
        [sys.executable, "-m", "leasehold_worker.driver.helper", str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=writes,
        stderr=subprocess.PIPE,
        env={**os.environ, **host.environment()},
        timeout=60,
        check=False,
    )
    os.close(writes)
    assert done.returncode == 1
    assert done.stderr == b"the worker ended before its driver helper had answered\n"


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def helpers() -> set[int]:
    """Those of them that are helpers of a driver."""
    program = b"leasehold_worker.driver.helper"
    return {pid for pid in children() if program in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")}


def test_a_state_of_a_newer_driver_is_kept() -> None:
    newer = ProcessState(9)
    assert (newer.name, newer.value) == ("STATE_9", 9)
    assert newer == ProcessState(9)
    assert newer not in list(ProcessState)
    with pytest.raises(ValueError, match="-1"):
        ProcessState(-1)


async def test_a_state_of_a_newer_driver_comes_through_the_bindings(
    host: SimulatedHost, driver: Driver, start_counter: StartCounter
) -> None:
    counter = start_counter()
    await counter.wait_count()
    process = CheckpointProcess(driver, counter.process.pid)
    host.set_fault("lock", counter.process.pid, state=7, times=1)
    await process.lock()
    assert (await process.state()).value == 7
    assert not await process.is_locked()
    assert await process.wait_for_state(ProcessState(7), timeout_s=0) == ProcessState(7)
    with pytest.raises(DriverError, match="STATE_7"):
        await process.toggle()


@pytest.mark.long
async def test_a_helper_that_is_killed_is_replaced(
    host: SimulatedHost, driver: Driver, start_counter: StartCounter
) -> None:
    counter = start_counter()
    await counter.wait_count()
    process = CheckpointProcess(driver, counter.process.pid)
    assert helpers()
    for pid in helpers():
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 - it was killed
    assert await process.is_running()
    host.set_fault("lock", counter.process.pid, delay_s=5, times=1)

    async def kill_in_call() -> None:
        while not (controllers := {p.controller_pid for p in host.processes()} - {None}):  # noqa: ASYNC110
            await trio.sleep(0.005)
        (controller,) = controllers
        os.kill(controller or 0, signal.SIGKILL)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(kill_in_call)
        with pytest.raises(DriverCallUnansweredError, match="helper ended") as raised:
            await process.lock()
    assert not raised.value.expired
    assert await process.is_running()


@pytest.mark.long
async def test_calls_that_hang_in_one_process_hold_up_no_other(
    host: SimulatedHost, start_counter: StartCounter
) -> None:
    hanging, other = start_counter(), start_counter(1)
    await hanging.wait_count()
    await other.wait_count()
    host.set_fault("get_state", hanging.process.pid, hang=True)
    answered = trio.Event()
    async with open_driver(60.0) as driver, trio.open_nursery() as nursery:

        async def ask() -> None:
            assert await CheckpointProcess(driver, hanging.process.pid).is_running()
            answered.set()

        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(3):
            assert await CheckpointProcess(driver, other.process.pid).is_running()
        assert not answered.is_set()
        host.clear_faults()


async def test_no_call_reaches_another_process_that_has_the_pid_by_now(
    host: SimulatedHost, driver: Driver, start_counter: StartCounter
) -> None:
    counter = start_counter()
    await counter.wait_count()
    identity = counter.identity
    before = dict(calls_of(host, identity.pid))
    earlier = CheckpointProcess(driver, identity.pid, identity.start_time_ticks - 1)
    for call in (earlier.state, earlier.lock, earlier.checkpoint, earlier.restore, earlier.unlock):
        with pytest.raises(DriverError) as raised:
            await call()
        assert (raised.value.result, raised.value.ended) == (OPERATING_SYSTEM, True)
    assert calls_of(host, identity.pid) == before
    assert await CheckpointProcess(driver, identity.pid, identity.start_time_ticks).is_running()


def test_equality_is_by_pid(host: SimulatedHost) -> None:
    driver = Driver()
    assert CheckpointProcess(driver, 5) == CheckpointProcess(Driver(), 5)
    assert CheckpointProcess.current(driver).pid == os.getpid()


ENDING = """
import sys
from leasehold_worker.driver import helper
from leasehold_worker.driver.helper_protocol import PROTOCOL_ENCODER, DriverCall, Reply, Request

over = iter((False, True))
helper.is_over = lambda _: next(over)
helper.make_call = lambda request: Reply(int(sys.argv[2]), "CUDA_ERROR")
helper.obstacle = lambda _: "tracing it is not permitted (No such process)"
reply = helper.answer(Request(DriverCall(sys.argv[1]), 2**22 + 1), lambda: None)
print(reply.ended, repr(reply.obstacle))
"""


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (DriverCall.STATE, OPERATING_SYSTEM),
        (DriverCall.LOCK, OPERATING_SYSTEM),
        (DriverCall.LOCK, NOT_INITIALIZED),
        (DriverCall.TRACE_PERMISSION, 0),
    ],
)
def test_a_process_that_ends_in_a_call_has_ended_and_lacks_no_permission(
    call: DriverCall, error: int
) -> None:
    """A missing process answers 304, and a zombie 3 (580.159.04)."""
    command = [sys.executable, "-c", ENDING, call, str(error)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "True ''\n", done.stderr
