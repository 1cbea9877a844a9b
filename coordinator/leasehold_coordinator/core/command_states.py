"""The state machine of a command in the coordinator, as one table. Pure.

A PENDING command is stored and not sent. A DISPATCHED command is sent. The worker reports later states. A
command is UNKNOWN while its worker is out of contact, and then takes the state that the worker reports.
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
"""The states that may follow each state. Nothing follows an outcome, or a state missing here."""


def is_terminal(state: CommandState.ValueType) -> bool:
    """Whether a command in this state has ended."""
    return state in OUTCOMES


def may_follow(state: CommandState.ValueType, following: CommandState.ValueType) -> bool:
    """Whether a command may go from one state to another."""
    return following in TRANSITIONS.get(state, frozenset())
