"""JSON documents for programs."""

import json
from typing import Any

from google.protobuf.message import Message

from leasehold_client.display.standard_output import echo
from leasehold_client.errors import LeaseholdError


def to_dict(message: Message) -> dict[str, Any]:
    """A message as JSON has it, with the names of the proto.

    Raises:
        LeaseholdError: JSON can't say it: the peer sent a time that no calendar has.
    """
    from google.protobuf import json_format  # late: a table needs none

    try:
        return json_format.MessageToDict(message, preserving_proto_field_name=True)
    except json_format.SerializeToJsonError as error:
        raise LeaseholdError(
            f"the answer can't be printed as JSON ({error}): look at the log of whoever sent it, or print a "
            "table instead"
        ) from error


def echo_message(message: Message) -> None:
    """Prints one message as a JSON document."""
    echo_json(to_dict(message))


def echo_json(document: object) -> None:
    """Prints one JSON document."""
    echo(json.dumps(document, indent=2))
