"""The life of a command on the worker: one table. Pure.

A command is ACCEPTED when the worker has it, RUNNING once its operation has begun, and ends once. The earlier
states and UNKNOWN are the coordinator's.
"""

from typing import Final

from leasehold.v1 import command_pb2
from leasehold.v1.command_pb2 import CommandState

ACCEPTED: Final = command_pb2.COMMAND_STATE_ACCEPTED
RUNNING: Final = command_pb2.COMMAND_STATE_RUNNING
SUCCEEDED: Final = command_pb2.COMMAND_STATE_SUCCEEDED
FAILED: Final = command_pb2.COMMAND_STATE_FAILED
REJECTED: Final = command_pb2.COMMAND_STATE_REJECTED
CANCELLED: Final = command_pb2.COMMAND_STATE_CANCELLED
EXPIRED: Final = command_pb2.COMMAND_STATE_EXPIRED

TRANSITIONS: Final[dict[CommandState.ValueType | None, frozenset[CommandState.ValueType]]] = {
    None: frozenset({ACCEPTED, REJECTED, CANCELLED}),
    ACCEPTED: frozenset({RUNNING, CANCELLED, EXPIRED}),
    RUNNING: frozenset({RUNNING, SUCCEEDED, FAILED, REJECTED, CANCELLED, EXPIRED}),
}
"""Transitions, from a state (None: a new command) to its successors. A missing state is terminal."""


def is_terminal(state: CommandState.ValueType) -> bool:
    """Whether a command in this state has ended."""
    return state not in TRANSITIONS
