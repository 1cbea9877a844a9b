"""Places where a test can kill this process for good. Nothing happens at them unless one is armed."""

import functools
import os
import signal
from typing import Final

VARIABLE: Final = "LEASEHOLD_CRASH_POINT"
"""Variable with the armed point, as NAME, or NAME:N for its Nth pass."""

CRASH_POINTS: Final = (
    "command-received",
    "command-journaled",
    "intent-run",
    "program-started",
    "intent-lock",
    "phase-lock",
    "intent-checkpoint",
    "phase-checkpoint",
    "phase-verify",
    "intent-restore",
    "phase-restore",
    "phase-unlock",
    "phase-rollback",
    "intent-stop",
    "phase-terminate",
    "phase-kill",
    "operation-ended",
    "outcome-journaled",
    "outcome-told",
    "acknowledged",
    "epoch-saved",
    "leases-rebuilt",
    "workload-probed",
    "command-settled",
)
"""The crash points of plain suspends, in order. `make chaos` reaches them."""

PARKING_CRASH_POINTS: Final = (
    "phase-hooks",
    "intent-hooks",
    "hook-noted",
    "phase-image",
    "intent-image",
    "image-final",
    "phase-resume",
    "intent-resume",
    "phase-save",
    "intent-save",
    "intent-end",
    "intent-ending",
    "phase-start",
    "intent-start",
    "phase-load",
)
"""The crash points of hooks, images and checkpointable applications. `make strategies` reaches them."""


class _Armed:
    def __init__(self, text: str) -> None:
        self.name, _, count = text.partition(":")
        self.passes_left = int(count or 1)


@functools.cache
def _armed() -> _Armed:
    return _Armed(os.environ.get(VARIABLE, ""))


def crash_point(name: str) -> None:
    """Kills this process by SIGKILL if the point is armed."""
    armed = _armed()
    if name == armed.name:
        armed.passes_left -= 1
        if armed.passes_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
