"""What a message says that two runs of the same story have in common."""

from collections.abc import Container
from typing import Any, Final

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

VOLATILE: Final = frozenset(
    {"time", "since", "etag", "event_id", "revision", "timeout", "session_id", "agent_version"}
)
"""Fields that differ from run to run, besides the times of things."""


def facts(message: Message, without: Container[str] = ()) -> Any:
    """A message as a document, without times and other volatile fields.

    Args:
        message: The message.
        without: Names of further fields to leave out.
    """

    def kept(value: Any) -> Any:
        if isinstance(value, list):
            return [kept(one) for one in value]
        if not isinstance(value, dict):
            return value
        return {
            name: kept(one)
            for name, one in value.items()
            if name not in VOLATILE and name not in without and not name.endswith("_time")
        }

    return kept(MessageToDict(message, preserving_proto_field_name=True))
