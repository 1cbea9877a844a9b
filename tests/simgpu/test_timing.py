"""Time: checkpoints and restores take as long as they are told.

Lower bounds hold on any machine. A time that must not count is longer than a program waits for an answer.
"""

from __future__ import annotations

import pytest
from leasehold_simgpu import SimulatedHost, Timing

from .programs import MIB, OPERATING_SYSTEM, SUCCESS, Program

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


def test_a_controller_killed_in_a_copy_has_changed_nothing(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    host.set_timing(Timing(FOR_EVER_S, 0, FOR_EVER_S, 0))
    target.allocate(MIB)
    controller.lock(target.pid)
    controller.begin("checkpoint", target.pid)
    assert controller.is_waiting()
    controller.kill()
    process = host.process(target.pid)
    assert process is not None
    assert process.state.name == "LOCKED"
    assert host.gpus[0].used_bytes == MIB
