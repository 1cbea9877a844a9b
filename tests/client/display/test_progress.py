"""The progress of a command on a terminal."""

import pytest
from leasehold.v1 import command_pb2
from leasehold_client.display.progress import progress_text

from tests.client.scripted_coordinator import command


@pytest.mark.parametrize(
    ("phase", "is_cancelled", "text"),
    [
        ("", False, "suspend: running"),
        ("hooks", False, "suspend: hooks"),
        ("hooks", True, "suspend: hooks, cancellation requested"),
    ],
)
def test_a_cancelled_command_says_that_it_still_waits(phase: str, is_cancelled: bool, text: str) -> None:
    running = command(command_pb2.COMMAND_STATE_RUNNING, phase=phase, cancel_requested=is_cancelled)
    assert progress_text(running) == text
