"""Targets that can't be checkpointed or called. Numbers are issues of NVIDIA/cuda-checkpoint."""

from __future__ import annotations

import signal

import pytest
from leasehold_simgpu import InvalidSettingError, SimulatedHost

from .conftest import StartProgram
from .programs import (
    CHECKPOINTED,
    ILLEGAL_STATE,
    INVALID_VALUE,
    LOCKED,
    MIB,
    NOT_PERMITTED,
    NOT_SUPPORTED,
    OPERATING_SYSTEM,
    RUNNING,
    SUCCESS,
    Program,
    wait_until,
)

CYCLE = ("lock", "checkpoint", "restore", "unlock")


@pytest.fixture
def peer(host: SimulatedHost, target: Program, start_program: StartProgram) -> Program:
    """A second program, of one group with the target."""
    program = start_program(host)
    program.set_up()
    host.set_peers([target.pid, program.pid])
    return program


def test_a_refusal_can_unlock_the_target(host: SimulatedHost, controller: Program, target: Program) -> None:
    host.set_fault("checkpoint", target.pid, error=NOT_SUPPORTED, state=RUNNING)
    controller.lock(target.pid)
    assert controller.checkpoint(target.pid) == NOT_SUPPORTED
    assert controller.get_state(target.pid) == [SUCCESS, RUNNING]
    assert target.allocate(MIB)[0] == SUCCESS


def test_a_checkpoint_hangs_while_there_is_a_multicast_group(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    host.set_multicast(target.pid)
    assert controller.lock(target.pid) == SUCCESS
    controller.begin("checkpoint", target.pid)
    assert controller.is_waiting()
    host.set_multicast(target.pid, enabled=False)
    assert controller.answer() == SUCCESS
    assert controller.get_state(target.pid) == [SUCCESS, CHECKPOINTED]


def test_a_checkpoint_that_hangs_ends_with_its_target(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    host.set_multicast(target.pid)
    controller.lock(target.pid)
    controller.begin("checkpoint", target.pid)
    assert controller.is_waiting()
    target.kill()
    assert controller.answer() == OPERATING_SYSTEM


def test_each_controller_hangs_at_a_multicast_group_and_its_end_leaves_the_target_locked(
    host: SimulatedHost, controller: Program, target: Program, start_program: StartProgram
) -> None:
    host.set_multicast(target.pid)
    controller.lock(target.pid)
    controller.begin("checkpoint", target.pid)
    assert controller.is_waiting()
    controller.kill()
    second = start_program(host)
    assert second.get_state(target.pid) == [SUCCESS, LOCKED]
    second.begin("checkpoint", target.pid)
    assert second.is_waiting()


def test_a_checkpoint_is_not_permitted_in_a_container_with_some_of_the_gpus(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    host.set_partial_passthrough(target.pid)
    controller.lock(target.pid)
    assert controller.checkpoint(target.pid) == NOT_PERMITTED
    assert controller.get_state(target.pid) == [SUCCESS, LOCKED]
    host.set_partial_passthrough(target.pid, enabled=False)
    assert controller.checkpoint(target.pid) == SUCCESS


def test_a_process_with_a_profiler_can_not_be_locked(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    """Seen on 580.159.04 with torch.profiler, at once: this lock would wait for the work."""
    host.set_profiler(target.pid)
    host.set_busy(target.pid)
    assert controller.lock(target.pid) == NOT_SUPPORTED
    host.set_busy(target.pid, busy=False)
    assert controller.checkpoint(target.pid) == ILLEGAL_STATE
    assert controller.unlock(target.pid) == ILLEGAL_STATE
    assert controller.get_state(target.pid) == [SUCCESS, RUNNING]
    assert target.allocate(MIB)[0] == SUCCESS
    host.set_profiler(target.pid, enabled=False)
    assert controller.lock(target.pid) == SUCCESS


def test_the_first_restore_of_a_process_with_imported_memory_wedges_it(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    """Seen on 580.159.04, in each order of exporter and importer."""
    target.allocate(MIB)
    controller.init()
    host.set_ipc_importer(target.pid)
    assert [controller.lock(target.pid), controller.checkpoint(target.pid)] == [SUCCESS, SUCCESS]
    uuid = host.gpus[0].uuid
    assert controller.restore(target.pid, [[uuid, uuid]]) == INVALID_VALUE  # wrong pairs wedge nothing
    process = host.process(target.pid)
    assert process is not None
    assert not process.wedged
    assert controller.restore(target.pid) == INVALID_VALUE
    for _ in range(2):
        assert controller.get_state(target.pid) == [SUCCESS, CHECKPOINTED]
        assert controller.restore(target.pid) == OPERATING_SYSTEM
        assert controller.unlock(target.pid) == ILLEGAL_STATE
    assert host.gpus[0].used_bytes == 0


def test_memory_that_was_closed_before_the_suspend_does_no_harm(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    """Seen on 580.159.04."""
    controller.init()
    host.set_ipc_importer(target.pid)
    host.set_ipc_importer(target.pid, enabled=False)
    assert [getattr(controller, call)(target.pid) for call in CYCLE] == [SUCCESS] * 4


@pytest.mark.parametrize(
    "call",
    [
        "get_state",
        pytest.param("restore_thread_id", marks=pytest.mark.long),
        "lock",
        pytest.param("checkpoint", marks=pytest.mark.long),
        pytest.param("restore", marks=pytest.mark.long),
        pytest.param("unlock", marks=pytest.mark.long),
    ],
)
def test_every_call_on_a_process_waits_while_a_peer_is_locked(
    host: SimulatedHost, controller: Program, target: Program, peer: Program, call: str
) -> None:
    """Issue 30."""
    second = controller
    assert second.lock(target.pid) == SUCCESS
    second.begin(call, peer.pid)
    assert second.is_waiting()
    host.set_peers([target.pid, peer.pid], enabled=False)
    second.answer()


@pytest.mark.long
def test_a_call_is_carried_out_once_the_peer_runs(
    host: SimulatedHost, controller: Program, target: Program, peer: Program, start_program: StartProgram
) -> None:
    """Issue 30: the first of two ranks can be suspended and brought back; calls on the second wait for it."""
    second = start_program(host)
    second.init()
    assert second.lock(target.pid) == SUCCESS
    assert second.checkpoint(target.pid) == SUCCESS
    controller.begin("lock", peer.pid, 1)
    assert controller.is_waiting()
    assert second.restore(target.pid) == SUCCESS
    assert second.unlock(target.pid) == SUCCESS
    assert controller.answer() == SUCCESS


@pytest.mark.long
def test_peers_that_were_locked_at_once_can_not_be_called_any_more(
    host: SimulatedHost, controller: Program, target: Program, peer: Program, start_program: StartProgram
) -> None:
    """Locks in parallel do not help: each is held up by the other's lock from then on."""
    second = start_program(host)
    for process in (target, peer):
        host.set_busy(process.pid)
    controller.begin("lock", target.pid)
    second.begin("lock", peer.pid)
    wait_until(lambda: all(process.controller_pid for process in host.processes()), "both locks wait")
    for process in (target, peer):
        host.set_busy(process.pid, busy=False)
    assert [controller.answer(), second.answer()] == [SUCCESS, SUCCESS]
    controller.begin("unlock", target.pid)
    assert controller.is_waiting()
    peer.kill()
    assert controller.answer() == SUCCESS


def test_a_target_can_die_seconds_after_the_call_that_killed_it(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    """Issue 58: the kernel writes the core dump first."""
    host.set_fault("lock", target.pid, signal=signal.SIGSEGV, signal_delay_s=600, error=OPERATING_SYSTEM)
    assert controller.lock(target.pid) == OPERATING_SYSTEM
    assert controller.get_state(target.pid)[0] == OPERATING_SYSTEM
    assert not target.has_ended()
    target.begin("memory_info")
    assert target.is_waiting()


@pytest.mark.long
def test_a_target_dies_in_its_time_although_the_controller_has_ended(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    host.set_fault("lock", target.pid, signal=signal.SIGSEGV, signal_delay_s=0.5, error=OPERATING_SYSTEM)
    assert controller.lock(target.pid) == OPERATING_SYSTEM
    controller.kill()
    assert target.wait() == -signal.SIGSEGV


def test_marks_are_listed_of_the_process_that_has_them(
    host: SimulatedHost, target: Program, peer: Program
) -> None:
    host.set_multicast(target.pid)
    host.set_partial_passthrough(peer.pid)
    host.set_profiler(peer.pid)
    host.set_ipc_importer(target.pid)
    first, second = host.process(target.pid), host.process(peer.pid)
    assert first is not None
    assert second is not None
    assert (first.profiler, first.ipc_importer) == (False, True)
    assert (second.profiler, second.ipc_importer) == (True, False)
    assert (first.multicast, first.partial_passthrough, first.peers) == (True, False, (peer.pid,))
    assert (second.multicast, second.partial_passthrough, second.peers) == (False, True, (target.pid,))


def test_only_cuda_processes_have_peers(host: SimulatedHost, controller: Program, target: Program) -> None:
    with pytest.raises(InvalidSettingError, match=f"pid {controller.pid} is not a live CUDA process"):
        host.set_peers([target.pid, controller.pid])
    assert [process.peers for process in host.processes()] == [()]
