"""Messages of any protobuf type with any content, for hypothesis."""

import random
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

Filled = TypeVar("Filled", bound=Message)
DEPTH_LIMIT = 3
TEXTS = (
    "",
    "alpha",
    "one",
    "w-1",
    "GPU-1",
    "\0",
    "é" * 50,
    "x" * 5000,
    "../../etc/passwd",
    "'; DROP TABLE",
    "?",
    "\x1b]0;owned\x07",
    "line\nfeed",
)
"""Names that exist, and names that try to hurt."""

_INTS = (0, 1, 2, 7, -1, 2**31 - 1, -(2**31))
_BIG = (2**32, 2**62, 2**63 - 1, -(2**63))


def fill(kind: type[Filled], choose: random.Random, depth: int = 0) -> Filled:
    """A message of a type with fields that were drawn."""
    message = kind()
    for field in message.DESCRIPTOR.fields:
        if choose.random() < 0.6:
            _put(message, field, choose, depth)
    return message


def _put(message: Message, field: Any, choose: random.Random, depth: int) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        values = getattr(message, field.name)
        if field.message_type.fields_by_name["value"].message_type is None:
            for _ in range(choose.randrange(3)):
                values[choose.choice(TEXTS)] = _scalar(field.message_type.fields_by_name["value"], choose)
    elif field.is_repeated:
        for _ in range(choose.randrange(3)):
            if field.message_type is None:
                getattr(message, field.name).append(_scalar(field, choose))
            elif depth < DEPTH_LIMIT:
                kind = type(getattr(message, field.name).add())
                getattr(message, field.name)[-1].CopyFrom(fill(kind, choose, depth + 1))
    elif field.message_type is None:
        setattr(message, field.name, _scalar(field, choose))
    elif depth < DEPTH_LIMIT:
        child = getattr(message, field.name)
        child.SetInParent()
        child.CopyFrom(fill(type(child), choose, depth + 1))


def _scalar(field: Any, choose: random.Random) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            text = choose.choice(TEXTS)
            return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
        case FieldDescriptor.CPPTYPE_BOOL:
            return choose.random() < 0.5
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return choose.choice([0.0, -1.0, float("inf"), float("nan"), 1e308])
        case FieldDescriptor.CPPTYPE_INT64:
            return choose.choice(_INTS + _BIG)
        case FieldDescriptor.CPPTYPE_ENUM:
            return choose.choice([0, 1, 2, 5, 99, 2**31 - 1])
        case _:
            return choose.choice(_INTS)
