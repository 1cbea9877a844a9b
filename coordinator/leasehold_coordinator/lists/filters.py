"""Filters of lists and watches: which entries a client wants. Pure."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeAlias, TypeVar, final

from google.protobuf.message import Message
from leasehold.v1.worker_pb2 import FleetGpu, Worker

from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.lists.filter_expression import (
    And,
    Expression,
    Not,
    Or,
    Restriction,
    refusal,
    restrictions,
)
from leasehold_coordinator.lists.filter_fields import Bound, Field, Ids, Reference, Referent

M = TypeVar("M", bound=Message)

Fields: TypeAlias = Mapping[str, Field[M]]
"""The fields of a kind of entry, by the names that filters use."""

NO_IDS: Final[Ids] = {}


@final
@dataclass(frozen=True, slots=True)
class All(Generic[M]):
    """Holds if all parts do."""

    parts: "tuple[Condition[M], ...]"


@final
@dataclass(frozen=True, slots=True)
class Either(Generic[M]):
    """Holds if a part does."""

    parts: "tuple[Condition[M], ...]"


@final
@dataclass(frozen=True, slots=True)
class Negation(Generic[M]):
    """Holds if the part does not."""

    part: "Condition[M]"


Condition: TypeAlias = Bound[M] | All[M] | Either[M] | Negation[M]
"""An expression whose restrictions are bound to fields."""


@final
@dataclass(frozen=True, slots=True)
class Filter(Generic[M]):
    """A filter of the entries of a list or watch.

    Attributes:
        condition: The condition of a match. None: every entry matches.
    """

    condition: Condition[M] | None = None


@final
@dataclass(frozen=True, slots=True)
class FleetFilter:
    """The filters of workers and of GPUs that one expression stands for."""

    workers: Filter[Worker]
    gpus: Filter[FleetGpu]


def matches(wanted: Filter[M], message: M) -> bool:
    """Whether an entry satisfies a filter."""
    return wanted.condition is None or _holds(wanted.condition, message)


def matches_fleet(wanted: FleetFilter, message: Worker | FleetGpu) -> bool:
    """Whether a worker or GPU satisfies a filter."""
    if isinstance(message, Worker):
        return matches(wanted.workers, message)
    return matches(wanted.gpus, message)


def _holds(condition: Condition[M], message: M) -> bool:
    match condition:
        case Bound():
            return condition.test(message)
        case Negation(part):
            return not _holds(part, message)
        case All(parts):
            return all(_holds(part, message) for part in parts)
        case Either(parts):
            return any(_holds(part, message) for part in parts)


def named_ids(condition: Condition[M] | None, field: str) -> frozenset[str]:
    """The ids that a condition compares a field with, wherever in the condition."""
    match condition:
        case Bound(name, _, frozenset() as ids) if name == field:
            return ids
        case Negation(part):
            return named_ids(part, field)
        case All(parts) | Either(parts):
            return frozenset().union(*(named_ids(part, field) for part in parts))
        case _:
            return frozenset()


def bind(expression: Expression | None, fields: Fields[M], ids: Ids = NO_IDS) -> Filter[M]:
    """The filter that an expression means for one kind of entry.

    Args:
        expression: The parsed filter. None: everything matches.
        fields: The fields of the entries.
        ids: Ids of the workers and workloads that the expression names: see :func:`references`.

    Raises:
        FleetError: INVALID_ARGUMENT, which names the position, the rule and the remedy.
    """
    if expression is None:
        return Filter()
    return Filter(_bound(expression, lambda restriction: _bind(restriction, fields, ids)))


def bind_fleet(
    expression: Expression | None, workers: Fields[Worker], gpus: Fields[FleetGpu], ids: Ids = NO_IDS
) -> FleetFilter:
    """The filter that an expression means for workers and GPUs together.

    A restriction that only one of the two kinds has, or whose value only one can have, holds for none of the
    other kind.

    Raises:
        FleetError: As :func:`bind`, for a restriction that neither kind has.
    """
    if expression is None:
        return FleetFilter(Filter(), Filter())
    return FleetFilter(
        Filter(_bound(expression, lambda restriction: _bind_one_of_two(restriction, workers, gpus, ids))),
        Filter(_bound(expression, lambda restriction: _bind_one_of_two(restriction, gpus, workers, ids))),
    )


def references(expression: Expression | None, *fields: Fields[Any]) -> set[tuple[Referent, str]]:
    """The workers and workloads that an expression names, by id or name. :func:`bind` needs their ids."""
    found: set[tuple[Referent, str]] = set()
    for restriction in restrictions(expression) if expression is not None else ():
        for one in fields:
            field = one.get(restriction.field)
            if isinstance(field, Reference):
                found.add((field.referent, restriction.value))
    return found


def _bound(expression: Expression, leaf: Callable[[Restriction], Bound[M]]) -> Condition[M]:
    match expression:
        case Restriction():
            return leaf(expression)
        case Not(part):
            return Negation(_bound(part, leaf))
        case And(parts):
            return All(tuple(_bound(part, leaf) for part in parts))
        case Or(parts):
            return Either(tuple(_bound(part, leaf) for part in parts))


def _bind(restriction: Restriction, fields: Fields[M], ids: Ids) -> Bound[M]:
    field = fields.get(restriction.field)
    if field is None:
        raise _unknown_field(restriction, fields)
    return field.bind(restriction, ids)


def _bind_one_of_two(restriction: Restriction, fields: Fields[M], others: Fields[Any], ids: Ids) -> Bound[M]:
    """The meaning of a restriction for one of two kinds. It never holds if only the other kind has it."""
    if restriction.field not in fields and restriction.field not in others:
        raise _unknown_field(restriction, {*fields, *others})
    try:
        return _bind(restriction, fields, ids)
    except FleetError:
        if restriction.field not in others:
            raise
        _bind(restriction, others, ids)
        return Bound(restriction.field, restriction.comparator, None, lambda _: False)


def _unknown_field(restriction: Restriction, known: Iterable[str]) -> FleetError:
    return refusal(
        restriction.position,
        f"no field is named {restriction.field[:64]!r}: use one of {', '.join(sorted(known))}",
    )
