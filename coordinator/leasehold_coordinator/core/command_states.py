"""The life of a command in the coordinator: one table. Pure.

PENDING is stored and not sent; DISPATCHED is sent; the worker reports the rest. UNKNOWN stands for a command
whose worker is out of contact, and resolves when the worker speaks again: to whatever the worker says.
"""

from typing import Final

from leasehold.v1 import command_pb2
from leasehold.v1.command_pb2 import CommandState

PENDING: Final = command_pb2.COMMAND_STATE_PENDING
DISPATCHED: Final = command_pb2.COMMAND_STATE_DISPATCHED
ACCEPTED: Final = command_pb2.COMMAND_STATE_ACCEPTED
RUNNING: Final = command_pb2.COMMAND_STATE_RUNNING
SUCCEEDED: Final = command_pb2.COMMAND_STATE_SUCCEEDED
FAILED: Final = command_pb2.COMMAND_STATE_FAILED
REJECTED: Final = command_pb2.COMMAND_STATE_REJECTED
CANCELLED: Final = command_pb2.COMMAND_STATE_CANCELLED
EXPIRED: Final = command_pb2.COMMAND_STATE_EXPIRED
UNKNOWN: Final = command_pb2.COMMAND_STATE_UNKNOWN

OUTCOMES: Final = frozenset({SUCCEEDED, FAILED, REJECTED, CANCELLED, EXPIRED})
"""The states that end a command."""

TRANSITIONS: Final[dict[CommandState.ValueType, frozenset[CommandState.ValueType]]] = {
    PENDING: frozenset({DISPATCHED, CANCELLED, EXPIRED}),
    DISPATCHED: frozenset({ACCEPTED, RUNNING, UNKNOWN}) | OUTCOMES,
    ACCEPTED: frozenset({RUNNING, UNKNOWN}) | OUTCOMES,
    RUNNING: frozenset({RUNNING, UNKNOWN}) | OUTCOMES,
    UNKNOWN: frozenset({ACCEPTED, RUNNING}) | OUTCOMES,
}
"""From a state to those that may follow. None leads out of an outcome, or out of what we don't know."""


def is_terminal(state: CommandState.ValueType) -> bool:
    """Whether a command in this state has ended."""
    return state in OUTCOMES


def may_follow(state: CommandState.ValueType, following: CommandState.ValueType) -> bool:
    """Whether a command may go from one state to another."""
    return following in TRANSITIONS.get(state, frozenset())
