"""Filters as clients write them. Names of workers and workloads are looked up when a list or watch begins."""

from typing import Any, TypeVar

from google.protobuf.message import Message

from leasehold_coordinator.fleet.fleet_reader import FleetReader
from leasehold_coordinator.lists import list_fields
from leasehold_coordinator.lists.filter_expression import Expression, parse_filter
from leasehold_coordinator.lists.filter_fields import Ids, Referent
from leasehold_coordinator.lists.filters import (
    NO_IDS,
    Fields,
    Filter,
    FleetFilter,
    bind,
    bind_fleet,
    references,
)

M = TypeVar("M", bound=Message)


async def read_filter(fleet: FleetReader, text: str, fields: Fields[M]) -> Filter[M]:
    """The filter of a list or watch of one kind of entry.

    Raises:
        FleetError: INVALID_ARGUMENT, or STORAGE_UNAVAILABLE.
    """
    expression = parse_filter(text)
    return bind(expression, fields, await _ids(fleet, expression, fields))


async def read_fleet_filter(fleet: FleetReader, text: str) -> FleetFilter:
    """The filter of a watch of workers and GPUs.

    Raises:
        FleetError: As :func:`read_filter`.
    """
    expression = parse_filter(text)
    workers, gpus = list_fields.WORKERS, list_fields.GPUS
    return bind_fleet(expression, workers, gpus, await _ids(fleet, expression, workers, gpus))


async def _ids(fleet: FleetReader, expression: Expression | None, *fields: Fields[Any]) -> Ids:
    if expression is None:
        return NO_IDS
    return {named: await _ids_of(fleet, *named) for named in references(expression, *fields)}


async def _ids_of(fleet: FleetReader, referent: Referent, id_or_name: str) -> frozenset[str]:
    """The entry with this id, or else all entries with this name. Empty: none is known."""
    if referent == "worker":
        return fleet.registry.ids(id_or_name)
    if id_or_name in fleet.workloads:
        return frozenset({id_or_name})
    return await fleet.store.workload_ids(id_or_name)
