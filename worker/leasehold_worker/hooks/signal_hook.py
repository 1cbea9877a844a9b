"""The signal hook."""

import signal

from leasehold_worker.hooks.context import HookFailedError, Turn
from leasehold_worker.host.processes import identify, send_signal


def send(turn: Turn) -> None:
    """Signals the workload's first process, and never a later process with its pid.

    Raises:
        HookFailedError: The process has ended, or may not be signalled.
        OperationError: The process could not be opened, and was not signalled.
    """
    root = turn.context.root
    number = turn.hook.signal.signal_number
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if identify(root.pid) != root:
        raise HookFailedError(f"{name} was not sent: process {root.pid} has ended")
    try:
        send_signal(root, number)
    except PermissionError as error:
        raise HookFailedError(
            f"{name} could not be sent to process {root.pid} ({error}): "
            "run the worker as its user, or as root"
        ) from error
