"""What a message says that two runs of the same story have in common."""

import os
import pwd
from collections.abc import Container
from typing import Any, Final

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

VOLATILE: Final = frozenset(
    {"time", "since", "etag", "event_id", "revision", "timeout", "session_id", "agent_version"}
)
"""Fields that differ from run to run, besides the times of things."""

RECORDED_OWNER: Final = "local/root"
"""The identity of the Unix user of the recording."""

OWNER: Final = f"local/{pwd.getpwuid(os.geteuid()).pw_name}"
"""The same of this run."""


def facts(message: Message, without: Container[str] = ()) -> Any:
    """A message as a document, without times and other volatile fields, and with the recorded owner.

    Args:
        message: The message.
        without: Names of further fields to leave out.
    """

    def kept(value: Any) -> Any:
        if isinstance(value, list):
            return [kept(one) for one in value]
        if not isinstance(value, dict):
            return RECORDED_OWNER if value == OWNER else value
        return {
            name: kept(one)
            for name, one in value.items()
            if name not in VOLATILE and name not in without and not name.endswith("_time")
        }

    return kept(MessageToDict(message, preserving_proto_field_name=True))
