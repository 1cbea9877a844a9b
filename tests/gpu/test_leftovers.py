"""What a report leaves is found by its mark, and ended without harm."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest
from leasehold_simgpu import SimulatedHost

from tests.simgpu.programs import Program

from . import leftovers
from .bootstrap import BUDGET_S, LEFTOVERS_S
from .bootstrap import END_S as REPORT_END_S
from .leftovers import END_S, LIMIT_S, MARK, end_marked, end_safely, marked
from .report import RESERVE_S


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
def test_one_controller_asks_for_all_processes(
    host: SimulatedHost, on_host: dict[str, str], mark: str
) -> None:
    environment = {**on_host, MARK: f"{mark}/1/"}
    ours = [subprocess.Popen(["sleep", "600"], env=environment) for _ in range(8)]
    counted = host.set_fault("cuInit", delay_s=0.001, times=100)
    notes = end_marked(f"{mark}/1/")
    assert [note.rpartition(": ")[2] for note in notes] == ["killed"] * len(ours)
    for process in ours:
        process.wait()
    (left,) = (fault.times for fault in host.faults() if fault.id == counted.id)
    assert left is not None
    assert 0 < 100 - left < len(ours), "one for all that were found at once, however often it looked"


@pytest.mark.long
def test_a_call_that_hangs_leaves_its_process_and_the_others_are_ended(
    host: SimulatedHost, on_host: dict[str, str], restored: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "END_S", 0.5)
    host.set_fault("get_state", restored.pid, hang=True)
    other = subprocess.Popen(["sleep", "600"], env=on_host)
    notes = end_safely([restored.pid, other.pid])
    assert "LEFT running, since the driver does not answer" in notes[restored.pid]
    assert notes[other.pid].endswith(": killed")
    other.wait()
    assert not restored.has_ended()


@pytest.mark.long
def test_no_driver_call_begins_after_the_deadline(host: SimulatedHost, restored: Program) -> None:
    calls = host.process(restored.pid)
    assert calls is not None
    (note,) = end_safely([restored.pid], time.monotonic() - END_S).values()
    assert "LEFT running, since no time was left" in note
    assert host.process(restored.pid) == calls


def test_the_ends_fit_into_what_is_kept_for_them() -> None:
    assert LIMIT_S + END_S <= RESERVE_S + REPORT_END_S - 5
    assert LIMIT_S + END_S <= LEFTOVERS_S - 5
    assert BUDGET_S + REPORT_END_S + LEFTOVERS_S <= 540


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
