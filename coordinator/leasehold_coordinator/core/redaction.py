"""Requests without secrets, for the audit. Pure."""

from functools import cache
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

REDACTED: Final = frozenset(
    {
        "leasehold.v1.JoinRequest.csr",
        "leasehold.v1.JoinRequest.secret",
        "leasehold.v1.RenewCertificateRequest.csr",
        "leasehold.v1.WorkloadSpec.environment",
        "leasehold.v1.WorkloadSpec.secret_environment",
    }
)
"""Full names of the fields with secrets. Maps keep their keys. A test compares the names of all fields."""

HIDDEN: Final = "***"
"""Stands for a secret text. Other secrets are left out."""


def without_secrets(message: Message) -> Message:
    """A copy of a message without the values of :data:`REDACTED`. The message itself if it can't have any."""
    if not _may_have_secrets(message.DESCRIPTOR):
        return message
    copy = type(message)()
    copy.CopyFrom(message)
    _redact(copy)
    return copy


def _redact(message: Message) -> None:
    for field, value in message.ListFields():
        if field.full_name in REDACTED:
            _hide(message, field, value)
        elif field.message_type is None or not _may_have_secrets(field.message_type):
            continue
        elif field.message_type.GetOptions().map_entry:
            for part in value.values():
                _redact(part)
        elif field.is_repeated:
            for part in value:
                _redact(part)
        else:
            _redact(value)


def _hide(message: Message, field: FieldDescriptor, value: Any) -> None:
    """Hides the value of a field, which may have any type."""
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        if kind.fields_by_name["value"].type == FieldDescriptor.TYPE_STRING:
            for key in list(value):  # a map must not change during its iteration
                value[key] = HIDDEN
            return
    elif field.type == FieldDescriptor.TYPE_STRING and not field.is_repeated:
        setattr(message, field.name, HIDDEN)
        return
    message.ClearField(field.name)


@cache
def _may_have_secrets(descriptor: Descriptor) -> bool:
    return _has_secrets(descriptor, frozenset())


def _has_secrets(descriptor: Descriptor, outer: frozenset[str]) -> bool:
    if descriptor.full_name in outer:
        return False
    within = outer | {descriptor.full_name}
    return any(
        field.full_name in REDACTED
        or (field.message_type is not None and _has_secrets(field.message_type, within))
        for field in descriptor.fields
    )
