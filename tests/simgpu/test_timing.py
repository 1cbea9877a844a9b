"""Time: checkpoints and restores take as long as they are told.

Lower bounds hold on any machine. Where one time is compared with another, the quickest of several counts.
"""

from __future__ import annotations

import pytest
from leasehold_simgpu import SimulatedHost, Timing

from .programs import MIB, OPERATING_SYSTEM, Program


def cycle(controller: Program, target: Program) -> tuple[float, float]:
    """Seconds of a checkpoint and of a restore."""
    controller.lock(target.pid)
    suspended = controller.timed("checkpoint", target.pid)
    restored = controller.timed("restore", target.pid)
    controller.unlock(target.pid)
    return suspended, restored


def quickest(controller: Program, target: Program, cycles: int) -> tuple[float, float]:
    """Seconds of the quickest checkpoint and of the quickest restore."""
    suspends, restores = zip(*(cycle(controller, target) for _ in range(cycles)), strict=True)
    return min(suspends), min(restores)


def test_time_follows_the_bytes_and_the_way(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    controller.init()
    host.set_timing(Timing(0, 1000 * MIB, 0, 4000 * MIB))
    target.allocate(200 * MIB)
    suspended, restored = quickest(controller, target, 3)
    target.allocate(200 * MIB)
    suspended_twice, _ = cycle(controller, target)
    assert suspended >= 0.2
    assert suspended_twice >= 0.4
    assert suspended > restored >= 0.05


def test_the_fixed_cost_is_there_without_bytes(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    controller.init()
    host.set_timing(Timing(0.1, 0, 0.05, 0))
    suspended, restored = cycle(controller, target)
    assert suspended >= 0.1
    assert restored >= 0.05
    host.set_timing(Timing.instant())
    assert max(quickest(controller, target, 20)) < 0.05


def test_the_typical_timing_is_that_of_the_planning_figures() -> None:
    timing = Timing.typical()
    assert timing.suspend_fixed_s + 10e9 / timing.suspend_bytes_per_s == pytest.approx(5.4)
    assert timing.restore_fixed_s + 10e9 / timing.restore_bytes_per_s == pytest.approx(3.0)


def test_a_target_that_dies_does_not_make_the_controller_wait(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    host.set_timing(Timing(600, 0, 600, 0))
    controller.lock(target.pid)
    controller.begin("checkpoint", target.pid)
    assert controller.is_waiting()
    target.kill()
    assert controller.answer() == OPERATING_SYSTEM


def test_a_controller_killed_in_a_copy_has_changed_nothing(
    host: SimulatedHost, controller: Program, target: Program
) -> None:
    host.set_timing(Timing(600, 0, 600, 0))
    target.allocate(MIB)
    controller.lock(target.pid)
    controller.begin("checkpoint", target.pid)
    assert controller.is_waiting()
    controller.kill()
    process = host.process(target.pid)
    assert process is not None
    assert process.state.name == "LOCKED"
    assert host.gpus[0].used_bytes == MIB
