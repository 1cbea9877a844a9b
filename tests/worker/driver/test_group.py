"""Groups: all members or none, whatever the driver does in between."""

import errno
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import trio
from leasehold.v1 import errors_pb2, workload_pb2
from leasehold_simgpu import SimulatedHost
from leasehold_worker.driver.gpu_pairs import GpuPair, complete_pairs
from leasehold_worker.driver.group import Group
from leasehold_worker.driver.helper_pool import Driver, open_driver
from leasehold_worker.driver.helper_protocol import DriverCall
from leasehold_worker.driver.members import (
    CHECKPOINTED,
    LOCKED,
    RUNNING,
    UNKNOWN,
    WEDGED,
    Member,
    find_members,
    next_call,
    state_since,
)
from leasehold_worker.driver.process import CheckpointProcess, ProcessState
from leasehold_worker.driver.transfer_rates import Rates
from leasehold_worker.driver.verification import Verification
from leasehold_worker.errors import OperationError
from leasehold_worker.gpus.facts import GpuFacts
from leasehold_worker.gpus.inventory import Inventory
from leasehold_worker.host.processes import ProcessIdentity, identify

from tests.grids import grid
from tests.worker.conftest import Counter
from tests.worker.operations.test_handler import calls_of

StartCounter = Callable[..., Counter]
SEQUENTIAL = pytest.mark.parametrize("sequential", [False, True], ids=["parallel", "sequential"])


async def start_members(driver: Driver, start_counter: StartCounter, count: int = 3) -> list[Counter]:
    counters = [start_counter(gpu) for gpu in range(count)]
    for counter in counters:
        await counter.wait_count()
    return counters


async def members_of(driver: Driver, counters: Sequence[Counter]) -> tuple[Member, ...]:
    found = await find_members(driver, [counter.identity for counter in counters])
    return await Verification(Inventory()).measured(found)


def make_group(driver: Driver, members: Sequence[Member], *, sequential: bool = False) -> Group:
    lanes = [members] if sequential else [[member] for member in members]
    return Group(driver, Inventory(), Rates(), lanes, on_phase=lambda _: None)


async def states(driver: Driver, counters: Sequence[Counter]) -> list[ProcessState]:
    return [await CheckpointProcess(driver, counter.process.pid).state() for counter in counters]


async def nobody_new() -> tuple[Member, ...]:
    return ()


def test_the_line_of_states() -> None:
    running, locked, checkpointed = RUNNING, LOCKED, CHECKPOINTED
    assert next_call(running, checkpointed) is DriverCall.LOCK
    assert next_call(locked, checkpointed) is DriverCall.CHECKPOINT
    assert next_call(checkpointed, running) is DriverCall.RESTORE
    assert next_call(locked, running) is DriverCall.UNLOCK
    assert next_call(running, running) is None
    assert next_call(WEDGED, running) is None


def test_a_wedged_member_that_the_driver_calls_checkpointed_is_wedged() -> None:
    assert state_since(WEDGED, CHECKPOINTED) == WEDGED
    assert state_since(WEDGED, RUNNING) == RUNNING, "somebody has brought it back"
    assert state_since(RUNNING, CHECKPOINTED) == CHECKPOINTED


@SEQUENTIAL
async def test_suspend_and_restore(driver: Driver, start_counter: StartCounter, sequential: bool) -> None:
    counters = await start_members(driver, start_counter)
    parties = make_group(driver, await members_of(driver, counters), sequential=sequential)
    await parties.suspend(1, nobody_new)
    assert await states(driver, counters) == [ProcessState.CHECKPOINTED] * 3
    await parties.restore(())
    assert await states(driver, counters) == [ProcessState.RUNNING] * 3
    for outcome in parties.outcomes:
        assert [phase.call for phase in outcome.phases] == ["lock", "checkpoint", "restore", "unlock"]
        assert outcome.error is None
        assert outcome.rolled_back is None


@SEQUENTIAL
@pytest.mark.parametrize(
    ("call", "error", "reason"),
    [
        pytest.param("lock", 600, errors_pb2.ERROR_REASON_LOCK_TIMEOUT, marks=pytest.mark.long),
        pytest.param("lock", 304, errors_pb2.ERROR_REASON_PERMISSION_OR_OS, marks=pytest.mark.long),
        pytest.param("checkpoint", 800, errors_pb2.ERROR_REASON_UNSUPPORTED_STATE, marks=pytest.mark.long),
        pytest.param("checkpoint", 801, errors_pb2.ERROR_REASON_UNSUPPORTED_STATE, marks=pytest.mark.long),
        ("checkpoint", 2, errors_pb2.ERROR_REASON_INSUFFICIENT_HOST_MEMORY),
    ],
)
async def test_a_suspend_that_fails_for_one_is_undone_for_all(
    host: SimulatedHost,
    driver: Driver,
    start_counter: StartCounter,
    call: str,
    error: int,
    reason: int,
    sequential: bool,
) -> None:
    counters = await start_members(driver, start_counter)
    parties = make_group(driver, await members_of(driver, counters), sequential=sequential)
    host.set_fault(call, counters[1].process.pid, error=error, times=1)
    with pytest.raises(OperationError) as raised:
        await parties.suspend(1, nobody_new)
    assert raised.value.reason == reason
    assert raised.value.metadata["pid"] == str(counters[1].process.pid)
    assert await states(driver, counters) == [ProcessState.RUNNING] * 3
    for counter in counters:
        await counter.wait_count()
    assert parties.outcomes[1].error is raised.value
    assert parties.outcomes[0].rolled_back is True


@pytest.mark.long
async def test_a_restore_elsewhere_that_fails_leaves_all_parked_and_the_next_one_works(
    host: SimulatedHost, driver: Driver, start_counter: StartCounter
) -> None:
    counters = [start_counter(0), start_counter(0)]
    for counter in counters:
        await counter.wait_count()
    uuids = [gpu.uuid for gpu in host.gpus]
    pairs = complete_pairs([GpuPair(uuids[0], uuids[1])], dict.fromkeys(uuids, "H100"))
    first = make_group(driver, await members_of(driver, counters))
    await first.suspend(1, nobody_new)
    host.set_fault("restore", counters[1].process.pid, error=801, times=1)
    members = [outcome.member_after() for outcome in first.outcomes]
    second = make_group(driver, members)
    with pytest.raises(OperationError):
        await second.restore(pairs)
    assert await states(driver, counters) == [ProcessState.CHECKPOINTED] * 2
    members = [outcome.member_after() for outcome in second.outcomes]
    assert [bool(member.displacement) for member in members] == [True, False]
    await make_group(driver, members).restore(())
    for counter in counters:
        await counter.wait_count()
        assert uuids[0] in counter.output.read_text().splitlines()[-1], "all are where they were"


@pytest.mark.long
async def test_a_restore_out_of_memory_is_wedged_and_the_others_stay_parked(
    host: SimulatedHost, driver: Driver, start_counter: StartCounter
) -> None:
    counters = await start_members(driver, start_counter, 2)
    first = make_group(driver, await members_of(driver, counters))
    await first.suspend(1, nobody_new)
    host.hog(1, host.gpus[1].memory_bytes)
    second = make_group(driver, [outcome.member_after() for outcome in first.outcomes])
    with pytest.raises(OperationError) as raised:
        await second.restore(())
    assert raised.value.reason == errors_pb2.ERROR_REASON_MEMBER_WEDGED
    assert [outcome.state_after for outcome in second.outcomes] == [
        workload_pb2.MEMBER_STATE_CHECKPOINTED,
        workload_pb2.MEMBER_STATE_WEDGED,
    ]
    assert second.outcomes[1].rolled_back is False


@pytest.mark.long
async def test_a_member_that_can_not_be_parked_again_is_not_left_locked(
    host: SimulatedHost, driver: Driver, start_counter: StartCounter
) -> None:
    counters = await start_members(driver, start_counter, 2)
    parties = make_group(driver, await members_of(driver, counters), sequential=True)
    await parties.suspend(1, nobody_new)
    first, second = (counter.process.pid for counter in counters)
    host.set_fault("restore", second, error=999)
    host.set_fault("checkpoint", first, error=999)
    with pytest.raises(OperationError):
        await parties.restore(())
    assert await states(driver, counters) == [ProcessState.RUNNING, ProcessState.CHECKPOINTED]
    assert [outcome.state_after for outcome in parties.outcomes] == [RUNNING, CHECKPOINTED]
    assert [outcome.rolled_back for outcome in parties.outcomes] == [False, None]
    await counters[0].wait_count()


@pytest.mark.long
async def test_a_suspend_that_is_undone_leads_back_to_where_the_member_ran(
    host: SimulatedHost, driver: Driver, start_counter: StartCounter
) -> None:
    counters = await start_members(driver, start_counter, 2)
    uuids = [gpu.uuid for gpu in host.gpus]
    pairs = complete_pairs([GpuPair(uuids[0], uuids[2])], dict.fromkeys(uuids, "H100"))
    (first, second) = await members_of(driver, counters)
    alone = make_group(driver, [first])
    await alone.suspend(1, nobody_new)
    await alone.restore(pairs)
    displaced = alone.outcomes[0].member_after()
    assert displaced.displacement == pairs
    parties = make_group(driver, [displaced, second])
    host.set_fault("checkpoint", counters[1].process.pid, error=801, delay_s=0.2)
    with pytest.raises(OperationError):
        await parties.suspend(1, nobody_new)
    assert await states(driver, counters) == [ProcessState.RUNNING] * 2
    process = host.process(displaced.identity.pid)
    assert process is not None
    assert set(process.gpu_bytes) == {uuids[2]}


@pytest.mark.long
async def test_a_newcomer_undoes_the_suspend(driver: Driver, start_counter: StartCounter) -> None:
    counters = await start_members(driver, start_counter, 2)
    parties = make_group(driver, await members_of(driver, counters[:1]))

    async def rescan() -> tuple[Member, ...]:
        return await members_of(driver, counters)

    with pytest.raises(OperationError) as raised:
        await parties.suspend(1, rescan)
    assert raised.value.reason == errors_pb2.ERROR_REASON_MEMBERS_CHANGED
    assert await states(driver, counters) == [ProcessState.RUNNING] * 2


@pytest.mark.long
async def test_a_member_that_was_held_up_is_asked_again_once_the_others_are_back(
    host: SimulatedHost, start_counter: StartCounter
) -> None:
    """A call on one peer hangs while another is locked (NVIDIA/cuda-checkpoint issue 30)."""
    async with open_driver(0.5) as driver:
        counters = await start_members(driver, start_counter)
        parties = make_group(driver, await members_of(driver, counters), sequential=True)
        host.set_peers([counter.process.pid for counter in counters[:2]])
        with pytest.raises(OperationError) as raised:
            await parties.suspend(0.5, nobody_new)
        assert raised.value.reason == errors_pb2.ERROR_REASON_DRIVER_TIMEOUT
        assert raised.value.metadata["pid"] == str(counters[1].process.pid)
        assert [outcome.state_after for outcome in parties.outcomes] == [RUNNING] * 3
        for counter in counters:
            await counter.wait_count()


@pytest.mark.long
async def test_a_member_that_hangs_alone_is_not_asked_again(
    host: SimulatedHost, start_counter: StartCounter
) -> None:
    """Nothing has changed that could make it answer."""
    async with open_driver(0.5) as driver:
        counters = await start_members(driver, start_counter, 1)
        parties = make_group(driver, await members_of(driver, counters))
        pid = counters[0].process.pid
        host.set_fault("lock", pid, hang=True)
        fault = host.set_fault("get_state", pid, hang=True)
        before = calls_of(host, pid)["get_state"]
        with pytest.raises(OperationError):
            await parties.suspend(0.5, nobody_new)
        assert parties.outcomes[0].state_after == UNKNOWN
        host.clear_faults(fault_id=fault.id)
        assert calls_of(host, pid)["get_state"] - before == 2


@pytest.mark.long
async def test_a_member_that_dies_fails_the_group_and_frees_the_others(
    host: SimulatedHost, driver: Driver, start_counter: StartCounter
) -> None:
    counters = await start_members(driver, start_counter)
    parties = make_group(driver, await members_of(driver, counters))
    counters[2].process.kill()
    counters[2].process.wait()
    with pytest.raises(OperationError) as raised:
        await parties.suspend(1, nobody_new)
    assert raised.value.reason == errors_pb2.ERROR_REASON_TARGET_CRASHED
    assert parties.outcomes[2].state_after == workload_pb2.MEMBER_STATE_GONE
    assert await states(driver, counters[:2]) == [ProcessState.RUNNING] * 2


@pytest.mark.long
async def test_a_lock_that_kills_its_target_is_told_as_its_end(
    host: SimulatedHost, driver: Driver, start_counter: StartCounter
) -> None:
    counters = await start_members(driver, start_counter)
    parties = make_group(driver, await members_of(driver, counters))
    # The call returns once its target has died.
    host.set_fault("lock", counters[2].process.pid, signal=signal.SIGSEGV, hang=True, times=1)
    with pytest.raises(OperationError) as raised:
        await parties.suspend(1, nobody_new)
    assert raised.value.reason == errors_pb2.ERROR_REASON_TARGET_CRASHED
    assert parties.outcomes[2].state_after == workload_pb2.MEMBER_STATE_GONE
    assert counters[2].process.wait(timeout=10) == -signal.SIGSEGV
    assert await states(driver, counters[:2]) == [ProcessState.RUNNING] * 2


@pytest.mark.long
async def test_a_target_that_dies_seconds_after_the_lock_is_told_as_its_end(
    host: SimulatedHost, driver: Driver, start_counter: StartCounter
) -> None:
    """The kernel writes the core dump of a big process first (NVIDIA/cuda-checkpoint issue 58)."""
    counters = await start_members(driver, start_counter)
    parties = make_group(driver, await members_of(driver, counters))
    pid = counters[2].process.pid
    host.set_fault("lock", pid, error=304, signal=signal.SIGSEGV, signal_delay_s=3, times=1)
    with pytest.raises(OperationError) as raised:
        await parties.suspend(1, nobody_new)
    assert await states(driver, counters[:2]) == [ProcessState.RUNNING] * 2
    assert raised.value.reason == errors_pb2.ERROR_REASON_TARGET_CRASHED


async def test_a_suspend_that_is_cancelled_during_the_lock_is_undone(
    driver: Driver, start_counter: StartCounter
) -> None:
    counters = await start_members(driver, start_counter, 2)
    parties = make_group(driver, await members_of(driver, counters))
    with trio.CancelScope() as scope:
        scope.cancel()
        await parties.suspend(1, nobody_new)
    assert scope.cancelled_caught
    assert await states(driver, counters) == [ProcessState.RUNNING] * 2
    assert [outcome.rolled_back for outcome in parties.outcomes] == [True, True]


async def test_a_suspend_that_is_cancelled_after_the_lock_is_finished(
    host: SimulatedHost, driver: Driver, start_counter: StartCounter
) -> None:
    counters = await start_members(driver, start_counter, 1)
    parties = make_group(driver, await members_of(driver, counters))
    host.set_fault("checkpoint", counters[0].process.pid, delay_s=0.2, times=1)

    def called(call: str) -> int:
        process = host.process(counters[0].process.pid)
        return process.calls[call] if process else 0

    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            async def cancel() -> None:
                while not called("checkpoint"):  # noqa: ASYNC110 - the driver tells nobody
                    await trio.sleep(0.005)
                scope.cancel()

            nursery.start_soon(cancel)
            await parties.suspend(1, nobody_new)
    assert await states(driver, counters) == [ProcessState.CHECKPOINTED]


@pytest.mark.long
async def test_a_transfer_of_unknown_size_gets_its_time(
    host: SimulatedHost, driver: Driver, start_counter: StartCounter
) -> None:
    """Killing the call would be worse than waiting."""
    (counter,) = await start_members(driver, start_counter, 1)
    members = await members_of(driver, [counter])
    inventory = Inventory()
    inventory._facts = (GpuFacts("GPU-0", "H100", *[None] * 9),)
    parties = Group(driver, inventory, Rates(), [members], on_phase=lambda _: None)
    host.set_fault("checkpoint", counter.process.pid, delay_s=3, times=1)
    driver.call_floor_s = 1.0
    await parties.suspend(0.5, nobody_new)
    assert await states(driver, [counter]) == [ProcessState.CHECKPOINTED]


async def test_only_cuda_processes_are_members(driver: Driver, start_counter: StartCounter) -> None:
    counters = await start_members(driver, start_counter, 1)
    parent = identify(1)
    assert parent is not None
    members = await find_members(driver, [parent, counters[0].identity])
    assert [member.identity for member in members] == [counters[0].identity]


async def test_a_pid_that_is_somebody_else_by_now_is_left_alone(
    host: SimulatedHost, driver: Driver, start_counter: StartCounter
) -> None:
    counters = await start_members(driver, start_counter, 2)
    first, second = await members_of(driver, counters)
    earlier = ProcessIdentity(second.identity.pid, second.identity.start_time_ticks - 1)
    parties = make_group(driver, [first, replace(second, identity=earlier)])
    with pytest.raises(OperationError) as raised:
        await parties.suspend(1, nobody_new)
    assert raised.value.reason == errors_pb2.ERROR_REASON_IDENTITY_MISMATCH
    process = host.process(second.identity.pid)
    assert process is not None
    assert process.calls["lock"] == 0
    assert await states(driver, counters) == [ProcessState.RUNNING] * 2


@pytest.mark.long
async def test_a_wedged_member_is_never_restored_again(
    host: SimulatedHost, driver: Driver, start_counter: StartCounter
) -> None:
    counters = await start_members(driver, start_counter, 1)
    first = make_group(driver, await members_of(driver, counters))
    await first.suspend(1, nobody_new)
    host.hog(0, host.gpus[0].memory_bytes)
    second = make_group(driver, [outcome.member_after() for outcome in first.outcomes])
    with pytest.raises(OperationError):
        await second.restore(())
    process = host.process(counters[0].process.pid)
    assert process is not None
    assert process.calls["restore"] == 1


async def test_a_query_that_lies_once_does_not_hide_a_locked_member(
    host: SimulatedHost, driver: Driver, start_counter: StartCounter
) -> None:
    counters = await start_members(driver, start_counter, 2)
    parties = make_group(driver, await members_of(driver, counters))
    host.set_fault("get_state", counters[0].process.pid, skip=True, times=1)
    with pytest.raises(OperationError, match="succeeded, but its state is"):
        await parties.suspend(1, nobody_new)
    assert await states(driver, counters) == [ProcessState.RUNNING] * 2


@pytest.mark.long
async def test_a_helper_that_can_not_be_started_fails_its_member_and_leaves_nobody_locked(
    driver: Driver, start_counter: StartCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = await start_members(driver, start_counter)
    parties = make_group(driver, (await members_of(driver, counters))[:2])
    warm = driver._idle.pop()
    while driver._idle:
        await driver._idle.pop().close()
    driver._idle.append(warm)
    # Without this, both would use that one.
    monkeypatch.setattr("leasehold_worker.driver.helper_pool.RETURN_TIMEOUT_S", 0)

    def refuse(*_: Any, **__: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        with pytest.raises(OperationError, match="no driver helper can be started") as raised:
            await parties.suspend(1, nobody_new)
    assert raised.value.reason == errors_pb2.ERROR_REASON_UNSUPPORTED_DRIVER
    assert await states(driver, counters) == [ProcessState.RUNNING] * 3
    for counter in counters:
        await counter.wait_count()


@pytest.mark.long
@SEQUENTIAL
@pytest.mark.parametrize(
    ("error", "brought_back"),
    [
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), 3),
        pytest.param(RuntimeError("can't start new thread"), 2, marks=pytest.mark.long),
    ],
    ids=["transient", "unforeseen"],
)
async def test_a_rollback_goes_through_all_members_whatever_one_does(
    host: SimulatedHost,
    driver: Driver,
    start_counter: StartCounter,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    brought_back: int,
    sequential: bool,
) -> None:
    monkeypatch.setattr("leasehold_worker.driver.group.PAUSE_S", 0.01)
    counters = await start_members(driver, start_counter)
    troubled = counters[1].process.pid
    errors: list[Exception] = []
    pidfd_open = os.pidfd_open

    def open_or_fail(pid: int) -> int:
        if pid == troubled and errors:
            raise errors.pop()
        return pidfd_open(pid)

    monkeypatch.setattr(os, "pidfd_open", open_or_fail)
    members = await members_of(driver, counters)
    lanes = [members] if sequential else [[member] for member in members]

    def on_phase(phase: str) -> None:
        if phase == "rollback":
            errors.append(error)

    parties = Group(driver, Inventory(), Rates(), lanes, on_phase)
    host.set_fault("checkpoint", counters[0].process.pid, error=801, times=1)
    with pytest.raises(OperationError, match="CUDA_ERROR_NOT_SUPPORTED"):
        await parties.suspend(1, nobody_new)
    assert not errors
    found = await states(driver, counters)
    assert found.count(ProcessState.RUNNING) == brought_back, found
    assert [outcome.rolled_back for outcome in parties.outcomes].count(True) == brought_back


@pytest.mark.long
async def test_a_process_with_a_profiler_is_not_locked_and_the_others_run_on(
    host: SimulatedHost, driver: Driver, start_counter: StartCounter
) -> None:
    counters = await start_members(driver, start_counter, 2)
    parties = make_group(driver, await members_of(driver, counters))
    host.set_profiler(counters[1].process.pid)
    with pytest.raises(OperationError, match="end the profiling or debugging, then try again") as raised:
        await parties.suspend(1, nobody_new)
    assert raised.value.reason == errors_pb2.ERROR_REASON_UNSUPPORTED_STATE
    assert "IPC" not in raised.value.message
    assert await states(driver, counters) == [ProcessState.RUNNING] * 2
    assert [outcome.state_after for outcome in parties.outcomes] == [RUNNING] * 2
    host.set_profiler(counters[1].process.pid, enabled=False)
    await parties.suspend(1, nobody_new)


async def test_a_checkpoint_that_is_not_supported_names_managed_memory_and_not_ipc(
    host: SimulatedHost, driver: Driver, start_counter: StartCounter
) -> None:
    """Managed memory leaves the process LOCKED, and imported memory is checkpointed (580.159.04)."""
    counters = await start_members(driver, start_counter, 1)
    parties = make_group(driver, await members_of(driver, counters))
    host.set_fault("checkpoint", counters[0].process.pid, error=801, times=1)
    with pytest.raises(OperationError, match="managed memory") as raised:
        await parties.suspend(1, nobody_new)
    assert raised.value.reason == errors_pb2.ERROR_REASON_UNSUPPORTED_STATE
    assert "IPC" not in raised.value.message
    assert await states(driver, counters) == [ProcessState.RUNNING]


async def test_an_error_304_of_a_living_process_with_permission_is_told_as_unknown(
    host: SimulatedHost, driver: Driver, start_counter: StartCounter
) -> None:
    """The helper has ruled out both known causes."""
    counters = await start_members(driver, start_counter, 1)
    parties = make_group(driver, await members_of(driver, counters))
    host.set_fault("lock", counters[0].process.pid, error=304, times=1)
    with pytest.raises(OperationError, match="it lives, and the worker may control it") as raised:
        await parties.suspend(1, nobody_new)
    assert raised.value.reason == errors_pb2.ERROR_REASON_PERMISSION_OR_OS
    assert await states(driver, counters) == [ProcessState.RUNNING]


@pytest.mark.parametrize("reaped", [True, False], ids=["missing", "zombie"])
@pytest.mark.parametrize("call", grid(["lock", "checkpoint", "restore", "unlock"], "checkpoint"))
async def test_a_member_that_ends_between_two_calls_has_ended_and_lacks_no_permission(
    host: SimulatedHost, driver: Driver, start_counter: StartCounter, call: str, reaped: bool
) -> None:
    """The driver answers 304 for a missing process, and 3 for a zombie (580.159.04)."""
    counters = await start_members(driver, start_counter, 2)
    parties = make_group(driver, await members_of(driver, counters), sequential=True)
    process = counters[1].process

    def end() -> None:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        if reaped:
            process.wait()

    taken = parties._member_caller.take  # nothing else comes between two calls

    async def take(step: Any, outcome: Any) -> None:
        if step.call is DriverCall(call) and not step.rollback and outcome is parties.outcomes[1]:
            end()
        await taken(step, outcome)

    parties._member_caller.take = take  # type: ignore[method-assign]
    if call in ("restore", "unlock"):
        await parties.suspend(1, nobody_new)
    operation = parties.restore(()) if call in ("restore", "unlock") else parties.suspend(1, nobody_new)
    with pytest.raises(OperationError) as raised:
        await operation
    assert raised.value.reason == errors_pb2.ERROR_REASON_TARGET_CRASHED
    assert parties.outcomes[1].state_after == workload_pb2.MEMBER_STATE_GONE
    assert await find_members(driver, [counter.identity for counter in counters[1:]]) == ()
