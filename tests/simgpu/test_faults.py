"""Faults: every way in which a call can go wrong, set while programs run."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from leasehold_simgpu import InvalidSettingError, ProcessState, SimulatedHost

from .conftest import StartProgram
from .programs import (
    CHECKPOINTED,
    FAILED,
    LOCKED,
    MIB,
    NOT_SUPPORTED,
    OPERATING_SYSTEM,
    OUT_OF_MEMORY,
    RUNNING,
    SUCCESS,
    Program,
    ProgramError,
)


def test_an_error_is_returned_instead_of_the_call(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    controller.lock(target.pid)
    host.set_fault("checkpoint", target.pid, error=NOT_SUPPORTED)
    assert controller.checkpoint(target.pid) == NOT_SUPPORTED
    assert controller.get_state(target.pid) == [SUCCESS, LOCKED]
    assert host.clear_faults() == 1
    assert controller.checkpoint(target.pid) == SUCCESS


def test_a_fault_holds_for_its_pid_and_so_many_times(
    host: SimulatedHost, controller: Program, target: Program, start_program: StartProgram
) -> None:
    other = start_program(host)
    other.set_up()
    host.set_fault("lock", target.pid, error=OPERATING_SYSTEM, times=2)
    assert controller.lock(other.pid) == SUCCESS
    assert [controller.lock(target.pid) for _ in range(3)] == [OPERATING_SYSTEM, OPERATING_SYSTEM, SUCCESS]
    assert host.faults() == ()


def test_a_fault_can_wait_for_later_calls(
    host: SimulatedHost, controller: Program, target: Program, start_program: StartProgram
) -> None:
    other = start_program(host)
    other.set_up()
    host.set_fault("lock", target.pid, error=OPERATING_SYSTEM, after=2, times=1)
    for _ in range(2):
        assert controller.lock(other.pid) == SUCCESS  # not of this pid: it does not count
        assert controller.unlock(other.pid) == SUCCESS
        assert controller.lock(target.pid) == SUCCESS
        assert controller.unlock(target.pid) == SUCCESS
    assert [fault.after for fault in host.faults()] == [0]
    assert [controller.lock(target.pid) for _ in range(2)] == [OPERATING_SYSTEM, SUCCESS]
    assert host.faults() == ()


def test_a_waiting_fault_counts_calls_that_another_one_meets(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    host.set_fault("lock", error=1)
    host.set_fault("lock", target.pid, error=2, after=1)
    assert [controller.lock(target.pid) for _ in range(3)] == [1, 2, 2]


def test_a_fault_for_a_pid_goes_before_one_for_anyone(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    host.set_fault("lock", error=1)
    host.set_fault("lock", target.pid, error=2, times=1)
    assert [controller.lock(target.pid) for _ in range(2)] == [2, 1]


def test_a_delay_comes_before_the_call(host: SimulatedHost, controller: Program, target: Program) -> None:
    host.set_fault("lock", target.pid, delay_s=0.1)
    assert controller.timed("lock", target.pid) >= 0.1


def test_a_hanging_call_ends_when_the_fault_is_cleared(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    fault = host.set_fault("checkpoint", target.pid, hang=True, times=1)
    controller.lock(target.pid)
    controller.begin("checkpoint", target.pid)
    assert controller.is_waiting()
    assert host.clear_faults(fault_id=fault.id) == 1
    assert controller.answer() == SUCCESS


def test_a_controller_that_hangs_can_be_killed_and_replaced(
    host: SimulatedHost, controller: Program, target: Program, start_program: StartProgram
) -> None:
    host.set_fault("checkpoint", target.pid, hang=True, times=1)
    controller.lock(target.pid)
    controller.begin("checkpoint", target.pid)
    assert controller.is_waiting()
    controller.kill()
    second = start_program(host)
    assert second.get_state(target.pid) == [SUCCESS, LOCKED]
    assert second.checkpoint(target.pid) == SUCCESS


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_target_can_be_made_to_crash_in_a_call(
    host: SimulatedHost, controller: Program, target: Program, number: signal.Signals
) -> None:
    host.set_fault("lock", target.pid, signal=number, error=OPERATING_SYSTEM)
    assert controller.lock(target.pid) == OPERATING_SYSTEM
    assert target.wait() == -number


@pytest.mark.parametrize("state", [RUNNING, LOCKED, CHECKPOINTED, FAILED])
def test_the_state_after_an_error_can_be_chosen(
    host: SimulatedHost, controller: Program, target: Program, state: int
) -> None:
    target.allocate(MIB)
    controller.lock(target.pid)
    host.set_fault("checkpoint", target.pid, error=OPERATING_SYSTEM, state=state)
    assert controller.checkpoint(target.pid) == OPERATING_SYSTEM
    assert controller.get_state(target.pid) == [SUCCESS, state]
    assert host.gpus[0].used_bytes == (0 if state == CHECKPOINTED else MIB)
    if state == RUNNING:
        target.memory_info()


def test_a_state_that_the_bindings_do_not_know_raises_there(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    host.set_fault("get_state", target.pid, state=7)
    with pytest.raises(ProgramError, match="ValueError"):
        controller.get_state(target.pid)


def test_an_error_that_the_bindings_do_not_know_raises_there(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    host.set_fault("lock", target.pid, error=4242)
    with pytest.raises(ProgramError, match=r"ValueError|KeyError"):
        controller.lock(target.pid)


def test_a_call_can_succeed_and_do_nothing(host: SimulatedHost, controller: Program, target: Program) -> None:
    host.set_fault("lock", target.pid, skip=True, times=1)
    assert controller.lock(target.pid) == SUCCESS
    assert controller.get_state(target.pid) == [SUCCESS, RUNNING]


def test_a_checkpoint_can_leave_the_memory_on_the_gpu(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    target.allocate(MIB)
    controller.lock(target.pid)
    host.set_fault("checkpoint", target.pid, keep_memory=True)
    assert controller.checkpoint(target.pid) == SUCCESS
    assert controller.get_state(target.pid) == [SUCCESS, CHECKPOINTED]
    assert controller.nvml_processes()[host.gpus[0].uuid] == {str(target.pid): MIB}


def test_a_restore_can_ignore_its_map(host: SimulatedHost, controller: Program, target: Program) -> None:
    uuids = [gpu.uuid for gpu in host.gpus]
    pairs = [[old, new] for old, new in zip(uuids, uuids[1:] + uuids[:1], strict=True)]
    controller.init()
    controller.lock(target.pid)
    controller.checkpoint(target.pid)
    host.set_fault("restore", target.pid, ignore_gpu_pairs=True)
    assert controller.restore(target.pid, pairs) == SUCCESS
    assert controller.unlock(target.pid) == SUCCESS
    assert target.device_uuids()[0] == uuids[0]


def test_calls_of_the_target_can_fail_too(host: SimulatedHost, target: Program) -> None:
    host.set_fault("cuMemAlloc", target.pid, error=OUT_OF_MEMORY, times=1)
    assert target.allocate(MIB)[0] == OUT_OF_MEMORY
    assert target.allocate(MIB)[0] == SUCCESS


def test_faults_are_listed_as_they_were_set(host: SimulatedHost) -> None:
    fault = host.set_fault("restore", 7, error=2, delay_s=0.5, state=ProcessState.FAILED, after=4, times=3)
    assert host.faults() == (
        fault.__class__(
            call="cuCheckpointProcessRestore",
            pid=7,
            error=2,
            delay_s=0.5,
            state=3,
            after=4,
            times=3,
            id=fault.id,
        ),
    )


@pytest.mark.parametrize(
    ("call", "settings"),
    [
        ("frobnicate", {}),
        ("lock", {"times": 0}),
        ("lock", {"delay_s": -1}),
        ("lock", {"state": 8}),
        ("lock", {"after": -1}),
        ("lock", {"signal_delay_s": 1}),
        ("cuMemAlloc", {"signal": 11, "signal_delay_s": 1}),
        ("lock", {"signal": 11, "signal_delay_s": -1}),
    ],
)
def test_a_fault_that_cannot_be_is_refused(host: SimulatedHost, call: str, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidSettingError):
        host.set_fault(call, **settings)
    assert host.faults() == ()


def test_there_is_an_end_to_faults(host: SimulatedHost) -> None:
    for _ in range(64):
        host.set_fault("lock", error=1)
    with pytest.raises(InvalidSettingError, match="64"):
        host.set_fault("lock", error=1)
    assert host.clear_faults(call="lock") == 64
