"""JSON and YAML documents for programs."""

import json
from typing import Any

from google.protobuf.message import Message

from leasehold_client.display.standard_output import echo_lines
from leasehold_client.errors import LeaseholdError


def to_dict(message: Message) -> dict[str, Any]:
    """Converts a message to JSON values, with the field names of the proto.

    A number that is 0 is there, and one that is unknown is not.

    Raises:
        LeaseholdError: The message has a value that JSON can't express, such as a time after the year 9999.
    """
    from google.protobuf import json_format  # late: tables need no JSON

    try:
        return json_format.MessageToDict(
            message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
    except json_format.SerializeToJsonError as error:
        raise LeaseholdError(
            f"the answer can't be printed as JSON ({error}): "
            "print a table instead, and see the coordinator's log"
        ) from error


def echo_message(message: Message, output: str) -> bool:
    """Prints one message as a document. Arguments and result as of :func:`echo_document`."""
    return echo_document(to_dict(message), output)


def echo_document(document: object, output: str) -> bool:
    """Prints one document. Arguments as of :func:`document_text`, result and errors as of ``echo_lines``."""
    return echo_lines(document_text(document, output))


def document_text(document: object, output: str) -> str:
    """One document as text.

    Args:
        document: Values of JSON.
        output: ``json`` or ``yaml``.

    Raises:
        ModuleNotFoundError: ``yaml``, and the client extra is not installed.
    """
    if output == "yaml":
        import yaml  # late: an optional package

        return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True)).rstrip()
    return json.dumps(document, indent=2)
