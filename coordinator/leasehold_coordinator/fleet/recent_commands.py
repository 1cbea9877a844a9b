"""The commands that ended last, in memory: a late watch of such a command reads no disk."""

from collections import OrderedDict
from typing import Final, final

from leasehold.v1.command_pb2 import Command

RECENT_LIMIT: Final = 500
RECENT_BYTES: Final = 2**20
"""Bound of all recent commands, in serialized bytes. A command takes about five times as much in memory."""


@final
class RecentCommands:
    """Commands that have ended and are on disk. Nothing changes them any more."""

    def __init__(self) -> None:
        self._commands: OrderedDict[str, Command] = OrderedDict()
        self._used_bytes = 0

    def add(self, command: Command) -> None:
        """Adds a command that has ended, and drops the oldest that don't fit beside it."""
        self._commands[command.command_id] = command
        self._used_bytes += command.ByteSize()
        while self._used_bytes > RECENT_BYTES or len(self._commands) > RECENT_LIMIT:
            _, oldest = self._commands.popitem(last=False)
            self._used_bytes -= oldest.ByteSize()

    def get(self, command_id: str) -> Command | None:
        """The command with this id. None: it has not ended, or long ago."""
        return self._commands.get(command_id)

    def discard(self, command_id: str) -> None:
        """Drops a command that was deleted, if it is here."""
        command = self._commands.pop(command_id, None)
        if command is not None:
            self._used_bytes -= command.ByteSize()
