"""Builds requests from arguments. An argument that its field can't hold is a :class:`UsageError`."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, ParamSpec, TypeVar, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from leasehold_client.errors import UsageError

Fields = ParamSpec("Fields")
Built = TypeVar("Built", bound=Message)

RANGES: Final = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
"""The least and the greatest value of fields, by their type."""

TEXT_LIMIT: Final = 60
"""Characters of a value that a message shows."""


def build(kind: Callable[Fields, Built], *arguments: Fields.args, **fields: Fields.kwargs) -> Built:
    """Builds a message from its fields.

    Raises:
        UsageError: A number is out of the range of its field, or a text has a surrogate.
        TypeError: The message has no such field. The caller passes options of its own caller as fields.
        ValueError: Any other error of protobuf, unchanged.
    """
    for name, value in fields.items():
        if isinstance(value, Iterator):  # its values are needed twice if one does not fit
            fields[name] = [*value]
    try:
        return kind(*arguments, **fields)
    except ValueError:  # protobuf's own text names neither the field nor the range
        descriptor = cast("type[Built]", kind).DESCRIPTOR
        for name, value in fields.items():
            if name not in descriptor.fields_by_name:
                raise TypeError(f"unexpected keyword argument {name!r} for {descriptor.name}") from None
            for part in _parts(value):
                _require_fit(name, descriptor.fields_by_name[name].cpp_type, part)
        raise


def value_text(value: object) -> str:
    """Formats a value for a message: in ASCII, and cut."""
    if isinstance(value, int) and value.bit_length() > TEXT_LIMIT * 3:  # Python formats no huge number
        return f"<{value.bit_length()} bits>"
    text = ascii(value)
    return text if len(text) <= TEXT_LIMIT else f"{text[:TEXT_LIMIT]}…"


def _parts(value: object) -> list[object]:
    """The single values of a field: one, or those of a map or of any other iterable."""
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    return [*value] if isinstance(value, Iterable) and not isinstance(value, str | bytes) else [value]


def _require_fit(name: str, cpp_type: int, value: object) -> None:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise UsageError(
                f"invalid {name} {value_text(value)}: not valid UTF-8; "
                "give a text without surrogates (U+D800 to U+DFFF)"
            ) from None
    if isinstance(value, int) and cpp_type in RANGES:
        least, greatest = RANGES[cpp_type]
        if not least <= value <= greatest:
            raise UsageError(
                f"invalid {name} {value_text(value)}: out of range; give a number from {least} to {greatest}"
            )
