"""Progress of a command: a spinner with the phase on a terminal, nothing elsewhere."""

import sys
from typing import TYPE_CHECKING

from leasehold.v1.command_pb2 import Command

from leasehold_client.coordinator.client import Client
from leasehold_client.display.terminal_text import safe_text
from leasehold_client.messages import command_state, operation_name

if TYPE_CHECKING:
    from rich.console import Console


def follow(client: Client, command: Command, timeout_s: float | None) -> Command:
    """Waits until a command has ended, and returns it. Arguments and errors as of :meth:`Client.watch`."""
    console = terminal()
    if console is None:
        return client.wait(command, timeout_s=timeout_s, check=False)
    from rich.text import Text  # no markup: a phase is arbitrary text

    with console.status(operation_name(command)) as status:
        for current in client.watch(command, timeout_s=timeout_s):
            command = current
            status.update(Text(safe_text(progress_text(command))))
    return command


def progress_text(command: Command) -> str:
    """Operation and phase. A cancelled command may wait for a hook or for a call of the driver."""
    phase = command.phase or command_state(command).lower()
    requested = ", cancellation requested" if command.cancel_requested else ""
    return f"{operation_name(command)}: {phase}{requested}"


def terminal() -> "Console | None":
    """A console on standard error. None: standard error is no terminal, or ``rich`` is not installed."""
    if not sys.stderr.isatty():
        return None
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        return None
    return Console(stderr=True)
