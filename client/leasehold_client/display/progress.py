"""Waiting for a command: a spinner with its phase on a terminal, nothing elsewhere."""

import sys
from typing import TYPE_CHECKING

from leasehold.v1.command_pb2 import Command

from leasehold_client.coordinator.client import Client
from leasehold_client.coordinator.command_watch import Patience
from leasehold_client.display.terminal_text import safe_text
from leasehold_client.messages import command_state, operation_name

if TYPE_CHECKING:
    from rich.console import Console


def follow(client: Client, command: Command, patience: Patience) -> Command:
    """Waits until the command has ended, and returns it as it is then.

    Raises:
        StillOpenError: The patience is over.
    """
    console = terminal()
    if console is None:
        return client.wait(command, patience)
    from rich.text import Text  # not markup: a phase may be any text

    with console.status(operation_name(command)) as status:
        for current in client.watch(command, patience):
            command = current
            phase = command.phase or command_state(command).lower()
            status.update(Text(safe_text(f"{operation_name(command)}: {phase}")))
    return command


def terminal() -> "Console | None":
    """The terminal that standard error is. None: it is none, or rich (of the extra client) is missing."""
    if not sys.stderr.isatty():
        return None
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        return None
    return Console(stderr=True)
