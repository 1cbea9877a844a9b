"""Waiting for a command: a spinner with its phase on a terminal, nothing elsewhere."""

import sys

from leasehold.v1.command_pb2 import Command

from leasehold_client.client import Client
from leasehold_client.render import command_state, operation_name


def follow(client: Client, command: Command) -> Command:
    """Waits until the command has ended, and returns it as it is then."""
    if not sys.stderr.isatty():
        return client.wait(command)
    from rich.console import Console

    console = Console(stderr=True)
    with console.status(operation_name(command)) as status:
        for current in client.watch(command):
            command = current
            phase = command.phase or command_state(command).lower()
            status.update(f"{operation_name(command)}: {phase}")
    return command
