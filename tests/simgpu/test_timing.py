"""Time: checkpoints and restores take as long as they are told.

Lower bounds hold on any machine. A time that must not count is longer than a program waits for an answer.
"""

from __future__ import annotations

import pytest
from leasehold_simgpu import SimulatedHost, Timing

from .conftest import StartProgram
from .programs import (
    CHECKPOINTED,
    ILLEGAL_STATE,
    LOCKED,
    MIB,
    OPERATING_SYSTEM,
    OUT_OF_MEMORY,
    SUCCESS,
    Program,
    wait_until,
)

FOR_EVER_S = 600.0


def cycle(controller: Program, target: Program) -> tuple[float, float]:
    """Seconds of a checkpoint and of a restore."""
    controller.lock(target.pid)
    suspended = controller.timed("checkpoint", target.pid)
    restored = controller.timed("restore", target.pid)
    controller.unlock(target.pid)
    return suspended, restored


def test_time_follows_the_bytes_and_the_way(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    controller.init()
    host.set_timing(Timing(0, 1000 * MIB, 0, 4000 * MIB))
    target.allocate(200 * MIB)
    suspended, restored = cycle(controller, target)
    target.allocate(200 * MIB)
    suspended_twice, restored_twice = cycle(controller, target)
    assert suspended >= 0.2
    assert suspended_twice >= 0.4
    assert restored >= 0.05
    assert restored_twice >= 0.1


def test_a_checkpoint_and_a_restore_have_their_own_times(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    controller.init()
    target.allocate(MIB)
    host.set_timing(Timing(0, 0, FOR_EVER_S, 1))
    controller.lock(target.pid)
    assert controller.checkpoint(target.pid) == SUCCESS
    host.set_timing(Timing(FOR_EVER_S, 1, 0, 0))
    assert controller.restore(target.pid) == SUCCESS


def test_the_fixed_cost_is_there_without_bytes(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    controller.init()
    host.set_timing(Timing(0.1, 0, 0.05, 0))
    suspended, restored = cycle(controller, target)
    assert suspended >= 0.1
    assert restored >= 0.05
    host.set_timing(Timing(FOR_EVER_S, 0, FOR_EVER_S, 0))
    host.set_timing(Timing.instant())
    cycle(controller, target)


def test_the_typical_timing_is_that_of_the_planning_figures() -> None:
    timing = Timing.typical()
    assert timing.suspend_fixed_s + 10e9 / timing.suspend_bytes_per_s == pytest.approx(5.4)
    assert timing.restore_fixed_s + 10e9 / timing.restore_bytes_per_s == pytest.approx(3.0)


def test_a_target_that_dies_does_not_make_the_controller_wait(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    host.set_timing(Timing(FOR_EVER_S, 0, FOR_EVER_S, 0))
    controller.lock(target.pid)
    controller.begin("checkpoint", target.pid)
    assert controller.is_waiting()
    target.kill()
    assert controller.answer() == OPERATING_SYSTEM


COPY_S = 3.0
EVICT, PLACE = 1, 2
"""`enum simgpu_request`."""


def kill_in(call: str, host: SimulatedHost, controller: Program, target: Program) -> None:
    """Kills the controller as soon as the target copies."""
    record = next(record for record in host._state.processes if record.pid == target.pid)
    controller.begin(call, target.pid)
    request = {"checkpoint": EVICT, "restore": PLACE}[call]
    wait_until(lambda: record.request == request, "the target copies")
    controller.kill()


@pytest.mark.long
def test_a_target_finishes_the_checkpoint_of_a_killed_controller(
    host: SimulatedHost, controller: Program, target: Program, start_program: StartProgram
) -> None:
    """Seen on 580.159.04: the next query waits for the end of the copy."""
    _, address = target.allocate(MIB)
    target.fill(address, MIB, 7)
    second = start_program(host)
    second.init()
    controller.lock(target.pid)
    host.set_timing(Timing(COPY_S, 0, 0, 0))
    kill_in("checkpoint", host, controller, target)
    assert second.get_state(target.pid) == [SUCCESS, CHECKPOINTED]
    assert host.gpus[0].used_bytes == 0
    assert [second.restore(target.pid), second.unlock(target.pid)] == [SUCCESS, SUCCESS]
    assert target.holds(address, MIB, 7)


@pytest.mark.long
def test_a_target_finishes_the_restore_of_a_killed_controller(
    host: SimulatedHost, controller: Program, target: Program, start_program: StartProgram
) -> None:
    """Seen on 580.159.04."""
    _, address = target.allocate(MIB)
    target.fill(address, MIB, 7)
    second = start_program(host)
    controller.init()
    controller.lock(target.pid)
    controller.checkpoint(target.pid)
    host.set_timing(Timing(0, 0, COPY_S, 0))
    kill_in("restore", host, controller, target)
    assert second.get_state(target.pid) == [SUCCESS, LOCKED]
    assert second.unlock(target.pid) == SUCCESS
    assert target.holds(address, MIB, 7)


def test_a_restore_without_memory_copies_nothing(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    """Seen on 580.159.04: such a restore answered after 0.01 s."""
    target.allocate(MIB)
    controller.init()
    controller.lock(target.pid)
    controller.checkpoint(target.pid)
    host.set_timing(Timing(0, 0, FOR_EVER_S, 0))
    host.hog(0, host.gpus[0].memory_bytes)
    assert controller.restore(target.pid) == OUT_OF_MEMORY
    assert controller.get_state(target.pid) == [SUCCESS, CHECKPOINTED]
    assert [controller.restore(target.pid), controller.unlock(target.pid)] == [
        OPERATING_SYSTEM,
        ILLEGAL_STATE,
    ]


def test_a_restore_takes_its_memory_before_the_copy(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    target.allocate(MIB)
    controller.init()
    controller.lock(target.pid)
    controller.checkpoint(target.pid)
    host.set_timing(Timing(0, 0, FOR_EVER_S, 0))
    controller.begin("restore", target.pid)
    assert controller.is_waiting()
    assert host.gpus[0].used_bytes == MIB
    target.kill()
    assert controller.answer() == OPERATING_SYSTEM
    assert host.gpus[0].used_bytes == 0
