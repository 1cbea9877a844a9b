"""Files of hooks: a JSON list of ``Hook`` messages, with the field names of the protos."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor
from leasehold.v1.hook_pb2 import Hook

from leasehold_client.arguments.suggestions import close_to
from leasehold_client.errors import UsageError

FILE_LIMIT_BYTES: Final = 1_000_000
"""Largest file. No spec can hold more hooks."""

_BASE64: Final = re.compile(r"[A-Za-z0-9+/_-]*={0,2}")


def read_hooks(path: Path) -> list[Hook]:
    """Reads the hooks of a file, in order. The worker checks the content of each hook.

    Raises:
        UsageError: The file is unreadable, or is not a list of hooks. The text names the invalid hook.
    """
    try:
        with path.open("rb") as file:
            data = file.read(FILE_LIMIT_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"the hooks file {path} can't be read: {error.strerror or error}; "
            "name a file with a JSON list of hooks"
        ) from error
    if len(data) > FILE_LIMIT_BYTES:
        raise UsageError(
            f"the hooks file {path} exceeds the limit of {FILE_LIMIT_BYTES} bytes: "
            "name a file with a JSON list of hooks"
        )
    try:
        documents = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the hooks file {path} is not JSON ({error}): write hooks as [{{…}}, …]") from error
    if not isinstance(documents, list):
        raise UsageError(f"the hooks file {path} is not a list: write hooks as [{{…}}, …]")
    return parse_hooks(documents, f"the hooks file {path}")


def parse_hooks(documents: Sequence[object], origin: str) -> list[Hook]:
    """Converts hooks of a file, in order.

    Args:
        documents: The hooks, as values of JSON.
        origin: The file, for messages.

    Raises:
        UsageError: A hook is invalid. The text names the hook.
    """
    return [_read_hook(origin, number, document) for number, document in enumerate(documents)]


def _read_hook(origin: str, number: int, document: object) -> Hook:
    if not isinstance(document, dict):
        raise UsageError(
            f"{origin}: hook {number} is {json.dumps(document)[:40]}, not an object: write {{…}}"
        )
    _check_keys(document, Hook.DESCRIPTOR, f"{origin}: hook {number}")
    try:
        _check_bodies(document)
        return json_format.ParseDict(document, Hook())
    except (json_format.ParseError, ValueError, TypeError, OverflowError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise UsageError(
            f"{origin}: hook {number} is not a Hook message ({why}): use the field names of the protos"
        ) from error


def _check_keys(document: dict[str, object], message: Descriptor, where: str) -> None:
    """Refuses keys that a message does not have, with the names of the protos.

    Raises:
        UsageError: A key is unknown.
    """
    for key, value in [(str(key), value) for key, value in document.items()]:  # YAML has other keys, too
        field = message.fields_by_name.get(key) or message.fields_by_camelcase_name.get(key)
        if field is None:
            names = [one.name for one in message.fields]
            raise UsageError(
                f"{where} has the unknown key {key[:40]!r}{close_to(key[:40], names)}: the keys are "
                f"{', '.join(names)}"
            )
        if field.message_type is not None and isinstance(value, dict):
            _check_keys(value, field.message_type, f"{where}: {field.name}")


def _check_bodies(document: dict[str, object]) -> None:
    """Refuses plain text as the body of an HTTP request, which would be decoded as base64 by mistake.

    Raises:
        ValueError: A body is not base64.
    """
    for key, value in document.items():
        if isinstance(value, dict):
            _check_bodies(value)
        elif key == "body" and isinstance(value, str) and not _BASE64.fullmatch(value):
            raise ValueError(f"the body {value[:40]!r} is not base64, the JSON form of bytes")
