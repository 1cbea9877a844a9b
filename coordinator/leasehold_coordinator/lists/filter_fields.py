"""Kinds of fields that a filter may name, and what a restriction means for each. Pure.

A field without a value satisfies no comparison, not even ``!=`` (AIP-160).
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, Protocol, TypeAlias, TypeVar, final

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from leasehold_coordinator.lists.filter_expression import Restriction, refusal

M = TypeVar("M", bound=Message)

Value: TypeAlias = str | int
"""Text, a number, nanoseconds of the Unix epoch, a flag as 0 or 1, or the number of an enum's value."""

Referent: TypeAlias = Literal["worker", "workload"]

Ids: TypeAlias = Mapping[tuple[Referent, str], frozenset[str]]
"""Ids of the workers and workloads that have a name."""

NUMBER_LIMIT: Final = 2**63
"""The first number that no field and no column holds."""

_COMPARE: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    ":": lambda found, part: part in found.casefold(),
}
_EQUALITY: Final = ("=", "!=")


@final
@dataclass(frozen=True, slots=True)
class Bound(Generic[M]):
    """A restriction whose field is known and whose value has been read.

    Attributes:
        field: Name of the field.
        comparator: The operator.
        value: The value that the field is compared with. A set: ids, of which the field has one. None: the
            restriction compares the field with no single value.
        test: Whether a message satisfies the restriction.
    """

    field: str
    comparator: str
    value: Value | frozenset[str] | None
    test: Callable[[M], bool]


class Field(Protocol[M]):
    """A field that a filter may name."""

    def bind(self, restriction: Restriction, ids: Ids) -> "Bound[M]":
        """The meaning of a restriction of this field.

        Raises:
            FleetError: INVALID_ARGUMENT, the field has no such comparison, or no such value.
        """


@final
@dataclass(frozen=True, slots=True)
class Scalar(Generic[M]):
    """A field with one value.

    Attributes:
        read: The value in a message. None: the field has no value there.
        parse: The value that a filter writes. Raises ValueError, whose text has the rule.
        comparators: The comparators that the field has.
        is_text: Whether values are text. Otherwise they are integers.
    """

    read: Callable[[M], Value | None]
    parse: Callable[[str], Value]
    comparators: tuple[str, ...]
    is_text: bool = False

    def bind(self, restriction: Restriction, ids: Ids) -> Bound[M]:
        """As :meth:`Field.bind`."""
        _require_no_key(restriction)
        read, comparator = self.read, restriction.comparator
        if restriction.is_presence:
            return Bound(restriction.field, comparator, None, lambda message: read(message) is not None)
        _require_comparator(restriction, self.comparators)
        try:
            value = self.parse(restriction.value)
        except ValueError as error:
            raise refusal(
                restriction.value_position,
                f"{restriction.field} can't be {restriction.value[:64]!r}: {error}",
            ) from None
        if isinstance(value, int) and abs(value) >= NUMBER_LIMIT:
            raise refusal(restriction.value_position, "the number has more than 64 bits: give a smaller one")
        return Bound(restriction.field, comparator, value, _comparison(read, comparator, value))


def _comparison(read: Callable[[M], Value | None], comparator: str, value: Value) -> Callable[[M], bool]:
    compare, wanted = _COMPARE[comparator], value if comparator != ":" else str(value).casefold()

    def test(message: M) -> bool:
        found = read(message)
        return found is not None and compare(found, wanted)

    return test


@final
@dataclass(frozen=True, slots=True)
class Labels(Generic[M]):
    """A map of texts: ``labels.KEY = VALUE``, or ``labels:KEY`` for any value."""

    read: Callable[[M], Mapping[str, str]]

    def bind(self, restriction: Restriction, ids: Ids) -> Bound[M]:
        """As :meth:`Field.bind`."""
        read, name, value = self.read, restriction.field, restriction.value
        if not restriction.keys:
            if restriction.comparator != ":":
                raise refusal(
                    restriction.position,
                    f"{name} {restriction.comparator} compares all labels: name one, as {name}.KEY = VALUE",
                )
            if restriction.is_presence:
                return Bound(name, ":", None, lambda message: bool(read(message)))
            return Bound(name, ":", None, lambda message: value in read(message))
        if len(restriction.keys) > 1:
            dotted = ".".join(restriction.keys)
            raise refusal(
                restriction.position, f'several keys follow {name}: quote one with dots, as {name}."{dotted}"'
            )
        key = restriction.keys[0]

        def label(message: M) -> str | None:
            labels = read(message)
            return labels.get(key)

        if restriction.is_presence:
            return Bound(name, ":", None, lambda message: key in read(message))
        _require_comparator(restriction, TEXT)
        return Bound(name, restriction.comparator, None, _comparison(label, restriction.comparator, value))


@final
@dataclass(frozen=True, slots=True)
class Texts(Generic[M]):
    """A list of texts: ``capabilities:gpu_remap`` holds if one of them is equal to the value."""

    read: Callable[[M], Iterable[str]]

    def bind(self, restriction: Restriction, ids: Ids) -> Bound[M]:
        """As :meth:`Field.bind`."""
        _require_no_key(restriction)
        _require_comparator(restriction, (":",))
        read, value = self.read, restriction.value
        if restriction.is_presence:
            return Bound(restriction.field, ":", None, lambda message: any(True for _ in read(message)))
        return Bound(restriction.field, ":", None, lambda message: value in read(message))


@final
@dataclass(frozen=True, slots=True)
class Reference(Generic[M]):
    """A worker or workload, by id or name.

    Attributes:
        referent: What is named.
        read: The ids in a message, and the name if messages have names. Empty: none.
        has_name: Whether messages have names. Otherwise the ids of a name are asked for beforehand.
    """

    referent: Referent
    read: Callable[[M], tuple[str, ...]]
    has_name: bool = False

    def bind(self, restriction: Restriction, ids: Ids) -> Bound[M]:
        """As :meth:`Field.bind`."""
        _require_no_key(restriction)
        read, name = self.read, restriction.field
        if restriction.is_presence:
            return Bound(name, ":", None, lambda message: bool(read(message)))
        _require_comparator(restriction, _EQUALITY)
        wanted = ids.get((self.referent, restriction.value)) or frozenset({restriction.value})
        if self.has_name:
            wanted |= {restriction.value}
        if restriction.comparator == "=":
            return Bound(name, "=", wanted, lambda message: not wanted.isdisjoint(read(message)))

        def is_another(message: M) -> bool:
            found = read(message)
            return bool(found) and wanted.isdisjoint(found)

        return Bound(name, "!=", wanted, is_another)


TEXT: Final = (*_EQUALITY, ":")
ORDERED: Final = (*_EQUALITY, "<", "<=", ">", ">=")


def text(read: Callable[[M], str | None]) -> Scalar[M]:
    """A text. ``:`` looks for a part of it, in upper or lower case. An empty text counts as no value."""
    return Scalar(lambda message: read(message) or None, str, TEXT, is_text=True)


def number(read: Callable[[M], int | None]) -> Scalar[M]:
    """An integer."""
    return Scalar(read, _integer, ORDERED)


def moment(read: Callable[[M], Timestamp | None]) -> Scalar[M]:
    """A time, written as RFC 3339."""

    def nanoseconds(message: M) -> int | None:
        found = read(message)
        return None if found is None else found.seconds * 10**9 + found.nanos

    return Scalar(nanoseconds, _nanoseconds, ORDERED)


def flag(read: Callable[[M], bool]) -> Scalar[M]:
    """True or false."""
    return Scalar(lambda message: int(read(message)), _flag, _EQUALITY)


def choice(enum: EnumDescriptor, prefix: str, read: Callable[[M], int | None]) -> Scalar[M]:
    """A value of an enum, written with or without the prefix of its names, in upper or lower case.

    UNSPECIFIED counts as no value.
    """
    numbers = {value.name.removeprefix(prefix): value.number for value in enum.values if value.number != 0}

    def parse(name: str) -> int:
        found = numbers.get(name.upper().removeprefix(prefix))
        if found is None:
            raise ValueError(f"write one of {', '.join(numbers)}")
        return found

    return Scalar(lambda message: read(message) or None, parse, _EQUALITY)


def word(words: Iterable[str], read: Callable[[M], str | None]) -> Scalar[M]:
    """One of some words."""
    known = tuple(words)

    def parse(value: str) -> str:
        if value not in known:
            raise ValueError(f"write one of {', '.join(known)}")
        return value

    return Scalar(lambda message: read(message) or None, parse, _EQUALITY, is_text=True)


def _integer(value: str) -> int:
    if not value.removeprefix("-").isdecimal() or not value.isascii() or len(value) > 20:
        raise ValueError("write an integer")
    return int(value)


def _nanoseconds(value: str) -> int:
    """Nanoseconds of the Unix epoch."""
    found = Timestamp()
    try:
        found.FromJsonString(value)
    except ValueError:
        raise ValueError("write a time and its zone, as 2026-01-31T08:00:00Z") from None
    value_ns = found.seconds * 10**9 + found.nanos
    if abs(value_ns) >= NUMBER_LIMIT:
        raise ValueError("write a time between the years 1678 and 2262")
    return value_ns


def _flag(value: str) -> int:
    if value not in ("true", "false"):
        raise ValueError("write true or false")
    return int(value == "true")


def _require_no_key(restriction: Restriction) -> None:
    if restriction.keys:
        raise refusal(
            restriction.position,
            f"{restriction.field} has no parts: leave out .{'.'.join(restriction.keys)[:64]}",
        )


def _require_comparator(restriction: Restriction, comparators: Iterable[str]) -> None:
    if restriction.comparator not in comparators:
        raise refusal(
            restriction.position,
            f"{restriction.field} can't be compared by {restriction.comparator}: "
            f"use {' '.join(comparators)}, or {restriction.field}:*",
        )
