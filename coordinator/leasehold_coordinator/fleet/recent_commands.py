"""A cache of the commands that ended last, so that a late watch reads no disk."""

from collections import OrderedDict
from typing import Final, final

from leasehold.v1.command_pb2 import Command

RECENT_LIMIT: Final = 500
RECENT_BYTES: Final = 2**20
"""Most serialized bytes of all cached commands. A command takes about five times as much memory."""


@final
class RecentCommands:
    """Commands that have ended and are on disk. They never change."""

    def __init__(self) -> None:
        self._commands: OrderedDict[str, Command] = OrderedDict()
        self._used_bytes = 0

    def add(self, command: Command) -> None:
        """Adds an ended command, and drops the oldest commands above the limits."""
        self._commands[command.command_id] = command
        self._used_bytes += command.ByteSize()
        while self._used_bytes > RECENT_BYTES or len(self._commands) > RECENT_LIMIT:
            _, oldest = self._commands.popitem(last=False)
            self._used_bytes -= oldest.ByteSize()

    def get(self, command_id: str) -> Command | None:
        """The command with this id. None: not in the cache."""
        return self._commands.get(command_id)

    def discard(self, command_id: str) -> None:
        """Drops a command that was deleted, if it is here."""
        command = self._commands.pop(command_id, None)
        if command is not None:
            self._used_bytes -= command.ByteSize()
