"""Named points at which a test can kill this process. A point does nothing unless it is armed."""

import functools
import os
import signal
from typing import Final

VARIABLE: Final = "LEASEHOLD_CRASH_POINT"
"""Environment variable that arms a point: NAME, or NAME:N for the Nth pass."""

CRASH_POINTS: Final = (
    "request-checked",
    "command-stored",
    "command-sent",
    "request-answered",
    "update-received",
    "outcome-stored",
    "outcome-acknowledged",
    "hello-received",
    "epoch-stored",
    "welcomed",
)
"""Every point, in the order in which a coordinator may reach them."""


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
