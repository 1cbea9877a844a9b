"""What a peer does in masses fills no log."""

import logging

import pytest
from leasehold.v1.errors_pb2 import Error
from leasehold.worker.v1.session_pb2 import ConnectRequest, Goodbye
from leasehold_coordinator import log_bounds
from leasehold_coordinator.log_bounds import LINE_LIMIT, LineBound
from leasehold_coordinator.log_format import LINE_LIMIT_CHARACTERS

from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker


@pytest.mark.long
def test_frames_that_are_ignored_are_not_all_logged(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    for _ in range(LINE_LIMIT + 200):
        worker.up.put(ConnectRequest())
    worker.up.put(ConnectRequest(goodbye=Goodbye(error=Error(message="x" * 100_000))))
    worker.wait_ended()
    lines = coordinator.log().splitlines()
    assert sum("ignored a frame of a newer worker" in line for line in lines) == LINE_LIMIT
    (goodbye,) = [line for line in lines if "said goodbye" in line]
    assert len(goodbye) < LINE_LIMIT_CHARACTERS + 200


def test_the_next_line_tells_how_many_were_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_bounds, "LINE_LIMIT", 2)
    bound = LineBound()

    def log(line: int, message: str = "a %s") -> str | None:
        record = logging.LogRecord("x", logging.WARNING, "x.py", line, message, ("frame",), None)
        return record.getMessage() if bound.filter(record) else None

    assert [log(1) for _ in range(5)] == ["a frame", "a frame", None, None, None]
    assert log(2) == "a frame", "another statement has lines of its own"
    monkeypatch.setattr(log_bounds, "PERIOD_S", 0.0)
    assert log(1) == "a frame (3 such lines before it were left out)"
    assert log(1) == "a frame"
