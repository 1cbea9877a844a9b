"""What a report leaves is found by its mark, and ended without harm."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest
from leasehold_simgpu import SimulatedHost

from tests.simgpu.programs import Program

from .leftovers import MARK, end_marked, end_safely, marked


@pytest.fixture
def restored(on_host: dict[str, str]) -> Iterator[Program]:
    """A process that was restored and runs."""
    program, controller = Program(on_host), Program(on_host)
    program.set_up()
    assert controller.init() == 0
    for call in (controller.lock, controller.checkpoint, controller.restore, controller.unlock):
        assert call(program.pid) == 0
    controller.close()
    yield program
    program.close()


def test_only_what_has_the_mark_is_ended(mark: str) -> None:
    ours = subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: f"{mark}/1/"})
    others = subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: f"{mark}/2/"})
    try:
        assert marked(f"{mark}/1/") == [ours.pid]
        assert end_marked(f"{mark}/1/") == [f"sleep 600 ({ours.pid}): killed"]
        assert others.poll() is None
        ours.wait()
    finally:
        others.kill()
        others.wait()


def test_a_stopped_process_is_ended(mark: str) -> None:
    ours = subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: f"{mark}/1/"})
    ours.send_signal(signal.SIGSTOP)
    assert end_marked(f"{mark}/1/") == [f"sleep 600 ({ours.pid}): killed"]
    ours.wait()


@pytest.mark.long
def test_a_restored_process_that_can_not_be_suspended_is_left_and_named(
    host: SimulatedHost, restored: Program
) -> None:
    host.set_fault("checkpoint", restored.pid, error=801)
    (note,) = end_safely([restored.pid]).values()
    assert "LEFT running, since its checkpoint answered 801" in note
    assert not restored.has_ended()
    assert restored.memory_info()[1] > 0, "it is not left locked"
    host.clear_faults()
    (note,) = end_safely([restored.pid]).values()
    assert note.endswith(": killed")
    assert restored.has_ended()


@pytest.mark.long
def test_a_process_whose_lock_fails_is_left_and_named(host: SimulatedHost, restored: Program) -> None:
    host.set_fault("lock", restored.pid, error=600)
    (note,) = end_safely([restored.pid]).values()
    assert "LEFT running, since its lock answered 600" in note
    assert not restored.has_ended()
