"""Files of hooks: a JSON list of ``Hook`` messages, with the field names of the protos."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message_factory import GetMessageClass
from leasehold.v1.hook_pb2 import Hook

from leasehold_client.arguments.job_document import parse_json
from leasehold_client.arguments.suggestions import close_to
from leasehold_client.errors import UsageError

FILE_LIMIT_BYTES: Final = 1_000_000
"""Largest file. No spec can hold more hooks."""

TIMEOUT_LIMIT_S: Final = 3_600
"""Longest timeout of a hook, as of docs/hooks.md."""

FAULTS: Final = (json_format.ParseError, ValueError, TypeError, OverflowError, RecursionError)
"""Exceptions of protobuf for a value that does not fit."""

_FORMS: Final = {
    FieldDescriptor.CPPTYPE_MESSAGE: "an object {…}",
    FieldDescriptor.CPPTYPE_BOOL: "true or false",
    FieldDescriptor.CPPTYPE_INT32: "a whole number",
}
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
        documents = parse_json(data)
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
    where = f"{origin}: hook {number}"
    _check_keys(document, Hook.DESCRIPTOR, where)
    try:
        hook = json_format.ParseDict(document, Hook())
    except FAULTS as error:
        raise UsageError(_fault(document, Hook.DESCRIPTOR, where)) from error
    timeout_s = hook.timeout.ToNanoseconds() / 1e9
    if hook.HasField("timeout") and not 0 < timeout_s <= TIMEOUT_LIMIT_S:
        raise UsageError(
            f"{where}: its timeout is {timeout_s:g} s: write more than 0 s and at most {TIMEOUT_LIMIT_S} s, "
            'such as "30s"'
        )
    return hook


def _fault(document: dict[str, object], message: Descriptor, where: str) -> str:
    """The first field that can't be read, with the form of its values."""
    keys: dict[str, str] = {}
    for key, value in document.items():
        field = _field(message, key)
        if field is None or value is None:
            continue
        alternatives = (field.containing_oneof or field).name
        if alternatives in keys:
            return f"{where} has {keys[alternatives]} and {key}: give only one of them"
        keys[alternatives] = key
        try:
            json_format.ParseDict({key: value}, GetMessageClass(message)())
        except FAULTS:
            if isinstance(value, dict) and field.message_type not in (None, Duration.DESCRIPTOR):
                return _fault(value, field.message_type, f"{where}: {field.name}")
            text = json.dumps(value, default=str)[:40]
            return f"{where}: {field.name} is {text}: write {_form(field)}"
    return f"{where} can't be read: compare it with the examples of docs/hooks.md"


def _field(message: Descriptor, key: str) -> FieldDescriptor | None:
    return message.fields_by_name.get(key) or message.fields_by_camelcase_name.get(key)


def _form(field: FieldDescriptor) -> str:
    """The form of a field's value in a file."""
    form = _FORMS.get(field.cpp_type, "a text")
    if field.enum_type is not None:
        form = f"one of {', '.join(_names(field.enum_type))}"
    elif field.message_type is Duration.DESCRIPTOR:
        form = 'seconds with an s, such as "30s"'
    elif field.type == FieldDescriptor.TYPE_BYTES:
        form = "base64, the JSON form of bytes"
    return f"a list, each {form}" if field.is_repeated else form


def _names(enum: EnumDescriptor) -> list[str]:
    return [value.name for value in enum.values if value.number]


def _completed(value: object, enum: EnumDescriptor) -> object:
    """A name of an enum, or a list of names, with the prefix that all its names have."""
    if isinstance(value, list):
        return [_completed(one, enum) for one in value]
    full = f"{enum.values[0].name.removesuffix('UNSPECIFIED')}{value}"
    return full if full in _names(enum) else value


def _check_keys(document: dict[str, object], message: Descriptor, where: str) -> None:
    """Refuses keys that a message does not have, and texts as bodies. Completes names of enums in place.

    A plain text as the body of an HTTP request would be decoded as base64 by mistake.

    Raises:
        UsageError: A key is unknown, or a body is not base64.
    """
    for key, value in [(str(key), value) for key, value in document.items()]:  # YAML has other keys, too
        field = _field(message, key)
        if field is None:
            names = [one.name for one in message.fields]
            raise UsageError(
                f"{where} has the unknown key {key[:40]!r}{close_to(key[:40], names)}: the keys are "
                f"{', '.join(names)}"
            )
        if field.enum_type is not None:
            document[key] = _completed(value, field.enum_type)
        elif field.message_type is not None and isinstance(value, dict):
            _check_keys(value, field.message_type, f"{where}: {field.name}")
        elif field.name == "body" and isinstance(value, str) and not _BASE64.fullmatch(value):
            raise UsageError(f"{where}: {field.name} is {json.dumps(value)[:40]}: write {_form(field)}")
