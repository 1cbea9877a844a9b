"""The checkpoint API's contract, as the driver API reference documents it, transition by transition."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from leasehold_simgpu import SimulatedHost

from .conftest import MakeHost, StartProgram
from .control_groups import ControlGroup
from .programs import (
    CHECKPOINTED,
    ILLEGAL_STATE,
    LOCKED,
    MIB,
    NOT_INITIALIZED,
    NOT_READY,
    NOT_SUPPORTED,
    OPERATING_SYSTEM,
    OUT_OF_MEMORY,
    RUNNING,
    SUCCESS,
    Program,
    ProgramError,
)


def suspend(controller: Program, target: Program) -> None:
    assert controller.lock(target.pid, 1000) == SUCCESS
    assert controller.checkpoint(target.pid) == SUCCESS


def test_a_full_cycle_passes_through_every_state(controller: Program, target: Program) -> None:
    controller.init()
    assert controller.get_state(target.pid) == [SUCCESS, RUNNING]
    assert controller.lock(target.pid) == SUCCESS
    assert controller.get_state(target.pid) == [SUCCESS, LOCKED]
    assert controller.checkpoint(target.pid) == SUCCESS
    assert controller.get_state(target.pid) == [SUCCESS, CHECKPOINTED]
    assert controller.restore(target.pid) == SUCCESS
    assert controller.get_state(target.pid) == [SUCCESS, LOCKED]
    assert controller.unlock(target.pid) == SUCCESS
    assert controller.get_state(target.pid) == [SUCCESS, RUNNING]


def test_every_other_call_is_an_illegal_state_and_changes_nothing(
    controller: Program, target: Program
) -> None:
    controller.init()
    legal = {RUNNING: "lock", LOCKED: "checkpoint", CHECKPOINTED: "restore"}
    for state, way_on in legal.items():
        allowed = {way_on, "unlock"} if state == LOCKED else {way_on}
        for call in {"lock", "checkpoint", "restore", "unlock"} - allowed:
            assert getattr(controller, call)(target.pid) == ILLEGAL_STATE, (state, call)
            assert controller.get_state(target.pid) == [SUCCESS, state]
        assert getattr(controller, way_on)(target.pid) == SUCCESS


def test_device_calls_wait_while_locked_and_go_on_with_the_data_intact(
    controller: Program, target: Program
) -> None:
    _, address = target.allocate(MIB)
    target.fill(address, MIB, 7)
    controller.init()
    suspend(controller, target)
    target.begin("holds", address, MIB, 7)
    assert target.is_waiting()
    assert controller.restore(target.pid) == SUCCESS
    assert target.is_waiting()
    assert controller.unlock(target.pid) == SUCCESS
    assert target.answer() is True


def test_waiting_takes_no_cpu(controller: Program, target: Program) -> None:
    before = target.cpu_seconds()
    assert controller.lock(target.pid) == SUCCESS
    target.begin("memory_info")
    assert target.is_waiting()
    assert controller.unlock(target.pid) == SUCCESS
    target.answer()
    assert target.cpu_seconds() - before < 0.1


def test_a_lock_that_does_not_drain_in_time_leaves_the_target_running(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    host.set_busy(target.pid)
    assert controller.lock(target.pid, 50) == NOT_READY
    assert controller.get_state(target.pid) == [SUCCESS, RUNNING]
    target.memory_info()
    host.set_busy(target.pid, False)
    assert controller.lock(target.pid, 1000) == SUCCESS


def test_a_lock_without_a_timeout_waits_until_work_drains(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    host.set_busy(target.pid)
    controller.begin("lock", target.pid, 0)
    assert controller.is_waiting()
    host.set_busy(target.pid, False)
    assert controller.answer() == SUCCESS


def test_a_lock_waits_for_device_calls_that_run(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    target.start_thread_allocating(MIB, 60)
    for _ in range(50):
        assert controller.lock(target.pid, 1000) == SUCCESS
        seen = {host.gpus[0].used_bytes for _ in range(3)}
        assert len(seen) == 1, "nothing is allocated while it is locked"
        assert controller.unlock(target.pid) == SUCCESS


def test_a_living_process_without_cuda_is_not_initialized(controller: Program) -> None:
    assert controller.get_state(os.getpid()) == [NOT_INITIALIZED, None]
    assert controller.restore_thread_id(os.getpid()) == [NOT_INITIALIZED, None]
    for call in ("lock", "checkpoint", "restore", "unlock"):
        assert getattr(controller, call)(os.getpid()) == NOT_INITIALIZED


def call_all(controller: Program, pid: int) -> list[int]:
    """The result of every call on a process."""
    results = [getattr(controller, call)(pid) for call in ("lock", "checkpoint", "restore", "unlock")]
    return [controller.get_state(pid)[0], controller.restore_thread_id(pid)[0], *results]


@pytest.mark.parametrize("initialized", [False, True])
def test_a_pid_without_a_process_is_an_error_of_the_operating_system(
    controller: Program, initialized: bool
) -> None:
    """Seen on 580.159.04. Pids below 1 are assumed."""
    if initialized:
        controller.init()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for pid in (gone.pid, 0, -1):
        assert call_all(controller, pid) == [OPERATING_SYSTEM] * 6


def test_a_zombie_has_no_cuda(controller: Program, target: Program) -> None:
    """Seen on 580.159.04: until it is collected, a killed target answers like a process without CUDA."""
    os.kill(target.pid, signal.SIGKILL)
    os.waitid(os.P_PID, target.pid, os.WEXITED | os.WNOWAIT)
    assert call_all(controller, target.pid) == [NOT_INITIALIZED] * 6
    target.wait()
    assert call_all(controller, target.pid) == [OPERATING_SYSTEM] * 6


def test_a_kernel_thread_has_no_cuda(controller: Program) -> None:
    name = Path("/proc/2/comm")
    if not name.exists() or name.read_text() != "kthreadd\n":
        pytest.skip("no kernel thread can be seen here, as in a container")
    assert call_all(controller, 2) == [NOT_INITIALIZED] * 6


def test_the_restore_thread_is_a_thread_of_the_target_and_names_it(
    controller: Program, target: Program
) -> None:
    error, tid = controller.restore_thread_id(target.pid)
    assert error == SUCCESS
    assert tid != target.pid
    with open(f"/proc/{target.pid}/task/{tid}/comm") as comm:
        name = comm.read().strip()
    assert name.startswith("cuda")
    assert int(name.removeprefix("cuda"), 16) > 0
    assert controller.get_state(tid) == [SUCCESS, RUNNING]
    assert controller.lock(tid) == SUCCESS
    assert controller.get_state(target.pid) == [SUCCESS, LOCKED]


def test_a_restore_needs_cuinit_in_the_caller(controller: Program, target: Program) -> None:
    suspend(controller, target)
    assert controller.restore(target.pid) == NOT_INITIALIZED
    assert controller.get_state(target.pid) == [SUCCESS, CHECKPOINTED]
    controller.init()
    assert controller.restore(target.pid) == SUCCESS


def test_persistence_mode_makes_cuinit_unnecessary(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    host.set_persistence_mode(True)
    suspend(controller, target)
    assert controller.restore(target.pid) == SUCCESS


def test_a_restore_out_of_memory_wedges_the_process(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    target.allocate(100 * MIB)
    controller.init()
    suspend(controller, target)
    host.hog(0, host.gpus[0].memory_bytes - MIB)
    assert controller.restore(target.pid) == OUT_OF_MEMORY
    host.hog(0, 0)
    assert controller.restore(target.pid) == OPERATING_SYSTEM
    assert controller.unlock(target.pid) == ILLEGAL_STATE
    assert controller.get_state(target.pid) == [SUCCESS, CHECKPOINTED]
    process = host.process(target.pid)
    assert process is not None
    assert process.wedged


def test_a_process_can_checkpoint_itself(target: Program) -> None:
    _, address = target.allocate(MIB)
    target.fill(address, MIB, 3)
    assert [getattr(target, call)(target.pid) for call in ("lock", "checkpoint", "restore", "unlock")] == [
        0
    ] * 4
    assert target.holds(address, MIB, 3)


def test_a_stopped_target_answers_no_call_until_it_goes_on(controller: Program, target: Program) -> None:
    target.stop()
    controller.begin("get_state", target.pid)
    assert controller.is_waiting()
    target.send_signal(signal.SIGCONT)
    assert controller.answer() == [SUCCESS, RUNNING]


@pytest.mark.long
def test_a_killed_controller_of_a_stopped_target_holds_nobody_up(
    host: SimulatedHost, controller: Program, target: Program, start_program: StartProgram
) -> None:
    """Seen on 580.159.04."""
    target.stop()
    controller.begin("get_state", target.pid)
    assert controller.is_waiting()
    controller.kill()
    second = start_program(host)
    second.init()
    second.begin("lock", target.pid)
    assert second.is_waiting()
    target.send_signal(signal.SIGCONT)
    assert second.answer() == SUCCESS
    assert second.checkpoint(target.pid) == SUCCESS


def test_a_stopped_target_that_is_killed_ends_the_call(controller: Program, target: Program) -> None:
    target.stop()
    controller.begin("get_state", target.pid)
    assert controller.is_waiting()
    target.kill()
    assert controller.answer()[0] == OPERATING_SYSTEM


@pytest.mark.parametrize(
    "call",
    [
        pytest.param("get_state", marks=pytest.mark.long),
        "lock",
        pytest.param("unlock", marks=pytest.mark.long),
    ],
)
def test_a_frozen_target_answers_no_call_until_it_is_thawed(
    controller: Program, target: Program, freezer: ControlGroup, call: str
) -> None:
    """Seen on 580.159.04, with a state query."""
    freezer.freeze(target.pid)
    controller.begin(call, target.pid)
    assert controller.is_waiting()
    freezer.thaw()
    answer = controller.answer()
    assert answer == {"get_state": [SUCCESS, RUNNING], "lock": SUCCESS, "unlock": ILLEGAL_STATE}[call]


def test_a_target_that_dies_in_a_call_ends_it(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    host.set_busy(target.pid)
    controller.begin("lock", target.pid)
    assert controller.is_waiting()
    target.kill()
    assert controller.answer() == OPERATING_SYSTEM


def test_calls_on_one_target_are_served_one_after_the_other(
    host: SimulatedHost, controller: Program, target: Program, start_program: StartProgram
) -> None:
    host.set_busy(target.pid)
    controller.begin("lock", target.pid, 0)
    assert controller.is_waiting()
    second = start_program(host)
    second.begin("get_state", target.pid)
    assert second.is_waiting()
    host.set_busy(target.pid, False)
    assert controller.answer() == SUCCESS
    assert second.answer() == [SUCCESS, LOCKED]


def test_a_controller_killed_in_a_lock_leaves_the_target_running(
    host: SimulatedHost, controller: Program, target: Program, start_program: StartProgram
) -> None:
    host.set_busy(target.pid)
    controller.begin("lock", target.pid, 0)
    assert controller.is_waiting()
    controller.kill()
    target.memory_info()
    host.set_busy(target.pid, False)
    second = start_program(host)
    assert second.get_state(target.pid) == [SUCCESS, RUNNING]
    assert second.lock(target.pid) == SUCCESS


def test_the_state_outlives_its_controller(
    host: SimulatedHost, controller: Program, target: Program, start_program: StartProgram
) -> None:
    suspend(controller, target)
    controller.kill()
    second = start_program(host)
    second.init()
    assert second.get_state(target.pid) == [SUCCESS, CHECKPOINTED]
    assert second.restore(target.pid) == SUCCESS
    assert second.unlock(target.pid) == SUCCESS
    target.memory_info()


def test_a_driver_of_cuda_12_4_has_no_checkpoint_api(
    make_host: MakeHost, start_program: StartProgram
) -> None:
    program = start_program(make_host(gpus=1, driver_version="550.163.01"))
    program.set_up()
    with pytest.raises(ProgramError, match="FunctionNotFoundError"):
        program.get_state(program.pid)


def test_a_driver_of_cuda_12_8_restores_but_does_not_move(
    make_host: MakeHost, start_program: StartProgram
) -> None:
    host = make_host(gpus=1, driver_version="570.158.01")
    program = start_program(host)
    program.set_up()
    program.lock(program.pid)
    program.checkpoint(program.pid)
    uuid = host.gpus[0].uuid
    assert program.restore(program.pid, [[uuid, uuid]]) == NOT_SUPPORTED
    assert program.get_state(program.pid) == [SUCCESS, CHECKPOINTED]
    assert program.restore(program.pid) == SUCCESS


def test_mig_and_lost_gpus_cannot_be_checkpointed(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    controller.lock(target.pid)
    host.set_readings(0, mig_enabled=True)
    assert controller.checkpoint(target.pid) == OUT_OF_MEMORY
    host.set_readings(0, mig_enabled=False)
    host.lose_gpu(0)
    assert controller.checkpoint(target.pid) == 999
    assert controller.get_state(target.pid) == [SUCCESS, LOCKED]


def test_a_client_of_mps_cannot_be_checkpointed(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    host.set_mps_client(target.pid)
    assert controller.lock(target.pid) == SUCCESS
    assert controller.checkpoint(target.pid) == NOT_SUPPORTED
    assert controller.get_state(target.pid) == [SUCCESS, LOCKED]
    assert controller.unlock(target.pid) == SUCCESS
    host.set_mps_client(target.pid, enabled=False)
    assert controller.lock(target.pid) == SUCCESS
    assert controller.checkpoint(target.pid) == SUCCESS


def test_calls_are_counted_for_their_target_whatever_the_answer(
    host: SimulatedHost, controller: Program, target: Program, start_program: StartProgram
) -> None:
    other = start_program(host)
    other.set_up()
    none = dict.fromkeys(("get_state", "get_restore_thread_id", "lock", "checkpoint", "restore", "unlock"), 0)
    host.set_fault("checkpoint", error=OPERATING_SYSTEM, times=1)
    controller.lock(target.pid)
    assert [controller.checkpoint(target.pid) for _ in range(3)] == [OPERATING_SYSTEM, SUCCESS, ILLEGAL_STATE]
    controller.init()
    controller.restore(target.pid)
    controller.unlock(target.pid)
    controller.restore_thread_id(target.pid)
    controller.get_state(target.pid)
    controller.get_state(controller.restore_thread_id(target.pid)[1])
    found, untouched = host.process(target.pid), host.process(other.pid)
    assert found is not None
    assert untouched is not None
    assert found.calls == {
        "get_state": 2,
        "get_restore_thread_id": 2,
        "lock": 1,
        "checkpoint": 3,
        "restore": 1,
        "unlock": 1,
    }
    assert untouched.calls == none
